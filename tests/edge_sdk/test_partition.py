from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.tasks.loading import DataError
from edge_sdk.tasks.partition import dirichlet, split

LABELS = np.repeat(np.arange(10), 60)


def test_every_sample_is_dealt_once():
    parts = dirichlet(LABELS, None, of=5, alpha=0.3, seed=1)
    assert len(parts) == 5
    assert sorted(np.concatenate(parts)) == list(range(600))
    assert min(map(len, parts)) >= 10


def test_the_seed_decides():
    first, again, other = (dirichlet(LABELS, None, of=4, alpha=0.5, seed=seed) for seed in (7, 7, 2**40 + 7))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_partition_is_the_same_on_every_numpy():
    # All devices deal alone and must agree, whatever their numpy: these numbers may never change.
    parts = dirichlet(LABELS, None, of=3, alpha=0.5, seed=0)
    assert [len(part) for part in parts] == [199, 225, 176]
    assert parts[0][:5].tolist() == [2, 7, 10, 11, 13]


def test_a_small_alpha_skews_labels_and_a_large_one_does_not():
    def largest_share(alpha):
        parts = dirichlet(LABELS, None, of=5, alpha=alpha, seed=3)
        return np.mean([np.bincount(LABELS[part], minlength=10).max() / len(part) for part in parts])

    assert largest_share(0.1) > 0.35
    assert largest_share(1000.0) < 0.15


def test_a_tiny_alpha_still_deals_everything():
    assert sum(map(len, dirichlet(LABELS, None, of=3, alpha=1e-3, seed=0))) == 600


def test_one_device_gets_everything():
    (part,) = dirichlet(LABELS, None, of=1, alpha=0.3, seed=0)
    assert part.tolist() == list(range(600))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"of": 0}, "at least 1 device"),
        ({"alpha": 0.0}, "alpha is 0"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"of": 61}, "use fewer devices"),
        ({"seed": -1}, "seed is -1"),
        ({"of": 40, "alpha": 0.01}, r"10000 draws .* use a larger alpha or fewer devices"),
    ],
)
def test_what_cannot_be_dealt_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        dirichlet(LABELS, None, **{"of": 5, "alpha": 0.3, "seed": 0, **arguments})


@pytest.mark.parametrize(
    ("count", "sizes"), [(3, (1, 1, 1)), (4, (1, 1, 2)), (10, (6, 1, 3)), (100, (60, 10, 30)), (1000, (595, 105, 300))]
)
def test_split_sizes(count, sizes):
    parts = split(count, seed=0)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == sizes
    assert sorted([*parts.train, *parts.validation, *parts.test]) == list(range(count))


def test_split_is_decided_by_the_seed():
    assert np.array_equal(split(50, seed=4).test, split(50, seed=4).test)
    assert not np.array_equal(split(50, seed=4).test, split(50, seed=5).test)


def test_too_few_samples_to_split():
    with pytest.raises(DataError, match=r"2 samples .* at least 3"):
        split(2, seed=0)
    with pytest.raises(DataError, match="between 0 and 1"):
        split(10, seed=0, held_out=1.0)
