"""Prediction of the memory that local training takes at its peak, without taking that much.

Two short trainings, on 4 and on 8 samples, allocate and free the same blocks in the same order; only the sizes of the
blocks differ, and each size grows by the same amount with every sample. The sizes at any batch follow from those two
trainings, and the peak is the largest of the running sums. Counted is what torch's allocator hands out, including
copies made inside its kernels: this is exact, and the same every time.

The process holds more than that: blocks of up to 32 MiB come from the C library's heap, which has holes between the
blocks in use, the more the longer a process trains. The factor follows from nothing that can be counted
(docs/results/prediction.md has the spread); ``HEAP`` is in the middle.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from edge_sdk.protocol.errors import SdkError
from sparrow.command_line.exits import Exit
from sparrow.devices import memory

if TYPE_CHECKING:
    from edge_sdk.training.rehearsal import Effort, Rehearsal

HEAP = 1.75
"""Memory held over memory in use, where the C library manages it (glibc 2.36)."""

FEW = (4, 8)
"""The batches that are tried. Not 1: a convolution of one sample runs in another kernel."""

MODELS_HELD = 2
"""Models that a session holds while it trains another one: the personal model, and the one it received."""


class Unpredictable(SdkError):
    """The trainings that were tried allocate differently, so that nothing follows for other batches."""

    exit_code: ClassVar[Exit] = Exit.FAILED


@dataclass(frozen=True)
class Memory:
    """Bytes that a round takes: ``held`` by the process before, and what training, evaluation and the ``models`` that a
    session holds add at their peaks."""

    held: int
    training: int
    evaluation: int
    models: int

    @property
    def total(self) -> int:
        """Return the bytes that the process holds at the peak of a round."""
        return self.held + self.models + max(self.training, self.evaluation)

    @property
    def without_training(self) -> int:
        """Return the bytes that it holds at the peak of an evaluation."""
        return self.held + self.models + self.evaluation


def predict_memory(rehearsal: Rehearsal, effort: Effort, held_before: Callable[[], int]) -> Memory:
    """Predict the memory of rounds that train with ``effort``, in batches of the task's size.

    held_before: read after the trainings, because the first one loads what every later one finds loaded. Raises
    Unpredictable, and what training raises.
    """
    training, evaluation = predict_training(rehearsal, effort), predict_evaluation(rehearsal)
    return Memory(held_before(), training, evaluation, MODELS_HELD * rehearsal.model_bytes)


def predict_training(rehearsal: Rehearsal, effort: Effort) -> int:
    """Predict the bytes that training adds at its peak.

    Two steps, since what an optimiser remembers exists from the second on. A gate computes other blocks for other
    samples, so that its steps cannot be compared; the step of the whole model, which takes about as much, stands for
    them. Raises as ``predict_memory``.
    """
    try:
        return _peak(rehearsal, lambda few: effort.train(2, few), rehearsal.samples)
    except Unpredictable:
        return _peak(rehearsal, lambda few: rehearsal.train(2, samples=few), rehearsal.samples)


def predict_evaluation(rehearsal: Rehearsal) -> int:
    """Predict the bytes that an evaluation adds at its peak. Raises as ``predict_memory``."""
    return _peak(rehearsal, rehearsal.evaluate, rehearsal.held_out)


def held(device: str) -> int:
    """Return the bytes that this process holds of the memory that training on ``device`` uses, after giving back those
    that are free."""
    if device == "cpu":
        memory.give_back()
        return memory.resident()
    import torch  # here, because nothing else of a device that trains without it needs it

    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def room(device: str) -> int:
    """Return the bytes that this process may hold at most: those that it holds, and those that are free."""
    if device == "cpu":
        return held(device) + memory.available()
    import torch

    free: int = torch.cuda.mem_get_info(device)[0]
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
        raise Unpredictable(
            f"training on {few[0]} samples allocates {len(one)} blocks of memory, on {few[1]} samples {len(other)}: "
            f"its memory cannot be predicted; give --budget and --memory-limit yourself"
        )
    in_use = peak = 0.0
    for small, large in zip(one, other, strict=True):
        per_sample = (large - small) / (few[1] - few[0]) if few[1] > few[0] else small / few[0]
        in_use += small + per_sample * (samples - few[0])
        peak = max(peak, in_use)
    return round(peak * (HEAP if device == "cpu" else 1))


def _allocations(work: Callable[[], object], device: str) -> list[int]:
    """Return the bytes of every block that ``work`` has the device allocate (above 0) and free (below), in order."""
    from torch._C._autograd import DeviceType
    from torch.autograd import profiler

    with _silence(), profiler.profile(profile_memory=True, use_device=_profiled(device)) as profile:
        work()
    on_processor = device == "cpu"
    return [
        event.nbytes()
        for event in profile.kineto_results.events()
        if event.name() == "[memory]" and (event.device_type() == DeviceType.CPU) == on_processor
    ]


def _profiled(device: str) -> str | None:
    return None if device == "cpu" else device


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
