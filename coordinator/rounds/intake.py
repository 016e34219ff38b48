"""The sums of an open round: clip updates, exclude outliers, and fold the others.

    update_clip     longest difference between an update and the sent values (2-norm); a longer one is scaled down
    relative_clip   the same limit as a multiple of the usual length (``lengths``)
    outlier_mads    largest distance of an update's root mean square difference from the round's median, in multiples of
                    1.4826 MAD, a normal distribution's standard deviation (Leys et al., J. Exp. Soc. Psychol. 2013)

The root mean square is comparable between unequal budgets. The MAD is at least 5 % of the median, so that nearly
identical updates do not exclude the next one. Outliers, and the usual length of the first round, need all updates,
which are then folded when the round closes.

If the sums have values that are not finite in the federation's precision, the old model stays (``next_model``).
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
"""Smallest number of updates for a search for outliers."""

LEAST_SPREAD = 0.05
"""Smallest MAD, as a fraction of the median."""

ROUNDING = 1e-6
"""Rounding error allowed below a variance of 0, as a fraction of the tensor's largest running variance."""

DECODED_BYTES = 24 * 1024 * 1024
"""Memory for decoded updates, bytes. All updates are also on disk."""


class DecodedUpdates:
    """Cache of accepted updates by key, up to ``DECODED_BYTES``; thread-safe."""

    def __init__(self) -> None:
        self._updates: OrderedDict[str, bundle.Bundle] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def has_room(self) -> bool:
        """Return True if the cache is less than half full."""
        return self._bytes < DECODED_BYTES / 2

    def put(self, key: str, decoded: bundle.Bundle) -> None:
        """Keep an update; drop the oldest ones if the memory is full."""
        with self._lock:
            self._drop(key)
            self._updates[key] = decoded
            self._bytes += _bytes_of(decoded)
            while self._bytes > DECODED_BYTES:
                self._drop(next(iter(self._updates)))

    def take(self, key: str) -> bundle.Bundle | None:
        """Remove and return an update, if it is kept."""
        with self._lock:
            return self._drop(key)

    def forget(self, folder: str) -> None:
        """Remove all updates in this folder."""
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
    """Return an update's values as model values; int8 updates are differences from ``sent``."""
    if decoded.precision != "int8":
        return decoded.values
    with np.errstate(over="ignore"):
        return decoded.values + pack(manifest, sent, decoded.mask)


def fault_of_update(manifest: Manifest, decoded: bundle.Bundle, sent: Tensors) -> str | None:
    """Describe an invalid value of an update; None if all values are valid."""
    values = values_of(manifest, decoded, sent)
    # Only int8 differences can overflow: other values were checked when they were decoded.
    unfit = decoded.precision == "int8" and not _fits(values, "fp32")
    if not unfit and not any(map(_is_variance, manifest.shared)):
        return None
    for spec, _, part in unpack(manifest, values, decoded.mask):
        if unfit and not _fits(part, "fp32"):
            return f"{spec.name}: a value plus this difference is not finite"
        if _is_variance(spec) and part.size and part.min() < -ROUNDING * max(0.0, float(sent[spec.name].max())):
            return f"{spec.name}: a running variance of {part.min():.3g} is negative"
    return None


def fault_of_model(model: GlobalModel, settings: FederationSettings) -> str | None:
    """Describe a tensor that cannot be sent to devices or stored; None if the model is valid."""
    precision = settings.precision_of("down", Kind.train)
    for name, array in (*model.tensors.items(), *model.own.items()):
        if array.dtype.kind == "f" and not _fits(array, precision):
            largest = float(np.abs(array).max())
            return (
                f"{name}: a value of {largest:g} does not fit {precision} (largest {bundle.LARGEST_VALUE[precision]:g})"
            )
    return None


def next_model(method: CoordinatorMethod, model: GlobalModel, sums: Sums, situation: Situation) -> GlobalModel | str:
    """Return the next global model, or the reason why these sums do not give a valid one."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            made = method.aggregation.close(model, sums, situation)
    except (ArithmeticError, ValueError) as error:
        log.exception("the method cannot make a model in round %s", situation.round)
        return f"{situation.settings.method} cannot make a model of these updates: {error}"
    # The difference of an honest but stale update can make a variance negative.
    negative = {
        spec.name: np.maximum(made.tensors[spec.name], np.float32(0))
        for spec in situation.manifest.shared
        if _is_variance(spec) and made.tensors[spec.name].size and made.tensors[spec.name].min() < 0
    }
    made = replace(made, tensors={**made.tensors, **negative}) if negative else made
    return fault_of_model(made, situation.settings) or made


def _fits(values: Array, precision: bundle.Precision) -> bool:
    """Return True if all values are finite in this precision."""
    largest = bundle.LARGEST_VALUE[precision]
    # The minimum is NaN if any value is.
    return not values.size or bool(-largest <= values.min() and values.max() <= largest)


def _is_variance(spec: TensorSpec) -> bool:
    return not spec.trainable and spec.name.rpartition(".")[2] == "running_var"


def sums_of(
    method: CoordinatorMethod, model: GlobalModel, situation: Situation, folder: Path, noise_key: bytes = b""
) -> Sums:
    """Return empty sums for a round: robust, private, or the method's own."""
    sums = method.aggregation.sums(model, situation)
    settings = situation.settings
    if isinstance(sums, OneUpdate):
        return sums
    if settings.robust is not None:
        return RobustSums(situation.manifest, settings.robust, settings.robust_share, folder)
    if settings.noise_multiplier is not None:
        return PrivateSums(situation.manifest, model.tensors, settings, noise_key, situation.round)
    return sums


@dataclass(frozen=True)
class Update:
    """A decoded update: model values, float32 [count_values(manifest, mask)], and the method's parts."""

    values: Array
    mask: Mask | None
    num_examples: int
    parts: Mapping[str, Numbers] = field(default_factory=dict)


class Intake:
    """Clip, check and fold the updates of one round, in the cohort's order.

    usual_length: norm of updates of earlier rounds, if any (``lengths``).
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
        self.sums = sums
        self._parts = parts
        # In secure rounds the devices clip, and the coordinator receives means of updates.
        self._clip = None if settings.secure else settings.update_clip
        self._mads = settings.outlier_mads
        self._relative = settings.relative_clip if clips_relatively(settings) else 0.0
        self._usual = usual_length
        self._manifest = manifest
        self._sent = sent
        # The prepared model of round 0 is not a difference, and there is no other update to compare it with.
        if isinstance(sums, OneUpdate):
            self._clip = None
            self._mads = None
            self._relative = 0.0
        self._waits = self._mads is not None or (self._relative > 0 and usual_length is None)
        # Assignment id, key, 2-norm, root mean square.
        self._measured: list[tuple[str, str, float, float]] = []
        self._lengths: list[float] = []
        self._clipped: dict[str, float] = {}
        self._left_out: dict[str, str] = {}

    def take(self, assignment_id: str, key: str, update: Update) -> None:
        """Measure or fold the next update. key: the key of the stored update."""
        if self._waits:
            norm = norm_of(self._manifest, self._sent, update.values, update.mask)
            self._measured.append((assignment_id, key, norm, norm / math.sqrt(max(1, len(update.values)))))
        else:
            self._fold(assignment_id, update)

    def leave_out(self, assignment_id: str, why: str) -> None:
        """Exclude an update and record the reason."""
        self._left_out[assignment_id] = why

    def finish(self, drawn: int, read: Callable[[str], Update]) -> None:
        """Fold the measured updates except outliers. read: returns an update by key."""
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
        """Return True if the round makes a new model."""
        # It does if an update came; under noise also without one, because the number of updates is private.
        return bool(self.sums.updates) or (isinstance(self.sums, PrivateSums) and drawn > 0)

    def notes(self) -> dict[str, Any]:
        """Return notes for the round's record.

        ``clipped``: assignment id -> scale factor. ``left_out``: assignment id -> reason.
        """
        found: dict[str, Any] = {}
        if self._clip is not None or self._clipped:
            found["updates_clipped"] = len(self._clipped)
        # Under noise, scale factors are as private as the updates.
        if self._clipped and not isinstance(self.sums, PrivateSums):
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
            # A usual length of 0 sets no limit.
            if self._relative and self._usual:
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
    """Return True if ``relative_clip`` applies."""
    # It does not in secure rounds, which hide single updates; under noise, because an update's weight would depend on
    # other devices' data; and with a robust rule, which has its own bound.
    return settings.relative_clip > 0 and not (
        settings.secure or settings.robust is not None or settings.noise_multiplier is not None
    )


def clip(manifest: Manifest, sent: Tensors, update: Update, longest: float) -> tuple[Update, float]:
    """Clip an update's difference from ``sent`` to ``longest`` (2-norm); return it and its original norm."""
    norm = norm_of(manifest, sent, update.values, update.mask)
    if norm <= longest:
        return update, norm
    moved = difference(manifest, sent, update.values, update.mask)
    values = pack(manifest, sent, update.mask) + (longest / norm) * moved
    return replace(update, values=values.astype(np.float32)), norm


def centre(sizes: list[float]) -> tuple[float, float]:
    """Return the median and the standard deviation estimated from the MAD."""
    median = float(np.median(sizes))
    mad = float(np.median(np.abs(np.array(sizes) - median)))
    return median, 1.4826 * max(mad, LEAST_SPREAD * median)


class Folding:
    """The sums of one open round.

    position: number of assignments examined in the cohort's order. taken: assignments whose updates were folded or
    measured. last and behind, in a buffered round: number of the last arrival; age of each update in models. sizes:
    bundle bytes by part.
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
        self.position = 0
        self.last = 0
        self.taken: list[str] = []
        self.behind: list[int] = []
        self.sizes: Counter[str] = Counter()
        self.notes: dict[str, Any] = {}
        # By key: the model version of updates trained on an older model.
        self._versions: dict[str, int] = {}
        self._limits: dict[str, int | None] = {}

    def finish(self) -> None:
        """Fold the measured updates after the last one has arrived."""
        self.intake.finish(self.position, lambda key: self._read(key)[0])

    def take_in_order(self, cohort: Sequence[Member]) -> None:
        """Fold the next updates in the cohort's order; stop at the first open assignment."""
        while self.position < len(cohort) and cohort[self.position].status != "open":
            member = cohort[self.position]
            if member.status == "done" and member.kind in BUNDLE_KINDS:
                key = update_key(self._federation.id, member.id, member.update_sha256 or "")
                self._take(member.id, key, member.most_examples)
            self.position += 1

    def take_sums(self, ended: Ended) -> None:
        """Fold the sums of a secure round, each as one update, and record the lost updates."""
        for each in ended.sums:
            self.intake.take(each.assignment_ids[0], "", Update(each.values, each.mask, each.num_examples))
            self.taken.extend(each.assignment_ids)
        for assignment_id, why in ended.lost.items():
            self.intake.leave_out(assignment_id, why)
        self.notes = ended.notes

    def take_arrivals(self, arrived: Sequence[Arrival]) -> None:
        """Fold updates in their order of arrival, each applied to the current model."""
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
        # Other updates are values that were checked when they were decoded.
        if (self._int8 or key in self._versions) and not _fits(update.values, self._precision):
            self.intake.leave_out(assignment_id, "the sum of its values and the global model is not finite")
        else:
            self.intake.take(assignment_id, key, update)
        self.sizes.update(sizes)
        self.taken.append(assignment_id)

    def _read(self, key: str) -> tuple[Update, Mapping[str, int]]:
        """Return an update with its weight in this round, and its bundle's bytes by part."""
        self._progress()
        decoded = self._decoded.take(key)
        if decoded is None:
            # The store has compared the body's digest with the key, so the inner digest is not checked again.
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
