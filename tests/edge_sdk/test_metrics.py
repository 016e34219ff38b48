"""Metrics that a task names: what they are, and where they are shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.errors import BadArgument
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.metrics import METRICS
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation import in_process

pytestmark = pytest.mark.integration  # plays whole federations


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "wanted"),
    [
        ("top1", [[0, 1], [3, 2]], [1, 1], 0.5),
        ("top1", [[[0, 1, 1], [2, 0, 0]]], [[1, 0, 1]], 2 / 3),  # [N, C, T]
        ("top1", [[[0, 1], [2, 0], [0, 3], [1, 0]]], [[1, 0, 1, 1]], 0.75),  # [N, T, C]
        ("mae", [[1], [3]], [2, 5], 1.5),
        ("rmse", [[0], [0]], [3, 4], np.sqrt(12.5)),
        ("r2", [[1], [2], [4]], [1, 2, 3], 0.5),
        ("r2", [[1], [2]], [5, 5], 0),
        ("iou", [[[[1, -1], [1, 1]]]], [[[[1, 1], [0, 1]]]], 0.5),
        ("iou", [[[5, 0, 0], [0, 5, 5]]], [[0, 0, 1]], (0.5 + 0.5) / 2),
    ],
)
def test_a_metric_is_what_it_is_called(name, outputs, targets, wanted):
    assert METRICS[name](np.array(outputs, np.float32), np.array(targets)) == pytest.approx(wanted)


def shifted(outputs, targets):
    return (outputs - targets).max()


def unknown(outputs, targets):
    return np.nan


def task_of(metrics, *, test=True):
    torch.manual_seed(0)
    x = torch.randn(12, 4)
    batches = [(x[:6], x[:6, :1]), (x[6:], x[6:, :1])]
    return Task(
        "regression", nn.Linear(4, 1), nn.MSELoss(), batches, batches[:1], batches[1:] if test else None,
        classification=False, metrics=metrics,
    )  # fmt: skip


@pytest.fixture
def client(tmp_path):
    with in_process.running(create_app(Settings(data_dir=tmp_path, default_task=""))) as client:
        yield client


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_metrics_are_in_the_result_the_records_and_the_overview(client, tmp_path, compiling, engine, caplog):
    metrics = {"mae": METRICS["mae"], "shifted": shifted, "unknown": unknown}
    settings = {"method": "fedavg", "rounds": 2, "min_devices": 1, "cohort": 1, "learning_rate": 0.1}
    publish(in_process.ADDRESS, "f", task_of(metrics), client=client, **settings)
    result = join(
        in_process.ADDRESS, task_of(metrics), client=client, federation="f", name="one", quiet=True,
        options=JoinOptions(engine=engine, budget=1.0, patience_seconds=20), state_dir=tmp_path / "state",
    )  # fmt: skip
    assert set(result.metrics) == {"mae", "shifted"}
    assert "metric unknown is nan on held-out data" in caplog.text
    record = client.get("/v1/federations/f/rounds").json()[-1]
    assert set(record["metrics_global"]) == {"mae", "shifted"}
    assert client.get("/v1/federations/f/overview").json()["metrics_global"] == record["metrics_global"]
    assert "metrics_global" in client.get("/v1/federations/f/rounds?format=csv").text


def test_a_device_that_brings_its_data_alone_measures_what_was_published(client, tmp_path, compiling):
    settings = {"method": "fedavg", "rounds": 1, "min_devices": 1, "cohort": 1}
    publish(in_process.ADDRESS, "f", task_of(("rmse", "r2")), client=client, **settings)
    arrays = [(x.numpy(), y.numpy()) for x, y in task_of(()).train]
    result = join(
        in_process.ADDRESS, Task("regression", None, None, arrays, arrays[:1], classification=False), client=client,
        federation="f", name="one", quiet=True, options=JoinOptions(budget=1.0, patience_seconds=20),
        state_dir=tmp_path / "state",
    )  # fmt: skip
    assert set(result.metrics) == {"rmse", "r2"}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (("mse",), "unknown metric 'mse'; choose from top1, mae"),
        ("mae", "give up to 8"),
        ({str(number): shifted for number in range(9)}, "give up to 8"),
    ],
)
def test_metrics_that_cannot_be_are_refused(metrics, said):
    with pytest.raises(BadArgument, match=said):
        task_of(metrics)


def test_a_metric_that_fails_is_refused_at_publication(client):
    with pytest.raises(BadArgument, match="the metric 'broken' fails on outputs"):
        publish(in_process.ADDRESS, "f", task_of({"broken": lambda outputs: 1.0}), client=client, method="fedavg")
