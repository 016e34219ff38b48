"""Streaming masked averages against FedSPU's vector V4 and a dense reference."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from sparrow.coordinator.methods import GlobalModel, Situation, load_method
from sparrow.coordinator.sums.averages import MaskedSums
from sparrow.protocol.manifest import Manifest, NeuronGroup, Segment, TensorSpec, initial_values
from sparrow.protocol.masks import NeuronDraw, NeuronMask, blocks, draw_neurons, pack
from sparrow.protocol.settings import FederationSettings

VECTOR = Manifest(
    task="v4",
    input_shape=(1,),
    output_shape=(1,),
    tensors=(TensorSpec(name="w", shape=(5,), axes=((Segment(group="h"),),)),),
    groups=(NeuronGroup(name="h", size=5),),
)
OLD = {"w": np.array([1, 2, 3, 4, 5], dtype=np.float32)}


def fold(manifest, updates, previous):
    sums = MaskedSums(manifest)
    for values, mask, examples in updates:
        sums.fold_in_place(np.asarray(values, dtype=np.float32), mask, examples)
    assert sums.updates == len(updates)
    situation = Situation(manifest, FederationSettings())
    return load_method("fedspu").aggregation.close(GlobalModel(previous), sums, situation).tensors


def neurons(*active):
    return NeuronMask({"h": np.array(active)})


V4 = [
    ([2, 4], neurons(0, 1), 10),
    ([6, 0], neurons(0, 2), 30),
    ([1, 1, 9, 7], neurons(0, 1, 2, 4), 60),
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_v4_weighted_mean_of_those_who_held_a_weight(order):
    """By hand: (10·2+30·6+60·1)/100, (10·4+60·1)/70, (30·0+60·9)/90, nobody, 60·7/60."""
    result = fold(VECTOR, [V4[place] for place in order], OLD)["w"]
    assert result.dtype == np.float32
    assert result.tolist() == np.array([2.6, 10 / 7, 6.0, 4.0, 7.0], dtype=np.float32).tolist()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_v4_partial_and_full_devices_enter_the_same_mean(order):
    updates = [([1], neurons(0), 10), ([3, 2, 3, 4, 5], None, 30)]
    result = fold(VECTOR, [updates[place] for place in order], OLD)["w"]
    assert result.tolist() == [2.5, 2, 3, 4, 5]


def test_nobody_keeps_the_old_value_bit_for_bit():
    old = {"w": np.array([0.1, -0.0, 1e-45, 3e38, 7], dtype=np.float32)}
    assert fold(VECTOR, [], old)["w"].tobytes() == old["w"].tobytes()
    result = fold(VECTOR, [([8], neurons(4), 3)], old)["w"]
    assert result[:4].tobytes() == old["w"][:4].tobytes()
    assert result[4] == 8


def updates_of(manifest, ratios, seed=0):
    """(dense tensors, mask, num_examples) of one device per ratio; None trains everything."""
    rng = np.random.default_rng(seed)
    updates = []
    for number, ratio in enumerate(ratios):
        dense = {spec.name: rng.normal(size=spec.shape).astype(np.float32) for spec in manifest.shared}
        mask = None if ratio is None else draw_neurons(manifest, NeuronDraw(f"{seed}-dev-{number}", ratio))
        updates.append((dense, mask, int(rng.integers(1, 5000))))
    return updates


def packed(manifest, updates):
    return [(pack(manifest, dense, mask), mask, examples) for dense, mask, examples in updates]


@pytest.mark.parametrize("seed", range(12))
def test_random_masks_agree_with_a_dense_reference(small, seed):
    """What is not in a mask is NaN in a dense copy; the reference is a NaN-aware weighted mean per weight."""
    previous = initial_values(small, seed)
    ratios = np.random.default_rng(seed).choice([0.2, 0.34, 0.5, 0.8, 1.0], size=4).tolist()
    updates = updates_of(small, ratios, seed)
    result = fold(small, packed(small, updates), previous)
    masked = {spec.name: [] for spec in small.shared}
    for dense, mask, _ in updates:
        for spec, block in blocks(small, mask):
            held = np.full(spec.shape, np.nan)
            block.put(held, block.take(dense[spec.name]))
            masked[spec.name].append(held)
    for name, stack in masked.items():
        held = np.stack(stack)
        weights = np.where(np.isnan(held), 0.0, np.array([u[2] for u in updates]).reshape(-1, *[1] * (held.ndim - 1)))
        total = weights.sum(axis=0)
        mean = (np.nan_to_num(held) * weights).sum(axis=0) / np.where(total > 0, total, 1)
        wanted = np.where(total > 0, mean, previous[name])
        np.testing.assert_allclose(result[name], wanted, rtol=2e-7, atol=0)
        assert result[name].shape == previous[name].shape


def test_full_devices_are_fedavg(small):
    """p = 1 for all: numpy's weighted mean, up to the rounding of the result to float32."""
    updates = updates_of(small, [None, 1.0, None, 1.0])
    result = fold(small, packed(small, updates), initial_values(small, 0))
    for name, tensor in result.items():
        stack = np.stack([dense[name].astype(np.float64) for dense, _, _ in updates])
        wanted = np.average(stack, axis=0, weights=[examples for _, _, examples in updates])
        np.testing.assert_allclose(tensor, wanted, rtol=1.2e-7, atol=1e-12)


def test_one_device_alone_is_returned_as_it_sent(small):
    ((dense, mask, examples),) = updates_of(small, [0.5])
    previous = initial_values(small, 0)
    result = fold(small, packed(small, [(dense, mask, examples)]), previous)
    np.testing.assert_array_equal(pack(small, result, mask), pack(small, dense, mask))


def test_the_same_order_gives_the_same_bits(small):
    updates = packed(small, updates_of(small, [0.2, 0.4, 0.6, 0.8, None]))
    previous = initial_values(small, 0)
    first, again = (fold(small, updates, previous) for _ in range(2))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    backwards = fold(small, updates[::-1], previous)
    for name in first:
        np.testing.assert_allclose(backwards[name], first[name], rtol=3e-7, atol=1e-12)


def test_folding_and_closing_leave_their_inputs_alone(small):
    ((values, mask, examples),) = packed(small, updates_of(small, [None]))
    previous = initial_values(small, 0)
    before = values.copy(), {name: tensor.copy() for name, tensor in previous.items()}
    fold(small, [(values, mask, examples)], previous)
    assert values.tobytes() == before[0].tobytes()
    assert all(previous[name].tobytes() == before[1][name].tobytes() for name in previous)


def test_large_weights_do_not_overflow():
    largest = np.full(5, 3.4e38, dtype=np.float32)
    result = fold(VECTOR, [(largest, None, 2**40), (largest, None, 2**40)], OLD)["w"]
    assert result.tolist() == largest.tolist()


def test_memory_does_not_grow_with_the_number_of_updates():
    manifest = Manifest(
        task="large",
        input_shape=(500,),
        output_shape=(400,),
        tensors=(TensorSpec(name="w", shape=(400, 500), axes=((Segment(group="h"),), ())),),
        groups=(NeuronGroup(name="h", size=400),),
    )
    mask = NeuronMask({"h": np.arange(0, 400, 2)})
    values = np.ones(200 * 500, dtype=np.float32)

    def peak(count):
        tracemalloc.start()
        sums = MaskedSums(manifest)
        for _ in range(count):
            sums.fold_in_place(values, mask, 10)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = peak(2), peak(60)
    assert many < few + 20_000
    # One model in float64 for numerators and weights each at most, and one update in float64 thrice while it is added.
    assert many < 8 * (2 * manifest.shared_values + 3 * len(values)) + 100_000
