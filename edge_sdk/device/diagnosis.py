"""Likely causes of training that diverged, in order: the scale of the inputs, the learning rate, the clip.

They are for the device's user, with the measured spread of its inputs. The coordinator gets only the failure's type and
code (``protocol.failures``), because nothing that was measured on a device's data may leave it.
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

OTHERS = "another device whose data are in other units: the operator's page names it"


@dataclass(frozen=True)
class Spread:
    """The smallest and largest value of inputs, and their standard deviation."""

    smallest: float
    largest: float
    deviation: float

    @classmethod
    def of(cls, batches: Batches) -> Spread | None:
        """Measure the first batches; None if inputs are indices. Random numbers stay as they were."""
        with random_state_kept(batches):
            found = [as_arrays(batch)[0] for batch in islice(batches, FIRST_BATCHES)]
        if not found or found[0].dtype.kind != "f":
            return None
        values = np.concatenate([each.reshape(-1) for each in found]).astype(np.float64)
        return cls(float(values.min()), float(values.max()), float(values.std()))

    @property
    def ordinary(self) -> bool:
        """True if networks usually train with inputs of this spread."""
        least, most = ORDINARY_DEVIATIONS
        return least <= self.deviation <= most and max(-self.smallest, self.largest) < ORDINARY_VALUE

    def __str__(self) -> str:
        return (
            f"lie between {self.smallest:.2g} and {self.largest:.2g} with a standard deviation of {self.deviation:.2g}"
        )


def diagnose(error: TrainingDiverged, settings: FederationSettings, batches: Batches) -> str:
    """Return an error with its likely causes. batches: the training data, whose inputs are measured."""
    if error.advice is not None and not isinstance(error, UnsoundModel):
        return str(error)
    try:
        spread = Spread.of(batches)
    except Exception:  # the user's loader; the error at hand says more
        spread = None
    if error.advice is not None:
        return str(error) if spread is None else f"{error}. The inputs {spread}"
    rate = settings.learning_rate if error.learning_rate is None else error.learning_rate
    steps = f"the learning rate of {rate:g}: lower it; {_clip(settings)}; {OTHERS}"
    likely = f"{error.met}; likely causes, in order:"
    if spread is None:
        return f"{likely} {steps}"
    if spread.ordinary:
        return f"{likely} hardly the scale, because inputs {spread}; {steps}"
    return f"{likely} inputs {spread}: standardise them; {steps}"


def _clip(settings: FederationSettings) -> str:
    """Return what a clip of each step's gradient could change."""
    if settings.clip is None:
        return "no clip of the gradient: have the operator set clip=1"
    return f"the clip of {settings.clip:g}: have the operator lower it"
