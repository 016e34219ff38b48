"""Masks against numbers worked out by hand, and pack/merge as inverses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, NeuronGroup, Segment, TensorSpec
from sparrow.protocol.masks import (
    NeuronDraw,
    NeuronMask,
    active_count,
    block_of,
    check_mask,
    count_values,
    draw_group,
    draw_neurons,
    merge_in_place,
    pack,
)


def spec(name, shape, *axes, trainable=True):
    """A tensor whose axes are given as None, "group" or ("group", repeat)."""
    segments = [
        ()
        if axis is None
        else (Segment(group=axis),)
        if isinstance(axis, str)
        else (Segment(group=axis[0], repeat=axis[1]),)
        for axis in axes
    ]
    segments += [()] * (len(shape) - len(segments))
    return TensorSpec(name=name, shape=shape, axes=tuple(segments), trainable=trainable)


def batch_norm(name, group, size):
    return [
        spec(f"{name}.weight", (size,), group),
        spec(f"{name}.bias", (size,), group),
        spec(f"{name}.running_mean", (size,), group, trainable=False),
        spec(f"{name}.running_var", (size,), group, trainable=False),
    ]


def manifest(tensors, **groups):
    return Manifest(
        task="vector",
        input_shape=(1,),
        output_shape=(1,),
        tensors=tuple(tensors),
        groups=tuple(NeuronGroup(name=name, size=size) for name, size in groups.items()),
    )


def mask(**active):
    return NeuronMask({group: np.array(index) for group, index in active.items()})


def active_entries(model, name, chosen):
    """The bool mask of one tensor, written through its block."""
    tensor = next(tensor for tensor in model.tensors if tensor.name == name)
    entries = np.zeros(tensor.shape, dtype=bool)
    block = block_of(model, tensor, chosen)
    block.put(entries, np.ones(block.shape, dtype=bool))
    return entries


MLP = manifest(
    [spec("W1", (4, 3), "h"), spec("b1", (4,), "h"), spec("W2", (2, 4), None, "h"), spec("b2", (2,))],
    h=4,
)

FLATTENED = manifest(
    [
        spec("conv1.weight", (3, 1, 3, 3), "conv1"),
        spec("conv1.bias", (3,), "conv1"),
        *batch_norm("bn1", "conv1", 3),
        spec("conv2.weight", (4, 3, 3, 3), "conv2", "conv1"),
        spec("conv2.bias", (4,), "conv2"),
        *batch_norm("bn2", "conv2", 4),
        spec("fc1.weight", (5, 16), "fc1", ("conv2", 4)),
        spec("fc1.bias", (5,), "fc1"),
        spec("out.weight", (2, 5), None, "fc1"),
        spec("out.bias", (2,)),
    ],
    conv1=3,
    conv2=4,
    fc1=5,
)

CIFAR10 = manifest(
    [
        spec("conv1.weight", (6, 3, 3, 3), "conv1"),
        spec("conv1.bias", (6,), "conv1"),
        *batch_norm("bn1", "conv1", 6),
        spec("conv2.weight", (16, 6, 3, 3), "conv2", "conv1"),
        spec("conv2.bias", (16,), "conv2"),
        *batch_norm("bn2", "conv2", 16),
        spec("fc1.weight", (120, 1024), "fc1", ("conv2", 64)),
        spec("fc2.weight", (84, 120), "fc2", "fc1"),
        spec("out.weight", (10, 84), None, "fc2"),
        spec("out.bias", (10,)),
    ],
    conv1=6,
    conv2=16,
    fc1=120,
    fc2=84,
)


def trainable_values(model, chosen):
    return sum(block_of(model, tensor, chosen).size for tensor in model.tensors if tensor.trainable)


def test_v1_masks_of_a_perceptron():
    chosen = mask(h=[0, 2])
    assert active_entries(MLP, "W1", chosen).astype(int).tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert active_entries(MLP, "b1", chosen).astype(int).tolist() == [1, 0, 1, 0]
    assert active_entries(MLP, "W2", chosen).astype(int).tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]
    assert active_entries(MLP, "b2", chosen).astype(int).tolist() == [1, 1]
    assert count_values(MLP, chosen) == 14
    assert count_values(MLP, None) == MLP.shared_values == 26


def test_v2_channels_expand_to_columns_behind_a_flatten():
    chosen = mask(conv1=[1], conv2=[0, 3], fc1=[2, 4])
    assert active_entries(FLATTENED, "conv1.weight", chosen).sum() == 9
    assert active_entries(FLATTENED, "conv2.weight", chosen).sum() == 18
    fc1 = active_entries(FLATTENED, "fc1.weight", chosen)
    assert np.flatnonzero(fc1.any(axis=0)).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert np.flatnonzero(fc1.any(axis=1)).tolist() == [2, 4]
    assert fc1.sum() == 16
    assert active_entries(FLATTENED, "out.weight", chosen).sum() == 4
    assert trainable_values(FLATTENED, chosen) == 60
    assert trainable_values(FLATTENED, None) == FLATTENED.trainable_values == 253
    assert count_values(FLATTENED, chosen) == 66
    assert count_values(FLATTENED, None) == 267
    bitmap = sum(FLATTENED.group_sizes.values())
    assert bitmap == 12
    assert bitmap + 32 * count_values(FLATTENED, chosen) == 2124


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (3, [1, 1, 1, 2, 3]),
        (6, [1, 2, 3, 4, 6]),
        (16, [3, 6, 9, 12, 16]),
        (20, [4, 8, 12, 16, 20]),
        (84, [16, 33, 50, 67, 84]),
        (120, [24, 48, 72, 96, 120]),
    ],
)
def test_v3_ratio_to_count(size, counts):
    assert [active_count(size, ratio) for ratio in (0.2, 0.4, 0.6, 0.8, 1.0)] == counts


@pytest.mark.parametrize(("ratio", "count"), [(0.29, 29), (0.57, 57)])
def test_v3_binary_floats_cost_no_neuron(ratio, count):
    assert int(100 * ratio) == count - 1
    assert active_count(100, ratio) == count


def test_ratios_from_099_on_count_as_one():
    assert active_count(1000, 0.99) == 1000
    assert active_count(1000, 0.989) == 989


def test_v7_wire_size_of_the_cifar10_model():
    chosen = draw_neurons(CIFAR10, NeuronDraw("device", 0.4))
    counts = [len(chosen.active[group]) for group in CIFAR10.group_sizes]
    assert counts == [2, 6, 48, 33]
    assert trainable_values(CIFAR10, chosen) == 20542
    assert count_values(CIFAR10, chosen) == 20558
    sizes = CIFAR10.group_sizes.values()
    assert sum(sizes) == 226
    assert sum(count * math.ceil(math.log2(size)) for count, size in zip(counts, sizes, strict=True)) == 597
    assert sum(sizes) + 32 * count_values(CIFAR10, chosen) == 658082
    assert CIFAR10.trainable_values == 134_902
    assert 4 * CIFAR10.shared_values == 539_784


@pytest.mark.parametrize(
    ("key", "layer", "size", "ratio", "active"),
    [
        ("dev-7-3", "conv1", 6, 0.4, [0, 1]),
        ("dev-7-3", "conv2", 16, 0.4, [0, 3, 5, 6, 8, 10]),
        ("dev-7-4", "conv1", 6, 0.4, [2, 3]),
        ("dev-8-3", "conv1", 6, 0.4, [2, 4]),
        ("dev-0-1", "conv1", 20, 0.2, [1, 3, 8, 10]),
        ("dev-0-1", "conv2", 20, 0.2, [12, 13, 14, 15]),
    ],
)
def test_v8_deterministic_draw(key, layer, size, ratio, active):
    assert draw_group(NeuronDraw(key, ratio), layer, size).tolist() == active


def test_a_draw_rejects_what_would_make_it_ambiguous():
    with pytest.raises(ValueError, match="ratio is 0"):
        NeuronDraw("device", 0)
    with pytest.raises(ValueError, match="may not contain"):
        NeuronDraw("a|b", 0.5)


@pytest.mark.parametrize(
    "wrong", [{"h": [0], "k": [0]}, {"h": []}, {"h": [4]}, {"h": [-1]}, {"h": [1, 0]}, {"h": [1, 1]}]
)
def test_a_mask_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ManifestError):
        check_mask(MLP, NeuronMask({group: np.array(index, dtype=np.intp) for group, index in wrong.items()}))


def test_concatenated_columns_keep_their_order():
    joined = manifest(
        [
            TensorSpec(
                name="fc.weight",
                shape=(2, 8),
                axes=((), (Segment(group="a", repeat=2), Segment(group="b"), Segment(group="b"))),
            )
        ],
        a=2,
        b=2,
    )
    values = {"fc.weight": np.arange(16, dtype=np.float32).reshape(2, 8)}
    assert pack(joined, values, mask(a=[1], b=[0])).tolist() == [2, 3, 4, 6, 10, 11, 12, 14]


@st.composite
def masks_of(draw, model):
    return NeuronMask(
        {
            group: np.array(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
            for group, size in model.group_sizes.items()
        }
    )


def numbered(model, start):
    values = np.arange(start, start + model.shared_values, dtype=np.float32)
    parts = np.split(values, np.cumsum([tensor.size for tensor in model.shared])[:-1])
    return {tensor.name: part.reshape(tensor.shape) for tensor, part in zip(model.shared, parts, strict=True)}


@given(chosen=masks_of(FLATTENED))
def test_pack_then_merge_moves_exactly_the_active_values(chosen):
    source, target = numbered(FLATTENED, 1000), numbered(FLATTENED, 0)
    before = {name: tensor.copy() for name, tensor in target.items()}
    packed = pack(FLATTENED, source, chosen)
    merge_in_place(FLATTENED, target, packed, chosen)
    for name, tensor in target.items():
        active = active_entries(FLATTENED, name, chosen)
        np.testing.assert_array_equal(tensor, np.where(active, source[name], before[name]))
    np.testing.assert_array_equal(pack(FLATTENED, target, chosen), packed)


@given(chosen=masks_of(FLATTENED))
def test_values_are_packed_tensor_by_tensor_and_row_major(chosen):
    source = numbered(FLATTENED, 0)
    wanted = np.concatenate([source[t.name][active_entries(FLATTENED, t.name, chosen)] for t in FLATTENED.shared])
    np.testing.assert_array_equal(pack(FLATTENED, source, chosen), wanted)
