"""On what, with how many threads, in which memory format and precision a device trains."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk import join, profile
from edge_sdk.budget.preparation import fastest_compute
from edge_sdk.errors import BadArgument
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task
from edge_sdk.tasks.compute import Compute, choose_device
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import evaluate, train_locally
from edge_sdk.training.rehearsal import TorchRehearsal
from sparrow.command_line.exits import Exit
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import fleet, simulate

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
SERVER = ["--server", "http://127.0.0.1:9"]


class Watched(nn.Sequential):
    """Notes how its convolution's output comes."""

    def forward(self, x):
        maps = self[0](x)
        self.seen = (maps.dtype, maps.is_contiguous(memory_format=torch.channels_last))
        return self[1](maps.flatten(1))


@pytest.fixture
def task():
    generator = torch.Generator().manual_seed(0)
    arrays = Arrays(torch.rand(24, 1, 8, 8, generator=generator), torch.arange(24) % 10)
    batches = ArrayBatches(arrays, 8)
    return Task("watched", Watched(nn.Conv2d(1, 4, 3), nn.Linear(144, 10)), F.cross_entropy, batches, batches)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def manifest_of(task):
    return describe(task.model, torch.zeros(2, 1, 8, 8), task="watched")


def train(task):
    settings = FederationSettings(local_steps=2)
    freezing = Freezing(task.model, manifest_of(task), None)
    train_locally(task.model, task, settings, learning_rate=0.1, freezing=freezing, seed=0)


# --- where -----------------------------------------------------------------------------------------------------------


@NO_GPU
def test_without_a_gpu_auto_is_the_processor_and_cuda_is_refused():
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(BadArgument, match="--accelerator cuda"):
        choose_device("cuda")


def test_with_a_gpu_auto_takes_it_unless_the_same_bits_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "nvidiactl").touch()
    assert choose_device("auto", nodes=tmp_path) == choose_device("cuda") == "cuda"
    assert choose_device("auto", deterministic=True, nodes=tmp_path) == choose_device("cpu") == "cpu"
    with pytest.raises(BadArgument, match="give --accelerator cpu"):
        choose_device("cuda", deterministic=True)


def test_pytorch_is_not_asked_for_a_gpu_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert choose_device("auto", nodes=tmp_path) == "cpu"
    with pytest.raises(BadArgument, match="needs PyTorch, which is not installed"):
        choose_device("cuda")


@NO_GPU
@pytest.mark.parametrize(
    ("command", "arguments"),
    [(join, SERVER), (simulate, [*SERVER, "--devices", "2"]), (profile, ["--task", "digits"])],
    ids=["join", "fleet", "profile"],
)
def test_every_command_says_so_before_anything_else(command, arguments, capsys):
    assert command.main([*arguments, "--accelerator", "cuda"]) == Exit.USAGE
    assert "--accelerator cuda, but this PyTorch" in capsys.readouterr().err


def test_an_accelerator_is_served_by_one_process():
    plan = fleet.Plan("f", 2, compute=Compute("cuda"))
    with pytest.raises(BadArgument, match="an accelerator allows only one"):
        fleet.run_fleet("http://127.0.0.1:9", plan, processes=2)


def test_the_workers_of_a_cluster_train_on_their_processors(capsys):
    assert simulate.main([*SERVER, "--devices", "2", "--ray", "auto", "--accelerator", "cuda"]) == Exit.USAGE
    assert "leave --ray out" in capsys.readouterr().err


# --- how -------------------------------------------------------------------------------------------------------------


def test_unless_told_otherwise_it_trains_as_the_model_is_fastest_in_float32(task):
    train(task)
    assert task.model.seen == (torch.float32, True)


def test_the_memory_format_can_be_chosen(task):
    train(task.on(Compute(channels_last=False)))
    assert task.model.seen == (torch.float32, False)


def test_in_bfloat16_passes_are_and_weights_are_not(task):
    in_bfloat16 = task.on(Compute(bfloat16=True))
    train(in_bfloat16)
    assert task.model.seen[0] == torch.bfloat16
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.float32}
    task.model.seen = None
    evaluate(task.model, in_bfloat16, task.validation)
    assert task.model.seen[0] == torch.bfloat16


def test_threads_are_the_processs(task, threads):
    task.on(Compute(threads=threads + 1))
    assert torch.get_num_threads() == threads + 1
    task.on(Compute())
    assert torch.get_num_threads() == threads + 1


# --- what is fastest -------------------------------------------------------------------------------------------------


class Scripted(TorchRehearsal):
    """Takes the seconds that it is told a step takes, (threads, channels last) -> seconds."""

    def __init__(self, task, seconds):
        super().__init__(task, manifest_of(task), FederationSettings())
        self.seconds = seconds
        self.tried = []

    def train(self, steps, *, mask=None, samples=None, compute=None):
        if compute is None:
            return [1e-3] * (steps - 1)
        self.task.on(compute)
        self.tried.append((torch.get_num_threads(), compute.channels_last))
        return [self.seconds(*self.tried[-1])] * (steps - 1)


LONG = FederationSettings(local_steps=1_000_000)


def find(rehearsal, settings=LONG):
    return fastest_compute(rehearsal, settings)


def test_threads_are_halved_and_then_the_other_memory_format_is_tried(task, threads):
    torch.set_num_threads(4)
    rehearsal = Scripted(task, lambda threads, last: threads * (0.5 if last is False else 1.0))
    assert find(rehearsal) == Compute(threads=1, channels_last=False)
    assert rehearsal.tried == [(4, None), (2, None), (1, None), (1, False)]
    assert torch.get_num_threads() == 1


def test_what_is_hardly_faster_changes_nothing(task, threads):
    torch.set_num_threads(4)
    assert find(Scripted(task, lambda threads, last: 1.0 + 0.01 * threads + (last is None))).threads == 4


def test_what_the_user_chose_is_not_tried(task, threads):
    rehearsal = Scripted(task.on(Compute(threads=2, channels_last=True)), lambda threads, last: 1.0)
    assert find(rehearsal) == Compute(threads=2, channels_last=True)
    assert rehearsal.tried == [(2, True)]


def test_rounds_of_little_work_are_left_as_they_are(task, threads):
    rehearsal = Scripted(task, lambda threads, last: pytest.fail("tried"))
    assert find(rehearsal, FederationSettings(local_steps=5)) == Compute()


def test_only_the_processor_is_tuned(task):
    rehearsal = Scripted(task, lambda threads, last: pytest.fail("tried"))
    rehearsal.task = dataclasses.replace(task, compute=Compute("cuda"))
    assert find(rehearsal) == rehearsal.task.compute
