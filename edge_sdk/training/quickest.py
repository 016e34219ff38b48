"""Which thread count and memory format train a task's model fastest on this processor, found by trying.

Trying must pay: it may take a twentieth of what a round's training takes, and never more than about two seconds. Rounds
of less than a second or two are left as they are. What is found differs from machine to machine and from start to
start, and with it the last bits of a result.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import nn

from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.training.compute import Compute
from edge_sdk.training.layout import gains
from edge_sdk.training.rehearsal import Rehearsal

SECONDS = 2.0
SHARE_OF_ROUND = 0.05
STEPS = 4
"""Steps of each candidate: one that does not count, and three of which the fastest does."""

FEW = 8
"""Samples that the first guess is made on."""

WORTH = 0.95
"""A candidate replaces another that takes longer than this times as long: chance alone makes a few per cent."""


def quickest(rehearsal: Rehearsal, steps: int, mask: NeuronMask | None = None) -> Compute:
    """The task's compute with the thread count and memory format that are fastest; as it is where trying cannot pay.

    steps: those of a round. mask: as the rounds have it. Tried are the process's threads, half of them, and so on down
    to 1, unless the compute says how many; then the other memory format. Big batches are tried in part. This process
    has the threads of what is returned.
    """
    usual = rehearsal.task.compute
    if usual.device.type != "cpu":
        return usual
    begin = time.monotonic()
    per_sample = min(rehearsal.train(STEPS, mask=mask, samples=FEW)) / min(FEW, rehearsal.samples)
    allowed = min(SECONDS, SHARE_OF_ROUND * steps * rehearsal.samples * per_sample)
    samples = max(FEW, min(rehearsal.samples, int(allowed / 5 / STEPS / max(per_sample, 1e-9))))

    def seconds(compute: Compute) -> float:
        torch.set_num_threads(compute.threads or default)
        return min(rehearsal.train(STEPS, mask=mask, samples=samples, compute=compute))

    default = torch.get_num_threads()
    best, least = usual, None
    for candidate in _candidates(usual, default, rehearsal.model):
        if time.monotonic() - begin > allowed - STEPS * samples * per_sample:
            break
        taken = seconds(replace(best, **candidate))
        if least is None or taken < WORTH * least:
            best, least = replace(best, **candidate), taken
    torch.set_num_threads(best.threads or default)
    return best


def _candidates(usual: Compute, threads: int, model: nn.Module) -> list[dict[str, int | bool]]:
    """What is changed of the best so far, in turn; the first is the usual one."""
    numbers = [usual.threads] if usual.threads else [threads >> shift for shift in range(threads.bit_length())]
    changes: list[dict[str, int | bool]] = [{"threads": number} for number in numbers]
    if usual.channels_last is None and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        changes.append({"channels_last": not gains(model)})
    return changes
