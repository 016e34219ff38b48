"""``join`` inside a program, told what happens and asked to stop, and ``Client``, of a coordinator's process."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

from edge_sdk.errors import BadArgument, NotAuthenticated, NotFound, Unreachable, WrongState
from edge_sdk.tasks import load_task
from sparrow import Client, DeviceProgress, JoinOptions, SdkError, join
from sparrow.protocol.failures import in_words

from .conftest import Coordinator, wait_until

pytestmark = pytest.mark.integration

BRIEF = {"method": "fedspu", "rounds": 3, "min_devices": 1, "local_epochs": 2, "early_stopping": "off"}
SOON = 12.0
"""Seconds within which a device that is asked to stop has stopped: a long poll takes up to 50."""


@pytest.fixture
def client(coordinator):
    with Client(coordinator.url) as found:
        yield found


@pytest.fixture
def where(coordinator, tmp_path):
    """Arguments of a device."""
    return {
        "server": coordinator.url,
        "data": "index=0,of=4",
        "name": "pi",
        "state_dir": tmp_path / "state",
        "options": JoinOptions(budget=0.5, threads=1),
    }


class Background:
    """``join`` on a thread; ``moments`` are what it was told."""

    def __init__(self, **arguments):
        self.stop, self.moments, self.result, self.error = threading.Event(), [], None, None
        self._arguments = arguments
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.result = join(on_progress=self.moments.append, stop=self.stop, **self._arguments)
        except SdkError as error:
            self.error = error

    def end(self):
        """Ask it to stop, and return after how many seconds it has."""
        begin = time.monotonic()
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None
        return time.monotonic() - begin


def test_each_moment_is_told_on_the_thread_that_works(coordinator, client, where, capfd):
    coordinator.create("default", **BRIEF)
    moments, threads = [], set()

    def note(moment):
        moments.append(moment)
        threads.add(threading.current_thread())

    result = join(on_progress=note, **where)
    assert not result.interrupted
    assert threads == {threading.current_thread()}
    assert not any(capfd.readouterr()), "in place of the bar"
    phases = [moment.phase for moment in moments]
    assert phases[:3] == ["opening", "opening", "waiting"], "the second has a line: where its state is kept"
    assert "keeps its state in" in moments[1].text
    assert {"download", "train", "upload", "evaluate"} <= set(phases)
    steps = [moment for moment in moments if moment.steps]
    assert {moment.round for moment in steps} == {1, 2, 3}
    assert [moment.step for moment in steps if moment.round == 2] == list(range(1, steps[0].steps + 1))
    assert all(moment.loss > 0 for moment in steps)
    assert result.steps == len(steps)
    last = moments[-1]
    assert (last.round, last.rounds, last.bytes_up > 0) == (3, 3, True)
    assert last.accuracy == pytest.approx(client.device(client.devices("default")[0].device_id).work[0].accuracy, abs=1)
    assert [moment.seconds for moment in moments] == sorted(moment.seconds for moment in moments)
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.round = 4


def test_it_stops_between_two_steps_and_goes_on_from_the_last_whole_round(coordinator, client, where, tmp_path):
    coordinator.create("default", **BRIEF)
    stop, kept = threading.Event(), []

    def note(moment):
        if (moment.phase, moment.round, moment.step) == ("train", 2, 3):
            kept.append((tmp_path / "state" / "model.safetensors").read_bytes())
            stop.set()

    export = tmp_path / "model.onnx"
    result = join(on_progress=note, stop=stop, export=export, **where)
    assert result.interrupted
    assert (result.rounds, result.engine, result.export.path) == (1, "ONNX Runtime", export)
    assert result.accuracy_after is not None
    assert [(tmp_path / "state" / "model.safetensors").read_bytes()] == kept, "the round's steps left no trace"
    (device,) = client.devices("default")
    assert (device.present, client.device(device.device_id).work[0].status) == (False, "returned")
    assert client.device(device.device_id).work[0].reason == in_words("interrupted/program")
    session = onnxruntime.InferenceSession(export)
    assert session.run(None, {session.get_inputs()[0].name: np.zeros((2, 1, 8, 8), np.float32)})[0].shape == (2, 10)
    again = join(on_progress=lambda moment: None, stop=threading.Event(), **where)
    assert not again.interrupted
    assert again.rounds > result.rounds
    assert client.federation("default").status.value == "finished"


def test_the_last_step_of_a_round_is_sent_before_it_stops(coordinator, client, where):
    coordinator.create("default", **BRIEF)
    last = []

    def note(moment):
        if moment.phase == "train" and moment.step == moment.steps > 0:
            last.append(moment)

    result = join(on_progress=note, stop=lambda: bool(last), **where)
    assert (result.interrupted, result.rounds) == (True, 1)
    wait_until(lambda: client.rounds("default")[0].status == "closed", "the round to close with its update")
    assert client.rounds("default")[0].updates == 1


def test_it_stops_while_it_waits_for_others(coordinator, client, where):
    coordinator.create("default", **{**BRIEF, "min_devices": 2})
    device = Background(**where)
    wait_until(lambda: device.moments and device.moments[-1].phase == "waiting", "the device to wait")
    time.sleep(1)  # in its poll
    assert device.end() < SOON
    assert (device.result.interrupted, device.result.rounds, device.result.accuracy_after) == (True, 0, None)
    assert not client.devices("default")[0].present


def test_it_stops_while_the_coordinator_is_away_and_keeps_what_it_has(coordinator, where):
    coordinator.create("default", **BRIEF)
    device = Background(**where)
    wait_until(lambda: device.moments and device.moments[-1].round >= 2, "the first round to be over")
    coordinator.kill()
    wait_until(lambda: any(moment.phase == "unreachable" for moment in device.moments), "the device to notice")
    assert "does not answer" in next(moment.text for moment in device.moments if moment.phase == "unreachable")
    assert device.end() < SOON
    assert device.result.interrupted
    assert device.result.rounds >= 1
    assert device.result.accuracy_after is not None, "its model is judged without the coordinator"

    later = Background(**where)  # which is never answered
    wait_until(lambda: any(moment.phase == "unreachable" for moment in later.moments), "the device to notice")
    assert later.end() < SOON
    assert (later.result.interrupted, later.result.engine) == (True, "")
    assert later.result.rounds == device.result.rounds
    coordinator.start()
    assert join(quiet=True, **where).rounds >= device.result.rounds


def test_what_is_raised_while_it_is_told_ends_the_work(coordinator, client, where):
    coordinator.create("default", **BRIEF)

    def note(moment):
        if moment.step:
            raise RuntimeError("the window is closed")

    with pytest.raises(RuntimeError, match="the window is closed"):
        join(on_progress=note, **where)
    (device,) = client.devices("default")
    assert client.device(device.device_id).work[0].reason == in_words("program-error/RuntimeError")


def test_a_task_is_named_or_the_federations(coordinator, where):
    coordinator.create("default", **{**BRIEF, "rounds": 1})
    server = where.pop("server")
    with pytest.raises(BadArgument, match=r"'digits'.*'mnist'"):
        join(server, "mnist", **where)
    with pytest.raises(BadArgument, match="data needs a task known by name"):
        join(server, load_task("digits", None, device="pi", seed=0, batch_size=8), **where)
    with pytest.raises(SdkError, match="index"):
        join(server, "digits", **{**where, "data": "index=9,of=4"})
    assert join(server, "digits", quiet=True, **where).rounds == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stop": 5}, "stop is a int; give a threading.Event"),
        ({"on_progress": "print"}, "on_progress is a str; give a"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(wrong, said):
    with pytest.raises(BadArgument, match=said):
        join("http://127.0.0.1:9", "digits", **wrong)


def test_a_client_reads_federations_rounds_devices_reports_and_models(coordinator, client, where, tmp_path):
    assert client.federations() == []
    coordinator.create("default", **{**BRIEF, "rounds": 2, "evaluation_interval": 1})
    join(quiet=True, **where)
    (info,) = client.federations()
    assert info == client.federation("default")
    assert (info.status.value, info.settings.method) == ("finished", "fedspu")
    assert [record.round for record in client.rounds("default")] == [1, 2]
    reports = client.reports("default", 1)
    (device,) = client.devices("default")
    assert {report.device for report in reports} == {device.name} == {"pi"}
    history = client.device(device.device_id)
    assert (history.federation, history.device.name) == ("default", "pi")
    assert {work.round for work in history.work} >= {1, 2}
    assert [model.current for model in client.models("default")][-1]
    safetensors.numpy.load_file(client.model("default", tmp_path / "global.safetensors"))
    assert onnxruntime.InferenceSession(client.model("default", str(tmp_path / "global.onnx")))
    assert client.change("default", rounds=3).rounds == 3
    assert client.change("default", action="reopen").status.value == "waiting"
    client.revoke(device.device_id)
    assert client.devices("default")[0].status == "revoked"
    client.delete("default")
    assert client.federations() == []


WRONG = {
    "no such federation": (lambda client: client.rounds("defualt"), NotFound, "did you mean default"),
    "no federation's name": (lambda client: client.devices("../x"), BadArgument, "cannot be a federation's name"),
    "no such round": (lambda client: client.reports("default", 7), NotFound, "there is no round 7"),
    "no such device": (lambda client: client.device("pi"), NotFound, "this device does not exist"),
    "no device's id": (lambda client: client.device("a/b"), BadArgument, "give the device_id of one of devices"),
    "no such setting": (lambda client: client.change("default", raunds=3), BadArgument, "did you mean rounds"),
    "no such action": (lambda client: client.change("default", action="end"), BadArgument, "action: "),
    "another ending": (
        lambda client: client.model("default", "model.pt"),
        BadArgument,
        "ends in .onnx or .safetensors",
    ),
    "no such folder": (lambda client: client.model("default", "none/model.onnx"), SdkError, "none/model.onnx"),
    "not now": (lambda client: client.delete("default"), WrongState, "stop"),
}


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    made = Coordinator(tmp_path_factory.mktemp("waiting"))
    made.start()
    made.create("default", **BRIEF)
    made.http.patch("/v1/federations/default", json={"action": "pause"})
    yield made
    made.close()


@pytest.mark.parametrize("what", WRONG)
def test_what_a_client_is_asked_wrongly_it_says(waiting, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    call, kind, said = WRONG[what]
    with Client(waiting.url) as client, pytest.raises(kind, match=said) as refused:
        call(client)
    assert isinstance(refused.value, SdkError)


def test_a_client_needs_the_right_token_and_somebody_who_answers(tmp_path, monkeypatch):
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unreachable, match="does not answer"):
        client.federations()
    tokens = {
        f"COORDINATOR_{kind}_TOKEN": f"the-{kind.lower()}-s-secret-0" for kind in ("ADMIN", "OBSERVER", "ENROLMENT")
    }
    guarded = Coordinator(tmp_path / "guarded", **tokens)
    guarded.start()
    try:
        with Client(guarded.url) as client, pytest.raises(NotAuthenticated):
            client.federations()
        with Client(guarded.url, token="the-observer-s-secret-0") as client:
            assert client.federations() == []
            with pytest.raises(NotAuthenticated, match="needs an admin token"):
                client.delete("default")
        monkeypatch.setenv("SPARROW_ADMIN_TOKEN", "the-admin-s-secret-0")
        with Client(guarded.url) as client, pytest.raises(NotFound):
            client.delete("default")
    finally:
        guarded.close()


def test_moments_have_a_beginning():
    assert DeviceProgress("opening") == DeviceProgress(phase="opening", round=0, loss=None, text=None)
