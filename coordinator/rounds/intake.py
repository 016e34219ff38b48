"""The sums of an open round: its updates are clipped, outliers are left out, and the others are folded in.

    update_clip     an update whose difference from what was sent is longer (2-norm, over the values that it sent) is
                    scaled down to that length
    outlier_mads    an update is left out of the sums when the root mean square of its difference lies further from the
                    round's median than so many times 1.4826 MAD, the median distance from that median (for a normal
                    distribution 1.4826 MAD is the standard deviation; Leys and others, J. Exp. Soc. Psychol. 2013)

The root mean square and not the norm, because masks of unequal budgets have unequally many values. A MAD of less than
a twentieth of the median counts as that: devices that agree to the last bit are no reason to leave the next one out.
Of fewer than four updates nobody can be told from the others.

Outliers are known when all updates have come. So updates are measured as they come, in the cohort's order, and read
from the disk once more when the round closes. An update that is left out stays acknowledged: the device did its work,
counts in the record, and the record says why the model is without it.

The sums are only memory: after a restart they are made again from the stored updates, in the same order. An update
that was accepted a moment ago is still decoded in memory (``DecodedUpdates``); others are read from the disk.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.protocol import bundle
from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import Mask, pack
from edge_sdk.protocol.messages import FederationSettings, UpdateReport
from sparrow.coordinator.methods import CoordinatorMethod, GlobalModel, Situation, load_method
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds.assignments import BUNDLE_KINDS, Member, update_key
from sparrow.coordinator.rounds.buffered import Arrival, bring_forward, staleness_weight
from sparrow.coordinator.rounds.privacy import PrivateSums
from sparrow.coordinator.rounds.robust import RobustSums
from sparrow.coordinator.rounds.sums import OneUpdate, Sums, difference
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Federation

FEWEST = 4
"""Updates among which an outlier can be told."""

LEAST_SPREAD = 0.05
"""A share of the median: a smaller MAD counts as this."""


DECODED_BYTES = 32 * 1024 * 1024
"""Decoded updates that are kept in memory: a few, or none of a large model. All of them are on the disk, too."""


class DecodedUpdates:
    """Updates between their acceptance and the sums, by their keys, so that each is decoded once.

    It holds at most ``DECODED_BYTES``, the latest ones: memory does not grow with the cohort. Any thread may use it.
    """

    def __init__(self) -> None:
        self._updates: OrderedDict[str, bundle.Bundle] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, decoded: bundle.Bundle) -> None:
        """Keep an update, in place of the oldest ones."""
        with self._lock:
            self._drop(key)
            self._updates[key] = decoded
            self._bytes += _bytes_of(decoded)
            while self._bytes > DECODED_BYTES:
                self._drop(next(iter(self._updates)))

    def take(self, key: str) -> bundle.Bundle | None:
        """Remove an update and return it, if it is here."""
        with self._lock:
            return self._drop(key)

    def forget(self, folder: str) -> None:
        """Remove all updates of this folder."""
        with self._lock:
            for key in [key for key in self._updates if key.startswith(f"{folder}/")]:
                self._drop(key)

    def _drop(self, key: str) -> bundle.Bundle | None:
        decoded = self._updates.pop(key, None)
        if decoded is not None:
            self._bytes -= _bytes_of(decoded)
        return decoded


def _bytes_of(decoded: bundle.Bundle) -> int:
    return decoded.values.nbytes + (0 if decoded.gradients is None else decoded.gradients.nbytes)


def sums_of(method: CoordinatorMethod, model: GlobalModel, situation: Situation, folder: Path) -> Sums:
    """Return the sums that a round's updates are folded into: the method's, or those of the federation's settings.

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
    """A decoded update: values float32 [count_values(manifest, mask)], those of a model."""

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
        """Take in the next update; key: the one under which it can be read again."""
        if self._mads is None:
            self._fold(update)
        else:
            moved = difference(self._manifest, self._sent, update.values, update.mask)
            self._measured.append((assignment_id, key, float(np.sqrt(np.mean(moved * moved)))))

    def finish(self) -> None:
        """Fold the updates that were only measured, except outliers, when all have come."""
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
        """Return whether a round for which so many devices were drawn makes a new model.

        It does if an update came; under noise always, since nobody shall know whether one came."""
        return bool(self.sums.updates) or (isinstance(self.sums, PrivateSums) and drawn > 0)

    def notes(self) -> dict[str, Any]:
        """Return notes for the round's record: how many updates were clipped and left out, and assignment id -> why."""
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
    """Return the update, its difference from what was sent cut to ``longest`` (2-norm), and whether it was longer."""
    moved = difference(manifest, sent, update.values, update.mask)
    norm = float(np.linalg.norm(moved))
    if norm <= longest:
        return update, False
    values = pack(manifest, sent, update.mask) + (longest / norm) * moved
    return replace(update, values=values.astype(np.float32)), True


def centre(sizes: list[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation that the MAD stands for."""
    median = float(np.median(sizes))
    mad = float(np.median(np.abs(np.array(sizes) - median)))
    return median, 1.4826 * max(mad, LEAST_SPREAD * median)


class Folding:
    """The sums of one open round. decoded: updates that are still in memory.

    round: its number. position: how many of its assignments, in the cohort's order, were looked at. taken: how many
    updates were taken in. last: in a buffered round the number of the last arrival among them, and behind: how many
    models old each was. parts: bytes of the updates' bundles by part. intact: that this process itself has checked
    their digests when they came, and nobody else stores any. progress: called with each update.
    """

    def __init__(
        self,
        store: Store,
        models: Models,
        decoded: DecodedUpdates,
        federation: Federation,
        situation: Situation,
        *,
        intact: bool,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._progress = progress
        self._store = store
        self._models = models
        self._decoded = decoded
        self._federation = federation
        self._model = models.model(federation, federation.model_version)
        self._manifest = situation.manifest
        self._intact = intact
        self._exponent = situation.settings.staleness_exponent
        self.round = situation.round
        self.intake = Intake(
            sums_of(load_method(federation.method), self._model, situation, store.folder),
            situation.settings,
            situation.manifest,
            self._model.tensors,
            lambda key: self._read(key, self._versions.get(key))[0],
        )
        self.position = self.taken = self.last = 0
        self.behind: list[int] = []
        self.parts: Counter[str] = Counter()
        self._versions: dict[str, int] = {}

    def take_in_order(self, cohort: Sequence[Member]) -> None:
        """Fold the next updates in the cohort's order; stop at the first that is still awaited."""
        while self.position < len(cohort) and cohort[self.position].status != "open":
            member = cohort[self.position]
            if member.status == "done" and member.kind in BUNDLE_KINDS:
                self._take(member.id, update_key(self._federation.id, member.id, member.update_sha256 or ""))
            self.position += 1

    def take_arrivals(self, arrived: Sequence[Arrival]) -> None:
        """Fold updates in the order in which they came, each brought forward to today's model."""
        for each in arrived:
            key = update_key(self._federation.id, each.assignment_id, each.update_sha256)
            behind = self._federation.model_version - each.model_version
            if behind:
                self._versions[key] = each.model_version
            self._take(each.assignment_id, key)
            self.behind.append(behind)
            self.last = each.number

    def _take(self, assignment_id: str, key: str) -> None:
        update, parts = self._read(key, self._versions.get(key))
        self.intake.take(assignment_id, key, update)
        self.parts.update(parts)
        self.taken += 1

    def _read(self, key: str, version: int | None) -> tuple[Update, Mapping[str, int]]:
        """Return an update, and the bytes of its parts. version: of the model it was trained on, if not today's."""
        self._progress()
        decoded = self._decoded.take(key)
        if decoded is None:
            body = self._store.blobs.load(key)
            decoded = bundle.decode(body, self._manifest, self._model.mask, intact=self._intact)
        report = UpdateReport.model_validate_json(decoded.report)
        began = self._model if version is None else self._models.model(self._federation, version)
        values = decoded.values
        if decoded.precision == "int8":  # a difference from what was sent
            values = values + pack(self._manifest, began.tensors, decoded.mask)
        if version is not None:
            weight = staleness_weight(self._federation.model_version - version, self._exponent)
            values = bring_forward(self._manifest, values, decoded.mask, began.tensors, self._model.tensors, weight)
        return Update(values, decoded.mask, report.num_examples, decoded.gradients), decoded.parts
