"""Time and memory of a few steps of local training, on a copy of the model."""

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

# ONNX Runtime does not report its allocator's memory, so the process is measured: new sessions take steps on a quarter
# and on half of a batch, and memory grows linearly with further samples. From 5 MiB on, predictions were 0.89 to 1.22
# of measured values (five built-in models, batches of 32 and 128, budgets of 0.4 and 1; table in docs/budget.md).
LEAST = 8
"""Smallest size of the larger measured batch, unless half of the requested batch is larger."""
TRIES = 2
"""Number of measurements per batch; the largest counts, because reused free memory is not measured."""


class Unpredictable(SdkError):
    """The measured runs differ in their use of memory."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class Rehearsal(ABC):
    """Training as in a round, repeated on the task's first batch with a learning rate of 0.

    narrow: masks drop neurons instead of freezing them. Raises ValueError without training data.
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
        self.task = task
        self.manifest = manifest
        self.settings = settings
        self._narrow = narrow
        self._clock = clock
        self.first_batch = self._first(task.train)
        self.held_out = len(self._first(task.held_out)[1])
        self.samples = len(self.first_batch[1])

    @abstractmethod
    def engine(self, mask: NeuronMask | None = None, compute: Compute | None = None) -> Engine:
        """Return an engine of the full model, or of the neurons of ``mask``."""

    @abstractmethod
    def peak(self, work: Callable[[int], object], samples: int) -> int:
        """Predict the peak of bytes that ``work(samples)`` adds.

        Raises Unpredictable if measured runs differ.
        """

    @property
    @abstractmethod
    def threads(self) -> int:
        """Largest number of threads to try."""

    def formats(self, compute: Compute) -> list[Compute]:
        """Return other memory formats to try with ``compute``."""
        return []

    @property
    def model_bytes(self) -> int:
        """Bytes of the model's parameters and buffers."""
        return sum(4 * spec.size for spec in self.manifest.tensors)

    def train(
        self, steps: int, *, mask: NeuronMask | None = None, samples: int | None = None, compute: Compute | None = None
    ) -> list[float]:
        """Train on ``samples`` of the batch; return the seconds of each step except the first."""
        batches = [self.batch(samples)]
        settings = self.settings.model_copy(update={"local_steps": steps})
        engine = self.engine(mask if self._narrow else None, compute)
        part = Part(None if self._narrow else mask)
        return self.timed(
            lambda progress: engine.train(batches, settings, part, learning_rate=0.0, seed=0, progress=progress)
        )

    def timed(self, work: Callable[[Callable[[int, int, float], None]], object]) -> list[float]:
        """Return the seconds of each step of ``work`` except the first."""
        ended: list[float] = []
        work(lambda done, total, loss: ended.append(self._now()))
        return [after - before for before, after in pairwise(ended)]

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of the second call of ``work``."""
        work()
        begin = self._now()
        work()
        return self._now() - begin

    def flops(self, samples: int, mask: NeuronMask | None) -> int:
        """Return the FLOPs of training on ``samples`` under ``mask``."""
        return training_flops(self.manifest, samples, weight_gradients=mask, narrow=self._narrow)

    def evaluate(self, samples: int) -> None:
        """Evaluate the model on ``samples`` of the batch."""
        self.engine().evaluate([self.batch(samples)])

    def batch(self, samples: int | None = None) -> Batch:
        """Return ``samples`` of the batch, repeated if it has fewer."""
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
        """Return a batch in the engine's types."""

    def _now(self) -> float:
        self.task.compute.wait()
        return self._clock()


Rehearse = Callable[..., Rehearsal]
"""Creates an engine's rehearsal, with the arguments of ``Rehearsal``."""


class OnnxRehearsal(Rehearsal):
    """Training on ONNX Runtime. sessions: number of threads -> sessions of the task's graphs."""

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
        """Return an engine of a model with initial weights."""
        # Imported here, because PyTorch's rehearsals need no ONNX Runtime.
        from .engine import OnnxEngine
        from .onnx import Network

        sessions = self._sessions((compute or self.task.compute).threads or 1)
        network = Network(self.manifest, sessions)
        network.load(own_initial_values(self.manifest, self.settings.seed, sessions.graphs.first))
        engine = OnnxEngine(network, classification=self.task.classification)
        return engine if mask is None else engine.narrow(mask, []).engine

    def peak(self, work: Callable[[int], object], samples: int) -> int:
        """Measure with few samples and extrapolate to ``samples``."""
        from .onnx import give_back

        kept = self._sessions
        large = min(max(LEAST, samples // 2), samples)
        small = large // 2

        def grown(count: int) -> int:
            made: dict[int, Sessions] = {}
            self._sessions = lambda threads: made.setdefault(threads, kept(threads).anew())
            # Creating the sessions takes more memory than they hold.
            work(1)
            gc.collect()
            give_back()
            memory.give_back()
            before = memory.resident()
            knows_peak = memory.forget_peak()
            work(count)
            return max(0, (memory.peak_resident() if knows_peak else memory.resident()) - before)

        try:
            less, more = (max(grown(count) for _ in range(TRIES)) if count else 0 for count in (small, large))
        finally:
            self._sessions = kept
        return round(more + max(0, more - less) / (large - small) * (samples - large))

    @property
    def threads(self) -> int:
        """Number of processors that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @staticmethod
    def _taken(batch: Any) -> Batch:
        return as_arrays(batch)


class Effort(Protocol):
    """Training at a budget, for a rehearsal."""

    # Number of values in an update.
    values: int

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take ``steps`` steps as ``Rehearsal.train``."""

    def flops(self) -> int:
        """Return the FLOPs of a step on the task's batch."""

    def judge(self, samples: int) -> None:
        """Evaluate the model on ``samples`` of the batch."""


class MaskedEffort:
    """Training of the active neurons of ``mask``, for ``models`` models in turn."""

    def __init__(self, rehearsal: Rehearsal, mask: NeuronMask | None, *, models: int = 1) -> None:
        self._rehearsal = rehearsal
        self._mask = mask
        self._models = models
        self.values = count_values(rehearsal.manifest, mask)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps with one model; return the seconds times the number of models."""
        taken = self._rehearsal.train(steps, mask=self._mask, samples=samples)
        return [self._models * seconds for seconds in taken]

    def flops(self) -> int:
        """Return the FLOPs of a step."""
        return self._models * self._rehearsal.flops(self._rehearsal.samples, self._mask)

    def judge(self, samples: int) -> None:
        """Evaluate the full model, including frozen neurons."""
        self._rehearsal.evaluate(samples)
