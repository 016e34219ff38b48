"""Local noise: how far an update may move, how much noise comes to it, what it costs, and what is not reported."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from edge_sdk import join, publish
from edge_sdk.device import local_noise
from edge_sdk.device.local_noise import DELTA, LocalNoise, check_history, count_update, epsilon, withhold
from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import Progress, StateFolder
from edge_sdk.device.trainable import CannotTrain
from edge_sdk.device.transport import Transport
from edge_sdk.device.watchdog import Paused
from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.errors import BadArgument
from edge_sdk.methods import DeviceState, Job, Trained, Update, load_method
from edge_sdk.tasks import Seeded, Task
from edge_sdk.tasks.digits import load
from edge_sdk.training.engine import TorchEngine
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import bundle
from sparrow.protocol.accounting import gaussian_epsilon
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.errors import MissingPart, ProtocolError
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, pack
from sparrow.protocol.messages import Assignment, Kind, PauseReason
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process

NEURONS = NeuronMask({"conv": np.array([0, 2]), "fc": np.array([1, 2, 5])})
NOISE = LocalNoise(0.5, 2.0)


def job_of(manifest, mask=None, **settings):
    """A round whose payload holds the model of seed 7 under ``mask``."""
    assignment = Assignment(
        assignment_id="a", kind="train", round=1, deadline_seconds=9, settings=FederationSettings(**settings)
    )
    task = Task("small", nn.Linear(1, 1), lambda outputs, targets: outputs.sum(), [], [])
    payload = bundle.decode(bundle.encode(manifest, pack(manifest, initial_values(manifest, 7), mask), mask), manifest)
    return Job(assignment, manifest, task, TorchEngine(task, manifest), DeviceState(), payload)


class Silent:
    """No noise, so that the clip can be seen."""

    def standard_normal(self, count):
        return np.zeros(count)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, NEURONS])
@pytest.mark.parametrize("length", [0.5, 50.0])
def test_an_update_moves_by_the_clip_at_most_before_its_noise(small, mask, length):
    job = job_of(small, mask)
    base = job.received.values
    moved = np.random.default_rng(0).normal(size=count_values(small, mask))
    moved *= length / np.linalg.norm(moved)
    sent = NOISE.hide(job, Update((base + moved).astype(np.float32), mask), Silent())
    assert sent.mask is mask
    assert sent.values.dtype == np.float32
    np.testing.assert_allclose(sent.values - base, moved * min(1, 2 / length), atol=1e-5)


@pytest.mark.parametrize("mask", [None, draw_neurons(load_builtin("mnist").manifest, NeuronDraw("d", 0.3))])
def test_every_value_gets_noise_of_the_clip_times_the_multiplier(mask):
    manifest = load_builtin("mnist").manifest
    job = job_of(manifest, mask)
    base = job.received.values
    noise = NOISE.hide(job, Update(base, mask), np.random.default_rng(0)).values - base
    assert noise.all()
    count = len(base)
    assert abs(noise.mean()) < 5 * 1.0 / count**0.5
    assert noise.std() == pytest.approx(1.0, rel=5 / (2 * count) ** 0.5), "0.5 times a clip of 2"
    assert np.mean(np.abs(noise) < 0.6745) == pytest.approx(0.5, abs=2.5 / count**0.5), "normal, and not else"


def test_noise_is_drawn_anew_from_the_operating_system(small, monkeypatch):
    job = job_of(small)
    one, other = (NOISE.hide(job, Update(job.received.values)).values for _ in range(2))
    assert abs(np.corrcoef(one - other, one)[0, 1]) < 1
    assert (one != other).all()
    monkeypatch.setattr(local_noise.secrets, "randbits", lambda bits: 2**bits - 1)
    one, other = (NOISE.hide(job, Update(job.received.values)).values for _ in range(2))
    assert (one == other).all(), "nothing else decides"


def test_a_round_that_asks_for_more_than_values_is_handed_back(small):
    job = job_of(small)
    values = job.received.values
    for update in (Update(values, parts={"gradients": values}), Update(values, parts={"signs": np.zeros(3, np.int8)})):
        with pytest.raises(ProtocolError, match="asks for more than --local-noise hides"):
            NOISE.hide(job, update)
    prepares = replace(job, assignment=job.assignment.model_copy(update={"kind": Kind.prepare}))
    with pytest.raises(ProtocolError, match="asks for more"):
        NOISE.hide(prepares, Update(values))
    with pytest.raises(ProtocolError, match="updates in int8 include"):
        NOISE.hide(job_of(small, precision="int8"), Update(values))
    with pytest.raises(TrainingDiverged, match="not finite"):
        NOISE.hide(job, Update(np.full_like(values, np.nan)))


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_epsilon_is_the_accountants_of_all_updates_against_a_replacement():
    updates = {}
    assert epsilon(updates) == 0.0
    for _ in range(3):
        updates = count_update(updates, LocalNoise(1.0, 0.1), Update(np.zeros(1, np.float32)))
    assert updates == {1.0: 3}
    assert epsilon(updates) == gaussian_epsilon(DELTA, (0.5, 3))
    assert epsilon({1.0: 1}) == pytest.approx(10.73, abs=0.01), "as the coordinator's at z = 1 (docs/privacy.md)"
    mixed = count_update(updates, LocalNoise(4), Update(np.zeros(1, np.float32)))
    assert epsilon(updates) < epsilon(mixed) < epsilon({1.0: 4}), "another multiplier counts as what it is"
    assert count_update(updates, NOISE, None) == updates, "a round that sends nothing costs nothing"
    assert epsilon({0.0: 1, 8.0: 1}) is None


def test_updates_are_counted_durably_by_multiplier(tmp_path, small):
    with closing(StateFolder(tmp_path)) as folder:
        folder.save_progress(Progress(rounds=3, updates={0.5: 1, 2.0: 2}))
        folder.forget_model()
    with closing(StateFolder(tmp_path)) as folder:
        assert folder.load(small)[1].updates == {0.5: 1, 2.0: 2}


def test_a_device_never_mixes_updates_with_and_without(tmp_path):
    check_history(NOISE, Progress(), tmp_path)
    check_history(NOISE, Progress(rounds=2, updates={1.0: 2}), tmp_path)
    check_history(None, Progress(rounds=2, updates={0.0: 2}), tmp_path)
    for before in (Progress(updates={0.0: 2}), Progress(rounds=2)):  # the second of before they were counted
        with pytest.raises(CannotTrain, match=r"2 updates without .*epsilon"):
            check_history(NOISE, before, tmp_path)
    with pytest.raises(CannotTrain, match=r"2 updates with .*--local-noise"):
        check_history(None, Progress(rounds=2, updates={1.0: 2}), tmp_path)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"local_noise": 0}, "local_noise=0 is invalid; give a number above 0"),
        ({"local_noise": float("nan")}, "local_noise=nan is invalid"),
        ({"local_noise": "much"}, "local_noise='much' is invalid"),
        ({"local_noise": 1, "local_clip": -1}, "local_clip=-1 is invalid"),
        ({"local_clip": 1.0}, "give both, or leave local_clip out"),
    ],
)
def test_numbers_that_cannot_work_are_refused(given, said):
    with pytest.raises(BadArgument, match=said):
        join.join("http://127.0.0.1:9", options=join.JoinOptions(**given))


def test_without_an_accountant_there_is_no_local_noise(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    with pytest.raises(MissingPart, match=r"pip install 'sparrow-fl\[privacy\]'"):
        LocalNoise.asked(1.0, None)
    assert LocalNoise.asked(None, None) is None


def test_methods_models_and_precisions_that_it_does_not_hide_are_refused(small):
    plain = Manifest.model_validate(
        {**small.model_dump(), "tensors": [each for each in small.model_dump()["tensors"] if each["trainable"]]}
    )

    def check(method="fedavg", manifest=plain, **settings):
        NOISE.check(load_method(method), manifest, FederationSettings(method=method, **settings))

    check()
    check("fedspu", precision="fp16")
    check(precision="int8", secure=True)
    with pytest.raises(CannotTrain, match=r"\bditto\b.*\bfedavg or fedspu\b"):
        check("ditto")
    with pytest.raises(CannotTrain, match=r"\bint8\b"):
        check(precision="int8")
    with pytest.raises(CannotTrain, match=r"bn\.running_mean .*--running-statistics personal"):
        check(manifest=small)


# --- what is reported -------------------------------------------------------------------------------------------------


def test_what_a_method_found_in_the_data_is_withheld():
    trained = Trained(DeviceState(), None, 5, 3, 9, 0.1, None, 0.2, True, counts={"pulled_steps": 3})
    found = withhold(trained)
    assert (found.counts, found.stopped) == ({}, False)
    assert (found.num_examples, found.steps) == (5, 3)


def _network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def plain_digits(index):
    digits = load(f"index={index},of=4", device=f"pi-{index}", seed=0, batch_size=16)
    return replace(digits, name="plain", model=Seeded(_network))


class Played:
    """A federation of a coordinator in this process, and its devices, which may be closed and opened again."""

    def __init__(self, client, folder):
        self.client, self.folder, self.opened = client, folder, []

    def publish(self, **settings):
        usual = {"rounds": 3, "local_epochs": 1, "cohort": 2, "min_devices": 2, "evaluation_interval": 1}
        publish.publish(in_process.ADDRESS, "f", plain_digits(0), client=self.client, **{**usual, **settings})

    def open(self, number, noise=NOISE):
        folder = StateFolder(self.folder / f"pi-{number}", durable=False)
        self.opened.append(folder)
        return Session(
            Transport(self.client),
            folder,
            federation="f",
            name=f"pi-{number}",
            make_task=lambda info, manifest: plain_digits(number),
            options=SessionOptions(engine="torch", local_noise=noise),
        )

    def close(self):
        while self.opened:
            self.opened.pop().close()

    def play(self, *sessions, until=lambda: False):
        over = set()
        while len(over) < len(sessions) and not until():
            over |= {session for session in sessions if session.step(0.1).outcome is Outcome.over}

    def get(self, path):
        return self.client.get(f"/v1/federations/f{path}").json()


@pytest.fixture
def federation(tmp_path):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task="", tick_seconds=0.05))
    with in_process.running(app) as client, closing(Played(client, tmp_path)) as played:
        yield played


@pytest.mark.integration
@pytest.mark.parametrize(("method", "rule"), [("fedavg", "off"), ("fedspu", "paper")])
def test_devices_finish_and_nothing_is_told_but_values_with_noise(federation, method, rule):
    """Two devices stop, and start again after a round: what they have sent before counts."""
    federation.publish(method=method, early_stopping=rule)
    sessions = [federation.open(0), federation.open(1)]
    federation.play(*sessions, until=lambda: all(session.progress.updates for session in sessions))
    federation.close()
    sessions = [federation.open(0), federation.open(1)]
    federation.play(*sessions)
    for session in sessions:
        assert session.progress.updates == {0.5: 3}
        assert session.progress.rounds == 3
        assert session.progress.stopped_round is None
        assert session.personal is not None
    records = federation.get("/rounds")
    assert [record["updates"] for record in records] == [2, 2, 2]
    for record in records:
        assert record["num_examples"] > 0
        assert not record["counts"]
        told = ("train_loss", "loss_personal", "loss_global", "accuracy_personal", "accuracy_global")
        assert [record[name] for name in told] == [None] * 5, "not told, and not zero"
    for number in (1, 2, 3):
        reports = json.dumps(federation.get(f"/rounds/{number}/reports"))
        assert "pi-0" in reports
        assert not re.search(r'(loss|accuracy)\w*": *[0-9{]', reports), reports
    assert all(device["accuracy"] is None for device in federation.get("/devices"))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TrainingDiverged("the loss is 7e12 after 3 steps"), local_noise.WITHHELD),
        (Paused(PauseReason.heat), PauseReason.heat),
    ],
)
def test_the_reason_of_a_failure_stays_on_the_device(federation, monkeypatch, error, reason):
    """A pause is the policy's and not the data's."""
    federation.publish(method="fedavg", min_devices=1, cohort=1, rounds=1, early_stopping="off")
    session = federation.open(0)
    told = []
    hand_back = session.transport.hand_back

    def train(*given, **named):
        raise error

    monkeypatch.setattr(session.engine, "train", train)
    monkeypatch.setattr(session.transport, "hand_back", lambda id_, why: told.append(why) or hand_back(id_, why))
    while not told:
        session.step(0.1)
    session.leave("ValueError: could not read row 17")
    assert told == [reason]
    assert "row 17" not in json.dumps(federation.get("/devices"))
    assert not session.progress.updates, "nothing was sent"


@pytest.mark.integration
def test_a_device_says_why_it_does_not_take_part_before_it_enrols(federation):
    federation.publish(method="fedprox")
    with pytest.raises(CannotTrain, match="--local-noise does not support fedprox"):
        federation.open(0)
    # Listed with its reason, without a token.
    assert [each["status"] for each in federation.get("/devices")] == ["not_joined"]


@pytest.mark.integration
def test_updates_under_masks_have_noise_too(federation):
    """With secure aggregation the noise comes before the masks, and what the sum shows has it."""
    pytest.importorskip("cryptography")
    common = {"method": "fedavg", "secure": True, "secure_metrics": True, "cohort": 4, "min_devices": 4, "rounds": 1}
    common |= {"secure_colluders": 0, "secure_dropouts": 0.1}
    federation.publish(**common, early_stopping="off", secure_bits=32, secure_range=8.0)
    sessions = [federation.open(number, LocalNoise(100.0, 1e-3)) for number in range(4)]
    before = pack(sessions[0].manifest, sessions[0].engine.read(), None)
    federation.play(*sessions)
    (record,) = federation.get("/rounds")
    assert record["updates"] == 4
    assert record["train_loss"] is None, "not even under masks"
    assert record["counts"] == {"clipped_values": 0}
    model = sessions[0].transport.model("f", sessions[0].manifest)
    moved = pack(sessions[0].manifest, model, None) - before
    assert 0.1 / 4**0.5 * 0.8 < moved.std() < 0.1, "four devices' noise of 0.1, averaged"
    assert all(session.progress.updates == {100.0: 1} for session in sessions)


@pytest.mark.integration
def test_join_says_what_was_spent_at_its_start_and_its_end(federation, tmp_path, capsys):
    federation.publish(method="fedavg", min_devices=1, cohort=1, rounds=2, early_stopping="off")
    result = join.join(
        in_process.ADDRESS,
        plain_digits(0),
        federation="f",
        name="pi-0",
        state_dir=tmp_path / "pi-0",
        client=federation.client,
        options=join.JoinOptions(engine="torch", budget=1.0, local_noise=1, local_clip=0.5),
        quiet=True,
    )
    assert result.local_epsilon == gaussian_epsilon(DELTA, (0.5, 2))
    said = "local noise: standard deviation 1 times the clip 0.5 on every sent value; epsilon so far 0 at delta 1e-05"
    assert said in capsys.readouterr().err
    text = join.report(result, "none")
    assert f"local noise                epsilon {result.local_epsilon:.4g} at delta 1e-05, of all updates sent" in text
    assert json.loads(join.as_json(result, "none"))["local_epsilon"] == result.local_epsilon
