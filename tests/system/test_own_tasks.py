"""Tasks of one's own beyond the README's: other settings, and what goes wrong in a user's code."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.errors import NothingTrained
from edge_sdk.join import JoinOptions, Result, join
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import Task
from sparrow.transport import httpx

from .conftest import Coordinator, environment, wait_until


def network(*head: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), *head)


def batches(targets: torch.Tensor, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch, the fewest there can be."""
    return [(torch.randn(len(targets), 6, generator=torch.Generator().manual_seed(seed)), targets)]


def regression(seed: int, loss=None) -> Task:
    data = batches(torch.linspace(-1, 1, 20)[:, None], seed)
    return Task("slope", network(nn.Linear(16, 1)), loss or nn.MSELoss(), data, data, classification=False)


def take_part(coordinator: Coordinator, folder, tasks: dict[str, Task], **how) -> dict[str, Result | BaseException]:
    """Every device in a thread of its own; what it returned, or raised."""
    ended: dict[str, Result | BaseException] = {}

    def run(name: str, task: Task) -> None:
        try:
            ended[name] = join(
                coordinator.url,
                task,
                federation="own",
                name=name,
                state_dir=folder / name,
                export=folder / f"{name}.onnx",
                # To find out what it can afford, it would call the loss before it enrols.
                options=JoinOptions(**{"budget": 1.0, "patience_seconds": 20, **how}),
                quiet=True,
            )
        except BaseException as error:
            ended[name] = error

    threads = [threading.Thread(target=run, args=item) for item in tasks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(ended) == set(tasks), "a device never came back"
    return ended


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_regression_with_personal_statistics_adam_and_short_values(coordinator, tmp_path, precision):
    publish(
        coordinator.url,
        "own",
        regression(0),
        options=PublishOptions(running_statistics="personal"),
        rounds=2,
        optimizer="adam",
        learning_rate=0.01,
        clip=1.0,
        precision=precision,
    )
    ended = take_part(coordinator, tmp_path, {"a": regression(1), "b": regression(2)}, budget=0.5)
    for name, result in ended.items():
        assert isinstance(result, Result), result
        assert result.rounds == 2
        assert result.accuracy_before is result.accuracy_after is None
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx")
        assert session.run(None, {"input": np.zeros((3, 6), np.float32)})[0].shape == (3, 1)
    info = coordinator.info("own")
    assert (info["status"], info["global_model_usable"]) == ("finished", False)
    answer = httpx.get(f"{coordinator.url}/v1/federations/own/model.onnx")
    assert answer.status_code == 404
    assert "running_mean is kept on the devices" in answer.json()["detail"]
    last = coordinator.rounds("own")[-1]
    assert last["accuracy_personal"] is None
    assert last["loss_personal"] > 0


class Failing(nn.MSELoss):
    """A user's loss with a mistake in it, that shows with whole batches: not before the device enrols."""

    def forward(self, outputs, targets):
        if len(targets) == 20:
            raise RuntimeError("no such column")
        return super().forward(outputs, targets)


class Exploding(nn.MSELoss):
    def forward(self, outputs, targets):
        return super().forward(outputs, targets) * (torch.inf if len(targets) == 20 else 1.0)


def test_a_loss_that_raises_ends_its_device_but_not_the_round(coordinator, tmp_path):
    publish(coordinator.url, "own", regression(0), rounds=1, early_stopping="off")
    ended = take_part(coordinator, tmp_path, {"good": regression(1), "bad": regression(2, Failing())})
    assert isinstance(ended["bad"], RuntimeError)
    assert isinstance(ended["good"], Result)
    (record,) = coordinator.rounds("own")
    assert (record["updates"], record["handed_back"], record["expired"]) == (1, 1, 0)


def test_training_that_diverges_is_handed_back_and_the_device_stays(coordinator, tmp_path):
    publish(coordinator.url, "own", regression(0), rounds=2, early_stopping="off", evaluation_interval=0)
    ended = take_part(coordinator, tmp_path, {"good": regression(1), "wild": regression(2, Exploding())})
    assert isinstance(ended["good"], Result)
    assert ended["good"].rounds == 2
    wild = ended["wild"]
    assert isinstance(wild, NothingTrained), wild
    assert "wild has trained nothing" in str(wild)
    first, second = coordinator.rounds("own")
    assert (first["updates"], first["handed_back"]) == (1, 1)
    assert second["cohort"] == ["good"], "it rests after handing back"


def test_an_update_that_is_refused_is_handed_back_and_the_personal_model_stays(coordinator, tmp_path):
    publish(coordinator.url, "own", regression(0), rounds=1, early_stopping="off", update_norm_limit=1e-6)
    ended = take_part(coordinator, tmp_path, {"a": regression(1), "b": regression(2)})
    for result in ended.values():
        assert isinstance(result, Result), result
        assert (result.rounds, result.adapted) == (1, False)
    (record,) = coordinator.rounds("own")
    assert (record["updates"], record["handed_back"]) == (0, 2)
    assert coordinator.info("own")["model_version"] == 0


def test_a_late_update_is_not_needed_but_the_personal_model_stays(coordinator, tmp_path):
    class Slow(nn.MSELoss):
        def forward(self, outputs, targets):
            if not torch.is_inference_mode_enabled() and any(
                info["name"] == "own" and info["devices"] == 2 for info in coordinator.get("/v1/federations").json()
            ):
                wait_until(lambda: coordinator.rounds("own")[0]["status"] == "closed", "round 1 to close")
            return super().forward(outputs, targets)

    publish(
        coordinator.url,
        "own",
        regression(0),
        rounds=1,
        local_steps=1,
        early_stopping="off",
        quorum=0.5,
    )
    ended = take_part(coordinator, tmp_path, {"fast": regression(1), "slow": regression(2, Slow())})
    slow = ended["slow"]
    assert isinstance(slow, Result), slow
    assert slow.rounds == 1, "the local step stays, and is not replaced by an adapted global model"
    (record,) = coordinator.rounds("own")
    assert (record["updates"], record["expired"]) == (1, 1)


WITHOUT_PYTORCH = (
    "import sys; sys.modules['torch'] = None; from edge_sdk.join import main; sys.exit(main(sys.argv[1:]))"
)


def test_devices_join_a_task_that_is_not_installed_with_their_data_alone(coordinator, tmp_path, compiling):
    """Without its model, and where there is no PyTorch; data that are not the model's are refused in a line."""
    inputs = torch.randn(40, 6)
    samples = [(inputs, (inputs[:, 0] > 0).long())]
    publish(
        coordinator.url,
        "own",
        Task("signs", network(nn.Linear(16, 2)), nn.CrossEntropyLoss(), samples, samples),
        rounds=4,
        min_devices=2,
        local_epochs=5,
    )

    def joins(name, x, y, *more):
        if x is not None:
            np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y)
        options = [
            "--server",
            coordinator.url,
            "--federation",
            "own",
            "--device-name",
            name,
            "--state-dir",
            name,
            "--quiet",
        ]
        data = [] if x is None else ["--data", f"{name}.npz"]
        return subprocess.Popen(
            [sys.executable, "-c", WITHOUT_PYTORCH, *options, *data, *more],
            cwd=tmp_path,
            env=environment(HOME=str(tmp_path), OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    chance = np.random.default_rng(0)
    x = chance.standard_normal((120, 6)).astype(np.float32)
    wrong = {
        "nothing": (joins("nothing", None, None), "is not installed here, nor need it be: give this device's samples"),
        "shape": (
            joins("shape", x[:, :5], np.arange(120) % 2),
            r"samples have the shape \(5,\), but the federation's model takes",
        ),
        "label": (joins("label", x, np.arange(120) // 118 * 4 + 1), "has the class '5'.* 0 to 1"),
    }
    for device, said in wrong.values():
        _, errors = device.communicate(timeout=60)
        assert device.returncode in (1, 2, 6), errors
        assert re.search(said, errors)
        assert "Traceback" not in errors
    devices = [joins(name, x, (x[:, 0] > 0).astype(int), "--export", f"{name}.onnx") for name in ("a", "b")]
    for device in devices:
        said, errors = device.communicate(timeout=100)
        assert device.returncode == 0, errors
        assert "engine                     ONNX Runtime" in said
    answer = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"input": x})[0]
    assert (answer.argmax(1) == (x[:, 0] > 0)).mean() > 0.8
