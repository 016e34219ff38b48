"""The text of an error on a device stays there; the coordinator gets its type and code, and shows a sentence."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.errors import NothingTrained
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.failures import FAILURES
from sparrow.simulation import in_process as inprocess
from sparrow.transport import httpx

pytestmark = pytest.mark.integration  # plays federations

SECRET = "/home/ann/secret.csv"


class Armed:
    """Data and a loss that raise an error once training has begun."""

    def __init__(self, in_loss=None, in_data=None, scale=1.0):
        self.in_loss = in_loss
        self.in_data = in_data
        self.training = False
        inputs = scale * torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        self.batches = [(inputs, (inputs[:, 0] > 0).long())] * 2

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        if self.training and self.in_data is not None:
            raise self.in_data
        return iter(self.batches)

    def loss(self, outputs, targets):
        if self.training and self.in_loss is not None:
            raise self.in_loss
        return F.cross_entropy(outputs, targets)

    def look(self, moment):
        self.training = self.training or moment.phase == "train"

    def task(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return Task("two", model, self.loss, self, self.batches)


class Recording(httpx.BaseTransport):
    """Passes calls on and keeps what was sent. answers: last part of a path -> the answer in place of the real one."""

    def __init__(self, client):
        self.client = client
        self.sent = []
        self.answers = {}

    def handle_request(self, request):
        request.read()
        self.sent.append(f"{request.method} {request.url} {dict(request.headers)}".encode() + request.content)
        for end, answer in self.answers.items():
            if request.url.path.endswith(end):
                return answer
        request.headers["Accept"] = "application/json"
        return self.client.send(request)


@pytest.fixture
def lab(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sparrow.coordinator.rounds.dispatch.REST_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    app = create_app(Settings(data_dir=tmp_path / "coordinator", default_task=""))
    with inprocess.running(app) as client:
        settings = {"rounds": 50, "min_devices": 1, "cohort": 1, "evaluation_interval": 0, "method": "fedavg"}
        publish(inprocess.ADDRESS, "f", Armed().task(), client=client, **settings)
        yield Recording(client)


def run(lab, armed, tmp_path):
    return join(
        inprocess.ADDRESS,
        armed.task(),
        federation="f",
        name="pi",
        state_dir=tmp_path / "device",
        options=JoinOptions(budget=1.0, engine="torch"),
        client=httpx.Client(base_url=inprocess.ADDRESS, transport=lab),
        on_progress=armed.look,
        quiet=True,
    )


def check_coordinator(lab, tmp_path, caplog, failure, words, secrets=(SECRET,)):
    """Check that the coordinator and everything that was sent to it have the failure, and no part of the secrets."""
    get = lab.client.get
    (device,) = get("/v1/federations/f/devices").json()
    history = get(f"/v1/devices/{device['device_id']}").json()
    overview = get("/v1/federations/f/overview").json()
    others = [get(f"/v1/federations/f/{path}").text for path in ("rounds", "assignments")]
    log = "\n".join(each.getMessage() for each in caplog.records if each.name.startswith("sparrow.coordinator"))
    stored = [file.read_bytes() for file in (tmp_path / "coordinator").rglob("*") if file.is_file()]
    cause, _, advice = words.partition("; ")

    assert device["failure"]["reason"] == words
    assert words in {each["reason"] for each in history["work"]} or "nothing-trained" in failure
    (notice,) = [each for each in overview["notices"] if each["kind"] == "failed"]
    assert notice["text"].startswith(f"pi: {cause}")
    assert advice.lower()[-20:] in (notice["remedy"] or "").lower()
    assert words in log
    assert any(f'"{failure}"'.encode() in each for each in lab.sent)
    assert any(failure.encode() in each for each in stored)
    for secret in (part for text in secrets for part in (text, *text.strip("/").split("/")[1:])):
        assert secret not in str([device, history, overview, others, log])
        for each in (*lab.sent, *stored):
            assert secret.encode() not in each


ERRORS = {
    "a loss that raises": (Armed(in_loss=ValueError(SECRET)), "program-error/ValueError"),
    "a loader that raises": (
        Armed(in_data=FileNotFoundError(2, "No such file", SECRET)),
        "program-error/FileNotFoundError",
    ),
    "an error of the task's own": (Armed(in_data=type("SecretError", (Exception,), {})(SECRET)), "program-error/other"),
    "no memory": (Armed(in_loss=MemoryError(SECRET)), "no-memory"),
    "an interrupt": (Armed(in_loss=KeyboardInterrupt(SECRET)), "interrupted/user"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_ends_a_device_is_reported_without_its_text(lab, tmp_path, caplog, name):
    armed, failure = ERRORS[name]
    with pytest.raises(BaseException) as ended:  # noqa: PT011 - each of them another
        run(lab, armed, tmp_path)
    assert SECRET in str(ended.value), "the device's own output has it"
    kind, _, code = failure.partition("/")
    words = str(FAILURES[failure]) if failure in FAILURES else str(FAILURES[kind]).replace("; ", f" ({code}); ", 1)
    check_coordinator(lab, tmp_path, caplog, failure, words)


def test_training_that_diverges_is_reported_without_the_spread_of_the_data(lab, tmp_path, caplog):
    with pytest.raises(NothingTrained, match="standard deviation") as ended:
        run(lab, Armed(scale=1e18), tmp_path)
    spread = [word for word in str(ended.value).replace(":", "").split() if "e+1" in word]
    assert spread
    last = FAILURES["training-diverged/loss"]
    words = f"{FAILURES['nothing-trained'].cause}; the last failure: {last}"
    check_coordinator(lab, tmp_path, caplog, "nothing-trained/training-diverged-loss", words, spread)
    assert any(b'"training-diverged/loss"' in each for each in lab.sent)


@pytest.fixture
def session(lab, tmp_path):
    client = httpx.Client(base_url=inprocess.ADDRESS, transport=lab)
    with closing(StateFolder(tmp_path / "device")) as folder:
        transport = Transport(client, sleep=lambda seconds: None)
        task = Armed().task()
        yield Session(
            transport,
            folder,
            federation="f",
            name="pi",
            make_task=lambda info, manifest: task,
            options=SessionOptions(engine="torch"),
        )


def problem(detail):
    document = {"type": "urn:sparrow:problem:BadContent", "title": "x", "status": 422, "detail": detail}
    return httpx.Response(422, json=document, headers={"Content-Type": "application/problem+json"})


@pytest.mark.parametrize(
    ("end", "answer", "failure", "here"),
    [
        ("/payload", httpx.Response(200, content=b"x"), "bad-payload/damaged", "match its digest"),
        ("/payload", problem(SECRET), "coordinator-fault", SECRET),
        ("/update", problem(SECRET), "update-refused", SECRET),
    ],
)
def test_a_fault_of_the_coordinator_is_reported_without_its_text(
    lab, session, tmp_path, caplog, end, answer, failure, here
):
    lab.answers[end] = answer
    while (step := session.step(wait_seconds=5)).assignment is None:
        assert step.outcome is Outcome.idle
    assert any(here in each.getMessage() for each in caplog.records if each.name.startswith("edge_sdk"))
    check_coordinator(lab, tmp_path, caplog, failure, str(FAILURES[failure]))
