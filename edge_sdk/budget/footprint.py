"""How much memory local training takes at its peak, predicted without taking it.

Two short trainings, on 4 and on 8 samples, allocate and free the same blocks in the same order; only their sizes
differ, and each of them by so much a sample. So the sizes at any batch follow from those two, and the peak is the
largest of the running sums. What counts is what torch's allocator hands out, copies made inside its kernels included:
exact, and the same every time.

What a process holds is more: blocks of up to 32 MiB come from the C library's heap, where what is free lies between
what is not, the more so the longer it trains. By how much follows from nothing that we could count
(docs/results/prediction.md has the spread); ``HEAP`` is in the middle.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler

from edge_sdk.errors import SdkError
from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.training.rehearsal import Rehearsal
from sparrow.devices import memory

HEAP = 1.75
"""Memory held over memory in use, where the C library manages it (glibc 2.36)."""

FEW = (4, 8)
"""The batches that are tried. Not 1: a convolution of one sample runs in another kernel."""

MODELS_HELD = 2
"""What a session holds of models while it trains, beside the one that is trained: its personal one, and what came."""


class Unpredictable(SdkError):
    """The trainings that were tried allocate differently: nothing can be said of others."""


def predict_training(rehearsal: Rehearsal, mask: NeuronMask | None, samples: int | None = None) -> int:
    """Bytes that training under ``mask`` adds at its peak, in batches of ``samples``; those of the task by default.

    Two steps, since what an optimiser remembers exists from the second on. Raises Unpredictable, and what training
    raises.
    """
    return _peak(rehearsal, lambda few: rehearsal.train(2, mask=mask, samples=few), samples or rehearsal.samples)


def predict_evaluation(rehearsal: Rehearsal) -> int:
    """Bytes that an evaluation adds at its peak, in the task's batches. Raises as ``predict_training``."""
    return _peak(rehearsal, rehearsal.evaluate, rehearsal.held_out)


def whole_round(rehearsal: Rehearsal, training: int, evaluation: int) -> int:
    """Bytes that a device's rounds add at their peak, where training and evaluation add so many: the larger, beside
    what a session holds meanwhile."""
    return MODELS_HELD * rehearsal.model_bytes + max(training, evaluation)


def held(device: torch.device) -> int:
    """Bytes that this process holds now, of the memory that training on ``device`` takes from; what is free among them
    is given back first."""
    if device.type == "cpu":
        memory.give_back()
        return memory.resident()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def room(device: torch.device) -> int:
    """Bytes that it may hold at most: those that it does, and those that are free."""
    free = memory.available() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return held(device) + free


def _peak(rehearsal: Rehearsal, work: Callable[[int], object], samples: int) -> int:
    device = rehearsal.task.compute.device
    few = [min(number, rehearsal.samples) for number in FEW]
    gc.disable()  # it would free at moments of its own
    try:
        # What the first leaves allocated the second may free; from then on all are alike.
        _, one, other = (_allocations(partial(work, number), device) for number in (few[0], *few))
    finally:
        gc.enable()
    if len(one) != len(other):
        raise Unpredictable(f"{few[0]} samples are trained in {len(one)} blocks of memory, {few[1]} in {len(other)}")
    in_use = peak = 0.0
    for small, large in zip(one, other, strict=True):
        per_sample = (large - small) / (few[1] - few[0]) if few[1] > few[0] else small / few[0]
        in_use += small + per_sample * (samples - few[0])
        peak = max(peak, in_use)
    return round(peak * (HEAP if device.type == "cpu" else 1))


def _allocations(work: Callable[[], object], device: torch.device) -> list[int]:
    """Bytes of every block that ``work`` has the device allocate (above 0) and free (below), in order."""
    with _silence(), profiler.profile(profile_memory=True, use_device=_profiled(device)) as profile:
        work()
    on_processor = device.type == "cpu"
    return [
        event.nbytes()
        for event in profile.kineto_results.events()
        if event.name() == "[memory]" and (event.device_type() == DeviceType.CPU) == on_processor
    ]


def _profiled(device: torch.device) -> str | None:
    return None if device.type == "cpu" else device.type


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps torch's profiler from writing of its own doings to the process's error stream, past Python's."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
