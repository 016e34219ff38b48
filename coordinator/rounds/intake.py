"""The sums of an open round: its updates are clipped, outliers are left out, and the others are folded in.

    update_clip     an update whose difference from what was sent is longer (2-norm, over the values that it sent) is
                    scaled down to that length
    relative_clip   likewise one that is so many times longer than usual (``lengths``)
    outlier_mads    an update is left out of the sums when the root mean square of its difference lies further from the
                    round's median than so many times 1.4826 MAD, the median distance from that median (for a normal
                    distribution 1.4826 MAD is the standard deviation; Leys and others, J. Exp. Soc. Psychol. 2013)

The root mean square and not the norm, because masks of unequal budgets have unequally many values. A MAD of less than
a twentieth of the median counts as that: devices that agree to the last bit are no reason to leave the next one out.
Of fewer than four updates nobody can be told from the others.

Outliers are known when all updates have come, and so is what is usual in the first round. There updates are measured
as they come, in the cohort's order, and read from the disk once more when the round closes. An update that is left out
stays acknowledged: the device did its work, counts in the record, and the record says why the model is without it.

What no model can hold does not get into one: a value that is not finite in the federation's precision. An update that
would bring one by itself is refused when it comes (``fault_of_update``). One of a buffered round that does so when it
is brought forward to a newer model is left out of the sums. And a round whose model would have one all the same makes
none (``next_model``): the old model stays, since nobody can say which update it was.

The sums are only memory: after a restart they are made again from the stored updates, in the same order. An update
that was accepted a moment ago is still decoded in memory (``DecodedUpdates``); others are read from the disk.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol import bundle
from sparrow.protocol.manifest import Array, Manifest, Tensors, TensorSpec
from sparrow.protocol.masks import Mask, pack, unpack
from sparrow.protocol.messages import Kind, UpdateReport
from sparrow.protocol.parts import Numbers, expected
from sparrow.protocol.settings import FederationSettings

from ..methods import CoordinatorMethod, GlobalModel, Situation, UpdatePart, load_method
from ..models.global_models import Models
from ..storage.store import Store
from ..storage.tables import Federation
from ..sums.averages import OneUpdate, Sums, difference
from ..sums.private import PrivateSums
from ..sums.robust import RobustSums
from .assignments import BUNDLE_KINDS, Member, update_key, weight_of
from .buffered import Arrival, bring_forward, staleness_weight
from .lengths import LENGTHS, kept, norm_of, usual
from .secure import Ended

log = logging.getLogger(__name__)

FEWEST = 4
"""Updates among which an outlier can be told."""

LEAST_SPREAD = 0.05
"""A share of the median: a smaller MAD counts as this."""

ROUNDING = 1e-6
"""The share of a tensor's largest running variance by which rounding may bring another one below 0."""

DECODED_BYTES = 24 * 1024 * 1024
"""Decoded updates that are kept in memory: a few, or none of a large model. All of them are on the disk, too."""


class DecodedUpdates:
    """Updates between their acceptance and the sums, by their keys, so that each is decoded once.

    It holds at most ``DECODED_BYTES``, the latest ones: memory does not grow with the cohort. Any thread may use it.
    """

    def __init__(self) -> None:
        self._updates: OrderedDict[str, bundle.Bundle] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def has_room(self) -> bool:
        """Return whether as much again may come before any is dropped."""
        return self._bytes < DECODED_BYTES / 2

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
    return decoded.values.nbytes + sum(numbers.nbytes for numbers in decoded.parts.values())


def values_of(manifest: Manifest, decoded: bundle.Bundle, sent: Tensors) -> NDArray[np.float32]:
    """Return an update's values as those of a model; int8 ones are a difference from what was sent.

    What does not fit float32 becomes infinite."""
    if decoded.precision != "int8":
        return decoded.values
    with np.errstate(over="ignore"):
        return decoded.values + pack(manifest, sent, decoded.mask)


def fault_of_update(manifest: Manifest, decoded: bundle.Bundle, sent: Tensors) -> str | None:
    """Return what no model can hold of what an update would make of the values that were sent; None if it can be."""
    values = values_of(manifest, decoded, sent)
    unfit = decoded.precision == "int8" and not _fits(values, "fp32")  # values that came as such are known to fit
    if not unfit and not any(map(_is_variance, manifest.shared)):
        return None
    for spec, _, part in unpack(manifest, values, decoded.mask):
        if unfit and not _fits(part, "fp32"):
            return f"{spec.name}: with this difference a value is not finite"
        if _is_variance(spec) and part.size and part.min() < -ROUNDING * max(0.0, float(sent[spec.name].max())):
            return f"{spec.name}: a running variance of {part.min():.3g} is below 0, which no model can hold"
    return None


def fault_of_model(model: GlobalModel, settings: FederationSettings) -> str | None:
    """Return what of a global model cannot be sent to devices, or stored; None if all can be."""
    precision = settings.precision_of("down", Kind.train)
    for name, array in (*model.tensors.items(), *model.own.items()):
        if array.dtype.kind == "f" and not _fits(array, precision):
            largest = float(np.abs(array).max())
            return (
                f"{name}: a value of {largest:g} does not fit {precision} (largest {bundle.LARGEST_VALUE[precision]:g})"
            )
    return None


def next_model(method: CoordinatorMethod, model: GlobalModel, sums: Sums, situation: Situation) -> GlobalModel | str:
    """Return the next global model, or why these sums make none that devices could be sent."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            made = method.aggregation.close(model, sums, situation)
    except (ArithmeticError, ValueError) as error:
        log.exception("a method cannot make a model of round %s", situation.round)
        return f"{situation.settings.method} cannot make a model of these updates: {error}"
    # A stale update's difference can bring a variance below 0 in an honest device's hands.
    negative = {
        spec.name: np.maximum(made.tensors[spec.name], np.float32(0))
        for spec in situation.manifest.shared
        if _is_variance(spec) and made.tensors[spec.name].size and made.tensors[spec.name].min() < 0
    }
    made = replace(made, tensors={**made.tensors, **negative}) if negative else made
    return fault_of_model(made, situation.settings) or made


def _fits(values: Array, precision: bundle.Precision) -> bool:
    """Return whether all values are finite in this precision, by the smallest and the largest, one of which is NaN if
    any is."""
    largest = bundle.LARGEST_VALUE[precision]
    return not values.size or bool(-largest <= values.min() and values.max() <= largest)


def _is_variance(spec: TensorSpec) -> bool:
    """Return whether these are batch norm's running variances, of which square roots are taken."""
    return not spec.trainable and spec.name.rpartition(".")[2] == "running_var"


def sums_of(
    method: CoordinatorMethod, model: GlobalModel, situation: Situation, folder: Path, noise_key: bytes = b""
) -> Sums:
    """Return the sums that a round's updates are folded into: the method's, or those of the federation's settings.

    What one device prepares (round 0) comes through as it is: there is nobody to compare it with. noise_key: that of
    the federation, of which only a private one makes use.
    """
    sums, settings = method.aggregation.sums(model, situation), situation.settings
    if isinstance(sums, OneUpdate):
        return sums
    if settings.robust is not None:
        return RobustSums(situation.manifest, settings.robust, settings.robust_share, folder)
    if settings.noise_multiplier is not None:
        return PrivateSums(situation.manifest, model.tensors, settings, noise_key, situation.round)
    return sums


@dataclass(frozen=True)
class Update:
    """A decoded update: values float32 [count_values(manifest, mask)], those of a model; and its method's parts."""

    values: Array
    mask: Mask | None
    num_examples: int
    parts: Mapping[str, Numbers] = field(default_factory=dict)


class Intake:
    """Takes in the updates of one round, in the cohort's order.

    sent: the values that devices were given. usual_length: that of updates of earlier rounds, None where there are none
    (``lengths``). parts: what updates of the method bring beside values.
    """

    def __init__(
        self,
        sums: Sums,
        settings: FederationSettings,
        manifest: Manifest,
        sent: Tensors,
        usual_length: float | None = None,
        parts: Sequence[UpdatePart] = (),
    ) -> None:
        self.sums, self._parts = sums, parts
        # In secure rounds devices have clipped, and what comes are means of their updates.
        self._clip, self._mads = None if settings.secure else settings.update_clip, settings.outlier_mads
        self._relative = settings.relative_clip if clips_relatively(settings) else 0.0
        self._usual = usual_length
        self._manifest = manifest
        self._sent = sent
        if isinstance(sums, OneUpdate):  # what prepares a model is no change of it, and there is no other
            self._clip = self._mads = None
            self._relative = 0.0
        self._waits = self._mads is not None or (self._relative > 0 and usual_length is None)
        self._measured: list[tuple[str, str, float, float]] = []  # with 2-norm and root mean square
        self._lengths: list[float] = []
        self._clipped: dict[str, float] = {}
        self._left_out: dict[str, str] = {}

    def take(self, assignment_id: str, key: str, update: Update) -> None:
        """Take in the next update; key: the one under which it can be read again."""
        if self._waits:
            norm = norm_of(self._manifest, self._sent, update.values, update.mask)
            self._measured.append((assignment_id, key, norm, norm / math.sqrt(max(1, len(update.values)))))
        else:
            self._fold(assignment_id, update)

    def leave_out(self, assignment_id: str, why: str) -> None:
        """Note that an update does not count."""
        self._left_out[assignment_id] = why

    def finish(self, drawn: int, read: Callable[[str], Update]) -> None:
        """Fold the updates that were only measured, except outliers, when all of ``drawn`` devices' have come.

        read: returns an update by its key, again."""
        if isinstance(self.sums, RobustSums):
            self.sums.drawn = drawn
        if not self._measured:
            return
        if self._usual is None:
            self._usual = usual(norm for _, _, norm, _ in self._measured)
        median, spread = centre([size for *_, size in self._measured])
        mads = self._mads if self._mads is not None and len(self._measured) >= FEWEST else math.inf
        for assignment_id, key, _, size in self._measured:
            if abs(size - median) > mads * spread:
                self._left_out[assignment_id] = (
                    f"outlier: its values moved by {size:.3g} (root mean square), the round's median is {median:.3g}, "
                    f"and {mads:g} deviations from it are {mads * spread:.3g}"
                )
            else:
                self._fold(assignment_id, read(key))
        self._measured.clear()

    def moves(self, drawn: int) -> bool:
        """Return whether a round for which so many devices were drawn makes a new model.

        It does if an update came; under noise always, since nobody shall know whether one came."""
        return bool(self.sums.updates) or (isinstance(self.sums, PrivateSums) and drawn > 0)

    def notes(self) -> dict[str, Any]:
        """Return notes for the round's record: the updates that were clipped, assignment id -> to which share of their
        length, and left out, assignment id -> why.

        And how many values a robust rule held back."""
        found: dict[str, Any] = {}
        if self._clip is not None or self._clipped:
            found["updates_clipped"] = len(self._clipped)
        if self._clipped and not isinstance(self.sums, PrivateSums):  # whose are as private as the updates
            found["clipped"] = self._clipped
        if self._lengths:
            found[LENGTHS] = kept(self._lengths)
        if self._mads is not None or self._left_out:
            found |= {"updates_left_out": len(self._left_out), "left_out": self._left_out}
        if isinstance(self.sums, RobustSums):
            found["values_held_back"] = self.sums.held_back
        return found

    def _fold(self, assignment_id: str, update: Update) -> None:
        if self._relative or self._clip is not None:
            longest = math.inf if self._clip is None else self._clip
            if self._relative and self._usual:  # of 0 where nobody moved anything, and then nothing is unusual
                longest = min(longest, self._relative * self._usual)
            update, norm = clip(self._manifest, self._sent, update, longest)
            if norm > longest:
                self._clipped[assignment_id] = longest / norm
            if self._relative:
                self._lengths.append(min(norm, longest))
        self.sums.fold_in_place(update.values, update.mask, update.num_examples)
        for part in self._parts:
            if part.name in update.parts:
                part.fold(self.sums, update.parts[part.name], update.num_examples)


def clips_relatively(settings: FederationSettings) -> bool:
    """Return whether ``relative_clip`` acts: not in secure rounds, where nobody sees single updates; not under noise,
    where other devices' updates would decide how much of one counts; not beside a robust rule, which has its bound."""
    return settings.relative_clip > 0 and not (
        settings.secure or settings.robust is not None or settings.noise_multiplier is not None
    )


def clip(manifest: Manifest, sent: Tensors, update: Update, longest: float) -> tuple[Update, float]:
    """Return the update, its difference from what was sent cut to ``longest`` (2-norm), and the norm that it had."""
    norm = norm_of(manifest, sent, update.values, update.mask)
    if norm <= longest:
        return update, norm
    moved = difference(manifest, sent, update.values, update.mask)
    values = pack(manifest, sent, update.mask) + (longest / norm) * moved
    return replace(update, values=values.astype(np.float32)), norm


def centre(sizes: list[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation that the MAD stands for."""
    median = float(np.median(sizes))
    mad = float(np.median(np.abs(np.array(sizes) - median)))
    return median, 1.4826 * max(mad, LEAST_SPREAD * median)


class Folding:
    """The sums of one open round. decoded: updates that are still in memory. usual_length: that of earlier updates.

    round: its number. position: how many of its assignments, in the cohort's order, were looked at. taken: those whose
    updates were taken in. last: in a buffered round the number of the last arrival among them, and behind: how many
    models old each was. notes: counts for the record. sizes: bytes of the updates' bundles by part. progress: called
    with each update.
    """

    def __init__(
        self,
        store: Store,
        models: Models,
        decoded: DecodedUpdates,
        federation: Federation,
        situation: Situation,
        *,
        usual_length: float | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._progress = progress
        self._store = store
        self._models = models
        self._decoded = decoded
        self._federation = federation
        self._model = models.model(federation, federation.model_version)
        self._manifest = situation.manifest
        self._exponent = situation.settings.staleness_exponent
        self._int8 = situation.settings.precision == "int8"
        self._precision = situation.settings.precision_of("down", Kind.train)
        self.round = situation.round
        method = load_method(federation.method)
        self._parts = expected(method.parts, situation.manifest, situation.plan)
        self.intake = Intake(
            sums_of(method, self._model, situation, store.folder, federation.noise_key),
            situation.settings,
            situation.manifest,
            self._model.tensors,
            usual_length,
            method.parts,
        )
        self.position = self.last = 0
        self.taken: list[str] = []
        self.behind: list[int] = []
        self.sizes: Counter[str] = Counter()
        self.notes: dict[str, Any] = {}
        self._versions: dict[str, int] = {}  # of the models that updates were trained on, where that is not today's
        self._limits: dict[str, int | None] = {}

    def finish(self) -> None:
        """Fold what waited until all have come."""
        self.intake.finish(self.position, lambda key: self._read(key)[0])

    def take_in_order(self, cohort: Sequence[Member]) -> None:
        """Fold the next updates in the cohort's order; stop at the first that is still awaited."""
        while self.position < len(cohort) and cohort[self.position].status != "open":
            member = cohort[self.position]
            if member.status == "done" and member.kind in BUNDLE_KINDS:
                key = update_key(self._federation.id, member.id, member.update_sha256 or "")
                self._take(member.id, key, member.most_examples)
            self.position += 1

    def take_sums(self, ended: Ended) -> None:
        """Fold the sums of a secure round, each as one update, and note whose updates are in none."""
        for each in ended.sums:
            self.intake.take(each.assignment_ids[0], "", Update(each.values, each.mask, each.num_examples))
            self.taken.extend(each.assignment_ids)
        for assignment_id, why in ended.lost.items():
            self.intake.leave_out(assignment_id, why)
        self.notes = ended.notes

    def take_arrivals(self, arrived: Sequence[Arrival]) -> None:
        """Fold updates in the order in which they came, each brought forward to today's model."""
        for each in arrived:
            key = update_key(self._federation.id, each.assignment_id, each.update_sha256)
            behind = self._federation.model_version - each.model_version
            if behind:
                self._versions[key] = each.model_version
            self._take(each.assignment_id, key, each.most_examples)
            self.behind.append(behind)
            self.last = each.number

    def _take(self, assignment_id: str, key: str, most_examples: int | None) -> None:
        self._limits[key] = most_examples
        update, sizes = self._read(key)
        # Others came as values, which were found to fit when they were decoded.
        if (self._int8 or key in self._versions) and not _fits(update.values, self._precision):
            self.intake.leave_out(assignment_id, "its values are not finite when they are added to the global model")
        else:
            self.intake.take(assignment_id, key, update)
        self.sizes.update(sizes)
        self.taken.append(assignment_id)

    def _read(self, key: str) -> tuple[Update, Mapping[str, int]]:
        """Return an update as it counts in this round, and the bytes of its bundle by part."""
        self._progress()
        decoded = self._decoded.take(key)
        if decoded is None:
            # Its digest was compared with its key's: that inside of it need not be.
            body = self._store.blobs.load(key)
            decoded = bundle.decode(body, self._manifest, self._model.mask, parts=self._parts, intact=True)
        report = UpdateReport.model_validate_json(decoded.report)
        version = self._versions.get(key)
        began = self._model if version is None else self._models.model(self._federation, version)
        values = values_of(self._manifest, decoded, began.tensors)
        if version is not None:
            share = staleness_weight(self._federation.model_version - version, self._exponent)
            values = bring_forward(self._manifest, values, decoded.mask, began.tensors, self._model.tensors, share)
        weight = weight_of(report.num_examples, self._limits[key])
        return Update(values, decoded.mask, weight, decoded.parts), decoded.sizes
