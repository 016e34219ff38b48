"""The rules of sparse training for both halves: which weights exist, and which change.

Functions of one layer, a maskable tensor, take flat arrays [n] in row-major order. Directions, d, are the sign of the
global model's last movement at a position: -1, 0 or 1; a zero neither agrees nor disagrees. Ties keep or revive the
lower flat index. Shares of a count are rounded down after adding 1e-9, so that 0.29 * 100 counts as 29.

Sources: FedSGC, arXiv:2405.01189; FedDST, Bibikar et al., AAAI 2022; RigL, Evci et al., ICML 2020; PruneFL, Jiang et
al., 2022; GraSP, Wang et al., ICLR 2020.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .elements import ElementMask, Flags, Index
from .manifest import MULTIPLYING, Manifest, Tensors

Reals = NDArray[np.floating[Any]]
Directions = NDArray[np.int8]

USUAL_INTERVAL = 5
"""Default interval between replacements, in rounds and in a device's epochs."""

LayerSparsity = Literal["erk", "feddst", "uniform", "uniform_first_dense"]
Basis = Literal["total", "moved"]
At = Literal["penultimate", "end"]


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)


# Weights per layer


def layer_densities(manifest: Manifest, density: float, rule: LayerSparsity = "erk") -> dict[str, float]:
    """Return the share of weights kept, 1 - s_l in (0, 1], of every maskable tensor, in order. density: the overall
    share, 1 - S. Raises ValueError if it is not in (0, 1].

    ``erk``, Erdos-Renyi-Kernel (RigL): min(1, eps * sum of the dimensions / their product), eps such that kept weights
    add up to density * n_w. ``uniform_first_dense``: the first layer whole, the others equal. ``feddst``: ERK of the
    FedDST code: sparsity in proportion to 1 - sum / product, of weights and biases; a layer that would keep no weight,
    or more than it has, stays dense.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}; the share of weights kept must lie in (0, 1]")
    # By rounding, sums could fall short of it.
    if density == 1:
        return {spec.name: 1.0 for spec in manifest.maskable}
    return _RULES[rule](manifest, density)


def layer_counts(manifest: Manifest, density: float, rule: LayerSparsity = "erk") -> dict[str, int]:
    """Return the number of weights kept, K_l >= 1, of every maskable tensor, in order.

    Raises ValueError if ``density`` is not in (0, 1].
    """
    kept = layer_densities(manifest, density, rule)
    if rule == "feddst":
        values = _values_with_biases(manifest)
        return {
            spec.name: spec.size if kept[spec.name] == 1 else math.floor(kept[spec.name] * values[spec.name])
            for spec in manifest.maskable
        }
    return {spec.name: max(1, _floor(kept[spec.name] * spec.size)) for spec in manifest.maskable}


def _erk(manifest: Manifest, density: float) -> dict[str, float]:
    dims = {spec.name: sum(spec.shape) for spec in manifest.maskable}
    sizes = {spec.name: spec.size for spec in manifest.maskable}
    target = density * sum(sizes.values())
    dense: set[str] = set()
    epsilon = 0.0
    while len(dense) < len(sizes):
        share = target - sum(sizes[name] for name in dense)
        epsilon = share / sum(dims[name] for name in sizes if name not in dense)
        # Dense layers get less than epsilon would give them, so it only rises, and no dense layer turns sparse again.
        saturated = {name for name in sizes if name not in dense and epsilon * dims[name] > sizes[name]}
        if not saturated:
            break
        dense |= saturated
    return {name: 1.0 if name in dense else epsilon * dims[name] / size for name, size in sizes.items()}


def _uniform_first_dense(manifest: Manifest, density: float) -> dict[str, float]:
    first, *others = manifest.maskable
    rest = sum(spec.size for spec in others)
    kept = density * (first.size + rest) - first.size
    if kept <= 0:
        raise ValueError(f"density is {density}; the first layer has more: use another rule, or a larger density")
    return {first.name: 1.0, **{spec.name: kept / rest for spec in others}}


def _feddst(manifest: Manifest, density: float) -> dict[str, float]:
    values = _values_with_biases(manifest)
    raw = {spec.name: 1 - sum(spec.shape) / spec.size for spec in manifest.maskable}
    weighted = sum(raw[name] * values[name] for name in raw)
    # If all layers are tiny, no raw sparsity is positive, and this rule cuts nothing.
    scale = (1 - density) * sum(values.values()) / weighted if weighted > 0 else 0.0
    densities = {}
    for spec in manifest.maskable:
        kept = 1 - raw[spec.name] * scale
        densities[spec.name] = kept if 1 <= math.floor(kept * values[spec.name]) <= spec.size else 1.0
    return densities


def _values_with_biases(manifest: Manifest) -> dict[str, int]:
    """Return the number of weights and layer biases of every maskable tensor, n_l of the FedDST code."""
    sizes = {spec.name: spec.size for spec in manifest.tensors}
    vectors = {spec.name for spec in manifest.tensors if len(spec.shape) == 1}
    biases = {
        name: sum(sizes[other] for other in layer.tensors if other in vectors)
        for layer in manifest.layers
        if layer.kind in MULTIPLYING
        for name in layer.tensors
    }
    return {spec.name: spec.size + biases[spec.name] for spec in manifest.maskable}


_RULES: dict[LayerSparsity, Callable[[Manifest, float], dict[str, float]]] = {
    "erk": _erk,
    "feddst": _feddst,
    "uniform": lambda manifest, density: {spec.name: density for spec in manifest.maskable},
    "uniform_first_dense": _uniform_first_dense,
}


# Largest values


def _among_largest(values: NDArray[Any], count: int) -> Flags:
    """Return flags of the ``count`` largest values [n]; ties take the lower index."""
    size = len(values)
    if count <= 0:
        return np.zeros(size, dtype=bool)
    if count >= size:
        return np.ones(size, dtype=bool)
    # Partitioning takes linear time, unlike sorting.
    least = np.partition(values, size - count)[size - count]
    chosen: Flags = values > least
    ties = np.flatnonzero(values == least)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return chosen


def largest(values: NDArray[Any], count: int) -> Index:
    """Return sorted indices of the ``count`` largest values [n]; ties take the lower index."""
    return np.flatnonzero(_among_largest(values, count))


def _smallest(values: NDArray[Any], count: int) -> Index:
    """Return sorted indices of the ``count`` smallest values [n]; ties take the higher index."""
    return np.flatnonzero(~_among_largest(values, len(values) - count))


def _magnitudes(values: NDArray[Any]) -> Reals:
    sizes: Reals = np.abs(values.reshape(-1))
    return sizes


# The first mask


def random_mask(manifest: Manifest, counts: Mapping[str, int], seed: int) -> ElementMask:
    """Return ``counts[name]`` uniform positions of every maskable tensor, the same on every machine: those with the
    smallest 64-bit keys of one PCG64 stream, tensors in manifest order.
    """
    key = hashlib.sha256(f"elements|{seed}".encode()).digest()
    generator = np.random.PCG64(int.from_bytes(key[:16], "big"))
    return ElementMask(
        {
            spec.name: _among_largest(~generator.random_raw(spec.size), counts[spec.name]).reshape(spec.shape)
            for spec in manifest.maskable
        }
    )


def magnitude_mask(tensors: Tensors, manifest: Manifest, counts: Mapping[str, int]) -> ElementMask:
    """Return the ``counts[name]`` largest |weights| of every maskable tensor (the FedDST code's first mask)."""
    return ElementMask(
        {
            spec.name: _among_largest(_magnitudes(tensors[spec.name]), counts[spec.name]).reshape(spec.shape)
            for spec in manifest.maskable
        }
    )


# Times of replacements


def interval(given: int | Literal["auto"], usual: int, length: int, share: float = 1.0) -> int:
    """Return the rounds or epochs between replacements; 0: never. auto: ``usual``, but at most half of ``length``, the
    whole run. share: share of the run to which ``given`` applies."""
    if given == "auto":
        return min(usual, max(1, length // 2))
    return given and max(1, round(given * share))


def shortening(rounds: int, of_rounds: int) -> float:
    """Return the share of ``rounds`` in a run of ``of_rounds``, at most 1; ``of_rounds`` 0 gives 1."""
    return min(1.0, rounds / of_rounds) if of_rounds else 1.0


def device_interval(given: int | Literal["auto"], of_rounds: int, rounds: int, expected: int) -> int:
    """Return ΔT, a device's own epochs between replacements. expected: its total, T_c."""
    return interval(given, USUAL_INTERVAL, expected, shortening(rounds, of_rounds))


def prunefl_interval(given: int | Literal["auto"], rounds: int) -> int:
    """Return PruneFL's rounds between replacements, in the paper 50; 0: never."""
    return interval(given, 50, rounds)


def over_pruning(time: float, end: float, alpha: float) -> float:
    """Return sigma(t) in [0, alpha], the share of a layer dropped beyond its sparsity: a cosine from 0 to ``end``."""
    return alpha / 2 * (1 + math.cos(math.pi * time / end)) if time < end else 0.0


def adjustment_steps(
    before: int, epochs: int, batches: int, interval: int, end: int, at: At = "penultimate"
) -> list[tuple[int, int]]:
    """Return a device's replacements in a round: (batches trained before, nominal time t in local epochs).

    One is due after every epoch at which e_c + e, ``before`` and this round's, is a multiple of ``interval`` below
    ``end``. Weights revived after the last batch would be sent as zeros. So ``penultimate`` moves that replacement one
    epoch earlier, keeping its t, or into the middle of a single epoch.
    """
    times: dict[int, int] = {}
    for epoch in range(1, epochs + 1):
        time = before + epoch
        if time % interval or time >= end:
            continue
        step = epoch * batches
        if epoch == epochs and at == "penultimate":
            step = step - batches if epochs > 1 else math.ceil(batches / 2)
        times[step] = time
    return list(times.items())


# Replacements on a device


@dataclass(frozen=True, eq=False)
class Pruned:
    """A layer after dropping weights. exists: bool [n], the remaining ones. Dropped, as sorted flat positions:
    ``guided``, which moved against the direction, and ``magnitude``, which were small."""

    exists: Flags
    guided: Index
    magnitude: Index


def prune(
    weights: Reals,
    moved: Reals,
    exists: Flags,
    directions: Directions,
    *,
    left: int,
    share: float,
    basis: Basis = "total",
) -> Pruned:
    """Drop the weights of one layer beyond ``left``, D_l (FedSGC, Eq. 1-2).

    moved: the local pseudo-gradient, local minus received. A ``share``, lambda, of the layer's zeros afterwards
    (``total``, as printed) or of the weights to drop (``moved``) is dropped first, among weights that moved against
    their direction, smallest first; the remaining drops are the smallest weights overall.
    """
    active = np.flatnonzero(exists)
    surplus = max(0, len(active) - left)
    sizes = _magnitudes(np.take(weights, active))
    # A product with -1, 0 or 1 is exact, and negative only if both differ in sign.
    incongruent = np.flatnonzero(np.take(moved, active) * np.take(directions, active) < 0)
    quota = _floor(share * (len(exists) - left if basis == "total" else surplus))
    chosen = incongruent[_smallest(np.take(sizes, incongruent), min(quota, surplus, len(incongruent)))]
    others = np.delete(active, chosen)
    guided = np.take(active, chosen)
    magnitude = np.take(others, _smallest(np.delete(sizes, chosen), surplus - len(chosen)))
    after = exists.copy()
    after[guided] = False
    after[magnitude] = False
    return Pruned(after, guided, magnitude)


@dataclass(frozen=True, eq=False)
class Grown:
    """A layer after reviving weights. exists: bool [n]. Revived, as sorted flat positions: ``guided``, whose gradient
    agrees with the direction, and ``magnitude``, whose gradient is large.
    """

    exists: Flags
    guided: Index
    magnitude: Index


def grow(
    gradient: Reals,
    pruned: Pruned,
    directions: Directions,
    *,
    count: int,
    share: float,
    candidates: Flags | None = None,
) -> Grown:
    """Revive weights of one layer until ``count``, K_l, exist (FedSGC, Eq. 3-4; RigL). Arrays are flat [n].

    gradient: gradient of all weights of the layer, computed before pruning. A ``share``, lambda, of missing weights
    goes to those whose descent agrees with their direction, largest gradients first; the rest to the largest gradients.
    candidates: allowed positions; if too few are free, other free positions follow, then ``pruned.guided``.
    """
    sizes = _magnitudes(gradient)
    missing = max(0, count - int(np.count_nonzero(pruned.exists)))
    free = ~pruned.exists
    free[pruned.guided] = False
    allowed = free if candidates is None else free & candidates

    congruent = np.flatnonzero((gradient * directions < 0) & allowed)
    guided = np.take(congruent, largest(np.take(sizes, congruent), _floor(share * missing)))
    exists = pruned.exists.copy()
    exists[guided] = True
    missing -= len(guided)
    before = exists.copy()
    for pool in (allowed, free, ~pruned.exists):
        if missing <= 0:
            break
        rest = pool & ~exists
        wanted = min(missing, int(np.count_nonzero(rest)))
        # -1 is below every |gradient|, and faster than gathering the others.
        exists |= _among_largest(np.where(rest, sizes, -1), wanted)
        missing -= wanted
    return Grown(exists, guided, np.flatnonzero(exists ^ before))


# Pruning on the coordinator


def trim(values: Reals, weights: NDArray[np.float64], union: Flags, count: int) -> Flags:
    """Return flags of the ``count``, K_l, largest |values| among the positions in ``union``, or all of them if there
    are fewer. weights: weight of the mean at each position; ties go to the larger weight, then the lower index (FedSGC,
    section 3.3)."""
    index = np.flatnonzero(union)
    if len(index) <= count:
        return union.copy()
    kept = np.zeros(len(union), dtype=bool)
    if count > 0:
        sizes = _magnitudes(np.take(values, index))
        least = np.partition(sizes, len(index) - count)[len(index) - count]
        above = np.compress(sizes > least, index)
        ties = np.compress(sizes == least, index)
        kept[above] = True
        kept[ties[largest(np.take(weights, ties), count - len(above))]] = True
    return kept


# Votes


@dataclass(frozen=True)
class Election:
    """The vote about one tensor. seats: weights to replace. candidates: positions to choose from."""

    seats: int
    candidates: int


def elections(
    manifest: Manifest, counts: Mapping[str, int], share: float, candidates_per_seat: float
) -> dict[str, Election]:
    """Return the votes of a round by tensor, without empty ones. counts: K_l by tensor. share: share of the weights to
    replace, limited by the free positions, with ``candidates_per_seat`` each."""
    found = {}
    for spec in manifest.maskable:
        seats = _floor(share * counts[spec.name])
        free = spec.size - counts[spec.name]
        candidates = min(free, _floor(candidates_per_seat * seats))
        if candidates:
            found[spec.name] = Election(min(seats, candidates), candidates)
    return found


def draw_candidates(mask: ElementMask, votes: Mapping[str, Election], seed: int, round_number: int) -> dict[str, Index]:
    """Return the candidates of each vote: sorted flat empty positions, drawn as in ``random_mask``."""
    key = hashlib.sha256(f"candidates|{seed}|{round_number}".encode()).digest()
    generator = np.random.PCG64(int.from_bytes(key[:16], "big"))
    drawn = {}
    for name, vote in votes.items():
        free = np.flatnonzero(~mask.exists[name].reshape(-1))
        drawn[name] = free[largest(~generator.random_raw(len(free)), vote.candidates)]
    return drawn


def ballot(gradient: Reals, seats: int) -> Directions:
    """Return a device's votes, int8 [n], from the candidates' gradient: the signs of the ``seats`` largest, else 0."""
    votes = np.zeros(len(gradient), dtype=np.int8)
    chosen = largest(np.abs(gradient), seats)
    votes[chosen] = np.sign(np.take(gradient, chosen))
    return votes


def elect(tally: Reals, seats: int) -> Index:
    """Return the sorted elected candidates: the ``seats`` largest |tally| [n] except 0. tally: Σ_c n_c v_c."""
    sizes = np.abs(tally)
    return largest(sizes, min(seats, int(np.count_nonzero(sizes))))


# Choices over the whole network


def weight_budget(manifest: Manifest, density: float) -> int:
    """Return K = floor(density * n_w) for the full network, at least one per tensor."""
    return max(len(manifest.maskable), _floor(density * manifest.maskable_values))


def readjust(
    manifest: Manifest,
    weights: Mapping[str, Reals],
    importance: Mapping[str, Reals],
    mask: ElementMask,
    *,
    density: float,
    share: float,
    fixed_cost: float,
) -> ElementMask:
    """Return ``keep_by_gain`` with FLOPs as seconds: a weight costs t_l = 6 * positions of its layer. fixed_cost: t_0,
    as a share of the dense network's cost."""
    multiplying = [layer for layer in manifest.layers if layer.kind in MULTIPLYING]
    cost = {
        spec.name: 6.0 * sum(layer.positions for layer in multiplying if spec.name in layer.tensors)
        for spec in manifest.maskable
    }
    dense = sum(cost[spec.name] * spec.size for spec in manifest.maskable)
    count = weight_budget(manifest, density)
    return keep_by_gain(weights, importance, mask, cost, fixed_cost=fixed_cost * dense, share=share, count=count)


def keep_by_gain(
    weights: Mapping[str, Reals],
    importance: Mapping[str, Reals],
    mask: ElementMask,
    cost: Mapping[str, float],
    *,
    fixed_cost: float,
    share: float,
    count: int,
) -> ElementMask:
    """Return PruneFL's next mask: at most ``count`` weights, chosen by gain per second.

    importance: mean squared gradients, g2. cost: seconds that one weight of a tensor adds to a round, t_l. fixed_cost:
    other seconds of a round, t_0. share: rho, the share of each tensor's existing weights, the smallest, that may be
    dropped; the others are fixed, per tensor as in PruneFL's code.

    Other weights are added by g2 / t_l, largest first, while that exceeds the sum of g2 over the seconds of all kept so
    far. A tensor without a fixed weight keeps the one with the largest g2. If these are too many, the ``count`` largest
    |weights| are kept, at least one per tensor.
    """
    names = list(mask.exists)
    sizes = [_magnitudes(weights[name]) for name in names]
    gains = [importance[name].reshape(-1).astype(np.float64) for name in names]
    fixed = [_fixed(size, gain, mask.index[name], share) for name, size, gain in zip(names, sizes, gains, strict=True)]
    room = count - sum(int(np.count_nonzero(flags)) for flags in fixed)
    if room <= 0:
        order = [np.where(flags, size, -1) for flags, size in zip(fixed, sizes, strict=True)]
        return _mask_like(mask.exists, _largest_of_all(order, count))

    gain = np.concatenate(gains)
    seconds = np.repeat([float(cost[name]) for name in names], [len(part) for part in gains])
    kept = np.concatenate(fixed)
    total_gain = float(np.compress(kept, gain).sum())
    total_seconds = fixed_cost + sum(
        float(cost[name]) * np.count_nonzero(flags) for name, flags in zip(names, fixed, strict=True)
    )
    rest = np.flatnonzero(~kept)
    rate = np.take(gain, rest) / np.take(seconds, rest)
    best = largest(rate, room)
    best = best[np.argsort(-rate[best], kind="stable")]
    chosen = rest[best]
    gain_before = np.cumsum(np.concatenate(([total_gain], gain[chosen])))[:-1]
    seconds_before = np.cumsum(np.concatenate(([total_seconds], seconds[chosen])))[:-1]
    worth = np.logical_and.accumulate(rate[best] > gain_before / seconds_before)
    kept[np.compress(worth, chosen)] = True
    return _mask_like(mask.exists, kept)


def _fixed(sizes: Reals, gains: Reals, active: Index, share: float) -> Flags:
    """Return the flags of a tensor's fixed weights."""
    flags = np.zeros(len(sizes), dtype=bool)
    flags[active[largest(np.take(sizes, active), len(active) - _floor(share * len(active)))]] = True
    if not flags.any():
        flags[np.argmax(gains)] = True
    return flags


def keep_by_score(scores: Mapping[str, Reals], count: int) -> ElementMask:
    """Return the ``count`` largest scores over all tensors (GraSP), at least one per tensor."""
    return _mask_like(scores, _largest_of_all([part.reshape(-1) for part in scores.values()], count))


def _largest_of_all(parts: Sequence[NDArray[Any]], count: int) -> Flags:
    """Return concatenated flags of the ``count`` largest values over all parts, at least one per part."""
    kept = np.concatenate([_among_largest(part, 1) for part in parts])
    rest = np.flatnonzero(~kept)
    kept[rest[largest(np.take(np.concatenate(parts), rest), count - len(parts))]] = True
    return kept


def _mask_like(shapes: Mapping[str, NDArray[Any]], flags: Flags) -> ElementMask:
    exists = {}
    start = 0
    for name, like in shapes.items():
        exists[name] = flags[start : start + like.size].reshape(like.shape)
        start += like.size
    return ElementMask(exists)
