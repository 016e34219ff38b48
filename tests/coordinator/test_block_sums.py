"""Sums of updates under masks of blocks: numbers worked out by hand, and a dense reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparrow.coordinator.sums.averages import BlockSums
from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.masks import blocks, pack

V5 = Manifest(
    task="v5",
    input_shape=(1,),
    output_shape=(1,),
    tensors=(TensorSpec(name="w", shape=(4,)),),
    blocks={"w": (1, 1, 1, 1)},
)
CHANGES = {1: {0: 1.0, 2: 1.0}, 2: {1: 2.0, 2: -1.0}, 3: {0: 3.0, 1: 0.0}, 4: {0: -1.0, 1: 1.0, 2: 2.0}}
"""Device -> block -> Δ; device k has 10 k samples. Device 3 sends a Δ of 0, which counts; nobody sends block 3."""

MIXED = Manifest(
    task="mixed",
    input_shape=(3,),
    output_shape=(2,),
    tensors=(
        TensorSpec(name="a.weight", shape=(4, 3)),
        TensorSpec(name="a.mean", shape=(4,), trainable=False),
        TensorSpec(name="own", shape=(2,), policy="personal", trainable=False),
        TensorSpec(name="b.weight", shape=(2, 4)),
        TensorSpec(name="b.bias", shape=(2,)),
    ),
    blocks={"a.weight": (3, 6, 3), "b.weight": (1, 4, 3), "b.bias": (2,)},
)
"""Seven blocks; the running mean belongs to every update, and ``own`` to none."""


def mask_of(*on):
    return BlockMask(np.array(on, dtype=bool))


@pytest.mark.parametrize("order", list(itertools.permutations(CHANGES)))
@pytest.mark.parametrize(
    ("everybody", "changes"), [(False, [60 / 80, 80 / 90, 70 / 70]), (True, [0.6, 0.8, 0.7])], ids=["touched", "all"]
)
def test_v5(everybody, changes, order):
    previous = {"w": np.array([0.5, -2.0, 8.0, 0.1], dtype=np.float32)}
    sums = BlockSums(V5, everybody=everybody)
    for device in order:
        mask = mask_of(*(block in CHANGES[device] for block in range(4)))
        moved = previous["w"] + np.array([CHANGES[device].get(block, 0) for block in range(4)], dtype=np.float32)
        sums.fold_in_place(pack(V5, {"w": moved}, mask), mask, 10 * device)
    mean = sums.mean(previous)["w"]
    np.testing.assert_allclose(mean[:3] - previous["w"][:3], changes, rtol=1e-6)
    assert mean[3:].tobytes() == previous["w"][3:].tobytes()
    assert sums.touched.tolist() == [True, True, True, False]
    assert sums.updates == 4


def drawn(seed):
    """(tensors, mask, samples) of one device."""
    chance = np.random.default_rng(seed)
    tensors = {spec.name: chance.normal(size=spec.shape).astype(np.float32) for spec in MIXED.shared}
    on = chance.random(7) < 0.5
    on[4] = False
    return tensors, BlockMask(on) if seed % 3 else None, int(chance.integers(1, 5000))


@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("seeds", [(1,), (1, 2), (1, 2, 4, 5), (0, 1, 2, 3), (0,)])
def test_any_mixture_of_masks_agrees_with_a_dense_reference(seeds, everybody):
    """Seeds that are multiples of three send everything, without a mask."""
    previous, *_ = drawn(99)
    sums = BlockSums(MIXED, everybody=everybody)
    numerators = {spec.name: np.zeros(spec.shape) for spec in MIXED.shared}
    weights = {spec.name: np.zeros(spec.shape) for spec in MIXED.shared}
    total = 0
    for seed in seeds:
        tensors, mask, samples = drawn(seed)
        values = pack(MIXED, tensors, mask)
        sums.fold_in_place(values, mask, samples)
        assert values.tobytes() == pack(MIXED, tensors, mask).tobytes(), "folding leaves its inputs alone"
        total += samples
        for spec, block in blocks(MIXED, mask):
            flags = np.zeros(spec.shape)
            block.add(flags, 1.0)
            numerators[spec.name] += samples * flags * tensors[spec.name].astype(np.float64)
            weights[spec.name] += samples * flags
    mean = sums.mean(previous)
    assert list(mean) == [spec.name for spec in MIXED.shared]
    for name, weight in weights.items():
        old, divisor = previous[name].astype(np.float64), total if everybody else np.maximum(weight, 1)
        wanted = (numerators[name] + (divisor - weight) * old * everybody) / divisor
        assert (mean[name].dtype, mean[name].shape) == (np.float32, previous[name].shape)
        np.testing.assert_allclose(mean[name][weight > 0], wanted[weight > 0], rtol=2e-7, atol=1e-9)
        assert mean[name][weight == 0].tobytes() == previous[name][weight == 0].tobytes()


def test_a_single_devices_blocks_are_returned_bit_for_bit():
    tensors, mask, _ = drawn(1)
    sums = BlockSums(MIXED)
    sums.fold_in_place(pack(MIXED, tensors, mask), mask, 4999)
    mean = sums.mean(drawn(2)[0])
    assert pack(MIXED, mean, mask).tobytes() == pack(MIXED, tensors, mask).tobytes()


def test_large_values_and_weights_do_not_overflow():
    sums = BlockSums(MIXED)
    for _ in range(2):
        sums.fold_in_place(np.full(MIXED.shared_values, 3.4e38, dtype=np.float32), None, 2**40)
    mean = sums.mean(drawn(0)[0])
    assert all((tensor == np.float32(3.4e38)).all() for tensor in mean.values())
