"""Likely causes of diverged training, in order: scale of the inputs, learning rate, clip.

They are shown only to the device's user, because measurements of a device's data must not leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from sparrow.protocol.settings import FederationSettings

from ..engines.training import TrainingDiverged, UnsoundModel
from ..tasks import Batches, as_arrays
from ..tasks.intake import random_state_kept

FIRST_BATCHES = 8
ORDINARY_DEVIATIONS = (0.1, 10.0)
ORDINARY_VALUE = 100.0

OTHERS = "another device with data in other units: the operator's page names it"


@dataclass(frozen=True)
class Spread:
    """Smallest and largest input value, and their standard deviation."""

    smallest: float
    largest: float
    deviation: float

    @classmethod
    def of(cls, batches: Batches) -> Spread | None:
        """Measure the first batches without changing random states; None if inputs are indices."""
        with random_state_kept(batches):
            found = [as_arrays(batch)[0] for batch in islice(batches, FIRST_BATCHES)]
        if not found or found[0].dtype.kind != "f":
            return None
        values = np.concatenate([each.reshape(-1) for each in found]).astype(np.float64)
        return cls(float(values.min()), float(values.max()), float(values.std()))

    @property
    def ordinary(self) -> bool:
        """Whether networks usually train with such inputs."""
        least, most = ORDINARY_DEVIATIONS
        return least <= self.deviation <= most and max(-self.smallest, self.largest) < ORDINARY_VALUE

    def __str__(self) -> str:
        return (
            f"lie between {self.smallest:.2g} and {self.largest:.2g} with a standard deviation of {self.deviation:.2g}"
        )


def diagnose(error: TrainingDiverged, settings: FederationSettings, batches: Batches) -> str:
    """Return the text of an error with its likely causes."""
    if error.advice is not None and not isinstance(error, UnsoundModel):
        return str(error)
    try:
        spread = Spread.of(batches)
    except Exception:
        # From the user's loader; the first error matters more.
        spread = None
    if error.advice is not None:
        return str(error) if spread is None else f"{error}. The inputs {spread}"
    rate = settings.learning_rate if error.learning_rate is None else error.learning_rate
    steps = f"the learning rate of {rate:g}: lower it; {_clip(settings)}; {OTHERS}"
    likely = f"{error.met}; likely causes, in order:"
    if spread is None:
        return f"{likely} {steps}"
    if spread.ordinary:
        return f"{likely} {steps}; probably not the scale, because inputs {spread}"
    return f"{likely} inputs {spread}: standardise them; {steps}"


def _clip(settings: FederationSettings) -> str:
    if settings.clip is None:
        return "no gradient clipping: ask the operator to set clip=1"
    return f"the clip of {settings.clip:g}: ask the operator to lower it"
