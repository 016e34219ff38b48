"""How long a training step takes under a mask, predicted from a few steps that are timed here.

Frozen neurons save a part of the backward pass, which grows with the FLOPs that are left, and cost what gathering the
others' values takes, which hardly changes with their number. So the seconds of a step are taken to be linear in its
counted FLOPs (``protocol.flops``), through steps timed under two masks. A step of the whole model gathers nothing: it
is timed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, draw_neurons
from edge_sdk.training.rehearsal import Rehearsal

ANCHORS = (0.25, 0.75)
"""Shares of active neurons of the masks that are timed."""

ROUNDS = 3
STEPS = 4
SECONDS = 1.0
"""How long each mask is timed, in several turns with the others; at least ``STEPS`` steps a turn, of which one does not
count."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step: of the whole model, and of one that takes no FLOPs, to which each FLOP adds its part."""

    whole: float
    fixed: float
    per_flop: float

    def predict(self, rehearsal: Rehearsal, mask: NeuronMask | None) -> float:
        """Seconds of a step on the task's batch under ``mask``."""
        return self.whole if mask is None else self.fixed + self.per_flop * rehearsal.flops(rehearsal.samples, mask)


def measure_pace(rehearsal: Rehearsal, manifest: Manifest, samples: int | None = None) -> Pace:
    """Time steps on ``samples`` of the task's batch, all by default; seconds in the end are of all.

    Fewer samples, for a device that has no memory for more, are scaled up as if a step were proportional to them.
    """
    masks = [draw_neurons(manifest, NeuronDraw("pace", 1, "pace", share)) for share in ANCHORS]
    low, high, whole = (
        seconds * rehearsal.samples / (samples or rehearsal.samples)
        for seconds in _least_seconds(rehearsal, [*masks, None], samples)
    )
    few, many = (rehearsal.flops(rehearsal.samples, mask) for mask in masks)
    # Where masks change next to nothing, chance decides which of the two was faster.
    per_flop = max(0.0, high - low) / (many - few) if many > few else 0.0
    return Pace(whole, low - per_flop * few, per_flop)


def _least_seconds(rehearsal: Rehearsal, masks: list[NeuronMask | None], samples: int | None) -> list[float]:
    """Seconds of a step under each mask: the least of all, for whatever else the machine does only adds."""
    least = [min(rehearsal.train(STEPS, mask=mask, samples=samples)) for mask in masks]
    for _ in range(ROUNDS):
        for number, mask in enumerate(masks):
            steps = max(STEPS, min(50, int(SECONDS / ROUNDS / max(least[number], 1e-6))))
            least[number] = min(least[number], *rehearsal.train(steps, mask=mask, samples=samples))
    return least
