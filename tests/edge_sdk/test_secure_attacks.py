"""Secure rounds against a coordinator that lies: devices send nothing, rather than something in clear."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from edge_sdk import publish
from edge_sdk.device.demands import Demands
from edge_sdk.device.secure import check_alone
from edge_sdk.device.session import Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.methods import Update
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks.digits import load
from sparrow.coordinator.fleet import checks
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.masks import NeuronDraw, draw_neurons
from sparrow.protocol.secure.pads import BadSecret
from sparrow.simulation import in_process
from sparrow.transport import httpx

from .hostile import Lying, changed

pytestmark = pytest.mark.integration

DIGITS = load_builtin("digits").manifest
SETTINGS = {
    "method": "fedavg",
    "secure": True,
    "rounds": 2,
    "local_steps": 1,
    "evaluation_interval": 0,
    "early_stopping": "off",
    "secure_dropouts": 0.0,
}


class Federation:
    """Devices of a secure federation in one process, each behind a coordinator that may lie to it."""

    def __init__(self, client, path, budgets, plain_metrics=(), **settings):
        count = len(budgets)
        asked = {**SETTINGS, "cohort": count, "min_devices": count, **settings}
        publish.publish(
            in_process.ADDRESS,
            "f",
            "digits",
            client=client,
            options=publish.PublishOptions(publisher=Publisher.new()),
            **asked,
        )
        self.client = client
        self.plain_metrics = plain_metrics
        self.lying = {f"d{number}": Lying(client) for number in range(count)}
        self.folders = {name: StateFolder(path / name, durable=False) for name in self.lying}
        self.devices = {name: self._device(name, budget) for name, budget in zip(self.lying, budgets, strict=True)}

    def _device(self, name, budget):
        client = httpx.Client(base_url=in_process.ADDRESS, transport=self.lying[name])
        return Session(
            Transport(client, sleep=lambda seconds: None),
            self.folders[name],
            federation="f",
            name=name,
            make_task=lambda info, manifest: load(f"index={name[1:]},of=20", device=name, seed=0, batch_size=16),
            options=SessionOptions(
                engine="onnx", budget=budget, demands=Demands(plain_metrics=name in self.plain_metrics)
            ),
        )

    def play(self, rounds=1, most=400):
        """Let devices work in turn until so many rounds have closed; return what failed, by device."""
        failed = dict[str, str]()
        for _ in range(most):
            for name, device in self.devices.items():
                step = device.step()
                if step.failed:
                    failed[name] = step.failed
            records = self.client.get("/v1/federations/f/rounds").json()
            if failed or sum(record["status"] == "closed" for record in records) >= rounds:
                return failed
        raise AssertionError("the round did not end")

    def updates(self):
        """Return the bundles that were sent, by device."""
        sent = {name: list(lying.sent("PUT", "/update")) for name, lying in self.lying.items()}
        return {name: [body for body in bodies if body[:1] != b"{"] for name, bodies in sent.items()}

    def close(self):
        for folder in self.folders.values():
            folder.close()


@pytest.fixture
def federate(tmp_path):
    opened = []
    app = create_app(Settings(data_dir=tmp_path / "data", default_task="", tick_seconds=0.02))
    with in_process.running(app) as client:

        def make(budgets=(1.0,) * 4, **settings):
            opened.append(Federation(client, tmp_path, budgets, **settings))
            return opened[-1]

        yield make
        for each in opened:
            each.close()


def with_payload(lying, forge):
    """Have a device get another payload, whose digest its assignments name; ``forge``: bytes -> bytes."""
    made = {}

    def announce(answer):
        work = json.loads(answer.content)
        if not work.get("payload") or work["kind"] != "train":
            return answer
        path = f"/v1/assignments/{work['assignment_id']}/payload"
        original = lying.client.get(path, headers=dict(answer.request.headers)).content
        made[work["assignment_id"]] = body = forge(original)
        payload = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        return httpx.Response(200, json={**work, "payload": payload})

    def deliver(answer):
        return httpx.Response(200, content=made[answer.request.url.path.split("/")[-2]])

    lying.answers["/assignment"] = announce
    lying.answers["/payload"] = deliver


def moved(body):
    """Return a payload of another model."""
    found = bundle.decode(body, DIGITS)
    return bundle.encode(DIGITS, found.values + np.float32(0.01), found.mask)


def test_without_a_lie_the_round_has_a_sum(federate):
    federation = federate()
    assert federation.play() == {}
    assert all(len(bodies) == 1 for bodies in federation.updates().values())


def test_two_models_in_one_cell_are_refused(federate):
    federation = federate()
    with_payload(federation.lying["d1"], moved)
    failed = federation.play()
    assert "settings or plan" in failed["d1"]
    assert federation.updates()["d1"] == []


def test_two_models_in_two_cells_are_refused(federate):
    """Each cell has one model, so that its devices agree with one another; the round's digest is of all cells."""
    federation = federate((0.5,) * 4 + (1.0,) * 4, method="fedspu")
    for name in ("d0", "d1", "d2", "d3"):
        with_payload(federation.lying[name], moved)
    failed = federation.play()
    assert failed
    assert set(failed) <= {"d0", "d1", "d2", "d3"}
    assert all(federation.updates()[name] == [] for name in failed)


def test_a_stale_model_is_refused(federate):
    """The payload of the first round, out of a cache, in the second one."""
    federation = federate(rounds=3)
    kept = []
    with_payload(federation.lying["d2"], lambda body: kept.append(body) or kept[0])
    assert federation.play() == {}
    failed = federation.play(rounds=2)
    assert "signed" in failed["d2"]
    assert len(federation.updates()["d2"]) == 1


def test_a_part_of_the_model_is_refused(federate):
    """A device must see all of the model to know that it is the one that others see."""
    federation = federate((0.5,) * 4, method="fedspu")
    mask = draw_neurons(DIGITS, NeuronDraw("0" * 32, 0.5))

    def part(body):
        from sparrow.protocol.masks import pack, unpack_whole

        whole = unpack_whole(DIGITS, bundle.decode(body, DIGITS).values)
        return bundle.encode(DIGITS, pack(DIGITS, whole, mask), mask)

    with_payload(federation.lying["d0"], part)
    assert "a secure round needs all of it" in federation.play()["d0"]


def test_a_plan_that_only_one_device_is_given_is_refused(federate):
    federation = federate()

    def told(answer):
        work = json.loads(answer.content)
        if work["kind"] == "train":
            work["plan"] = {"share": 0.5}
        return httpx.Response(200, json=work)

    federation.lying["d3"].answers["/assignment"] = told
    assert "signed" in federation.play()["d3"]
    assert federation.updates()["d3"] == []


def test_keys_for_another_model_are_refused_by_everybody(federate):
    """Who is given another digest signs for another round: its keys are not those of this one."""
    federation = federate(secure_phase_seconds=1.0)

    def told(answer):
        work = json.loads(answer.content)
        if work["kind"] == "keys":
            work["secure"]["context"] = work["secure"]["context"][:-1] + "x"
        return httpx.Response(200, json=work)

    federation.lying["d3"].answers["/assignment"] = told
    federation.play()
    assert federation.updates()["d3"] == []


def test_gradients_beside_masked_values_are_refused(federate, monkeypatch):
    """PruneFL's rounds send squared gradients; a coordinator that calls such a federation secure gets none."""
    monkeypatch.setattr(checks, "check_secure", lambda *given: None)
    federation = federate(method="prunefl")
    failed = federation.play()
    assert all("has no secure work of kind" in why for why in failed.values())
    assert not any(federation.updates().values())


def test_one_assignment_without_masks_is_refused(federate):
    federation = federate()
    federation.lying["d0"].answers["/assignment"] = changed(
        settings=lambda settings: {**settings, "secure": False, "secure_metrics": None}
    )
    failed = federation.play()
    assert "secure=false" in failed["d0"]
    assert federation.updates()["d0"] == []


@pytest.mark.parametrize("opted_out", [False, True])
def test_losses_go_up_in_clear_only_if_both_sides_agree(federate, opted_out):
    """The federation asks for them; one device's owner agrees, the others do not."""
    federation = federate(secure_metrics=False, plain_metrics=["d0"] if opted_out else [])
    assert federation.play() == {}
    reports = {
        name: json.loads(bundle.decode(bodies[0], DIGITS).report) for name, bodies in federation.updates().items()
    }
    assert {name for name, report in reports.items() if report.get("train_loss") is not None} == (
        {"d0"} if opted_out else set()
    )


def test_an_update_that_says_more_than_values_is_refused():
    """Signs, gradients and masks that a device chooses by its data: none leaves it beside masked values."""
    values = np.zeros(DIGITS.shared_values, np.float32)
    draw = NeuronDraw("a" * 32, 0.5)
    job = SimpleNamespace(
        manifest=DIGITS,
        received=None,
        assignment=SimpleNamespace(
            work=SimpleNamespace(key=draw.key, ratio=draw.ratio), settings=SimpleNamespace(method="fedspu")
        ),
    )
    check_alone(job, Update(values))
    check_alone(job, Update(values, draw_neurons(DIGITS, draw), draw))
    own_choice = draw_neurons(DIGITS, NeuronDraw("b" * 32, 0.5))
    elements = ElementMask({spec.name: np.ones(spec.shape, bool) for spec in DIGITS.maskable})
    for update in (
        Update(values, parts={"signs": np.ones(3, np.int8)}),
        Update(values, parts={"gradients": np.ones(3, np.float32)}),
        Update(values, own_choice),
        Update(values, elements),
    ):
        with pytest.raises(BadSecret):
            check_alone(job, update)
