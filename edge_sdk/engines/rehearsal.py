"""A few steps of local training on a copy of the model, to find out what they take, with either engine or with ONNX's.

What ONNX Runtime's allocator holds cannot be asked for, so it is measured: sessions that are made anew take steps on a
quarter of a batch and on half of it, and what the process then holds more grows by as much with every further sample.
Five built-in models, batches of 32 and 128, budgets of 0.4 and 1: where training adds 5 MiB or more it was predicted to
between 0.89 and 1.22 of what was measured; docs/budget.md has the table.
"""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from sparrow.command_line.exits import Exit
from sparrow.devices import memory
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Manifest, own_initial_values
from sparrow.protocol.masks import NeuronMask, count_values
from sparrow.protocol.settings import FederationSettings

from ..errors import SdkError
from ..tasks import Batches, Task, as_arrays
from ..tasks.compute import Compute
from . import Engine
from .training import Batch, Part

if TYPE_CHECKING:
    from .engine import OnnxEngine
    from .onnx import Sessions

LEAST = 8
"""Samples of the larger of the batches that memory is measured on, at least; otherwise half of those wanted."""
TRIES = 2
"""Measurements of each batch, of which the largest counts: memory that the process held free is not seen to grow."""


class Unpredictable(SdkError):
    """The trainings that were tried take memory differently, so that nothing follows for other batches."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class Rehearsal(ABC):
    """Training as in a round, on the task's first batch again and again, with a learning rate of 0.

    ``samples`` is what that batch holds, ``held_out`` the first one of the task's held-out data. The task's model stays
    as it is. narrow: what masks leave out is gone, and not frozen. clock: what seconds are taken from. Raises
    ValueError where there is nothing to train on.
    """

    def __init__(
        self,
        task: Task,
        manifest: Manifest,
        settings: FederationSettings,
        *,
        narrow: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.task, self.manifest, self.settings = task, manifest, settings
        self._narrow, self._clock = narrow, clock
        self.first_batch = self._first(task.train)
        self.held_out = len(self._first(task.held_out)[1])
        self.samples = len(self.first_batch[1])

    @abstractmethod
    def engine(self, mask: NeuronMask | None = None, compute: Compute | None = None) -> Engine:
        """Return the engine that trains: of the whole model, or of the neurons of ``mask`` alone.

        compute: replaces the task's.
        """

    @abstractmethod
    def peak(self, work: Callable[[int], object], samples: int) -> int:
        """Predict the bytes that ``work``, given a number of samples, adds at its peak. Raises Unpredictable."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """The most threads that are worth trying."""

    def formats(self, compute: Compute) -> list[Compute]:
        """Return other memory formats that are worth trying with ``compute``."""
        return []

    @property
    def model_bytes(self) -> int:
        """The bytes of the model's parameters and buffers."""
        return sum(4 * spec.size for spec in self.manifest.tensors)

    def train(
        self, steps: int, *, mask: NeuronMask | None = None, samples: int | None = None, compute: Compute | None = None
    ) -> list[float]:
        """Train ``steps`` steps under ``mask`` on ``samples`` of the batch, all by default.

        Returns the seconds of each but the first, which also pays for whatever is set up once. compute: replaces the
        task's.
        """
        batches, settings = [self.batch(samples)], self.settings.model_copy(update={"local_steps": steps})
        engine = self.engine(mask if self._narrow else None, compute)
        part = Part(None if self._narrow else mask)
        return self.timed(
            lambda progress: engine.train(batches, settings, part, learning_rate=0.0, seed=0, progress=progress)
        )

    def timed(self, work: Callable[[Callable[[int, int, float], None]], object]) -> list[float]:
        """Do ``work``, which calls its argument after every step; return the seconds of each but the first."""
        ended: list[float] = []
        work(lambda done, total, loss: ended.append(self._now()))
        return [after - before for before, after in pairwise(ended)]

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long ``work`` takes when it is done for the second time."""
        work()
        begin = self._now()
        work()
        return self._now() - begin

    def flops(self, samples: int, mask: NeuronMask | None) -> int:
        """Return the FLOPs of training on so many samples under ``mask``."""
        return training_flops(self.manifest, samples, weight_gradients=mask, narrow=self._narrow)

    def evaluate(self, samples: int) -> None:
        """Judge the model on ``samples`` of the batch."""
        self.engine().evaluate([self.batch(samples)])

    def batch(self, samples: int | None = None) -> Batch:
        """Return inputs and targets of the batch, or of ``samples`` of it: its first ones again where it has fewer."""
        inputs, targets = self.first_batch
        if samples is None or samples <= self.samples:
            return inputs[:samples], targets[:samples]
        again = np.arange(samples) % self.samples
        return inputs[again], targets[again]

    def _first(self, batches: Batches) -> Batch:
        for batch in batches:
            return self._taken(batch)
        raise ValueError("the task's data has no batches; give it at least one sample")

    @staticmethod
    @abstractmethod
    def _taken(batch: Any) -> Batch:
        """Return a batch as the engine takes it."""

    def _now(self) -> float:
        self.task.compute.wait()
        return self._clock()


Rehearse = Callable[..., Rehearsal]
"""Makes the rehearsal of an engine, of what ``Rehearsal`` takes."""


class OnnxRehearsal(Rehearsal):
    """Training on ONNX Runtime. sessions: of the task's graphs, by the number of threads."""

    def __init__(
        self,
        task: Task,
        manifest: Manifest,
        settings: FederationSettings,
        *,
        sessions: Callable[[int], Sessions],
        narrow: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(task, manifest, settings, narrow=narrow, clock=clock)
        self._sessions = sessions

    def engine(self, mask: NeuronMask | None = None, compute: Compute | None = None) -> OnnxEngine:
        """Return an engine of a model with the federation's first weights."""
        from .engine import OnnxEngine  # here, because PyTorch's rehearsals need no ONNX Runtime
        from .onnx import Network

        sessions = self._sessions((compute or self.task.compute).threads or 1)
        network = Network(self.manifest, sessions)
        network.load(own_initial_values(self.manifest, self.settings.seed, sessions.graphs.first))
        engine = OnnxEngine(network, classification=self.task.classification)
        return engine if mask is None else engine.narrow(mask, []).engine

    def peak(self, work: Callable[[int], object], samples: int) -> int:
        """Measure few samples; return what follows for ``samples``, of a model beside the device's own."""
        from .onnx import give_back

        kept = self._sessions
        large = min(max(LEAST, samples // 2), samples)
        small = large // 2

        def grown(count: int) -> int:
            made: dict[int, Sessions] = {}
            self._sessions = lambda threads: made.setdefault(threads, kept(threads).anew())
            work(1)  # makes the sessions, which takes more than they hold
            gc.collect()
            give_back()
            memory.give_back()
            before, knows_peak = memory.resident(), memory.forget_peak()
            work(count)
            return max(0, (memory.peak_resident() if knows_peak else memory.resident()) - before)

        try:
            less, more = (max(grown(count) for _ in range(TRIES)) if count else 0 for count in (small, large))
        finally:
            self._sessions = kept
        return round(more + max(0, more - less) / (large - small) * (samples - large))

    @property
    def threads(self) -> int:
        """The processors that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @staticmethod
    def _taken(batch: Any) -> Batch:
        return as_arrays(batch)


class Effort(Protocol):
    """Training at some budget, to be rehearsed. ``values``: how many an update has."""

    values: int

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take ``steps`` steps as ``Rehearsal.train`` does."""

    def flops(self) -> int:
        """Return the FLOPs of a step on the task's batch."""

    def judge(self, samples: int) -> None:
        """Judge the model on so many samples of the batch, as early stopping does."""


class MaskedEffort:
    """Training of the active neurons of ``mask``; None trains everything. models: how many a round trains in turn."""

    def __init__(self, rehearsal: Rehearsal, mask: NeuronMask | None, *, models: int = 1) -> None:
        self._rehearsal, self._mask, self._models = rehearsal, mask, models
        self.values = count_values(rehearsal.manifest, mask)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps of one model under the mask; each counts for those of all."""
        taken = self._rehearsal.train(steps, mask=self._mask, samples=samples)
        return [self._models * seconds for seconds in taken]

    def flops(self) -> int:
        """Return the FLOPs of a step."""
        return self._models * self._rehearsal.flops(self._rehearsal.samples, self._mask)

    def judge(self, samples: int) -> None:
        """Judge the whole model: what is frozen takes part."""
        self._rehearsal.evaluate(samples)
