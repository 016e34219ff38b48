from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.tasks.partition import classes, dirichlet, grouped, iid, person, quantity, shards, shifted, split
from sparrow.reading.errors import DataError

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
        ({"of": 0}, "1 device or more"),
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


PEOPLE = np.arange(600) % 7
DEALS = {
    "dirichlet": partial(dirichlet, of=8),
    "dirichlet, skewed": partial(dirichlet, of=8, alpha=0.1, minimum=3),
    "grouped": partial(grouped, of=8, groups=3),
    "shards": partial(shards, of=8),
    "shards, three": partial(shards, of=7, shards=3),
    "classes": partial(classes, of=20, minimum=3),
    "quantity": partial(quantity, of=8),
    "person": partial(person, of=7),
    "iid": partial(iid, of=7),
}


@pytest.mark.parametrize("name", DEALS)
def test_no_sample_is_dealt_twice_and_none_left_over_but_by_classes(name):
    parts = DEALS[name](LABELS, PEOPLE, seed=3)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert len(together) >= (500 if name == "classes" else 600)
    assert len(parts) == DEALS[name].keywords["of"]
    assert min(map(len, parts)) >= 3
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("name", sorted(set(DEALS) - {"person"}))
def test_the_seed_decides_every_partition(name):
    deal = DEALS[name]
    first, again, other = (deal(LABELS, PEOPLE, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@given(
    name=st.sampled_from(["dirichlet", "grouped", "quantity"]),
    counts=st.lists(st.integers(20, 80), min_size=2, max_size=6),
    of=st.integers(1, 6),
    seed=st.integers(0, 2**62),
    minimum=st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_every_device_has_the_least_number(name, counts, of, seed, minimum):
    labels = np.repeat(np.arange(len(counts)), counts)
    options = {"groups": min(of, 2)} if name == "grouped" else {}
    deal = {"dirichlet": dirichlet, "grouped": grouped, "quantity": quantity}[name]
    parts = deal(labels, None, of=of, seed=seed, minimum=minimum, **options)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert min(map(len, parts)) >= minimum


def test_partitions_are_the_same_on_every_numpy():
    # These numbers may never change, as those of dirichlet above.
    parts = {name: DEALS[name](LABELS, PEOPLE, seed=0)[1][3:7].tolist() for name in DEALS}
    assert parts == {
        "dirichlet": [64, 65, 69, 71],
        "dirichlet, skewed": [64, 65, 69, 71],
        "grouped": [36, 47, 55, 61],
        "shards": [117, 118, 119, 120],
        "shards, three": [61, 62, 63, 64],
        "classes": [123, 124, 125, 126],
        "quantity": [20, 24, 28, 37],
        "person": [22, 29, 36, 43],
        "iid": [15, 20, 28, 37],
    }


def test_a_shard_is_a_run_of_one_label_or_two():
    parts = shards(LABELS, None, of=10, seed=0)
    assert [len(part) for part in parts] == [60] * 10
    assert max(len(np.unique(LABELS[part])) for part in parts) == 2
    assert len(shards(np.array([1, 0, 1, 0]), None, of=1, seed=0, shards=4)[0]) == 4


def test_a_tenth_of_the_devices_holds_half_of_the_samples_of_few_classes():
    labels = np.repeat(np.arange(10), 600)
    parts = classes(labels, None, of=50, seed=0)
    sizes = sorted(map(len, parts))
    assert 0.48 < sum(sizes[-5:]) / 6000 <= 0.5
    assert {len(np.unique(labels[part])) for part in parts} == {2}
    large = parts[int(np.argmax([len(part) for part in parts]))]
    one, two = (count for count in np.bincount(labels[large]) if count)
    assert abs(one - two) <= 1
    (everything,) = classes(labels, None, of=1, seed=0, classes=10)
    assert len(everything) == 6000


def test_quantity_skews_sizes_but_not_labels():
    labels = np.repeat(np.arange(4), 2500)
    parts = quantity(labels, None, of=10, seed=0, sigma=1.0)
    sizes = np.array([len(part) for part in parts])
    assert sizes.max() > 4 * sizes.min()
    shares = np.array([np.bincount(labels[part], minlength=4) / len(part) for part in parts if len(part) > 500])
    assert np.abs(shares - 0.25).max() < 0.08
    assert np.ptp([len(part) for part in quantity(labels, None, of=10, seed=0, sigma=0)]) <= 1


def test_devices_of_a_group_are_alike_and_groups_are_not():
    labels = np.repeat(np.arange(10), 600)
    parts = grouped(labels, None, of=9, seed=1, groups=3)
    mixtures = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    for group in range(3):
        assert np.ptp(mixtures[group::3], axis=0).max() <= 1
    assert np.abs(mixtures[0] - mixtures[1]).max() > 50


def test_person_follows_the_people():
    parts = person(LABELS, np.repeat(["zoe", "ann", "bob"], 200), of=3, seed=0)
    assert [part[0] for part in parts] == [200, 400, 0]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("deal", "options", "message"),
    [
        (person, {"of": 6}, "6 devices for 7 people; leave of= out, or set of=7"),
        (shards, {"of": 5, "shards": 0}, "shards is 0"),
        (shards, {"of": 400}, "use fewer devices"),
        (classes, {"of": 5, "classes": 0}, "classes is 0"),
        (classes, {"of": 50, "minimum": 12}, "100 draws with classes=2 .* set minimum= lower"),
        (grouped, {"of": 5, "groups": 6}, "groups is 6 for 5 devices"),
        (grouped, {"of": 5, "groups": 0}, "groups is 0 for 5 devices"),
        (quantity, {"of": 5, "sigma": -1.0}, "sigma is -1"),
        (quantity, {"of": 50, "sigma": 9.0}, "10000 draws with sigma=9 .* a smaller sigma"),
        (iid, {"of": 601}, "use fewer devices"),
    ],
)
def test_what_a_partition_cannot_do_is_explained(deal, options, message):
    with pytest.raises(DataError, match=message):
        deal(LABELS, PEOPLE, seed=0, **options)


def test_person_needs_people():
    with pytest.raises(DataError, match="does not name who"):
        person(LABELS, None, of=7, seed=0)


@pytest.mark.parametrize(("count", "replaced"), [(113, [0, 23, 45, 68, 90, 113]), (150, [0, 30, 60, 90, 120, 150])])
def test_shifted_sets_are_nested_and_as_long_as_before(count, replaced):
    """The counts are DM-PFL's (section 4.1); the union lies apart here, so that kept and drawn samples can be told."""
    own, union = np.arange(count), np.arange(1000, 3000)
    kept = []
    for step, wanted in enumerate(replaced):
        mixed = shifted(own, union, seed=4, device=2, degree=step / 5)
        assert len(mixed) == count
        drawn = mixed[mixed >= 1000]
        assert len(drawn) == wanted == len(np.unique(drawn))
        kept.append(set(mixed[mixed < 1000]))
    assert all(larger >= smaller for larger, smaller in itertools.pairwise(kept))


def test_a_shift_by_hand():
    own, union = np.array([3, 8]), np.array([1, 3, 5, 8])
    assert shifted(own, union, seed=0, device=0, degree=0.0).tolist() == [3, 8]
    half = shifted(own, union, seed=0, device=0, degree=0.25)  # floor(0.25 * 2 + 0.5) = 1
    assert half[0] in (3, 8)
    assert half[1] in union
    everything = shifted(own, np.array([5, 9]), seed=0, device=0, degree=1.0)
    assert sorted(everything) == [5, 9]


def test_a_shift_is_decided_by_seed_device_and_degree():
    own, union = np.arange(100), np.arange(1000, 3000)

    def drawn(**changed):
        return shifted(own, union, **{"seed": 1, "device": 2, "degree": 0.6, **changed})

    assert np.array_equal(drawn(), drawn())
    for changed in ({"seed": 2}, {"device": 3}):
        assert not np.array_equal(drawn(), drawn(**changed))
    assert drawn(degree=0.4)[60:].tolist() != drawn()[40:80].tolist()
    with pytest.raises(DataError, match="from 0 to 1"):
        drawn(degree=1.1)


@pytest.mark.parametrize(
    ("count", "sizes"), [(3, (1, 1, 1)), (4, (1, 1, 2)), (10, (6, 1, 3)), (100, (60, 10, 30)), (1000, (595, 105, 300))]
)
def test_split_sizes(count, sizes):
    parts = split(count, seed=0)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == sizes
    assert sorted([*parts.train, *parts.validation, *parts.test]) == list(range(count))


def test_recordings_are_not_divided_and_the_test_set_has_at_least_its_share():
    runs = np.repeat(np.arange(12), [9, 1, 4, 4, 20, 2, 7, 7, 13, 11, 12, 10])
    for seed in range(20):
        parts = split(100, seed, 0.3, 0.15, runs)
        sets = [parts.train, parts.validation, parts.test]
        assert sorted(np.concatenate(sets)) == list(range(100))
        assert sum(len(set(runs[each])) for each in sets) == 12
        assert len(parts.test) >= 30
        assert len(parts.validation) <= 0.15 * (100 - len(parts.test)) or len(set(runs[parts.validation])) == 1
    assert len(split(100, 0, None, 0.15, runs).test) == 0
    with pytest.raises(DataError, match=r"\b2\b.*\(run\).*\b3\b"):
        split(100, 0, runs=np.arange(100) // 50)


def test_split_is_decided_by_the_seed():
    assert np.array_equal(split(50, seed=4).test, split(50, seed=4).test)
    assert not np.array_equal(split(50, seed=4).test, split(50, seed=5).test)


def test_too_few_samples_to_split():
    with pytest.raises(DataError, match=r"2 samples .* give 3 or more"):
        split(2, seed=0)
    with pytest.raises(DataError, match="between 0 and 1"):
        split(10, seed=0, held_out=1.0)
