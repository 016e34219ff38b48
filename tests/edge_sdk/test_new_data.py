"""A device comes back with new data: its best model is judged again, and the old one is not exported in silence."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.device.session.learning import digest_of
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation import in_process as inprocess

INPUTS = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
LABELS = (INPUTS[:, 0] > 0).astype(np.int64)


def task(labels) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    train, held_out = (ArrayBatches(Arrays(INPUTS[part], labels[part]), 16) for part in (slice(64), slice(64, 96)))
    return Task("weeks", model, F.cross_entropy, train, held_out)


def test_a_digest_is_that_of_the_samples():
    whole = [(INPUTS, LABELS)]
    assert digest_of(whole) == digest_of(ArrayBatches(Arrays(INPUTS, LABELS), 7)) == digest_of(list(whole))
    assert digest_of(whole) == digest_of([(torch.tensor(INPUTS), torch.tensor(LABELS))])
    assert len({digest_of(whole), digest_of([(INPUTS, 1 - LABELS)]), digest_of([(-INPUTS, LABELS)])}) == 3


@pytest.fixture
def client(tmp_path):
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "coordinator", default_task=""))) as client:
        yield client


def take_part(client, folder, labels):
    result = join(
        inprocess.ADDRESS,
        task(labels),
        federation="weeks",
        name="pi",
        state_dir=folder / "pi",
        export=folder / "pi.onnx",
        options=JoinOptions(budget=1.0, deterministic=True),
        client=client,
        quiet=True,
    )
    scores = onnxruntime.InferenceSession(folder / "pi.onnx").run(None, {"input": INPUTS[64:]})[0]
    return result, float((scores.argmax(1) == labels[64:]).mean())


@pytest.mark.integration  # plays whole federations
@pytest.mark.parametrize("method", ["fedspu", "local"])
def test_an_old_model_is_not_exported_in_silence(client, tmp_path, method):
    settings = {"method": method, "rounds": 8, "min_devices": 1, "cohort": 1, "learning_rate": 0.5, "local_epochs": 3}
    publish(inprocess.ADDRESS, "weeks", task(LABELS), client=client, **settings)
    first, right = take_part(client, tmp_path, LABELS)
    assert right > 0.85
    assert not any("data changed" in text for text in first.warnings)
    again, _ = take_part(client, tmp_path, LABELS)
    assert again.warnings == first.warnings, "the same data"

    unchanged, right = take_part(client, tmp_path, 1 - LABELS)
    assert right < 0.5
    assert any("data changed" in text for text in unchanged.warnings), "no round has trained on the new data"

    for change in ({"rounds": 16}, {"action": "reopen"}):
        answer = client.patch("/v1/federations/weeks", json=change)
        assert answer.status_code == 200, answer.text
    second, right = take_part(client, tmp_path, 1 - LABELS)
    assert second.rounds == 16
    assert second.best_round > 8
    assert right > 0.85


@pytest.mark.integration
def test_a_device_that_stopped_early_trains_on_new_data(client, tmp_path):
    settings = {"method": "local", "rounds": 30, "min_devices": 1, "cohort": 1, "learning_rate": 0.5, "local_epochs": 3}
    rule = {"patience": 1, "min_participations": 2, "min_improvement": 0.1}
    publish(inprocess.ADDRESS, "weeks", task(LABELS), client=client, **settings, **rule)
    first, _ = take_part(client, tmp_path, LABELS)
    assert first.stopped_round is not None
    before = client.get("/v1/federations/weeks").json()
    assert (before["status"], before["devices_stopped"]) == ("finished", 1)
    client.patch("/v1/federations/weeks", json={"rounds": 60, "action": "reopen"}).raise_for_status()
    second, right = take_part(client, tmp_path, 1 - LABELS)
    assert second.rounds > first.rounds + 1
    assert right > 0.85
