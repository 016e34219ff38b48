"""What happens to a round's updates between the disk and the sums: they are clipped, and outliers left out.

    update_clip     an update whose difference from what was sent is longer (2-norm, over the values that it sent) is
                    scaled down to that length
    outlier_mads    an update is left out of the sums when the root mean square of its difference lies further from the
                    round's median than so many times 1.4826 MAD, the median distance from that median (for a normal
                    distribution 1.4826 MAD is the standard deviation; Leys and others, J. Exp. Soc. Psychol. 2013)

The root mean square and not the norm, because masks of unequal budgets have unequally many values. A MAD of less than
a twentieth of the median counts as that: devices that agree to the last bit are no reason to leave the next one out.
Of fewer than four updates nobody can be told from the others.

Who is an outlier is known when all have come. So updates are measured as they come, in the cohort's order, and read
from the disk once more when the round closes; none is kept in memory. What is left out stays acknowledged: the device
did its work, counts in the record, and the record says why the model is without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import Mask, pack
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.methods import CoordinatorMethod, GlobalModel, Situation
from sparrow.coordinator.rounds.privacy import PrivateSums
from sparrow.coordinator.rounds.robust import RobustSums
from sparrow.coordinator.rounds.sums import OneUpdate, Sums, difference

FEWEST = 4
"""Updates among which an outlier can be told."""

LEAST_SPREAD = 0.05
"""Of the median: a smaller MAD counts as this."""


def sums_of(method: CoordinatorMethod, model: GlobalModel, situation: Situation, folder: Path) -> Sums:
    """What a round's updates are folded into: the method's sums, or what the federation has in their place.

    What one device prepares (round 0) comes through as it is: there is nobody to compare it with.
    """
    sums, settings = method.sums(model, situation), situation.settings
    if isinstance(sums, OneUpdate):
        return sums
    if settings.robust is not None:
        return RobustSums(situation.manifest, settings.robust, settings.robust_share, folder)
    if settings.noise_multiplier is not None:
        return PrivateSums(situation.manifest, model.tensors, settings)
    return sums


@dataclass(frozen=True)
class Update:
    """An update as it was decoded: values float32 [count_values(manifest, mask)], those of a model."""

    values: Array
    mask: Mask | None
    num_examples: int
    gradients: Array | None = None


class Intake:
    """Takes in the updates of one round, in the cohort's order.

    sent: the values that devices were given. read: an update by its key on the disk, again.
    """

    def __init__(
        self,
        sums: Sums,
        settings: FederationSettings,
        manifest: Manifest,
        sent: Tensors,
        read: Callable[[str], Update],
    ) -> None:
        self.sums = sums
        self._clip, self._mads = settings.update_clip, settings.outlier_mads
        self._manifest = manifest
        self._sent = sent
        self._read = read
        if isinstance(sums, OneUpdate):  # what prepares a model is no change of it, and there is no other
            self._clip = self._mads = None
        self._measured: list[tuple[str, str, float]] = []
        self._clipped = 0
        self._left_out: dict[str, str] = {}

    def take(self, assignment_id: str, key: str, update: Update) -> None:
        """The next update, and the key under which it can be read again."""
        if self._mads is None:
            self._fold(update)
        else:
            moved = difference(self._manifest, self._sent, update.values, update.mask)
            self._measured.append((assignment_id, key, float(np.sqrt(np.mean(moved * moved)))))

    def finish(self) -> None:
        """All have come: fold what was only measured, less the outliers."""
        if self._mads is None or not self._measured:
            return
        median, spread = centre([size for _, _, size in self._measured])
        for assignment_id, key, size in self._measured:
            if len(self._measured) >= FEWEST and abs(size - median) > self._mads * spread:
                self._left_out[assignment_id] = (
                    f"outlier: its values moved by {size:.3g} (root mean square), the round's median is {median:.3g}, "
                    f"and {self._mads:g} deviations from it are {self._mads * spread:.3g}"
                )
            else:
                self._fold(self._read(key))
        self._measured.clear()

    def moves(self, drawn: int) -> bool:
        """Whether a round for which so many devices were drawn makes a new model: an update came, or may have come of
        whom nobody shall know."""
        return bool(self.sums.updates) or (isinstance(self.sums, PrivateSums) and drawn > 0)

    def notes(self) -> dict[str, Any]:
        """For the round's record: how many updates were clipped and left out, and assignment id -> why."""
        found: dict[str, Any] = {}
        if self._clip is not None:
            found["updates_clipped"] = self._clipped
        if self._mads is not None:
            found |= {"updates_left_out": len(self._left_out), "left_out": self._left_out}
        return found

    def _fold(self, update: Update) -> None:
        if self._clip is not None:
            update, clipped = clip(self._manifest, self._sent, update, self._clip)
            self._clipped += clipped
        self.sums.fold_in_place(update.values, update.mask, update.num_examples, update.gradients)


def clip(manifest: Manifest, sent: Tensors, update: Update, longest: float) -> tuple[Update, bool]:
    """The update, its difference from what was sent no longer than ``longest`` (2-norm), and whether it was longer."""
    moved = difference(manifest, sent, update.values, update.mask)
    norm = float(np.linalg.norm(moved))
    if norm <= longest:
        return update, False
    values = pack(manifest, sent, update.mask) + (longest / norm) * moved
    return replace(update, values=values.astype(np.float32)), True


def centre(sizes: list[float]) -> tuple[float, float]:
    """The median, and the standard deviation that the MAD stands for."""
    median = float(np.median(sizes))
    mad = float(np.median(np.abs(np.array(sizes) - median)))
    return median, 1.4826 * max(mad, LEAST_SPREAD * median)
