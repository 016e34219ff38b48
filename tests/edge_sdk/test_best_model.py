"""A device keeps, judges and exports the personal model that its validation data speak for, of whatever round it is.

A model of one weight is trained towards 10 while its validation data want 3 and its test data 4: the best round lies in
the middle, and every round's model is known by hand.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.device import state
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.export.source import read_source
from sparrow.simulation import in_process as inprocess

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

FLAT = {"local_steps": 1, "min_devices": 1, "cohort": 1, "evaluation_interval": 0, "early_stopping": "off"}


class Constant(nn.Sequential):
    """Answers its one hidden value, whatever it is asked: 2 · w."""

    def __init__(self, start: float) -> None:
        super().__init__(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            self[0].weight.fill_(start / 2)
            self[1].weight.fill_(2.0)
        self[1].weight.requires_grad_(False)


def task(start: float = 0.0) -> Task:
    def data(target: float):
        return [(torch.ones(1, 1), torch.full((1, 1), target))]

    return Task("one", Constant(start), nn.MSELoss(), data(10.0), data(3.0), data(4.0), classification=False)


def outputs(rounds: int, start: float = 0.0, rate: float = 0.01) -> list[float]:
    """What the model answers after each round of one step of SGD on (2w - 10)²."""
    found, w = [], start / 2
    for _ in range(rounds):
        w -= rate * 4 * (2 * w - 10)
        found.append(2 * w)
    return found


@pytest.fixture
def client(tmp_path):
    settings = Settings(data_dir=tmp_path / "coordinator", default_task="", log_level="WARNING")
    with inprocess.running(create_app(settings)) as client:
        yield client


def join_one(client, folder, task, name="pi"):
    return join(
        "http://in-process",
        task,
        federation="one",
        name=name,
        options=JoinOptions(budget=1.0),
        state_dir=folder / name,
        export=folder / "model.onnx",
        client=client,
        quiet=True,
    )


def take_part(client, folder, *, start=0.0, name="pi", method="fedspu", rounds=12, **settings):
    settings = {**FLAT, "learning_rate": 0.01, "rounds": rounds, "method": method, **settings}
    publish("http://in-process", "one", task(start), client=client, **settings)
    return join_one(client, folder, task(start), name)


def answer(path) -> float:
    session = onnxruntime.InferenceSession(str(path))
    (given,) = session.get_inputs()
    return float(session.run(None, {given.name: np.ones((1, 1), np.float32)})[0][0, 0])


@pytest.mark.parametrize("method", ["fedspu", "ditto", "local"])
def test_the_best_round_is_exported_and_judged(client, tmp_path, method):
    settings = {"method_settings": {"proximal_weight": 1e-9}} if method == "ditto" else {}
    result = take_part(client, tmp_path, method=method, **settings)
    by_round = outputs(12)
    best = 1 + int(np.argmin([abs(each - 3) for each in by_round]))
    assert 1 < best < 12
    assert result.best_round == best
    assert answer(result.export.path) == pytest.approx(by_round[best - 1], abs=1e-4)
    assert read_source(tmp_path / "pi").progress["last_round"] == best, "what sparrow export takes"
    (*_, last) = client.get("/v1/federations/one/rounds").json()
    assert last["loss_personal"] == pytest.approx((by_round[best - 1] - 4) ** 2, rel=1e-3)


def test_a_newer_model_replaces_one_that_is_no_more_than_a_quarter_better(client, tmp_path):
    losses = [(each - 3) ** 2 for each in outputs(5, rate=0.0122)]
    assert losses[3] > losses[2] > losses[3] / 1.25, "round 3 has the lowest loss, round 4 one a little above it"
    result = take_part(client, tmp_path, method="local", rounds=5, learning_rate=0.0122)
    assert result.best_round == 4


def test_the_last_round_is_kept_where_the_federation_says_so(client, tmp_path):
    result = take_part(client, tmp_path, personal_model="last")
    assert result.best_round is None
    assert not (tmp_path / "pi" / "best.safetensors").exists()
    assert answer(result.export.path) == pytest.approx(outputs(12)[-1], abs=1e-4)


def test_training_goes_on_from_the_last_model_not_from_the_best(client, tmp_path):
    take_part(client, tmp_path, method="local")
    (*_, last) = client.get("/v1/federations/one/rounds").json()
    assert last["train_loss"] == pytest.approx((outputs(12)[-2] - 10) ** 2, rel=1e-3)


def test_a_stopped_device_keeps_its_best_model_and_says_that_it_stopped(client, tmp_path, capsys):
    result = take_part(client, tmp_path, rounds=40, early_stopping="validation", min_participations=8, patience=3)
    best = 1 + int(np.argmin([abs(each - 3) for each in outputs(40)]))
    assert result.stopped_round is not None
    assert f"training stopped early in round {result.stopped_round}" in capsys.readouterr().err, "though it is quiet"
    assert best < result.stopped_round < 40
    assert result.best_round == best
    assert answer(result.export.path) == pytest.approx(outputs(40)[best - 1], abs=1e-4)


def test_a_personal_model_worse_than_before_its_first_round_is_a_warning(client, tmp_path):
    result = take_part(client, tmp_path, start=3.0, rounds=2)
    (warning, *_) = result.warnings
    assert "worse than the model" in warning
    assert "more rounds or another learning_rate" in warning
    assert result.best_round == 1


def test_killed_between_the_model_and_its_second_name_the_best_is_found_again(client, tmp_path, monkeypatch):
    """The model's file is there, and its second name is still that of an older one."""
    saved = state.StateFolder.keep_as_best
    calls = []

    def killed(self):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        saved(self)

    monkeypatch.setattr(state.StateFolder, "keep_as_best", killed)
    with pytest.raises(KeyboardInterrupt):
        take_part(client, tmp_path, method="local")  # whose rounds depend on nobody else's
    monkeypatch.undo()
    result = join_one(client, tmp_path, task())
    by_round = outputs(12)
    best = 1 + int(np.argmin([abs(each - 3) for each in by_round]))
    assert result.best_round == best
    assert answer(result.export.path) == pytest.approx(by_round[best - 1], abs=1e-4)


def test_where_files_cannot_have_two_names_the_best_is_copied(client, tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    result = take_part(client, tmp_path)
    best = tmp_path / "pi" / "best.safetensors"
    assert not best.samefile(tmp_path / "pi" / "model.safetensors")
    assert answer(result.export.path) == pytest.approx(outputs(12)[result.best_round - 1], abs=1e-4)


def test_a_best_model_that_is_damaged_is_refused_by_name(client, tmp_path):
    take_part(client, tmp_path)
    best = tmp_path / "pi" / "best.safetensors"
    shutil.copy(best, tmp_path / "copy")
    best.unlink()
    best.write_bytes((tmp_path / "copy").read_bytes()[:-40])
    manifest = client.get("/v1/federations/one/manifest")
    folder = state.StateFolder(tmp_path / "pi")
    try:
        with pytest.raises(state.StateError, match=r"best\.safetensors is damaged"):
            folder.best(state.Manifest.model_validate(json.loads(manifest.content)))
    finally:
        folder.close()


def test_a_mixture_with_the_finished_global_model_is_kept_where_it_is_better(client, tmp_path):
    """Of two devices one wants 0 and one wants 6, both by their validation data: the global model lies between."""
    wanted = {"low": 0.0, "high": 6.0}
    settings = {**FLAT, "min_devices": 2, "cohort": 2, "rounds": 4, "local_steps": 40, "learning_rate": 0.02}
    settings["method_settings"] = {"proximal_weight": 0.001}

    def of(name):
        def data(target):
            return [(torch.ones(1, 1), torch.full((1, 1), target))]

        middle = 0.75 * wanted[name] + 0.25 * 3.0
        return Task("one", Constant(3.0), nn.MSELoss(), data(wanted[name]), data(middle), classification=False)

    publish("http://in-process", "one", of("low"), client=client, method="ditto", **settings)

    def take_part(name):
        return join(
            "http://in-process",
            of(name),
            federation="one",
            name=name,
            options=JoinOptions(budget=1.0),
            state_dir=tmp_path / name,
            export=tmp_path / f"{name}.onnx",
            client=client,
            quiet=True,
        )

    with ThreadPoolExecutor() as pool:
        results = dict(zip(wanted, pool.map(take_part, wanted), strict=True))
    for name, result in results.items():
        assert result.global_share == 0.25
        assert answer(result.export.path) == pytest.approx(0.75 * wanted[name] + 0.25 * 3.0, abs=0.3)
        assert state.personal.read((tmp_path / name / "best.safetensors").read_bytes()).best


@pytest.mark.parametrize("epochs", [0, 2])
def test_fedspu_trains_a_mixture_once_more_at_the_end(client, tmp_path, epochs):
    """One device, whose validation data want what only more training than its one round's step brings."""

    def data(target):
        return [(torch.ones(1, 1), torch.full((1, 1), target))]

    def task():
        return Task("one", Constant(3.0), nn.MSELoss(), data(6.0), data(6.0), classification=False)

    settings = {**FLAT, "min_devices": 1, "cohort": 1, "rounds": 1, "local_steps": 1, "learning_rate": 0.0625}
    publish("http://in-process", "one", task(), client=client, method="fedspu", finetune_epochs=epochs, **settings)
    result = join_one(client, tmp_path, task())
    # A step halves the distance to 6 (loss (2 w - 6)^2, rate 1/16): 3, then 4.5, and with two more 5.25 and 5.625.
    assert answer(result.export.path) == pytest.approx(5.625 if epochs else 4.5, abs=1e-4)
    assert result.global_share == (0.5 if epochs else 0.0)
