"""A task is a learning problem on one device: its own data, and the model and loss that PyTorch trains with.

Data are numpy arrays, and nothing here imports PyTorch before a model or a loss is asked for: a device may have none.

Built-in tasks and those of other packages register a loader under the entry point ``sparrow.tasks``; a user with a
model of their own makes a ``Task`` directly. A task with several networks is named with the one meant: ``mnist:leaf``.
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


OWN = "npz"
"""The task of a user's own files (``tasks.own``)."""


class Batches(Protocol):
    """The interface of a task's data; a list of batches has it, and so has a torch DataLoader.

    Data that are to come in another order in each pass have ``shuffled`` too: as ``__iter__``, in an order drawn from
    the numpy Generator that it is given. What has not is taken as it comes.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield (inputs, targets), batch first: numpy arrays, or anything that ``as_arrays`` takes."""

    def __len__(self) -> int:
        """Return the number of batches."""


def as_arrays(batch: Iterable[Any]) -> tuple[Array, Array]:
    """Return (inputs, targets) as C-contiguous arrays: of tensors on the processor too, nothing copied that is one."""
    inputs, targets = batch
    return np.ascontiguousarray(inputs), np.ascontiguousarray(targets)


def passes(batches: Batches, seed: int) -> Iterator[Any]:
    """Yield the batches of one pass after another, without end, each in another order where they can be ``shuffled``.

    The order follows from ``seed`` alone, by numpy's PCG64. A DataLoader that shuffles by torch's default generator
    finds that seeded. Raises ValueError where there is no batch.
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
    """Return the number of samples in one pass: as the batches say, as a DataLoader's dataset says, or else counted."""
    known = getattr(batches, "num_examples", None)
    if isinstance(known, int):
        return known
    try:
        return len(batches.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return sum(len(targets) for _, targets in batches)


def collect_targets(batches: Batches) -> Array:
    """Return the targets of one pass, of whole samples [N]: as batches in memory have them, or else collected."""
    known = getattr(batches, "targets", None)
    if isinstance(known, np.ndarray):
        return known.reshape(-1)
    return np.concatenate([np.asarray(targets).reshape(-1) for _, targets in batches])


@dataclass(frozen=True)
class Prepared:
    """How a task's data were prepared: by ``preparer`` (``export.preparation.Preparer``); ``validation``: raw."""

    preparer: Any
    validation: Batches


@dataclass(frozen=True)
class Task:
    """A learning problem on one device.

    model: a torch.nn.Module with the weights that it holds, or ``Seeded``, which will have those of the federation's
    seed. loss: (outputs, targets) -> mean over the batch, of tensors. A device that does not train with PyTorch needs
    neither of the two: None. train: what local training sees. validation: held out, read by the early-stopping rule.
    test: held out, only for reports; where a user has none, ``validation`` serves for both, and accuracies are then a
    little optimistic. public: samples that every device of the federation has alike, in one order, for methods that
    compare what models say of them. classification: targets are class indices and outputs are scores [batch, classes],
    so that accuracy means something. metrics: what else is measured on held-out data, names of ``tasks.metrics`` such
    as ("mae", "rmse"), or name -> function of all outputs and targets as arrays. preparation: if given, the data are
    raw samples, and this makes the model's inputs of a batch of them: a torch.nn.Module, which ``publish`` compiles
    into a graph, or a ``preparing.BuiltPreparation``. class_names: of the outputs, in order; outputs behind them are
    spare. targets: what a loader knows of the targets beside that. said: lines about the data for the device's user.
    prepared: how the data were prepared on this device. compute: how this device computes; ``on`` changes it.
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
                f"metrics: there is no {unknown[0]!r}; there are {', '.join(METRICS)}, and a dictionary of name -> "
                "function has your own"
            )
        if not (self.model is None or isinstance(self.model, Seeded) or is_module(self.model)):
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
        """Return the same task, computed so: moves a model that is made there, and gives PyTorch the threads."""
        if not is_module(self.model):
            return replace(self, compute=compute)
        import torch

        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        return replace(self, model=self.model.to(compute.device), compute=compute)

    @property
    def measured(self) -> dict[str, Metric]:
        """The metrics by name."""
        named = self.metrics
        return dict(named) if isinstance(named, Mapping) else {name: METRICS[name] for name in named}

    @property
    def held_out(self) -> Batches:
        """The data that accuracy is reported on."""
        return self.validation if self.test is None else self.test


@dataclass(frozen=True)
class Seeded:
    """A model that is yet to be made: ``build``, a class or function without arguments, makes it.

    ``publish`` and ``join`` call it under the federation's seed, so that the same seed gives the same first weights, on
    all devices also those that are never sent. It is called where PyTorch trains, and nowhere else.
    """

    build: Callable[[], nn.Module]


def is_module(model: object) -> bool:
    """Return whether this is a torch.nn.Module; there is none before torch is imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model whose initial weights depend on ``seed`` alone; torch's generator stays as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class TaskLoader(Protocol):
    """Makes a task from what the user said of the data.

    A loader with several networks takes ``model`` too, the text behind the colon in the task's name, left out if there
    is none. One that reads files by what the federation has published takes ``manifest`` too, None to publish. It
    raises UnknownTask for a model that it does not know, and calls its task as the name says.
    """

    def __call__(self, data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
        """Make the task. ``data`` is the text after ``--data``; ``device`` the device's name; ``seed`` the
        federation's.
        """


class UnknownTask(SdkError):
    """The federation's task is not built in, and no package registers it; or it has no such model."""

    exit_code = Exit.NOT_FOUND


def load_task(
    name: str, data: str | None, *, device: str, seed: int, batch_size: int, manifest: Manifest | None = None
) -> Task:
    """Return the task registered as ``name``, or as ``name:model``, over this device's data.

    manifest: the federation's; None to publish. ``Task.seeded`` makes its model. Raises UnknownTask, which names what
    is installed.
    """
    task, colon, model = name.partition(":")
    loader = _find_loader(task)
    taken = signature(loader).parameters
    more: dict[str, Any] = {"manifest": manifest} if "manifest" in taken else {}
    if colon:
        if "model" not in taken:
            raise UnknownTask(f"there is no task {name!r}: {task} has one model only; call it {task}")
        more["model"] = model
    return loader(data, device=device, seed=seed, batch_size=batch_size, **more)


def load_data_of(manifest: Manifest, data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """Return the task of a federation over this device's data: the installed one of this name or, if there is none, the
    samples of the file ``data``, without a model, which ONNX Runtime trains without.

    Raises UnknownTask without data, and what the task raises.
    """
    name = manifest.task
    if name.partition(":")[0] in installed("sparrow.tasks"):
        return load_task(name, data, device=device, seed=seed, batch_size=batch_size, manifest=manifest)
    if not data:
        raise UnknownTask(
            f"the federation's task {name!r} is not installed here, nor need be: give this device's samples with "
            f"--data FILE, a table or an npz file, or join from Python: edge_sdk.join.join(server, task)"
        )
    task = load_task(OWN, data, device=device, seed=seed, batch_size=batch_size, manifest=manifest)
    return replace(task, model=None)


@cache
def _find_loader(task: str) -> Callable[..., Task]:
    """Kept, because a fleet loads a task a thousand times and looking through all installed packages is slow."""
    found = installed("sparrow.tasks")
    if task not in found:
        raise UnknownTask(
            f"there is no task {task!r} here{nearest(task, found)}; there are {', '.join(found)}; with one of "
            f"your own call join and publish from Python, or register it under the entry points sparrow.tasks"
        )
    loader: TaskLoader = load(found[task], UnknownTask, what="task")
    return loader
