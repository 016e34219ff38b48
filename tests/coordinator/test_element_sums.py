"""Sums of updates under masks of elements, against a dense reference in float64."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from sparrow.coordinator.sums.averages import ElementSums
from sparrow.protocol.elements import ElementMask, everything
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import Points, blocks, pack
from sparrow.protocol.sparsity import layer_counts, random_mask


@pytest.fixture(scope="module")
def model(small):
    """The small model with all its weights maskable, batch norm and biases not."""
    layers = [Layer(name=name, kind="linear", tensors=(f"{name}.weight",)) for name in ("conv", "fc", "out")]
    return Manifest.model_validate({**small.model_dump(), "layers": [layer.model_dump() for layer in layers]})


def mask_of(manifest, seed, density=0.4):
    return random_mask(manifest, layer_counts(manifest, density), seed)


def update(manifest, mask, seed):
    """(values packed under the mask, the same dense with 0 elsewhere, examples) of one device."""
    chance = np.random.default_rng(seed)
    dense = {spec.name: chance.normal(size=spec.shape).astype(np.float32) for spec in manifest.shared}
    for name, exists in mask.exists.items():
        dense[name] = np.where(exists, dense[name], np.float32(0))
    return pack(manifest, dense, mask), dense, int(chance.integers(1, 5000))


def fold(manifest, shared, updates):
    sums = ElementSums(manifest, shared)
    for values, mask, examples in updates:
        sums.fold_in_place(values, mask, examples)
    return sums


def totals(sums):
    return {spec.name: (numerator, weights) for spec, numerator, weights in sums.totals()}


MIXTURES = {
    "all under the round's mask": (0, 0, 0),
    "all under others": (1, 2, 3),
    "two of one other": (1, 1),
    "first others, then the round's": (1, 2, 0, 0),
    "in turn": (0, 1, 0, 2, 0),
    "one alone": (0,),
    "nobody": (),
}


@pytest.mark.parametrize("seeds", MIXTURES.values(), ids=MIXTURES)
def test_any_mixture_of_masks_agrees_with_a_dense_reference(model, seeds):
    masks = [mask_of(model, seed) for seed in seeds]
    made = [update(model, mask, 10 + place) for place, mask in enumerate(masks)]
    sums = fold(model, mask_of(model, 0), [(each[0], mask, each[2]) for each, mask in zip(made, masks, strict=True)])
    assert (sums.updates, sums.num_examples) == (len(made), sum(examples for _, _, examples in made))
    found = totals(sums)
    assert list(found) == [spec.name for spec in model.shared]
    for spec in model.shared:
        numerator, weights = np.zeros(spec.size), np.zeros(spec.size)
        for (_, dense, examples), mask in zip(made, masks, strict=True):
            numerator += examples * dense[spec.name].reshape(-1).astype(np.float64)
            weights += examples * mask.exists.get(spec.name, np.ones(spec.shape, bool)).reshape(-1)
        assert {array.dtype for array in found[spec.name]} == {np.dtype(np.float64)}
        np.testing.assert_allclose(found[spec.name][0], numerator, rtol=1e-12, atol=1e-9)
        np.testing.assert_array_equal(found[spec.name][1], weights)
        assert not found[spec.name][0][weights == 0].any()


def test_the_mean_keeps_what_nobody_sent_bit_for_bit(model):
    shared, other = mask_of(model, 0), mask_of(model, 1)
    one, two = update(model, shared, 5), update(model, other, 6)
    previous = initial_values(model, 3)
    mean = fold(model, shared, [(one[0], shared, one[2]), (two[0], other, two[2])]).mean(previous)
    for spec in model.shared:
        held = [mask.exists.get(spec.name, np.ones(spec.shape, bool)) for mask in (shared, other)]
        weights = sum(np.where(flags, each[2], 0.0) for each, flags in zip((one, two), held, strict=True))
        dense = sum(each[2] * each[1][spec.name].astype(np.float64) for each in (one, two))
        wanted = np.where(weights > 0, dense / np.where(weights > 0, weights, 1), previous[spec.name])
        assert mean[spec.name].dtype == np.float32
        np.testing.assert_allclose(mean[spec.name], wanted, rtol=2e-7, atol=1e-12)
        nobody = ~(held[0] | held[1])
        assert mean[spec.name][nobody].tobytes() == previous[spec.name][nobody].tobytes()


def test_a_mask_equal_to_the_rounds_is_the_rounds_whoever_made_it(model):
    shared = mask_of(model, 0)
    copied = ElementMask({name: flags.copy() for name, flags in shared.exists.items()})
    values, _, examples = update(model, shared, 1)
    one, other = fold(model, shared, [(values, shared, examples)]), fold(model, shared, [(values, copied, examples)])
    for (numerator, weights), (again, weights_again) in zip(totals(one).values(), totals(other).values(), strict=True):
        assert numerator.tobytes() == again.tobytes()
        assert weights.tobytes() == weights_again.tobytes()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_sums_that_are_exact_do_not_depend_on_the_order(model, order):
    masks = [mask_of(model, seed) for seed in (0, 1, 0, 2)]
    updates = []
    for place, mask in enumerate(masks):
        values, _, _ = update(model, mask, place)
        updates.append((np.round(values * 64) / np.float32(64), mask, place + 1))
    wanted = totals(fold(model, masks[0], updates))
    found = totals(fold(model, masks[0], [updates[place] for place in order]))
    for name, (numerator, weights) in wanted.items():
        np.testing.assert_array_equal(found[name][0], numerator)
        np.testing.assert_array_equal(found[name][1], weights)


def test_totals_can_be_taken_twice_and_written_to(model):
    shared, other = mask_of(model, 0), mask_of(model, 1)
    sums = fold(model, shared, [(update(model, mask, 4)[0], mask, 3) for mask in (shared, other)])
    first = {name: (one.copy(), two.copy()) for name, (one, two) in totals(sums).items()}
    for _, numerator, weights in sums.totals():
        numerator += 1
        weights *= 0
    for name, (numerator, weights) in totals(sums).items():
        np.testing.assert_array_equal(numerator, first[name][0])
        np.testing.assert_array_equal(weights, first[name][1])


def test_folding_leaves_its_inputs_alone(model):
    shared, other = mask_of(model, 0), mask_of(model, 1)
    made = [update(model, mask, 4)[0] for mask in (shared, other)]
    before = [values.copy() for values in made]
    fold(model, shared, list(zip(made, (shared, other), (3, 4), strict=True)))
    assert [values.tobytes() for values in made] == [values.tobytes() for values in before]


def test_large_values_and_weights_do_not_overflow(model):
    shared = everything(model)
    values = np.full(model.shared_values, 3.4e38, dtype=np.float32)
    mean = fold(model, shared, [(values, shared, 2**40)] * 2).mean(initial_values(model, 0))
    assert all((tensor == np.float32(3.4e38)).all() for tensor in mean.values())


WIDE = Manifest(
    task="wide",
    input_shape=(500,),
    output_shape=(400,),
    tensors=(TensorSpec(name="w", shape=(400, 500)), TensorSpec(name="b", shape=(400,))),
    layers=(Layer(name="w", kind="linear", tensors=("w", "b")),),
)


def most_memory(updates):
    """The largest number of bytes in use while these (values, mask) are folded."""
    tracemalloc.start()
    sums = ElementSums(WIDE, updates[0][1])
    for values, mask in updates:
        sums.fold_in_place(values, mask, 10)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_memory_is_that_of_what_exists_while_everybody_keeps_the_rounds_mask():
    mask = mask_of(WIDE, 0, 0.05)
    values = np.ones(mask.count + 400, dtype=np.float32)
    _ = mask.index, mask.digest  # remembered by the mask, not by the sums
    few, many = most_memory([(values, mask)] * 2), most_memory([(values, mask)] * 60)
    assert many < few + 20_000
    # The sum in float64, and one update in float64 while it is added; a dense model would be 1.6 MB.
    assert many < 8 * 2 * len(values) + 100_000


def test_memory_does_not_grow_with_the_number_of_other_masks():
    shared, *others = (mask_of(WIDE, seed, 0.05) for seed in range(9))
    values = np.ones(shared.count + 400, dtype=np.float32)
    for mask in (shared, *others):
        _ = mask.index, mask.digest
    few = most_memory([(values, mask) for mask in (shared, *others[:2])])
    many = most_memory([(values, mask) for mask in (shared, *others, *others)])
    assert many < few + 20_000
    assert many < 8 * (2 * WIDE.shared_values + 4 * len(values)) + 100_000


def test_points_of_the_rounds_mask_are_unpacked_once(model, monkeypatch):
    """However many updates came under it: that is what packed sums are for."""
    shared = mask_of(model, 0)
    added = []
    add = Points.add
    monkeypatch.setattr(
        Points, "add", lambda self, *arguments, **more: added.append(self) or add(self, *arguments, **more)
    )
    sums = fold(model, shared, [(update(model, shared, seed)[0], shared, 1) for seed in range(9)])
    assert added == []
    totals(sums)
    masked = [block for _, block in blocks(model, shared) if isinstance(block, Points)]
    assert len(added) == 2 * len(masked), "its numerators, and its weights"
