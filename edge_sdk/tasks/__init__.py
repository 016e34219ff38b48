"""Tasks: the data of one device, with model and loss for PyTorch.

Built-in tasks and those of other packages register a loader under the entry point ``sparrow.tasks``; users make a
``Task`` directly. ``mnist:leaf`` names one of several networks of a task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparrow.command_line.exits import Exit
from sparrow.command_line.installed import installed, load
from sparrow.command_line.nearest import nearest
from sparrow.protocol.manifest import MOST_METRICS, Array, Manifest
from sparrow.protocol.preparation import Targets

from ..errors import BadArgument, SdkError
from .compute import USUAL, Compute
from .metrics import METRICS, Metric

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Batches", "Seeded", "Task", "TaskLoader", "UnknownTask", "build_seeded", "load_task"]


# The task of a user's own files (``tasks.own``).
OWN = "npz"


class Batches(Protocol):
    """Protocol of a task's data; lists of batches and torch's DataLoader implement it.

    An optional ``shuffled`` yields the batches in an order drawn from its argument, a numpy Generator.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield (inputs, targets), batch first: numpy arrays, or other values that ``as_arrays`` accepts."""

    def __len__(self) -> int:
        """Return the number of batches."""


def as_arrays(batch: Iterable[Any]) -> tuple[Array, Array]:
    """Return (inputs, targets) as C-contiguous arrays, copied only if needed."""
    inputs, targets = batch
    return np.ascontiguousarray(inputs), np.ascontiguousarray(targets)


def passes(batches: Batches, seed: int) -> Iterator[Any]:
    """Yield the batches of endless passes, each pass shuffled if the data support it.

    Also seeds torch's default generator, which a DataLoader uses. Raises ValueError if there is no batch.
    """
    if len(batches) == 0:
        raise ValueError("the task's training data has no batches; give it at least one sample")
    shuffled = getattr(batches, "shuffled", None)
    if shuffled is None and (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
    generator = np.random.Generator(np.random.PCG64(seed))
    while True:
        yield from batches if shuffled is None else shuffled(generator)


def count_examples(batches: Batches) -> int:
    """Return the number of samples in one pass, declared or counted."""
    known = getattr(batches, "num_examples", None)
    if isinstance(known, int):
        return known
    try:
        return len(batches.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return sum(len(targets) for _, targets in batches)


def collect_targets(batches: Batches) -> Array:
    """Return the targets of one pass, flattened."""
    known = getattr(batches, "targets", None)
    if isinstance(known, np.ndarray):
        return known.reshape(-1)
    return np.concatenate([np.asarray(targets).reshape(-1) for _, targets in batches])


@dataclass(frozen=True)
class Prepared:
    """The preparation of a task's data. preparer: ``export.preparation.Preparer``. validation: raw batches."""

    preparer: Any
    validation: Batches


@dataclass(frozen=True)
class Task:
    """A learning problem on one device.

    model: a torch.nn.Module with its weights, or ``Seeded``; None, like the loss, on a device without PyTorch. loss:
    (outputs, targets) -> mean over the batch. validation: held-out data for early stopping. test: held-out data for
    reports; None reports on ``validation``. public: samples that all devices have in the same order, for methods that
    compare outputs on them. classification: targets are class indices and outputs scores [batch, classes]. metrics:
    further measures on held-out data, names of ``tasks.metrics`` or name -> function of all outputs and targets as
    arrays. preparation: a torch.nn.Module, or ``preparing.BuiltPreparation``, that makes the model's inputs from
    batches of raw samples. class_names: names of the outputs, in order; further outputs are spare. targets: further
    facts about the targets. said: lines about the data for the device's user. prepared: set once the data are prepared.
    compute: accelerator and precision; ``on`` changes it.
    """

    name: str
    model: Any
    loss: Any
    train: Batches
    validation: Batches
    test: Batches | None = None
    _: KW_ONLY
    public: Batches | None = None
    classification: bool = True
    metrics: Mapping[str, Metric] | Sequence[str] = ()
    preparation: Any = None
    class_names: Sequence[str] = ()
    targets: Targets | None = None
    said: Sequence[str] = ()
    prepared: Prepared | None = None
    compute: Compute = USUAL

    def __post_init__(self) -> None:
        given = self.metrics
        if isinstance(given, str) or len(given) > MOST_METRICS:
            raise BadArgument(f'metrics={given!r}: give up to {MOST_METRICS}, as ("mae", "rmse") or name -> function')
        unknown = [name for name in given if not isinstance(given, Mapping) and name not in METRICS]
        if unknown:
            raise BadArgument(
                f"metrics: unknown metric {unknown[0]!r}; choose from {', '.join(METRICS)}, or give your own as a "
                "dictionary of name -> function"
                "function has your own"
            )
        if not (self.model is None or isinstance(self.model, Seeded) or is_module(self.model)):
            name = getattr(self.model, "__name__", type(self.model).__name__)
            raise BadArgument(
                f"model: {name} is not a torch.nn.Module; give a module to keep its weights, or Seeded({name}) to "
                f"initialise them from the federation's seed"
            )

    def seeded(self, seed: int) -> Task:
        """Return the same task with its model built, if it is ``Seeded``."""
        if not isinstance(self.model, Seeded):
            return self
        return replace(self, model=build_seeded(self.model.build, seed))

    def on(self, compute: Compute) -> Task:
        """Return the same task with these settings: moves a built model, and sets PyTorch's threads."""
        if not is_module(self.model):
            return replace(self, compute=compute)
        import torch

        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        return replace(self, model=self.model.to(compute.device), compute=compute)

    @property
    def measured(self) -> dict[str, Metric]:
        """Metrics by name."""
        named = self.metrics
        return dict(named) if isinstance(named, Mapping) else {name: METRICS[name] for name in named}

    @property
    def held_out(self) -> Batches:
        """The data for reported accuracies."""
        return self.validation if self.test is None else self.test


@dataclass(frozen=True)
class Seeded:
    """A model that ``build``, a class or function without arguments, creates.

    It is called under the federation's seed, so that all devices have the same initial weights, and only if PyTorch
    trains.
    """

    build: Callable[[], nn.Module]


def is_module(model: object) -> bool:
    """Return whether this is a torch.nn.Module, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model whose initial weights depend only on ``seed``."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class TaskLoader(Protocol):
    """The interface of functions that make a task from the user's data.

    A loader with several networks also takes ``model``, the text after the colon in the task's name; a loader that
    reads files by the published description also takes ``manifest``, None to publish. Raises UnknownTask.
    """

    def __call__(self, data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
        """Return the task. data: text after ``--data``. device: the device's name. seed: the federation's."""


class UnknownTask(SdkError):
    """The task is neither built in nor registered, or has no such model."""

    exit_code = Exit.NOT_FOUND


def load_task(
    name: str, data: str | None, *, device: str, seed: int, batch_size: int, manifest: Manifest | None = None
) -> Task:
    """Return the task registered as ``name``, or ``name:model``, over this device's data; its model is not yet seeded.

    manifest: None to publish. Raises UnknownTask.
    """
    task, colon, model = name.partition(":")
    loader = _find_loader(task)
    taken = signature(loader).parameters
    more: dict[str, Any] = {"manifest": manifest} if "manifest" in taken else {}
    if colon:
        if "model" not in taken:
            raise UnknownTask(f"unknown task {name!r}: {task} has only one model; name it {task}")
        more["model"] = model
    return loader(data, device=device, seed=seed, batch_size=batch_size, **more)


def load_data_of(manifest: Manifest, data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """Return a federation's task over this device's data; if it is not installed, the samples of ``data`` only.

    Raises UnknownTask without data.
    """
    name = manifest.task
    if name.partition(":")[0] in installed("sparrow.tasks"):
        return load_task(name, data, device=device, seed=seed, batch_size=batch_size, manifest=manifest)
    if not data:
        raise UnknownTask(
            f"task {name!r} is not installed here, nor need it be: give this device's samples with --data FILE, a "
            f"table or an npz file, or join from Python: edge_sdk.join.join(server, task)"
        )
    task = load_task(OWN, data, device=device, seed=seed, batch_size=batch_size, manifest=manifest)
    return replace(task, model=None)


# Searching the installed packages is slow, and a fleet loads a task a thousand times.
@cache
def _find_loader(task: str) -> Callable[..., Task]:
    found = installed("sparrow.tasks")
    if task not in found:
        raise UnknownTask(
            f"unknown task {task!r}{nearest(task, found)}; choose from {', '.join(found)}, or call join and publish "
            f"from Python with your own, or register it under the entry points sparrow.tasks"
        )
    loader: TaskLoader = load(found[task], UnknownTask, what="task")
    return loader
