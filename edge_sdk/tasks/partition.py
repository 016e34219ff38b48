"""Partitions of a data set over many devices, and the split of one device's part.

A partition is a function of labels [samples] (classes of any type), people [samples] or None (who made each sample),
``of`` (number of devices) and a seed; it returns each device's indices, sorted, without repeats. Further arguments are
numeric options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Array
from sparrow.reading.errors import BadOption, DataError

Index = NDArray[np.intp]

# Draws before a partition is considered impossible: seconds for 100 devices of ten classes.
REDRAWS = 10_000


@dataclass(frozen=True)
class Split:
    """A device's samples by use: sorted indices, disjoint except after ``shifted``."""

    train: Index
    validation: Index
    test: Index


def dirichlet(
    labels: Array, people: Array | None, *, of: int, seed: int, alpha: float = 0.3, minimum: int = 10
) -> list[Index]:
    """Label skew: per class, q ~ Dir(alpha·1_N) gives each of the N = ``of`` devices its share of the samples.

    FedSPU, arXiv:2403.11464, section 5. Redrawn until every device has ``minimum`` samples. Every sample is dealt.
    Raises DataError if that is impossible.
    """
    _check(labels, of, minimum)
    if not (alpha > 0 and math.isfinite(alpha)):
        raise BadOption(f"alpha is {alpha}; give a number above 0, such as 0.3")
    random = _random(seed)
    by_class = [random.permutation(np.flatnonzero(labels == label)) for label in sorted(set(labels.tolist()))]
    for _ in range(REDRAWS):
        proportions = random.dirichlet(np.full(of, alpha), size=len(by_class))
        # A tiny alpha can make all shares of a class underflow to zero, and their quotient NaN.
        if not np.isfinite(proportions).all():
            continue
        sizes = np.array([[len(samples)] for samples in by_class])
        cuts = (np.cumsum(proportions[:, :-1], axis=1) * sizes).astype(np.intp)
        counts = np.diff(cuts, axis=1, prepend=0, append=sizes)
        if counts.sum(axis=0).min() >= minimum:
            dealt = [np.split(samples, cut) for samples, cut in zip(by_class, cuts, strict=True)]
            return [np.sort(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]
    raise _too_few(REDRAWS, f"alpha={alpha:g}", of, minimum, labels, "a larger alpha")


def grouped(
    labels: Array,
    people: Array | None,
    *,
    of: int,
    seed: int,
    groups: int = 5,
    alpha: float = 0.3,
    minimum: int = 10,
) -> list[Index]:
    """Label skew between ``groups`` of similar devices: ``dirichlet`` over groups, then equal mixtures within a group.

    Device i is in group i mod ``groups``. Every sample is dealt.
    """
    _check(labels, of, minimum)
    if not 1 <= groups <= of:
        raise BadOption(f"groups is {groups} for {of} devices; use 1 to {of}")
    largest = -(-of // groups)
    dealt: list[Index] = [np.empty(0, np.intp)] * of
    random = _random(seed, 1)
    for group, samples in enumerate(
        dirichlet(labels, people, of=groups, seed=seed, alpha=alpha, minimum=minimum * largest)
    ):
        mixed = random.permutation(samples)
        by_label = mixed[np.argsort(labels[mixed], kind="stable")]
        members = range(group, of, groups)
        for number, device in enumerate(members):
            dealt[device] = np.sort(by_label[number :: len(members)])
    return dealt


def shards(labels: Array, people: Array | None, *, of: int, seed: int, shards: int = 2) -> list[Index]:
    """Pathological label skew: samples sorted by label, cut into ``of * shards`` equal pieces, ``shards`` per device.

    McMahan et al. (arXiv:1602.05629, section 3). Every sample is dealt.
    """
    if shards < 1:
        raise BadOption(f"shards is {shards}; give at least 1")
    _check(labels, of, shards)
    pieces = np.array_split(np.argsort(labels, kind="stable"), of * shards)
    hands = _random(seed).permutation(of * shards).reshape(of, shards)
    return [np.sort(np.concatenate([pieces[number] for number in hand])) for hand in hands]


def classes(
    labels: Array, people: Array | None, *, of: int, seed: int, classes: int = 2, minimum: int = 10
) -> list[Index]:
    """Pathological label skew with quantity skew: a tenth of the devices, drawn at random, hold half of the samples.

    DM-PFL's second partition, completed: sizes are proportional to u ~ U[0.5, 1.5] inside each half. Large devices
    first, each draws ``classes`` classes, weighted by remaining samples, and takes equally many of each. Other classes
    replace one that runs out; if all do, the device gets fewer. Remaining samples are not dealt. Redrawn until every
    device has ``minimum`` samples.
    """
    _check(labels, of, minimum)
    if classes < 1:
        raise BadOption(f"classes is {classes}; give at least 1")
    random = _random(seed)
    # Each draw loops over the devices.
    attempts = 100
    for _ in range(attempts):
        dealt = _deal_classes(labels, of, classes, random)
        if min(map(len, dealt)) >= minimum:
            return dealt
    raise _too_few(attempts, f"classes={classes}", of, minimum, labels, "more classes each")


def _deal_classes(labels: Array, of: int, classes: int, random: np.random.RandomState) -> list[Index]:
    left = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    order = random.permutation(of)
    large = max(1, of // 10)
    wishes = random.uniform(0.5, 1.5, of)
    # A single device has all.
    halves = [half for half in np.split(wishes, [large]) if len(half)]
    for half in halves:
        half /= half.sum() * len(halves)
    sizes = np.floor(wishes * len(labels)).astype(np.intp)
    # Largest first, while classes still have enough samples.
    by_size = np.argsort(-sizes, kind="stable")
    dealt: list[Index] = [np.empty(0, np.intp)] * of
    for device, size in zip(order[by_size], sizes[by_size], strict=True):
        weights = np.array([len(samples) for samples in left], dtype=np.float64)
        held = min(classes, int((weights > 0).sum()))
        if held == 0:
            continue
        chosen = random.choice(len(left), size=held, replace=False, p=weights / weights.sum())
        taken: list[Index] = []
        # Scarcest first: the following classes make up for its shortage.
        for rank, number in enumerate(sorted(chosen, key=lambda number: (len(left[number]), number))):
            wanted = (size - sum(map(len, taken))) // (held - rank)
            taken.append(left[number][:wanted])
            left[number] = left[number][wanted:]
        dealt[device] = np.sort(np.concatenate(taken))
    return dealt


def quantity(
    labels: Array, people: Array | None, *, of: int, seed: int, sigma: float = 0.3, minimum: int = 10
) -> list[Index]:
    """Quantity skew only: sizes follow a log-normal whose logarithm has deviation ``sigma``; labels are mixed.

    Acar et al., arXiv:2111.04263 (FedDyn). Redrawn until every device has ``minimum`` samples. Every sample is dealt.
    """
    _check(labels, of, minimum)
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise BadOption(f"sigma is {sigma}; give a number of at least 0, such as 0.3")
    random = _random(seed)
    mixed = random.permutation(len(labels))
    for _ in range(REDRAWS):
        weights = random.lognormal(0.0, sigma, of)
        cuts = (np.cumsum(weights)[:-1] / weights.sum() * len(labels)).astype(np.intp)
        if np.diff(cuts, prepend=0, append=len(labels)).min() >= minimum:
            return [np.sort(part) for part in np.split(mixed, cuts)]
    raise _too_few(REDRAWS, f"sigma={sigma:g}", of, minimum, labels, "a smaller sigma")


def person(labels: Array, people: Array | None, *, of: int, seed: int, minimum: int = 1) -> list[Index]:
    """Deal by person: device i holds the samples of the i-th person, in order of names or numbers.

    People with fewer than ``minimum`` samples are left out.
    """
    if people is None:
        raise BadOption("partition=person: this set does not name who made its samples; choose another partition")
    found = people_of(people, minimum)
    if of != len(found):
        raise DataError(
            f"partition=person: {of} devices for {len(found)} people; leave of= out, or set of={len(found)} (--devices "
            f"{len(found)} of a fleet or the bench)"
        )
    return [np.flatnonzero(people == one) for one in found]


def people_of(people: Array, minimum: float = 1) -> Array:
    """Return the people with at least ``minimum`` samples, each once, in order."""
    found, counts = np.unique(people, return_counts=True)
    enough: Array = found[counts >= minimum]
    return enough


def iid(labels: Array, people: Array | None, *, of: int, seed: int) -> list[Index]:
    """No skew: samples shuffled and dealt in equal numbers, plus or minus one."""
    _check(labels, of, 1)
    return [np.sort(part) for part in np.array_split(_random(seed).permutation(len(labels)), of)]


def split(
    count: int, seed: int, held_out: float | None = 0.3, validation: float = 0.15, runs: Array | None = None
) -> Split:
    """Split ``count`` samples into train, validation and test at random.

    held_out: test share; None for no test set. validation: share of the rest. The default is 0.595, 0.105 and 0.3. Each
    set gets at least one sample.

    runs [count]: unbroken recording of each sample. A recording is in one set only, because neighbouring samples
    overlap.

    Raises DataError for fewer samples, or recordings, than sets, and BadOption for shares outside (0, 1).
    """
    if held_out is None and not 0 < validation < 1:
        raise BadOption(f"validation={validation:g}; it must lie between 0 and 1")
    if held_out is not None and not (0 < held_out < 1 and 0 < validation < 1):
        raise BadOption(f"held_out is {held_out} and validation {validation}; both must lie between 0 and 1")
    _, run, sizes = np.unique(np.arange(count) if runs is None else runs, return_inverse=True, return_counts=True)
    sets = ["training", "validation", *["test"] * (held_out is not None)]
    if len(sizes) < len(sets):
        units = "samples" if runs is None else "unbroken recordings (run)"
        raise DataError(
            f"{len(sizes)} {units} cannot be split into {', '.join(sets[:-1])} and {sets[-1]}; give {len(sets)} or more"
        )
    order = _random(seed).permutation(len(sizes))
    ends = np.cumsum(sizes[order])

    # 1e-9 removes rounding of binary floats: (1 - 0.3) * 10 is 7, not 6.999...
    def within(samples: float) -> int:
        return int(np.searchsorted(ends, samples + 1e-9, side="right"))

    local = len(order) if held_out is None else min(max(within((1 - held_out) * count), 2), len(order) - 1)
    kept = min(max(within(validation * ends[local - 1]), 1), local - 1)
    place = np.argsort(order)[run]
    return Split(
        *(np.flatnonzero(chosen) for chosen in ((place >= kept) & (place < local), place < kept, place >= local))
    )


def shifted(own: Index, union: Index, *, seed: int, device: int, degree: float) -> Index:
    """Return a shifted test set: ``floor(degree * n + 0.5)`` of the device's n test samples are replaced (as in
    DM-PFL).

    own: the device's test samples. union: those of all devices, each once; replacements are drawn from it without
    replacement. Samples kept at a larger degree are a subset of those kept at a smaller one. The kept indices come
    first. Raises BadOption for a degree outside [0, 1].
    """
    if not 0 <= degree <= 1:
        raise BadOption(f"shift is {degree}; give a share from 0 to 1")
    replaced = math.floor(degree * len(own) + 0.5)
    # Drawn without the degree, which makes the kept sets nested.
    order = _random(seed, device).permutation(own)
    drawn = _random(seed, device, round(degree * 10**6)).permutation(union)[:replaced]
    return np.concatenate([np.sort(order[: len(own) - replaced]), drawn])


def _check(labels: Array, of: int, minimum: int) -> None:
    if of < 1 or minimum < 0:
        raise BadOption(
            f"{of} devices with at least {minimum} samples each; use 1 device or more, and 0 samples or more"
        )
    if of * minimum > len(labels):
        raise DataError(f"{len(labels)} samples cannot give {of} devices {minimum} each; use fewer devices")


def _too_few(attempts: int, drawn: str, of: int, minimum: int, labels: Array, instead: str) -> DataError:
    return DataError(
        f"{attempts} draws with {drawn} never gave each of {of} devices {minimum} of {len(labels)} samples; "
        f"use {instead} or fewer devices, or set minimum= lower (3 is the least that can be split)"
    )


def drawn(count: int, seed: int, share: float) -> Index:
    """Return floor(share count) of ``count`` samples, in an order drawn from the seed."""
    size = math.floor(share * count + 1e-9)
    return _random(seed, 0, 0).permutation(count)[:size] if size else np.zeros(0, np.intp)


# All devices must deal identically with any numpy. It keeps the streams of RandomState unchanged, unlike the
# distributions of Generator.
def _random(seed: int, *more: int) -> np.random.RandomState:
    if not 0 <= seed < 2**63:
        raise BadOption(f"seed is {seed}; give an integer from 0 to 2^63-1")
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, *more])
