"""Similarities of masks, distances of vectors and of label distributions, and how two of these go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

Flags = NDArray[np.bool_]
Matrix = NDArray[np.float64]
Layers = Mapping[str, Flags]
"""Layer -> flat booleans, True where the mask keeps a neuron, weight or block."""

BINS = 20
PERMUTATIONS = 999


def _common(masks: Sequence[Layers]) -> tuple[Matrix, Matrix]:
    """Return |A ∩ B| of every pair [n, n], and its mean if both were drawn at random, as many in each layer."""
    common = np.zeros((len(masks), len(masks)))
    drawn = np.zeros_like(common)
    for name in masks[0]:
        flags = np.stack([mask[name] for mask in masks]).astype(np.float32)
        found = (flags @ flags.T).astype(np.float64)
        common += found
        sizes = np.diag(found)
        drawn += np.outer(sizes, sizes) / flags.shape[1]
    return common, drawn


def jaccard(masks: Sequence[Layers]) -> Matrix:
    """Return |A ∩ B| / |A ∪ B| of every pair of masks, [n, n]; 1 for two empty ones."""
    common, _ = _common(masks)
    return _over_union(common, np.diag(common))


def overlap(masks: Sequence[Layers]) -> Matrix:
    """Return |A ∩ B| / min(|A|, |B|) of every pair of masks, [n, n]; 1 if one is empty."""
    common, _ = _common(masks)
    smaller = np.minimum.outer(np.diag(common), np.diag(common))
    return np.divide(common, smaller, out=np.ones_like(common), where=smaller > 0)


def chance_jaccard(masks: Sequence[Layers]) -> Matrix:
    """Return the Jaccard index of two random masks that keep as many in each layer: of means, not its own mean."""
    common, drawn = _common(masks)
    return _over_union(drawn, np.diag(common))


def _over_union(common: Matrix, sizes: NDArray[np.float64]) -> Matrix:
    union = np.add.outer(sizes, sizes) - common
    return np.divide(common, union, out=np.ones_like(common), where=union > 0)


def similarity(one: Layers, other: Layers) -> float:
    """Return the Jaccard index of two masks."""
    return float(jaccard([one, other])[0, 1])


def gram(vectors: Sequence[Mapping[str, NDArray[Any]]]) -> Matrix:
    """Return the scalar products of vectors, [n, n], each given in parts by name."""
    products = np.zeros((len(vectors), len(vectors)))
    for name in vectors[0]:
        part = np.stack([np.ravel(each[name]) for each in vectors]).astype(np.float64)
        products += part @ part.T
    return products


def euclidean(products: Matrix) -> Matrix:
    """Return the Euclidean distances of vectors with these scalar products."""
    squares = np.diag(products)
    return np.asarray(np.sqrt(np.maximum(np.add.outer(squares, squares) - 2 * products, 0.0)))


def cosine(products: Matrix) -> Matrix:
    """Return 1 - cosine of vectors with these scalar products; 1 if one is zero."""
    lengths = np.sqrt(np.outer(np.diag(products), np.diag(products)))
    return 1 - np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)


def label_distances(counts: NDArray[np.integer]) -> Matrix:
    """Return the total variation of every pair of label distributions, [n, n] in 0..1. counts: [n, classes]."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2)


def distances_to_all(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the total variation distance of each label distribution from that of all samples, [n]."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    together = counts.sum(axis=0) / counts.sum()
    return np.asarray(np.abs(shares - together).sum(axis=1) / 2)


def pairs(matrix: Matrix) -> NDArray[np.float64]:
    """Return the values above the diagonal."""
    return np.asarray(matrix[np.triu_indices(len(matrix), 1)])


def spread(values: NDArray[np.float64]) -> dict[str, float] | None:
    """Return mean, minimum and maximum of the values; None if there are none."""
    if not len(values):
        return None
    return {"mean": float(values.mean()), "least": float(values.min()), "most": float(values.max())}


def together(one: Matrix, other: Matrix) -> dict[str, float] | None:
    """Return Pearson's correlation of two matrices over pairs, and p of Mantel's test; None if one is constant.

    Pairs that share a device are not independent. So p is the share of 1,000 orders of the devices, 999 random ones and
    the given one, whose correlation is at least as far from 0.
    """
    return _permuted(pairs(one), lambda order: pairs(other[np.ix_(order, order)]), len(one))


def together_each(one: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, float] | None:
    """Return Pearson's correlation of two figures of each device, and p by permutation, as ``together`` has it."""
    return _permuted(one, lambda order: other[order], len(one))


def _permuted(fixed: NDArray[np.float64], moved: Any, count: int) -> dict[str, float] | None:
    same = np.arange(count)
    if len(fixed) < 3 or np.ptp(fixed) < 1e-12 or np.ptp(moved(same)) < 1e-12:
        return None
    found = float(np.corrcoef(fixed, moved(same))[0, 1])
    chance = np.random.Generator(np.random.PCG64(0))
    others = [np.corrcoef(fixed, moved(chance.permutation(count)))[0, 1] for _ in range(PERMUTATIONS)]
    as_far = sum(abs(each) >= abs(found) - 1e-12 for each in others)
    return {"r": found, "p": (1 + as_far) / (1 + PERMUTATIONS)}


def histogram(values: NDArray[np.floating], low: float = 0.0, high: float = 1.0) -> list[int]:
    """Return the number of values in each of 20 equal bins of low..high; values outside count in the outer bins."""
    counts, _ = np.histogram(np.clip(values, low, high), bins=BINS, range=(low, high))
    return [int(count) for count in counts]


def histogram_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the total variation of two histograms, in 0..1."""
    first = np.array(one, dtype=np.float64)
    second = np.array(other, dtype=np.float64)
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def ward(distances: Matrix) -> list[list[float]]:
    """Return Ward's hierarchical clustering of points with these Euclidean distances, as scipy's linkage [n - 1, 4]."""
    return [[float(each) for each in row] for row in hierarchy.linkage(squareform(distances, checks=False), "ward")]


def nearest(distances: Matrix) -> NDArray[np.intp]:
    """Return the nearest other one of each, [n]."""
    return np.asarray(np.argmin(distances + np.diag(np.full(len(distances), np.inf)), axis=1))
