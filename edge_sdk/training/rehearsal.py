"""Time and memory of a few training steps with PyTorch, on copies of the model and of each layer.

Training on 4 and on 8 samples allocates and frees the same blocks of torch's allocator in the same order, and each
block's size grows linearly with the samples. Two runs therefore give the sizes for any batch, and the peak is the
largest running sum.
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
"""Passes through each layer; the fastest counts."""

# The process holds more than the allocator's blocks: those of up to 32 MiB lie in the C library's heap, which
# fragments, more so in longer training. This factor cannot be derived; docs/results/speed.md has its spread.
HEAP = 1.75
"""Ratio of held memory to used memory with the C library (glibc 2.36)."""

FEW = (4, 8)
"""Batch sizes of the runs; not 1, because a convolution of one sample runs in another kernel."""


class TorchRehearsal(Rehearsal):
    """Rehearsal with PyTorch that restores the random state."""

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
        """Return an engine of the copy; a narrow one is not compared."""
        task = self.task if compute is None else self.task.on(compute)
        manifest = self.manifest
        if mask is not None:
            network = Narrow(self.model, manifest, mask, None)
            task = replace(task, model=network.model)
            manifest = network.manifest
        return TorchEngine(task, manifest)

    def timed(self, work: Callable[[Callable[[int, int, float], None]], object]) -> list[float]:
        """Run ``work``; return the seconds of each step except the first."""
        with torch.random.fork_rng(devices=[]):
            return super().timed(work)

    @property
    def threads(self) -> int:
        """Number of threads at the start."""
        return self._threads

    def formats(self, compute: Compute) -> list[Compute]:
        """Return the other memory format of convolutions."""
        if compute.channels_last is not None or not any(isinstance(each, nn.Conv2d) for each in self.model.modules()):
            return []
        return [replace(compute, channels_last=not gains(self.model))]

    def peak(self, work: Callable[[int], object], samples: int) -> int:
        """Extrapolate the peak of allocated memory, in bytes, from small batches to ``samples``."""
        device = self.task.compute.device
        few = [min(number, self.samples) for number in FEW]
        # Garbage collection would free memory at unpredictable moments.
        gc.disable()
        try:
            # The second run may free blocks of the first; later runs are alike.
            _, one, other = (_allocations(partial(work, number), device) for number in (few[0], *few))
        finally:
            gc.enable()
        if len(one) != len(other):
            raise Unpredictable(
                f"training on {few[0]} samples allocates {len(one)} blocks of memory, on {few[1]} samples "
                f"{len(other)}: its memory cannot be predicted; set --budget and --memory-limit"
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
    """Return the bytes of each block that ``work`` allocates (positive) and frees (negative), in order."""
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
    """Hide the output of torch's profiler, which bypasses Python's streams."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def block_nanoseconds(model: nn.Module, manifest: Manifest, inputs: torch.Tensor) -> Costs:
    """Return the nanoseconds of each block in a training step on ``inputs``, [L]."""
    # Blocks share the time of their linear layer or convolution by their part of its weights; others have 0.
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
