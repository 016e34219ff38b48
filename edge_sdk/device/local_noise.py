"""Local differential privacy: a device clips its update and adds noise before it sends it (docs/privacy.md).

    Δ ← (w_k - w^t) · min(1, C / ‖w_k - w^t‖₂);   send w^t + Δ + N(0, (z C)²)         C: the clip, z: the multiplier

The clip is that of Abadi and others, "Deep Learning with Differential Privacy", CCS 2016, arXiv:1607.00133, Algorithm
1, over a whole update instead of one sample's gradient; the noise is the Gaussian mechanism. Two runs are neighbours if
all of a device's data are replaced by others: an update of norm C at most then differs by 2 C at most. Each update that
is sent counts as one mechanism, whatever became of it, so epsilon is that of their composition.

Noise comes from the operating system's randomness, never from the federation's seed. An update that is sent again comes
from the outbox, byte for byte; a round that is trained again has sent nothing, and draws noise anew.

An epsilon for the values is worth little beside a loss that is sent as it is. So a device with local noise withholds
all that depends on its data, except the number of its samples, by which updates are weighted.
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

DELTA = 1e-5
"""The delta at which epsilon is stated."""
WITHHELD = Failure("other")
"""The failure that the coordinator reads: the kind of an error could depend on the data."""


@dataclass(frozen=True)
class LocalNoise:
    """The noise that a device adds. multiplier: z; clip: C. Raises BadArgument for numbers that cannot work."""

    multiplier: float
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("local_noise", self.multiplier), ("local_clip", self.clip)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise BadArgument(f"{name}={value!r} cannot work; give a number above 0")

    @classmethod
    def asked(cls, multiplier: float | None, clip: float | None) -> LocalNoise | None:
        """Return the noise that a caller asks for, or None. Raises BadArgument, and MissingPart without accountant."""
        if multiplier is None:
            if clip is not None:
                raise BadArgument("local_clip bounds updates that get noise; give local_noise as well, or leave it out")
            return None
        noise = cls(multiplier, 1.0 if clip is None else clip)
        check_accountant()
        return noise

    def described(self, updates: Mapping[float, int]) -> str:
        """Return the noise and what the updates so far have cost, as a line for a person."""
        spent = epsilon(updates)
        assert spent is not None, "the session has refused a history without noise"
        return (
            f"local noise: deviation {self.multiplier:g} times the clip {self.clip:g} on every value sent; epsilon so "
            f"far {spent:.4g} at delta {DELTA:g}"
        )

    def check(self, method: DeviceMethod, manifest: Manifest, settings: FederationSettings) -> None:
        """Raise CannotTrain for a federation whose updates this noise does not hide."""
        if not method.adds_local_noise:
            raise CannotTrain(
                f"--local-noise is not for {settings.method}; leave it out, or join a federation of "
                f"{' or '.join(_methods())}"
            )
        if (fault := _unfit(settings)) is not None:
            raise CannotTrain(fault)
        statistics = next((spec.name for spec in manifest.shared if not spec.trainable), None)
        if statistics is not None:
            raise CannotTrain(
                f"--local-noise: {statistics} is sent, and a running variance with noise can fall below 0; join a "
                f"federation whose model has no batch norm or, with fedspu, was published with "
                f"--running-statistics personal"
            )

    def hide(self, job: Job, update: Update, chance: np.random.Generator | None = None) -> Update:
        """Return an update that has moved by at most the clip (2-norm), with noise on each of its values.

        chance: the source of the noise; the operating system by default. Raises ProtocolError for a round that asks for
        more than values, TrainingDiverged where they are not finite.
        """
        settings = job.assignment.settings
        if job.assignment.kind is not Kind.train or update.parts:
            raise ProtocolError("the round asks for more than --local-noise hides")
        if (fault := _unfit(settings)) is not None:
            raise ProtocolError(fault)
        manifest, mask = job.manifest, update.mask
        # Of the payload as it came: neither may depend on the device's data.
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
    """Return the names of the installed methods that can add local noise."""
    found = []
    for name in installed("sparrow.device_methods"):
        with suppress(SdkError):  # one that needs PyTorch, which is not here
            if load_method(name).adds_local_noise:
                found.append(name)
    return found


def _unfit(settings: FederationSettings) -> str | None:
    """Return why updates in the federation's precision cannot be hidden."""
    if settings.precision_of("up", Kind.train) != "int8" or settings.secure:
        return None
    return (
        "--local-noise: updates in int8 carry what rounding took from earlier ones, which epsilon does not count; join "
        "a federation of another precision"
    )


def withhold(trained: Trained) -> Trained:
    """Return the outcome of a round without what its method found in the data."""
    return replace(trained, counts={}, stopped=False)


def count_update(updates: Mapping[float, int], noise: LocalNoise | None, update: Update | None) -> Mapping[float, int]:
    """Return the numbers of updates by their multiplier, 0 without noise, after a round; None if it sends no update."""
    if update is None:
        return updates
    multiplier = 0.0 if noise is None else float(noise.multiplier)
    return {**updates, multiplier: updates.get(multiplier, 0) + 1}


def epsilon(updates: Mapping[float, int]) -> float | None:
    """Return epsilon at ``DELTA`` of all updates, by their multiplier; None if one was sent without noise.

    Raises MissingPart without the accountant.
    """
    if updates.get(0.0):
        return None
    mechanisms = ((multiplier / SENSITIVITY["replacement"], times) for multiplier, times in sorted(updates.items()))
    return gaussian_epsilon(DELTA, *mechanisms)


def check_history(noise: LocalNoise | None, progress: Progress, path: Path) -> None:
    """Raise CannotTrain unless all updates of a device, sent and to be sent, have noise, or none has."""
    noisy = sum(times for multiplier, times in progress.updates.items() if multiplier)
    # A folder of before updates were counted has rounds alone.
    bare = max(progress.updates.get(0.0, 0), progress.rounds - noisy)
    afresh = "use another --device-name and --state-dir"
    if noise is not None and bare:
        raise CannotTrain(
            f"{path}: this device has sent {bare} updates without noise, so no epsilon holds for its data; leave "
            f"--local-noise out or, to count from now on, {afresh}"
        )
    if noise is None and noisy:
        raise CannotTrain(
            f"{path}: this device has sent {noisy} updates with local noise, and without it their epsilon would not "
            f"hold any more; give --local-noise again or, to give it up, {afresh}"
        )
