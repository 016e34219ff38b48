"""A few steps of local training on a copy of the model, and of each layer alone, to find out what they take."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import nn

from edge_sdk.protocol.blocks import Costs
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import MULTIPLYING, Manifest
from edge_sdk.protocol.masks import NeuronMask, count_values
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.publishing.modes import buffers_kept
from edge_sdk.tasks import Batches, Task
from edge_sdk.tasks.compute import Compute
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import as_tensors, evaluate, train_locally
from edge_sdk.training.narrow import Narrow

REPEATS = 3
"""Passes through each layer, of which the fastest counts."""


class Rehearsal:
    """Training as in a round, on the task's first batch again and again, with a learning rate of 0.

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
            self.first_batch = _first(task.train)
            self.held_out = len(_first(task.held_out)[1])
        self.samples = len(self.first_batch[1])

    @property
    def model(self) -> nn.Module:
        """Return the copy of the model."""
        model: nn.Module = self.task.model
        return model

    @property
    def model_bytes(self) -> int:
        """Return the bytes of the model's parameters and buffers."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())

    def train(
        self, steps: int, *, mask: NeuronMask | None = None, samples: int | None = None, compute: Compute | None = None
    ) -> list[float]:
        """Train ``steps`` steps under ``mask`` on ``samples`` of the batch, all by default.

        Returns the seconds of each but the first, which also pays for whatever is set up once. compute: replaces the
        task's.
        """
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
        """Do ``work``, which calls its argument after every step; return the seconds of each but the first."""
        ended: list[float] = []
        with torch.random.fork_rng(devices=[]):
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

    def _trained(self, mask: NeuronMask | None) -> tuple[nn.Module, Freezing]:
        if mask is None or not self._narrow:
            return self.model, Freezing(self.model, self.manifest, mask)
        network = Narrow(self.model, self.manifest, mask, None)
        return network.model, Freezing(network.model, network.manifest, None)

    def evaluate(self, samples: int) -> None:
        """Judge the model on ``samples`` of the batch."""
        evaluate(self.model, self.task, [self.batch(samples)])

    def batch(self, samples: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the batch, or of its first ``samples``."""
        inputs, targets = self.first_batch
        return inputs[:samples], targets[:samples]

    def _now(self) -> float:
        self.task.compute.wait()
        return self._clock()


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
    """Training of the active neurons of ``mask``; None trains everything."""

    def __init__(self, rehearsal: Rehearsal, mask: NeuronMask | None) -> None:
        self._rehearsal, self._mask = rehearsal, mask
        self.values = count_values(rehearsal.manifest, mask)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps under the mask."""
        return self._rehearsal.train(steps, mask=self._mask, samples=samples)

    def flops(self) -> int:
        """Return the FLOPs of a step."""
        return self._rehearsal.flops(self._rehearsal.samples, self._mask)

    def judge(self, samples: int) -> None:
        """Judge the whole model: what is frozen takes part."""
        self._rehearsal.evaluate(samples)


def _first(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    for batch in batches:
        return as_tensors(batch)
    raise ValueError("the task's data has no batches; give it at least one sample")


def block_nanoseconds(model: nn.Module, manifest: Manifest, inputs: torch.Tensor) -> Costs:
    """Return the nanoseconds of each block in a training step on ``inputs``, [L], measured on this device.

    A block has those of its layer, forward and backward, by its part of the layer's weights; 0 where it is in no linear
    layer or convolution.
    """
    modules = dict(model.named_modules())
    layers = {layer.name: modules[layer.name] for layer in manifest.layers if layer.kind in MULTIPLYING}
    seen: dict[str, torch.Tensor] = {}

    def note_input(name: str, given: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(name, given[0].detach())

    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: note_input(name, given))
        for name, module in layers.items()
    ]
    try:
        with torch.no_grad(), buffers_kept(model):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    table = manifest.block_table
    costs = np.zeros(len(table.sizes), dtype=np.int64)
    for layer in manifest.layers:
        if layer.name not in seen:
            continue
        given = seen[layer.name].requires_grad_(layer.input_error != "none")
        nanoseconds = min(_pass(layers[layer.name], given) for _ in range(REPEATS))
        weights = [table.places[name] for name in layer.tensors if name in table.tensors]
        largest = max(weights, key=lambda place: int(table.sizes[place].sum()))
        sizes = table.sizes[largest]
        costs[largest] += nanoseconds * sizes // sizes.sum()
    return costs


def _pass(layer: nn.Module, inputs: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    outputs = layer(inputs)
    torch.autograd.grad(outputs.sum(), [*layer.parameters(), *([inputs] if inputs.requires_grad else [])])
    return time.perf_counter_ns() - start
