"""A task is a learning problem on one device: a model, a loss and the device's own data.

Built-in tasks and those of other packages register a loader under the entry point ``sparrow.tasks``; a user with a
model of their own makes a ``Task`` directly. A task with several networks is named with the one meant: ``mnist:leaf``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Protocol

import torch
from torch import nn

from edge_sdk.errors import BadArgument, SdkError
from edge_sdk.tasks.compute import USUAL, Compute
from sparrow.command_line.exits import Exit
from sparrow.command_line.installed import installed, load
from sparrow.command_line.nearest import nearest


class Batches(Protocol):
    """The interface of a task's data; a torch DataLoader has it."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (inputs, targets), batch first, drawing any shuffling from torch's default generator."""

    def __len__(self) -> int:
        """Return the number of batches."""


@dataclass(frozen=True)
class Task:
    """A learning problem on one device.

    model: with the weights that it holds, or ``Seeded``, with those of the federation's seed. loss: (outputs, targets)
    -> mean over the batch. train: what local training sees. validation: held out, read by the early-stopping rule.
    test: held out, only for reports; where a user has none, ``validation`` serves for both, and accuracies are then a
    little optimistic. classification: targets are class indices and outputs are scores [batch, classes], so that
    accuracy means something. compute: how this device computes; ``on`` changes it.
    """

    name: str
    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    train: Batches
    validation: Batches
    test: Batches | None = None
    classification: bool = True
    compute: Compute = USUAL

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            what = getattr(self.model, "__name__", type(self.model).__name__)
            raise BadArgument(
                f"model: {what} is not a torch.nn.Module; give a model, whose weights are kept, or Seeded({what}), "
                f"whose weights the federation's seed decides"
            )

    def seeded(self, seed: int) -> Task:
        """Return the same task, its model made where it is ``Seeded``."""
        if not isinstance(self.model, Seeded):
            return self
        return replace(self, model=build_seeded(self.model.build, seed))

    def on(self, compute: Compute) -> Task:
        """Return the same task, computed so: moves its model there, and gives this process the threads."""
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        return replace(self, model=self.model.to(compute.device), compute=compute)

    @property
    def held_out(self) -> Batches:
        """The data that accuracy is reported on."""
        return self.validation if self.test is None else self.test


class Seeded(nn.Module):
    """A model that is yet to be made: ``build``, a class or function without arguments, makes it.

    ``publish`` and ``join`` call it under the federation's seed, so that the same seed gives the same first weights, on
    all devices also those that are never sent.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.build = build


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model whose initial weights depend on ``seed`` alone; torch's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class TaskLoader(Protocol):
    """Makes a task from what the user said of the data.

    A loader with several networks takes ``model`` too, the text behind the colon in the task's name, left out where
    there is none. It raises UnknownTask for a model that it does not know, and calls its task as the name says.
    """

    def __call__(self, data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
        """Make the task. ``data`` is the text after ``--data``; ``device`` the device's name; ``seed`` the
        federation's.
        """


class UnknownTask(SdkError):
    """The federation's task is not built in, and no package registers it; or it has no such model."""

    exit_code = Exit.NOT_FOUND


def load_task(name: str, data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """Return the task registered as ``name``, or as ``name:model``, over this device's data.

    Raises UnknownTask, which names what is installed.
    """
    task, colon, model = name.partition(":")
    loader = _find_loader(task)
    if not colon:
        return loader(data, device=device, seed=seed, batch_size=batch_size).seeded(seed)
    if "model" not in signature(loader).parameters:
        raise UnknownTask(f"there is no task {name!r}: {task} has one model only; call it {task}")
    return loader(data, device=device, seed=seed, batch_size=batch_size, model=model).seeded(seed)


@cache
def _find_loader(task: str) -> Callable[..., Task]:
    """Kept, because a fleet loads a task a thousand times and looking through all installed packages is slow."""
    found = installed("sparrow.tasks")
    if task not in found:
        raise UnknownTask(
            f"there is no task {task!r} here{nearest(task, found)}; there are {', '.join(found)}; one of "
            f"your own is joined from Python, or installed (docs/own-model.md)"
        )
    loader: TaskLoader = load(found[task], UnknownTask, what="task")
    return loader
