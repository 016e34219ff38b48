"""A few steps of local training on a copy of the model, to see what they take before it matters."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask, count_values
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks import Batches, Task
from edge_sdk.tasks.compute import Compute
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import evaluate, train_locally
from edge_sdk.training.narrow import Narrow


class Rehearsal:
    """Training as a round does it, on the task's first batch again and again, with a learning rate of 0.

    ``samples`` is what that batch holds, ``held_out`` the first one of the task's held-out data. The task's model stays
    as it is, and so do torch's random numbers. narrow: what masks leave out is gone, and not frozen. clock: what
    seconds are taken from. Raises ValueError where there is nothing to train on.
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
        self.task = replace(task, model=copy.deepcopy(task.model))
        self.manifest = manifest
        self.settings = settings
        self._narrow = narrow
        self._clock = clock
        with torch.random.fork_rng(devices=[]):
            self._batch = _first(task.train)
            self.held_out = len(_first(task.held_out)[1])
        self.samples = len(self._batch[1])

    @property
    def model(self) -> nn.Module:
        """The copy."""
        return self.task.model

    @property
    def model_bytes(self) -> int:
        """Bytes of the model's parameters and buffers."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())

    def train(
        self, steps: int, *, mask: NeuronMask | None = None, samples: int | None = None, compute: Compute | None = None
    ) -> list[float]:
        """Train ``steps`` steps under ``mask`` on ``samples`` of the batch, all by default; returns the seconds of each
        but the first, which also pays for whatever is set up once. ``compute`` stands in for the task's."""
        batches = [self.batch(samples)]
        model, freezing = self._trained(mask)
        task = replace(self.task, model=model, train=batches, compute=compute or self.task.compute)
        settings = self.settings.model_copy(update={"local_steps": steps})
        return self.timed(
            lambda progress: train_locally(
                model, task, settings, learning_rate=0.0, freezing=freezing, seed=0, progress=progress
            )
        )

    def timed(self, work: Callable[[Callable[[int, int, float], None]], object]) -> list[float]:
        """Do ``work``, which tells its argument of every step; returns the seconds of each but the first."""
        ended: list[float] = []
        with torch.random.fork_rng(devices=[]):
            work(lambda done, total, loss: ended.append(self._now()))
        return [after - before for before, after in pairwise(ended)]

    def seconds(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes when it is done for the second time."""
        work()
        begin = self._now()
        work()
        return self._now() - begin

    def flops(self, samples: int, mask: NeuronMask | None) -> int:
        """Those of training on so many samples under ``mask``."""
        return training_flops(self.manifest, samples, weight_gradients=mask, narrow=self._narrow)

    def _trained(self, mask: NeuronMask | None) -> tuple[nn.Module, Freezing]:
        if mask is None or not self._narrow:
            return self.model, Freezing(self.model, self.manifest, mask)
        network = Narrow(self.model, self.manifest, mask, None)
        return network.model, Freezing(network.model, network.manifest, None)

    def evaluate(self, samples: int) -> None:
        """Judge the model on ``samples`` of the batch."""
        evaluate(self.model, self.task, [self.batch(samples)])

    def batch(self, samples: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the batch, or of its first ``samples``."""
        inputs, targets = self._batch
        return inputs[:samples], targets[:samples]

    def _now(self) -> float:
        self.task.compute.wait()
        return self._clock()


class Effort(Protocol):
    """What training at some budget is, for a rehearsal. ``values``: how many an update has."""

    values: int

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take ``steps`` steps as ``Rehearsal.train`` does."""

    def flops(self) -> int:
        """Those of a step on the task's batch."""

    def judge(self, samples: int) -> None:
        """Judge the model on so many samples of the batch, as early stopping does."""


class MaskedEffort:
    """Training under ``mask``; None trains everything."""

    def __init__(self, rehearsal: Rehearsal, mask: NeuronMask | None) -> None:
        self._rehearsal, self._mask = rehearsal, mask
        self.values = count_values(rehearsal.manifest, mask)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps under the mask."""
        return self._rehearsal.train(steps, mask=self._mask, samples=samples)

    def flops(self) -> int:
        """Those of a step."""
        return self._rehearsal.flops(self._rehearsal.samples, self._mask)

    def judge(self, samples: int) -> None:
        """Judge the whole model: what is frozen takes part."""
        self._rehearsal.evaluate(samples)


def _first(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    for batch in batches:
        return batch
    raise ValueError("the task's data has no batches; give it at least one sample")
