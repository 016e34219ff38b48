"""Rules of sparse training: numbers worked out by hand, and slow definitions of every choice.

The slow definitions sort whole lists; values are small integers, so that ties are the rule and not the exception.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask, check_elements
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.sparsity import (
    Pruned,
    adjustment_steps,
    grow,
    keep_by_gain,
    keep_by_score,
    largest,
    layer_counts,
    layer_densities,
    magnitude_mask,
    over_pruning,
    prune,
    random_mask,
    trim,
)

MNIST = load_builtin("mnist:fedsgc").manifest
CIFAR = load_builtin("cifar10:fedsgc").manifest
RULES = ("erk", "feddst", "uniform")
ALL_RULES = (*RULES, "uniform_first_dense")


def model(*shapes, bias=True):
    """Linear layers a, b, ... with weights of these shapes, each with a bias unless told."""
    tensors, layers = [], []
    for name, shape in zip("abcdef", shapes, strict=False):
        names = [f"{name}.weight", f"{name}.bias"][: 1 + bias]
        tensors += [TensorSpec(name=each, shape=size) for each, size in zip(names, (shape, shape[:1]), strict=False)]
        layers.append(Layer(name=name, kind="linear", tensors=tuple(names)))
    return Manifest(task="test", input_shape=(1,), output_shape=(1,), tensors=tuple(tensors), layers=tuple(layers))


# Section 8.1


@pytest.mark.parametrize(
    ("manifest", "sparsity", "epsilon", "densities", "counts", "total"),
    [
        (MNIST, 0.5, 24.976008, [1, 0.199808, 0.504398, 1], [250, 999, 129_125, 500], 130_874),
        (MNIST, 0.8, 9.912063, [0.832613, 0.079297, 0.200177, 1], [208, 396, 51_245, 500], 52_349),
        (MNIST, 0.9, 4.947080, [0.415555, 0.039577, 0.099908, 0.593650], [103, 197, 25_576, 296], 26_172),
        (
            CIFAR,
            0.5,
            154.557377,
            [1, 0.319982, 0.208290, 1, 1],
            [2_400, 16_383, 21_328, 65_536, 10_240],
            115_887,
        ),
        (
            CIFAR,
            0.8,
            26.227451,
            [0.491765, 0.054299, 0.035346, 0.435417, 1],
            [1_180, 2_780, 3_619, 28_535, 10_240],
            46_354,
        ),
        (
            CIFAR,
            0.9,
            9.613273,
            [0.180249, 0.019902, 0.012955, 0.159595, 0.970715],
            [432, 1_019, 1_326, 10_459, 9_940],
            23_176,
        ),
    ],
)
def test_erk_keeps_what_the_card_says(manifest, sparsity, epsilon, densities, counts, total):
    kept = layer_densities(manifest, 1 - sparsity)
    assert list(kept) == [spec.name for spec in manifest.maskable]
    assert list(kept.values()) == pytest.approx(densities, abs=5e-7)
    for spec in manifest.maskable:
        if kept[spec.name] < 1:
            assert kept[spec.name] * spec.size / sum(spec.shape) == pytest.approx(epsilon, abs=5e-7)
    assert list(layer_counts(manifest, 1 - sparsity).items()) == list(zip(kept, counts, strict=True))
    assert sum(counts) == total


@pytest.mark.parametrize(
    ("manifest", "sparsity", "counts", "total"),
    [
        (MNIST, 0.5, [138, 2_478, 128_021, 280], 130_917),
        (MNIST, 0.8, [65, 953, 51_204, 143], 52_365),
        (MNIST, 0.9, [41, 445, 25_599, 97], 26_182),
        (CIFAR, 0.5, [1_226, 25_415, 50_761, 33_487, 5_593], 116_482),
        (CIFAR, 0.8, [502, 9_906, 19_740, 13_644, 2_800], 46_592),
        (CIFAR, 0.9, [261, 4_736, 9_400, 7_029, 1_869], 23_295),
    ],
)
def test_feddst_keeps_what_its_own_code_keeps(manifest, sparsity, counts, total):
    kept = layer_counts(manifest, 1 - sparsity, "feddst")
    assert list(kept) == [spec.name for spec in manifest.maskable]
    assert list(kept.values()) == counts
    assert sum(counts) == total


def test_uniform_keeps_the_same_share_of_every_layer():
    assert set(layer_densities(MNIST, 0.29, "uniform").values()) == {0.29}
    assert list(layer_counts(MNIST, 0.2, "uniform").values()) == [50, 1000, 51_200, 100]
    assert int(0.29 * 100) == 28
    assert list(layer_counts(model((10, 10)), 0.29, "uniform").values()) == [29], "binary floats cost no weight"


@pytest.mark.parametrize("density", [1e-4, 0.01, 0.2, 0.37, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("manifest", [MNIST, CIFAR, model((3, 5), (40, 30), (2, 7))])
def test_erk_falls_short_of_its_target_by_less_than_one_weight_per_layer(manifest, density):
    target = density * sum(spec.size for spec in manifest.maskable)
    densities, counts = layer_densities(manifest, density), layer_counts(manifest, density)
    kept = [densities[spec.name] * spec.size for spec in manifest.maskable]
    assert sum(kept) == pytest.approx(target)
    assert all(0 < share <= 1 for share in densities.values())
    for count, wanted in zip(counts.values(), kept, strict=True):
        assert count == max(1, math.floor(wanted + 1e-9))


@pytest.mark.parametrize("rule", ALL_RULES)
@pytest.mark.parametrize("manifest", [CIFAR, model((38_967, 12_604))], ids=["cifar10", "large enough to round"])
def test_density_one_keeps_every_weight(rule, manifest):
    assert set(layer_densities(manifest, 1, rule).values()) == {1.0}
    assert layer_counts(manifest, 1, rule) == {spec.name: spec.size for spec in manifest.maskable}


@pytest.mark.parametrize("rule", ALL_RULES)
@pytest.mark.parametrize("density", [0, -0.1, 1.01, math.nan])
def test_densities_that_are_no_share_are_refused(rule, density):
    for function in (layer_densities, layer_counts):
        with pytest.raises(ValueError, match=f"density is {density}; "):
            function(MNIST, density, rule)


@pytest.mark.parametrize("rule", RULES)
def test_no_layer_is_left_without_weights(rule):
    counts = layer_counts(model((2, 30), (200, 30)), 1e-5, rule)
    assert min(counts.values()) >= 1


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("manifest", [load_builtin("cifar10:dmpfl").manifest, MNIST, model((3, 5), (40, 30), (2, 7))])
def test_the_first_layer_may_be_dense_and_the_others_alike(manifest, density):
    kept = layer_densities(manifest, density, "uniform_first_dense")
    first, *others = manifest.maskable
    assert list(kept) == [spec.name for spec in manifest.maskable]
    assert kept[first.name] == 1
    assert len({kept[spec.name] for spec in others}) == 1
    assert 0 < kept[others[0].name] < density
    size = sum(spec.size for spec in manifest.maskable)
    assert sum(kept[spec.name] * spec.size for spec in manifest.maskable) == pytest.approx(density * size)
    counts = layer_counts(manifest, density, "uniform_first_dense")
    assert counts[first.name] == first.size
    assert density * size - len(others) < sum(counts.values()) <= density * size + 1e-6


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_a_first_layer_that_is_too_large_to_be_dense_is_told(density):
    with pytest.raises(ValueError, match=f"density is {density}; .*first layer"):
        layer_densities(model((60, 10), (10, 60)), density, "uniform_first_dense")
    with pytest.raises(ValueError, match="the first layer has more"):
        layer_densities(model((60, 10)), density, "uniform_first_dense")


def test_feddst_leaves_layers_dense_that_its_rule_cannot_cut():
    tiny = model((1, 10), (100, 100))  # more dimensions than weights: its raw sparsity is negative
    assert layer_densities(tiny, 0.2, "feddst")["a.weight"] == 1
    assert layer_counts(tiny, 0.2, "feddst")["a.weight"] == 10
    assert layer_densities(tiny, 0.2, "feddst")["b.weight"] == pytest.approx(0.2, abs=0.01)
    assert layer_counts(model((1, 10)), 0.2, "feddst") == {"a.weight": 10}
    assert layer_counts(model((2, 2)), 0.2, "feddst") == {"a.weight": 4}
    # S = 0.99 would keep floor(0.01 * 36) = 0 of the weights: the code leaves such a layer alone.
    assert layer_counts(model((6, 6), bias=False), 0.01, "feddst") == {"a.weight": 36}


def test_feddst_counts_the_biases_of_a_layer():
    with_bias, without = (layer_counts(model((20, 20), (20, 20), bias=bias), 0.5, "feddst") for bias in (True, False))
    assert set(with_bias.values()) == {210}
    assert set(without.values()) == {200}


# The first mask


@pytest.mark.parametrize("density", [0.2, 1])
def test_a_random_mask_has_exactly_the_counts(density):
    counts = layer_counts(MNIST, density)
    mask = random_mask(MNIST, counts, seed=3)
    check_elements(MNIST, mask)
    assert mask.counts == counts


def test_random_masks_follow_from_their_seed():
    counts = layer_counts(MNIST, 0.2)
    first, again, other = (random_mask(MNIST, counts, seed) for seed in (3, 3, 4))
    assert first.digest == again.digest
    for name in ("conv1.weight", "conv2.weight", "fc1.weight"):
        assert not np.array_equal(first.exists[name], other.exists[name])


def test_random_positions_are_those_of_the_smallest_keys():
    manifest = model((3, 4), (5, 2))
    mask = random_mask(manifest, {"a.weight": 5, "b.weight": 4}, seed=7)
    raw = np.random.PCG64(int.from_bytes(hashlib.sha256(b"elements|7").digest()[:16], "big"))
    for name, size, count in (("a.weight", 12, 5), ("b.weight", 10, 4)):
        keys = [int(key) for key in raw.random_raw(size)]
        assert mask.index[name].tolist() == sorted(sorted(range(size), key=keys.__getitem__)[:count])


def test_the_draw_of_a_random_mask_never_changes():
    """Golden: a change of the draw would make old federations irreproducible."""
    mask = random_mask(MNIST, layer_counts(MNIST, 0.2), seed=0)
    assert mask.digest == "64bf88c39a73e63d6628408cc8ace6555a6e32fe69158dd2402eb084396f761d"


def test_random_positions_are_uniform():
    manifest = model((2, 3), bias=False)
    drawn = sum(random_mask(manifest, {"a.weight": 2}, seed).exists["a.weight"].astype(int) for seed in range(1500))
    # 500 expected at each of 6 positions, with a standard deviation of 18
    assert drawn.sum() == 3000
    assert drawn.min() > 430
    assert drawn.max() < 570


def test_a_magnitude_mask_keeps_the_largest_weights_of_each_layer():
    values = {
        "a.weight": np.array([[1, -3, 2], [3, 0, -2]], np.float32),
        "b.weight": np.array([[-9, 1]], np.float32),
        "a.bias": np.full(2, 50, np.float32),
    }
    manifest = model((2, 3), (1, 2))
    mask = magnitude_mask(values, manifest, {"a.weight": 3, "b.weight": 1})
    check_elements(manifest, mask)
    assert mask.index["a.weight"].tolist() == [1, 2, 3], "2 ties at 2 and 5, the lower index stays"
    assert mask.index["b.weight"].tolist() == [0]


def test_a_magnitude_mask_of_a_whole_model():
    counts = layer_counts(MNIST, 0.2)
    values = initial_values(MNIST, seed=0)
    mask = magnitude_mask(values, MNIST, counts)
    assert mask.counts == counts
    sizes = np.abs(values["fc1.weight"])
    kept = mask.exists["fc1.weight"]
    assert sizes[kept].min() >= sizes[~kept].max()


# Section 8.2


@pytest.mark.parametrize(
    ("alpha", "time", "sigma"),
    [
        (0.5, 0, 0.5),
        (0.5, 20, 0.487764),
        (0.5, 40, 0.452254),
        (0.5, 60, 0.396946),
        (0.5, 100, 0.25),
        (0.5, 140, 0.103054),
        (0.5, 180, 0.012236),
        (0.5, 200, 0),
        (0.5, 300, 0),
        (0.01, 100, 0.005),
        (0.01, 180, 0.00024472),
    ],
)
def test_over_pruning_fades_as_the_card_says(alpha, time, sigma):
    assert over_pruning(time, 200, alpha) == pytest.approx(sigma, abs=5e-7 if alpha == 0.5 else 5e-9)


def test_without_any_time_nothing_is_over_pruned():
    assert over_pruning(0, 0, 0.5) == 0


@pytest.mark.parametrize(
    ("before", "epochs", "interval", "end", "plan"),
    [
        (15, 5, 20, 200, [(4, 20)]),
        (10, 5, 20, 200, []),
        (195, 5, 20, 200, []),
        (40, 20, 10, 800, [(10, 50), (19, 60)]),
        (790, 20, 10, 800, []),
    ],
)
def test_plans_of_the_card(before, epochs, interval, end, plan):
    assert adjustment_steps(before, epochs, 1, interval, end) == plan
    batches = 7
    assert adjustment_steps(before, epochs, batches, interval, end) == [(epoch * 7, time) for epoch, time in plan]


@pytest.mark.parametrize(
    ("before", "epochs", "interval", "at", "plan"),
    [
        (15, 5, 20, "end", [(35, 20)]),
        (40, 20, 10, "end", [(70, 50), (140, 60)]),
        (19, 1, 20, "end", [(7, 20)]),
        (19, 1, 20, "penultimate", [(4, 20)]),
        (18, 2, 20, "penultimate", [(7, 20)]),
        (18, 3, 20, "penultimate", [(14, 20)]),
        (17, 5, 20, "penultimate", [(21, 20)]),
        (0, 3, 1, "penultimate", [(7, 1), (14, 3)]),
        (0, 3, 1, "end", [(7, 1), (14, 2), (21, 3)]),
    ],
)
def test_when_re_adjustments_fall_among_batches(before, epochs, interval, at, plan):
    assert adjustment_steps(before, epochs, 7, interval, 1000, at) == plan


def test_a_single_batch_leaves_only_its_end():
    assert adjustment_steps(0, 1, 1, 1, 10) == [(1, 1)]
    assert adjustment_steps(0, 1, 2, 1, 10) == [(1, 1)]


# Sections 8.3 and 8.5

THETA = np.array([0.12, -0.10, 0.30, -0.40, 0.06, 0.05, 0, 0, 0, 0], np.float32)
THETA_0 = np.array([0.10, -0.15, 0.35, -0.30, 0.06, 0.02, 0, 0, 0, 0], np.float32)
EXISTS = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0], bool)
DIRECTIONS = np.array([1, -1, 1, -1, 1, 1, 0, 1, -1, 0], np.int8)
GRADIENT = np.array([0.03, -0.02, 0.05, 0.01, 0.02, -0.10, 0.90, -0.15, -0.70, 0.30], np.float32)


def test_prune_and_grow_ten_weights():
    left = math.floor((1 - 0.5) * 0.6 * 10 + 1e-9)
    assert left == 3
    pruned = prune(THETA, THETA - THETA_0, EXISTS, DIRECTIONS, left=left, share=0.4)
    assert pruned.guided.tolist() == [1, 2]
    assert pruned.magnitude.tolist() == [5]
    assert pruned.exists.astype(int).tolist() == [1, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    grown = grow(GRADIENT, pruned, DIRECTIONS, count=6, share=0.4)
    assert grown.guided.tolist() == [7]
    assert grown.magnitude.tolist() == [6, 8]
    assert grown.exists.astype(int).tolist() == [1, 0, 0, 1, 1, 0, 1, 1, 1, 0]
    after = np.where(grown.exists, THETA, 0)
    np.testing.assert_array_equal(after, np.array([0.12, 0, 0, -0.40, 0.06, 0, 0, 0, 0, 0], np.float32))
    assert EXISTS.tolist() == [True] * 6 + [False] * 4, "the caller's mask stays"


@pytest.mark.parametrize(("share", "directions"), [(0, DIRECTIONS), (0.4, np.zeros(10, np.int8))])
def test_without_guidance_it_is_magnitude_pruning(share, directions):
    pruned = prune(THETA, THETA - THETA_0, EXISTS, directions, left=3, share=share)
    assert pruned.guided.tolist() == []
    assert pruned.magnitude.tolist() == [1, 4, 5]
    grown = grow(GRADIENT, pruned, directions, count=6, share=share)
    assert grown.guided.tolist() == []
    assert grown.magnitude.tolist() == [6, 8, 9]
    assert grown.exists.astype(int).tolist() == [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    after = np.where(grown.exists, THETA, 0)
    np.testing.assert_array_equal(after, np.array([0.12, 0, 0.30, -0.40, 0, 0, 0, 0, 0, 0], np.float32))


def test_the_share_may_be_of_the_weights_to_drop():
    pruned = prune(THETA, THETA - THETA_0, EXISTS, DIRECTIONS, left=3, share=0.4, basis="moved")
    assert pruned.guided.tolist() == [1], "0.4 * 3 dropped, not 0.4 * 7 zeros; 0.10 is the smaller of positions 1, 2"
    assert pruned.magnitude.tolist() == [4, 5]


def test_shares_are_rounded_down_without_accidents_of_binary_floats():
    assert int(0.29 * 100) == 28
    ones = np.ones(200, np.float32)
    pruned = prune(ones, -ones, np.ones(200, bool), np.ones(200, np.int8), left=100, share=0.29)
    assert len(pruned.guided) == 29
    bare = Pruned(np.zeros(200, bool), np.arange(0), np.arange(0))
    assert len(grow(-ones, bare, np.ones(200, np.int8), count=100, share=0.29).guided) == 29


@pytest.mark.parametrize(
    ("direction", "moved", "incongruent"),
    [(1, -0.01, True), (1, 0.01, False), (1, 0, False), (0, -0.01, False), (-1, 0.01, True), (-1, -0.01, False)],
)
def test_signs_of_what_is_dropped(direction, moved, incongruent):
    """A large weight and a small one, one to drop: only guidance drops the large one."""
    pruned = prune(
        np.array([9, 1], np.float32),
        np.array([moved, 0], np.float32),
        np.ones(2, bool),
        np.array([direction, 0], np.int8),
        left=1,
        share=1,
    )
    assert pruned.guided.tolist() == ([0] if incongruent else [])
    assert pruned.magnitude.tolist() == ([] if incongruent else [1])


@pytest.mark.parametrize(
    ("direction", "slope", "congruent"),
    [(1, -0.3, True), (1, 0.3, False), (0, -0.3, False), (1, 0, False), (-1, 0.3, True), (-1, -0.3, False)],
)
def test_signs_of_what_is_revived(direction, slope, congruent):
    """A small gradient and a large one, one to revive: only guidance revives the small one."""
    pruned = Pruned(np.zeros(2, bool), np.arange(0), np.arange(0))
    grown = grow(np.array([slope, 9], np.float32), pruned, np.array([direction, 0], np.int8), count=1, share=1)
    assert grown.guided.tolist() == ([0] if congruent else [])
    assert grown.magnitude.tolist() == ([] if congruent else [1])


def test_nothing_is_dropped_where_no_more_than_wanted_exist():
    pruned = prune(THETA, THETA - THETA_0, EXISTS, DIRECTIONS, left=6, share=0.4)
    assert pruned.exists.tolist() == EXISTS.tolist()
    assert pruned.exists is not EXISTS
    assert len(pruned.guided) == len(pruned.magnitude) == 0
    assert prune(THETA, THETA - THETA_0, EXISTS, DIRECTIONS, left=9, share=0.4).exists.tolist() == EXISTS.tolist()


def test_nothing_is_revived_where_enough_exist():
    pruned = prune(THETA, THETA - THETA_0, EXISTS, DIRECTIONS, left=5, share=0.4)
    grown = grow(GRADIENT, pruned, DIRECTIONS, count=4, share=0.4)
    assert grown.exists.tolist() == pruned.exists.tolist()
    assert len(grown.guided) == len(grown.magnitude) == 0


def test_small_weights_that_agree_are_taken_back():
    """Growth protects a weight that was dropped a moment ago for being small."""
    weights = np.array([5, 1, 2, 6, 0, 0], np.float32)
    exists = np.array([1, 1, 1, 1, 0, 0], bool)
    directions = np.array([0, 1, 0, 0, 0, 0], np.int8)
    gradient = np.array([0, -0.1, 0, 0, 7, 8], np.float32)
    pruned = prune(weights, np.zeros(6, np.float32), exists, directions, left=2, share=0.5)
    assert pruned.magnitude.tolist() == [1, 2]
    grown = grow(gradient, pruned, directions, count=4, share=0.5)
    assert grown.guided.tolist() == [1]
    assert grown.magnitude.tolist() == [5]


def test_what_was_dropped_by_guidance_returns_last():
    pruned = Pruned(np.array([1, 0, 0, 0, 0, 0], bool), np.array([1, 2]), np.array([3]))
    gradient = np.array([9, 8, 7, 1, 2, 0], np.float32)
    none = np.zeros(6, np.int8)
    for count, wanted in [(2, [0, 4]), (4, [0, 3, 4, 5]), (5, [0, 1, 3, 4, 5]), (6, [0, 1, 2, 3, 4, 5])]:
        assert np.flatnonzero(grow(gradient, pruned, none, count=count, share=0).exists).tolist() == wanted
    against = np.sign(-gradient).astype(np.int8)
    assert 1 not in grow(gradient, pruned, against, count=3, share=1).guided, "however well it agrees"


def test_exploration_is_limited_as_long_as_it_can_be():
    pruned = Pruned(np.array([1, 0, 0, 0, 0, 0], bool), np.array([1]), np.arange(0))
    gradient = np.array([9, 8, 7, -1, -6, 5], np.float32)
    directions = np.array([0, 0, -1, 1, 1, 0], np.int8)
    candidates = np.array([1, 1, 0, 1, 0, 1], bool)
    grown = grow(gradient, pruned, directions, count=3, share=0.5, candidates=candidates)
    assert grown.guided.tolist() == [3], "2 and 4 agree too, and are no candidates"
    assert grown.magnitude.tolist() == [5]
    for count, wanted in [(4, [2, 5]), (5, [2, 4, 5]), (6, [1, 2, 4, 5])]:
        grown = grow(gradient, pruned, directions, count=count, share=0.34, candidates=candidates)
        assert grown.guided.tolist() == [3]
        assert grown.magnitude.tolist() == wanted


# Section 8.4

REST_ALL = ([0.49, -0.125, 0.125, 0.2, -0.8, 0], [1000, 800, 800, 300, 100, 0])
REST_NONE = ([0.475, 0.1, 0.2, 0.2, -0.8, 0], [400, 200, 200, 300, 100, 0])


@pytest.mark.parametrize(
    ("half", "weights", "count", "mask"),
    [
        (*REST_ALL, 3, [1, 0, 0, 1, 1, 0]),
        (*REST_ALL, 4, [1, 1, 0, 1, 1, 0]),
        (*REST_NONE, 3, [1, 0, 0, 1, 1, 0]),
        (*REST_NONE, 4, [1, 0, 1, 1, 1, 0]),
        (*REST_NONE, 5, [1, 1, 1, 1, 1, 0]),
        (*REST_NONE, 6, [1, 1, 1, 1, 1, 0]),
        (*REST_NONE, 0, [0, 0, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_trim_as_in_the_card(half, weights, count, mask, dtype):
    weights = np.array(weights, np.float64)
    union = weights > 0
    kept = trim(np.array(half, dtype), weights, union, count)
    assert kept.astype(int).tolist() == mask
    assert kept.dtype == np.bool_
    assert not np.shares_memory(kept, union)


# Slow definitions


def slow_largest(values, count, among=None):
    order = sorted(range(len(values)) if among is None else among, key=lambda i: (-values[i], i))
    return sorted(order[: max(0, count)])


def slow_smallest(values, count, among):
    return sorted(sorted(among, key=lambda i: (values[i], -i))[: max(0, count)])


def slow_prune(weights, moved, exists, directions, left, share, basis):
    sizes = np.abs(weights).tolist()
    active = [i for i in range(len(exists)) if exists[i]]
    surplus = max(0, len(active) - left)
    against = [i for i in active if directions[i] != 0 and np.sign(moved[i]) == -directions[i]]
    base = len(exists) - left if basis == "total" else surplus
    guided = slow_smallest(sizes, min(math.floor(share * base + 1e-9), surplus, len(against)), against)
    others = [i for i in active if i not in guided]
    return guided, slow_smallest(sizes, surplus - len(guided), others)


def slow_grow(gradient, exists, dropped, directions, count, share, candidates):
    sizes = np.abs(gradient).tolist()
    inactive = [i for i in range(len(exists)) if not exists[i]]
    missing = max(0, count - (len(exists) - len(inactive)))
    free = [i for i in inactive if i not in dropped]
    first = [i for i in free if candidates[i]]
    agree = [i for i in first if directions[i] != 0 and np.sign(-gradient[i]) == directions[i]]
    guided = slow_largest(sizes, math.floor(share * missing + 1e-9), agree)
    tier = {**dict.fromkeys(inactive, 2), **dict.fromkeys(free, 1), **dict.fromkeys(first, 0)}
    others = sorted((i for i in inactive if i not in guided), key=lambda i: (tier[i], -sizes[i], i))
    return guided, sorted(others[: missing - len(guided)])


SHARES = st.sampled_from([0, 0.01, 0.25, 0.5, 1])


@given(values=st.lists(st.integers(-3, 3), max_size=40), count=st.integers(-1, 45))
def test_the_largest_are_those_a_full_sort_puts_first(values, count):
    for dtype in (np.float32, np.int64):
        assert largest(np.array(values, dtype), count).tolist() == slow_largest(values, count)


@st.composite
def layers(draw):
    """A layer amid a re-adjustment, and what is asked of it."""
    size = draw(st.integers(1, 30))

    def array(elements, dtype):
        return np.array(draw(st.lists(elements, min_size=size, max_size=size)), dtype)

    exists = array(st.booleans(), bool)
    small = st.integers(-3, 3)
    count = draw(st.integers(0, size))
    return {
        "weights": np.where(exists, array(small, np.float32), 0).astype(np.float32),
        "moved": np.where(exists, array(small, np.float32), 0).astype(np.float32),
        "exists": exists,
        "directions": array(st.integers(-1, 1), np.int8),
        "gradient": array(small, np.float32),
        "left": draw(st.integers(0, count)),
        "count": count,
        "share": draw(SHARES),
        "basis": draw(st.sampled_from(["total", "moved"])),
        "candidates": draw(st.one_of(st.none(), st.just(array(st.booleans(), bool)))),
    }


@given(layer=layers())
def test_prune_and_grow_choose_what_the_definitions_say(layer):
    four = [layer[name] for name in ("weights", "moved", "exists", "directions")]
    before = [array.copy() for array in four]
    pruned = prune(*four, left=layer["left"], share=layer["share"], basis=layer["basis"])
    wanted = slow_prune(*four, layer["left"], layer["share"], layer["basis"])
    assert (pruned.guided.tolist(), pruned.magnitude.tolist()) == wanted
    dropped = wanted[0] + wanted[1]
    assert np.flatnonzero(layer["exists"] & ~pruned.exists).tolist() == sorted(dropped)
    assert not (pruned.exists & ~layer["exists"]).any()
    assert pruned.exists.sum() == min(layer["left"], layer["exists"].sum())

    asked = {name: layer[name] for name in ("count", "share", "candidates")}
    left = pruned.exists.copy()
    grown = grow(layer["gradient"], pruned, layer["directions"], **asked)
    all_allowed = np.ones(len(left), bool)
    candidates = all_allowed if layer["candidates"] is None else layer["candidates"]
    wanted = slow_grow(
        layer["gradient"], left, wanted[0], layer["directions"], layer["count"], layer["share"], candidates
    )
    assert (grown.guided.tolist(), grown.magnitude.tolist()) == wanted
    assert np.flatnonzero(grown.exists & ~left).tolist() == sorted(wanted[0] + wanted[1])
    assert (grown.exists >= left).all()
    assert grown.exists.sum() == layer["count"], "prune, then grow: exactly K_l exist"
    assert pruned.exists.tolist() == left.tolist()
    assert all(np.array_equal(array, copy) for array, copy in zip(four, before, strict=True))


@given(layer=layers())
def test_no_share_and_no_directions_come_to_the_same(layer):
    """lambda = 0 is FedDST: magnitude pruning, growth by gradient, whatever the directions say."""
    results = []
    for share, directions in ((0, layer["directions"]), (layer["share"], np.zeros_like(layer["directions"]))):
        arrays = layer["weights"], layer["moved"], layer["exists"], directions
        pruned = prune(*arrays, left=layer["left"], share=share, basis=layer["basis"])
        grown = grow(layer["gradient"], pruned, directions, count=layer["count"], share=share)
        kept = slow_largest(np.abs(layer["weights"]), layer["left"], np.flatnonzero(layer["exists"]).tolist())
        assert np.flatnonzero(pruned.exists).tolist() == kept
        results.append((pruned.magnitude.tolist(), grown.magnitude.tolist(), grown.exists.tolist()))
    assert results[0] == results[1]


@given(
    positions=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), max_size=30),
    count=st.integers(0, 32),
)
def test_trim_keeps_what_a_full_sort_puts_first(positions, count):
    values = np.array([value for value, _ in positions], np.float32)
    weights = np.array([weight for _, weight in positions], np.float64)
    union = weights > 0
    order = sorted(np.flatnonzero(union).tolist(), key=lambda i: (-abs(values[i]), -weights[i], i))
    assert np.flatnonzero(trim(values, weights, union, count)).tolist() == sorted(order[:count])


# Choices over the whole network


def slow_by_gain(weights, importance, exists, cost, fixed_cost, share, count):
    """Word for word, one weight after the other; positions are (tensor, index)."""
    everything = [(name, i) for name in weights for i in range(len(weights[name]))]
    fixed = []
    for name in weights:
        active = [i for i in range(len(weights[name])) if exists[name][i]]
        staying = len(active) - math.floor(share * len(active) + 1e-9)
        chosen = slow_largest(np.abs(weights[name]).tolist(), staying, active)
        chosen = chosen or slow_largest(importance[name].tolist(), 1)
        fixed += [(name, i) for i in chosen]
    if len(fixed) >= count:
        order = sorted(fixed, key=lambda at: -abs(weights[at[0]][at[1]]))
        first = [next(at for at in order if at[0] == name) for name in weights]
        return set(first + [at for at in order if at not in first][: max(0, count - len(first))])
    gain = sum(importance[name][i] for name, i in fixed)
    seconds = fixed_cost + sum(cost[name] for name, _ in fixed)
    chosen = list(fixed)
    rest = [at for at in everything if at not in fixed]
    for name, i in sorted(rest, key=lambda at: -importance[at[0]][at[1]] / cost[at[0]]):
        if len(chosen) == count or not importance[name][i] / cost[name] > gain / seconds:
            break
        chosen.append((name, i))
        gain += importance[name][i]
        seconds += cost[name]
    return set(chosen)


@st.composite
def networks(draw):
    sizes = draw(st.lists(st.integers(1, 10), min_size=1, max_size=4))

    def arrays(elements, dtype):
        return {
            name: np.array(draw(st.lists(elements, min_size=size, max_size=size)), dtype)
            for name, size in zip("abcd", sizes, strict=False)
        }

    return {
        "weights": arrays(st.integers(-3, 3), np.float32),
        "importance": arrays(st.integers(0, 8), np.float32),
        "exists": arrays(st.booleans(), bool),
        "cost": {name: draw(st.sampled_from([0.5, 1.0, 2.0])) for name in "abcd"},
        "fixed_cost": draw(st.sampled_from([0.0, 1.0, 8.0])),
        "share": draw(st.sampled_from([0, 0.25, 0.3, 0.5, 1])),
        "count": draw(st.integers(1, sum(sizes) + 2)),
    }


def by_gain(weights, importance, exists, cost, **numbers):
    return keep_by_gain(weights, importance, ElementMask(exists), cost, **numbers)


@given(network=networks())
def test_prunefl_takes_what_is_worth_its_time(network):
    kept = by_gain(**network)
    assert {(name, int(i)) for name, index in kept.index.items() for i in index} == slow_by_gain(**network)
    assert list(kept.exists) == list(network["weights"])
    assert min(kept.counts.values()) >= 1
    assert kept.count <= max(network["count"], len(network["weights"]))


GAIN = {
    "weights": {"a": np.array([[4, -3], [2, 0]], np.float32), "b": np.array([5, 0, 0], np.float32)},
    "importance": {"a": np.array([[1, 1], [4, 6]], np.float32), "b": np.array([1, 9, 2], np.float32)},
    "exists": {"a": np.array([[1, 1], [1, 0]], bool), "b": np.array([1, 0, 0], bool)},
    "cost": {"a": 1.0, "b": 2.0},
    "fixed_cost": 2.0,
    "share": 0.34,
}


@pytest.mark.parametrize(
    ("changed", "a", "b"),
    [
        # Fixed: a0, a1, b0: gain 3 in 2 + 1 + 1 + 2 = 6 s, 0.5 per second. Rates: a3 6, b1 4.5, a2 4, b2 1. After the
        # first three the gain is 22 in 10 s: 2.2 per second, b2 is not worth it.
        ({}, [[1, 1], [1, 1]], [1, 1, 0]),
        ({"count": 5}, [[1, 1], [0, 1]], [1, 1, 0]),
        ({"count": 4}, [[1, 1], [0, 1]], [1, 0, 0]),
        ({"count": 3}, [[1, 1], [0, 0]], [1, 0, 0]),
        # Fewer than are fixed: the largest |weights| of these, and at least one of every tensor.
        ({"count": 2}, [[1, 0], [0, 0]], [1, 0, 0]),
        ({"count": 1}, [[1, 0], [0, 0]], [1, 0, 0]),
        # A round that takes long anyway makes every weight worth its time.
        ({"fixed_cost": 100.0}, [[1, 1], [1, 1]], [1, 1, 1]),
        # b is expensive: its best rate is 0.009, and a0 to a3 with b0 have a gain of 13 in 1006 s: 0.013 per second.
        ({"cost": {"a": 1.0, "b": 1000.0}}, [[1, 1], [1, 1]], [1, 0, 0]),
        ({"share": 0.0, "count": 4}, [[1, 1], [1, 0]], [1, 0, 0]),
    ],
)
def test_gains_by_hand(changed, a, b):
    kept = by_gain(**{**GAIN, "count": 7, **changed})
    assert kept.exists["a"].astype(int).tolist() == a
    assert kept.exists["b"].astype(int).tolist() == b


def test_a_tensor_that_gains_nothing_keeps_its_best_weight():
    nothing = {"a": GAIN["exists"]["a"], "b": np.zeros(3, bool)}
    kept = by_gain(**{**GAIN, "exists": nothing, "cost": {"a": 1.0, "b": 1e9}, "count": 5})
    assert kept.index["b"].tolist() == [1]
    assert kept.index["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.integration
@given(network=networks())
def test_grasp_keeps_the_largest_scores_of_the_whole_network(network):
    scores, count = network["weights"], network["count"]
    order = sorted(
        ((name, i) for name in scores for i in range(len(scores[name]))), key=lambda at: -scores[at[0]][at[1]]
    )
    first = [next(at for at in order if at[0] == name) for name in scores]
    wanted = first + [at for at in order if at not in first][: max(0, count - len(first))]
    kept = keep_by_score(scores, count)
    assert {(name, int(i)) for name, index in kept.index.items() for i in index} == set(wanted)
    plain = order[:count]
    if {name for name, _ in plain} == set(scores):
        assert set(wanted) == set(plain), "where every tensor gets something, nothing is set aside"


def test_grasp_keeps_shapes_and_one_weight_of_every_layer():
    scores = {"a.weight": np.array([[5, 7], [6, 5]], np.float32), "b.weight": np.array([[-2, -1]], np.float32)}
    kept = keep_by_score(scores, 3)
    check_elements(model((2, 2), (1, 2)), kept)
    assert kept.exists["a.weight"].tolist() == [[False, True], [True, False]]
    assert kept.exists["b.weight"].tolist() == [[False, True]]
    assert keep_by_score(scores, 4).index["a.weight"].tolist() == [0, 1, 2], "5 ties at 0 and 3"
    assert keep_by_score(scores, 6).count == keep_by_score(scores, 60).count == 6
