"""Local differential privacy: clip an update and add noise before sending it (docs/privacy.md).

    Δ ← (w_k - w^t) · min(1, C / ‖w_k - w^t‖₂);   send w^t + Δ + N(0, (z C)²)         C: the clip, z: the multiplier

The clip follows Abadi et al., CCS 2016, arXiv:1607.00133, Algorithm 1, on a whole update instead of one sample's
gradient; the noise is the Gaussian mechanism. Neighbouring data sets replace all of a device's data, so the sensitivity
is 2 C. Every sent update counts as one mechanism; epsilon is that of their composition.

Noise comes from the operating system, never from the federation's seed. A repeated update is sent from the outbox, byte
for byte; a repeated round has not sent an update yet and draws new noise. A device with local noise withholds all other
data-dependent numbers, such as losses, except its number of samples.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparrow.command_line.installed import installed
from sparrow.protocol.accounting import SENSITIVITY, check_accountant, gaussian_epsilon
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Kind
from sparrow.protocol.settings import FederationSettings

from ..engines.training import TrainingDiverged
from ..errors import BadArgument, SdkError
from ..methods import DeviceMethod, Job, Trained, Update, load_method
from ..methods.merging import sent_values
from .trainable import CannotTrain

if TYPE_CHECKING:
    from .state import Progress

# Epsilon is reported at this delta.
DELTA = 1e-5
# Reported in place of the real failure, whose kind could depend on the data.
WITHHELD = Failure("other")


@dataclass(frozen=True)
class LocalNoise:
    """Noise on updates."""

    # Z.
    multiplier: float
    # C. Raises BadArgument for invalid numbers.
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("local_noise", self.multiplier), ("local_clip", self.clip)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise BadArgument(f"{name}={value!r} is invalid; give a number above 0")

    @classmethod
    def asked(cls, multiplier: float | None, clip: float | None) -> LocalNoise | None:
        """Return the requested noise, or None. Raises BadArgument; MissingPart without an accountant."""
        if multiplier is None:
            if clip is not None:
                raise BadArgument("local_clip has no effect without local_noise; give both, or leave local_clip out")
            return None
        noise = cls(multiplier, 1.0 if clip is None else clip)
        check_accountant()
        return noise

    def described(self, updates: Mapping[float, int]) -> str:
        """Return a message with the noise and the epsilon spent so far."""
        spent = epsilon(updates)
        assert spent is not None, "the session refuses updates without noise"
        return (
            f"local noise: standard deviation {self.multiplier:g} times the clip {self.clip:g} on every sent value; "
            f"epsilon so far {spent:.4g} at delta {DELTA:g}"
        )

    def check(self, method: DeviceMethod, manifest: Manifest, settings: FederationSettings) -> None:
        """Raise CannotTrain if the noise would not cover the federation's updates."""
        if not method.adds_local_noise:
            raise CannotTrain(
                f"--local-noise does not support {settings.method}; leave it out, or join a federation with "
                f"{' or '.join(_methods())}"
            )
        if (fault := _unfit(settings)) is not None:
            raise CannotTrain(fault)
        statistics = next((spec.name for spec in manifest.shared if not spec.trainable), None)
        if statistics is not None:
            raise CannotTrain(
                f"--local-noise: {statistics} is sent, and noise can make a running variance negative; join a "
                f"federation whose model has no batch norm or, with fedspu, was published with "
                f"--running-statistics personal"
            )

    def hide(self, job: Job, update: Update, chance: np.random.Generator | None = None) -> Update:
        """Return the update clipped to ``clip`` (2-norm), with noise on each value.

        chance: default: seeded by the operating system. Raises ProtocolError if the round asks for more than values,
        TrainingDiverged if they are not finite.
        """
        settings = job.assignment.settings
        if job.assignment.kind is not Kind.train or update.parts:
            raise ProtocolError("the round asks for more than --local-noise hides")
        if (fault := _unfit(settings)) is not None:
            raise ProtocolError(fault)
        manifest = job.manifest
        mask = update.mask
        # The base must not depend on the device's data.
        base = sent_values(manifest, job.received, mask) if update.base is None else pack(manifest, update.base, mask)
        base = np.asarray(base, np.float64)
        moved = np.asarray(update.values, np.float64) - base
        norm = float(np.linalg.norm(moved))
        if not math.isfinite(norm):
            raise TrainingDiverged("the update holds values that are not finite")
        if norm > self.clip:
            moved *= self.clip / norm
        chance = chance or np.random.Generator(np.random.PCG64(secrets.randbits(256)))
        moved += self.multiplier * self.clip * chance.standard_normal(len(moved))
        return replace(update, values=(base + moved).astype(np.float32))


def _methods() -> list[str]:
    found = []
    for name in installed("sparrow.device_methods"):
        # Methods that need PyTorch may fail to load.
        with suppress(SdkError):
            if load_method(name).adds_local_noise:
                found.append(name)
    return found


def _unfit(settings: FederationSettings) -> str | None:
    if settings.precision_of("up", Kind.train) != "int8" or settings.secure:
        return None
    return (
        "--local-noise: updates in int8 include rounding residuals of earlier ones, which epsilon does not cover; join "
        "a federation with another precision"
    )


def withhold(trained: Trained) -> Trained:
    """Return the outcome of a round without counts and early stopping, which depend on the data."""
    return replace(trained, counts={}, stopped=False)


def count_update(updates: Mapping[float, int], noise: LocalNoise | None, update: Update | None) -> Mapping[float, int]:
    """Return multiplier (0 without noise) -> number of updates."""
    if update is None:
        return updates
    multiplier = 0.0 if noise is None else float(noise.multiplier)
    return {**updates, multiplier: updates.get(multiplier, 0) + 1}


def epsilon(updates: Mapping[float, int]) -> float | None:
    """Return epsilon at ``DELTA`` of all updates; None if one was sent without noise.

    Raises MissingPart if the accountant is not installed.
    """
    if updates.get(0.0):
        return None
    mechanisms = ((multiplier / SENSITIVITY["replacement"], times) for multiplier, times in sorted(updates.items()))
    return gaussian_epsilon(DELTA, *mechanisms)


def check_history(noise: LocalNoise | None, progress: Progress, path: Path) -> None:
    """Raise CannotTrain if the device would mix updates with and without noise."""
    noisy = sum(times for multiplier, times in progress.updates.items() if multiplier)
    # Older state folders count only rounds.
    bare = max(progress.updates.get(0.0, 0), progress.rounds - noisy)
    afresh = "use another --device-name and --state-dir"
    if noise is not None and bare:
        raise CannotTrain(
            f"{path}: this device has sent {bare} updates without noise, so no epsilon holds for its data; leave "
            f"--local-noise out or, to start counting now, {afresh}"
        )
    if noise is None and noisy:
        raise CannotTrain(
            f"{path}: this device has sent {noisy} updates with local noise, whose epsilon would no longer hold; give "
            f"--local-noise again or, to do without it, {afresh}"
        )
