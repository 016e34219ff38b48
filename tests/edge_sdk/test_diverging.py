"""Training that diverges: its likely causes in order, and a device that trained nothing says so."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk import join as joining
from edge_sdk.device.diagnosis import Spread, diagnose
from edge_sdk.engines.training import LOSS, Divergence, TrainingDiverged, UnsoundModel
from edge_sdk.errors import NothingTrained
from edge_sdk.join import JoinOptions, join, report
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.failures import in_words
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process as inprocess

SETTINGS = FederationSettings(method="fedavg", learning_rate=0.25)


def batches(deviation: float):
    inputs = np.random.default_rng(0).normal(0, deviation, (64, 4)).astype(np.float32)
    return [(inputs[start : start + 16], np.zeros(16, np.int64)) for start in (0, 16, 32, 48)]


def test_causes_are_named_in_order_with_the_measured_spread():
    error = Divergence(SETTINGS, 0.125, 20).of_loss(float("nan"), 3, inputs_finite=True)
    found = diagnose(error, SETTINGS, batches(1e5))
    spread = Spread.of(batches(1e5))
    places = [found.index(text) for text in ("step 3 of 20", f"{spread.deviation:.2g}", "0.125", "clip=1")]
    assert places == sorted(places)
    for measured in (spread.smallest, spread.largest, spread.deviation):
        assert f"{measured:.2g}" in found
    assert error.failure == "training-diverged/loss"


def test_an_ordinary_scale_is_not_blamed():
    error = TrainingDiverged("the loss is nan")
    assert "probably not the scale" in diagnose(error, SETTINGS, batches(1.0))
    assert "standardise" in diagnose(error, SETTINGS, batches(0.001))
    assert "0.25" in diagnose(error, SETTINGS, batches(1.0))
    assert "clip of 5" in diagnose(error, SETTINGS.model_copy(update={"clip": 5.0}), batches(1.0))


def test_indices_have_no_scale_and_other_advice_stays():
    words = [(np.arange(8), np.zeros(8, np.int64))]
    assert "inputs" not in diagnose(TrainingDiverged("the loss is nan"), SETTINGS, words)
    other = diagnose(TrainingDiverged("a score is not finite", "publish a sound model"), SETTINGS, batches(1e5))
    assert other == "a score is not finite; publish a sound model"
    unsound = diagnose(UnsoundModel("no finite loss", "see the data"), SETTINGS, batches(1e5))
    assert f"{Spread.of(batches(1e5)).deviation:.2g}" in unsound
    assert unsound.startswith("no finite loss; see the data. ")


def test_the_error_survives_the_way_between_processes():
    # By __reduce__, as pickle does.
    again = copy.copy(TrainingDiverged("the loss is nan", learning_rate=0.5, failure=LOSS))
    assert again.failure is LOSS
    assert (again.met, again.advice, again.learning_rate) == ("the loss is nan", None, 0.5)


# --- a whole federation ----------------------------------------------------------------------------------------------


def task(scale: float = 1.0) -> Task:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Task("two", model, F.cross_entropy, [(scale * inputs, labels)] * 2, [(inputs, labels)])


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr("sparrow.coordinator.rounds.dispatch.REST_SECONDS", 0.0)
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "coordinator", default_task=""))) as client:
        yield client


def both(client, tmp_path):
    """The results of a device that trains, and of one whose inputs are too large to train with."""

    def run(name: str):
        return join(
            inprocess.ADDRESS,
            task(1e18 if name == "bad" else 1.0),
            client=client,
            name=name,
            state_dir=tmp_path / name,
            export=tmp_path / f"{name}.onnx",
            options=JoinOptions(budget=1.0, deterministic=True),
            quiet=True,
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ("good", "bad")))


@pytest.mark.integration  # plays a federation
def test_a_device_with_only_failed_rounds_reports_it(client, tmp_path, monkeypatch, capsys):
    publish(inprocess.ADDRESS, "default", task(), client=client, method="fedavg", rounds=2, min_devices=2, cohort=2)
    good, bad = both(client, tmp_path)
    assert (good.trained_nothing, good.failures) == (False, 0)
    assert (bad.trained_nothing, bad.rounds, bad.adapted) == (True, 0, True)
    assert bad.failures in (1, 2)
    assert (tmp_path / "bad.onnx").exists()
    assert any("trained nothing" in text and "as received" in text for text in bad.warnings)
    assert "trained nothing" in report(bad, "none")
    assert "adapted" not in report(bad, "none")
    assert "adapted" not in report(good, "none") or good.adapted

    devices = {each["name"]: each for each in client.get("/v1/federations/default/devices").json()}
    assert {name: each["doing"] for name, each in devices.items()} == {"good": "done", "bad": "untrained"}
    assert devices["bad"]["failure"]["reason"] == in_words(LOSS)
    assert "deviation" in bad.failure
    spread = Spread.of(task(1e18).train)
    told = str(devices) + str(client.get(f"/v1/devices/{devices['bad']['device_id']}").json())
    assert f"{spread.deviation:.2g}" not in told
    found = client.get("/v1/federations/default/devices", params={"doing": "untrained"}).json()
    assert [each["name"] for each in found] == ["bad"]

    monkeypatch.setattr(joining, "join", lambda *given, **more: bad)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(joining.main(["--server", inprocess.ADDRESS]))
    assert ended.value.code == NothingTrained.exit_code == Exit.FAILED
    assert "trained nothing" in capsys.readouterr().out


@pytest.mark.integration  # plays a federation
def test_a_device_that_comes_after_the_end_has_adapted(client, tmp_path):
    publish(inprocess.ADDRESS, "default", task(), client=client, method="fedavg", rounds=1, min_devices=1, cohort=1)
    where = {"client": client, "options": JoinOptions(budget=1.0, deterministic=True), "quiet": True}
    join(inprocess.ADDRESS, task(), name="first", state_dir=tmp_path / "first", **where)
    late = join(inprocess.ADDRESS, task(), name="late", state_dir=tmp_path / "late", **where)
    assert (late.trained_nothing, late.adapted) == (False, True)
    devices = client.get("/v1/federations/default/devices").json()
    assert {each["doing"] for each in devices} == {"done"}
