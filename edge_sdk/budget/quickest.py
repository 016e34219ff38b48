"""Which thread count and memory format train a task's model fastest on this processor, found by trying.

Trying must pay: it may take a twentieth of what a round's training takes, and never more than about two seconds. Rounds
of so little work that this would not do for one try are left as they are. What is found differs from machine to machine
and from start to start, and with it the last bits of a result.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import nn

from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks.compute import Compute
from edge_sdk.training.layout import gains
from edge_sdk.training.rehearsal import Rehearsal

SECONDS = 2.0
SHARE_OF_ROUND = 0.05
STEPS = 4
"""Steps of each candidate: one that does not count, and three of which the fastest does."""

WORTH_TRYING = 2e10
"""FLOPs of a round: seconds on a small board, one on a large."""

FEW = 8
"""Samples that the first guess is made on."""

WORTH = 0.95
"""A candidate replaces another that takes longer than this times as long: chance alone makes a few per cent."""


def quickest(rehearsal: Rehearsal, settings: FederationSettings, mask: NeuronMask | None = None) -> Compute:
    """The task's compute with the thread count and memory format that are fastest; as it is where trying cannot pay.

    settings: how long rounds are. mask: as they have it. Tried are the process's threads, half of them, and so on down
    to 1, unless the compute says how many; then the other memory format. Big batches are tried in part. This process
    has the threads of what is returned. Raises what training raises.
    """
    usual = rehearsal.task.compute
    steps = settings.local_steps or settings.local_epochs * len(rehearsal.task.train)
    flops = rehearsal.flops(steps * rehearsal.samples, mask)
    if usual.device.type != "cpu" or flops < WORTH_TRYING:
        return usual
    begin = time.monotonic()
    few = min(FEW, rehearsal.samples)
    per_sample = min(rehearsal.train(STEPS, mask=mask, samples=few)) / few
    allowed = min(SECONDS, SHARE_OF_ROUND * steps * rehearsal.samples * per_sample)
    samples = max(few, min(rehearsal.samples, int(allowed / 5 / STEPS / max(per_sample, 1e-9))))
    default = torch.get_num_threads()
    best, least = usual, math.inf

    def attempt(candidate: Compute) -> None:
        nonlocal best, least
        if time.monotonic() - begin > allowed - STEPS * samples * per_sample:
            return
        torch.set_num_threads(candidate.threads or default)
        taken = min(rehearsal.train(STEPS, mask=mask, samples=samples, compute=candidate))
        if taken < WORTH * least:
            best, least = candidate, taken

    for threads in [usual.threads] if usual.threads else [default >> shift for shift in range(default.bit_length())]:
        attempt(replace(usual, threads=threads))
    if usual.channels_last is None and any(isinstance(module, nn.Conv2d) for module in rehearsal.model.modules()):
        attempt(replace(best, channels_last=not gains(rehearsal.model)))
    torch.set_num_threads(best.threads or default)
    return best
