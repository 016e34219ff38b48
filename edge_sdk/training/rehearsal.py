"""A few steps of training with PyTorch on a copy of the model, and of each layer alone, to find out what they take.

Two short trainings, on 4 and on 8 samples, allocate and free the same blocks in the same order; only the sizes of the
blocks differ, and each size grows by the same amount with every sample. The sizes at any batch follow from those two
trainings, and the peak is the largest of the running sums. Counted is what torch's allocator hands out, including
copies made inside its kernels: this is exact, and the same every time.

The process holds more than that: blocks of up to 32 MiB come from the C library's heap, which has holes between the
blocks in use, the more the longer a process trains. The factor follows from nothing that can be counted
(docs/results/speed.md has the spread); ``HEAP`` is in the middle.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from sparrow.protocol.blocks import Costs
from sparrow.protocol.manifest import MULTIPLYING, Manifest
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.settings import FederationSettings

from ..engines.rehearsal import Rehearsal, Unpredictable
from ..engines.training import Batch
from ..publishing.modes import buffers_kept
from ..tasks import Task
from ..tasks.compute import Compute
from .engine import TorchEngine
from .layout import gains
from .local import as_tensors
from .narrow import Narrow

REPEATS = 3
"""Passes through each layer, of which the fastest counts."""

HEAP = 1.75
"""Memory held over memory in use, where the C library manages it (glibc 2.36)."""

FEW = (4, 8)
"""The batches that are tried. Not 1: a convolution of one sample runs in another kernel."""


class TorchRehearsal(Rehearsal):
    """Training with PyTorch, whose random numbers stay as they are."""

    def __init__(
        self,
        task: Task,
        manifest: Manifest,
        settings: FederationSettings,
        *,
        narrow: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        task = replace(task, model=copy.deepcopy(task.model))
        with torch.random.fork_rng(devices=[]):
            super().__init__(task, manifest, settings, narrow=narrow, clock=clock)
        self._threads = torch.get_num_threads()

    @property
    def model(self) -> nn.Module:
        """The copy of the model."""
        model: nn.Module = self.task.model
        return model

    def engine(self, mask: NeuronMask | None = None, compute: Compute | None = None) -> TorchEngine:
        """Return an engine of the copy, which is not compared where it is narrow; the process has its threads."""
        task, manifest = self.task if compute is None else self.task.on(compute), self.manifest
        if mask is not None:
            network = Narrow(self.model, manifest, mask, None)
            task, manifest = replace(task, model=network.model), network.manifest
        return TorchEngine(task, manifest)

    def timed(self, work: Callable[[Callable[[int, int, float], None]], object]) -> list[float]:
        """Do ``work``; return the seconds of each step but the first."""
        with torch.random.fork_rng(devices=[]):
            return super().timed(work)

    @property
    def threads(self) -> int:
        """The threads that the process began with."""
        return self._threads

    def formats(self, compute: Compute) -> list[Compute]:
        """Return the other format of convolutions."""
        if compute.channels_last is not None or not any(isinstance(each, nn.Conv2d) for each in self.model.modules()):
            return []
        return [replace(compute, channels_last=not gains(self.model))]

    def peak(self, work: Callable[[int], object], samples: int) -> int:
        """Count what the allocator hands out for few samples; return what follows for ``samples``."""
        device = self.task.compute.device
        few = [min(number, self.samples) for number in FEW]
        gc.disable()  # it would free at moments of its own
        try:
            # What the first leaves allocated the second may free; from then on all are alike.
            _, one, other = (_allocations(partial(work, number), device) for number in (few[0], *few))
        finally:
            gc.enable()
        if len(one) != len(other):
            raise Unpredictable(
                f"training on {few[0]} samples allocates {len(one)} blocks of memory, on {few[1]} samples "
                f"{len(other)}: its memory cannot be predicted; give --budget and --memory-limit yourself"
            )
        in_use = peak = 0.0
        for small, large in zip(one, other, strict=True):
            per_sample = (large - small) / (few[1] - few[0]) if few[1] > few[0] else small / few[0]
            in_use += small + per_sample * (samples - few[0])
            peak = max(peak, in_use)
        return round(peak * (HEAP if device == "cpu" else 1))

    @staticmethod
    def _taken(batch: Any) -> Batch:
        return as_tensors(batch)


def _allocations(work: Callable[[], object], device: str) -> list[int]:
    """Return the bytes of every block that ``work`` has the device allocate (above 0) and free (below), in order."""
    from torch._C._autograd import DeviceType
    from torch.autograd import profiler

    on_processor = device == "cpu"
    with _silence(), profiler.profile(profile_memory=True, use_device=None if on_processor else device) as profile:
        work()
    return [
        event.nbytes()
        for event in profile.kineto_results.events()
        if event.name() == "[memory]" and (event.device_type() == DeviceType.CPU) == on_processor
    ]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep torch's profiler from writing to the process's error stream, which it does past Python's."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


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
