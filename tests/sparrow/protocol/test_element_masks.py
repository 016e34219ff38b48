"""Masks of elements: bits and differences there and back, and packing under them against plain dense indexing."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import (
    ElementMask,
    Points,
    apply_difference,
    check_elements,
    difference,
    everything,
    from_bits,
)
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import (
    NeuronMask,
    block_of,
    check_mask,
    count_values,
    merge_in_place,
    pack,
    same_mask,
    unpack,
)

MIXED = Manifest(
    task="mixed",
    input_shape=(2, 6, 6),
    output_shape=(3,),
    tensors=(
        TensorSpec(name="conv.weight", shape=(4, 2, 3, 3)),
        TensorSpec(name="conv.bias", shape=(4,)),
        TensorSpec(name="norm.running_mean", shape=(4,), trainable=False),
        TensorSpec(name="norm.count", shape=(), dtype="int64", policy="dropped", trainable=False),
        TensorSpec(name="table.weight", shape=(5, 3)),
        TensorSpec(name="own.weight", shape=(2, 2), policy="personal"),
        TensorSpec(name="frozen.weight", shape=(2, 2), trainable=False),
        TensorSpec(name="out.weight", shape=(3, 7)),
        TensorSpec(name="out.bias", shape=(3,)),
    ),
    layers=(
        Layer(name="conv", kind="conv2d", tensors=("conv.weight", "conv.bias")),
        Layer(name="table", kind="embedding", tensors=("table.weight",)),
        Layer(name="own", kind="linear", tensors=("own.weight",)),
        Layer(name="frozen", kind="linear", tensors=("frozen.weight",)),
        Layer(name="out", kind="linear", tensors=("out.weight", "out.bias")),
    ),
)
"""Maskable are conv.weight (72) and out.weight (21), and nothing between them."""

NOTHING_MASKABLE = Manifest(
    task="none", input_shape=(1,), output_shape=(1,), tensors=(TensorSpec(name="w", shape=(3,)),)
)


def line(*sizes):
    """A model of linear layers a, b, ... with one output each, of so many weights."""
    names = [f"{letter}.weight" for letter in "abcdef"[: len(sizes)]]
    return Manifest(
        task="line",
        input_shape=(1,),
        output_shape=(1,),
        tensors=tuple(TensorSpec(name=name, shape=(1, size)) for name, size in zip(names, sizes, strict=True)),
        layers=tuple(Layer(name=name[0], kind="linear", tensors=(name,)) for name in names),
    )


def at(manifest, *positions):
    """The mask of these positions, counted over all maskable weights."""
    flags = np.zeros(sum(spec.size for spec in manifest.maskable), dtype=bool)
    flags[list(positions)] = True
    ends = np.cumsum([spec.size for spec in manifest.maskable])[:-1]
    return ElementMask(
        {
            spec.name: part.reshape(spec.shape)
            for spec, part in zip(manifest.maskable, np.split(flags, ends), strict=True)
        }
    )


def some(manifest, density, seed=0):
    generator = np.random.default_rng(seed)
    return ElementMask({spec.name: generator.random(spec.shape) < density for spec in manifest.maskable})


def same_elements(one, other):
    return list(one.exists) == list(other.exists) and all(
        np.array_equal(flags, other.exists[name]) and flags.shape == other.exists[name].shape
        for name, flags in one.exists.items()
    )


# --- what a mask says of itself ----------------------------------------------------------------------------------


def test_maskable_are_trained_and_shared_weights_of_layers_that_multiply():
    assert [spec.name for spec in MIXED.maskable] == ["conv.weight", "out.weight"]
    assert NOTHING_MASKABLE.maskable == ()


def test_counts_index_and_bits_of_a_small_mask():
    mask = at(line(3, 6), 0, 2, 3, 8)
    assert mask.counts == {"a.weight": 2, "b.weight": 2}
    assert (mask.count, mask.size) == (4, 9)
    assert {name: index.tolist() for name, index in mask.index.items()} == {"a.weight": [0, 2], "b.weight": [0, 5]}
    assert mask.bits == bytes([0b10110000, 0b10000000])
    assert mask.digest == hashlib.sha256(mask.bits).hexdigest()


@pytest.mark.parametrize("density", [0.0, 0.3, 1.1])
@pytest.mark.parametrize(
    "manifest", [MIXED, line(1), line(8), line(7, 2), NOTHING_MASKABLE], ids=lambda each: each.task
)
def test_bits_there_and_back(manifest, density):
    mask = some(manifest, density)
    assert len(mask.bits) == math.ceil(mask.size / 8)
    read = from_bits(manifest, mask.bits)
    check_elements(manifest, read)
    assert same_elements(read, mask)
    assert read.digest == mask.digest
    assert all(flags.flags.c_contiguous for flags in read.exists.values())


def test_the_digest_tells_masks_apart_whichever_single_element_differs():
    manifest = line(5, 6)
    masks = [at(manifest), *(at(manifest, position) for position in range(11))]
    assert len({mask.digest for mask in masks}) == 12
    assert at(manifest, 3, 9).digest == at(manifest, 9, 3).digest
    assert same_mask(at(manifest, 3), at(manifest, 3))
    assert not same_mask(at(manifest, 3), at(manifest, 4))


def test_a_mask_of_everything_is_still_not_the_absence_of_a_mask():
    """The two pack alike; but who holds a mask and who does not must not be taken for the same."""
    mask = everything(MIXED)
    assert mask.count == mask.size == 93
    assert not same_mask(mask, None)
    assert not same_mask(None, mask)
    assert not same_mask(mask, NeuronMask({}))
    assert not same_mask(NeuronMask({}), mask)


@pytest.mark.parametrize(
    ("exists", "said"),
    [
        ({}, r"the mask has the tensors \[\], but the maskable ones are"),
        ({"out.weight": np.ones((3, 7), bool), "conv.weight": np.ones((4, 2, 3, 3), bool)}, "the maskable ones are"),
        ({"conv.weight": np.ones((4, 18), bool), "out.weight": np.ones((3, 7), bool)}, "give booleans of"),
        ({"conv.weight": np.ones((4, 2, 3, 3), np.uint8), "out.weight": np.ones((3, 7), bool)}, "a mask of uint8"),
    ],
    ids=["none", "another order", "another shape", "no booleans"],
)
def test_masks_of_another_model_are_refused(exists, said):
    with pytest.raises(ManifestError, match=said):
        check_mask(MIXED, ElementMask(exists))


@pytest.mark.parametrize(
    ("manifest", "data", "said"),
    [
        (line(9), b"\0", "the mask has 1 bytes, but 9 weights need 2"),
        (line(9), b"\0\0\0", "the mask has 3 bytes, but 9 weights need 2"),
        (line(9), b"", "the mask has 0 bytes, but 9 weights need 2"),
        (line(9), b"\0\x40", "padding bits must be zero"),
        (line(9), b"\0\x01", "padding bits must be zero"),
        (NOTHING_MASKABLE, b"\0", "the mask has 1 bytes, but 0 weights need 0"),
    ],
)
def test_bits_that_do_not_fit_are_refused(manifest, data, said):
    with pytest.raises(ManifestError, match=said):
        from_bits(manifest, data)


# --- differences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "encoded"),
    [
        ([], []),
        ([0], [0]),
        ([0, 1, 2], [0, 0, 0]),
        ([254], [254]),
        ([255], [255, 0]),
        ([256], [255, 1]),
        ([509], [255, 254]),
        ([510], [255, 255, 0]),
        ([3, 259], [3, 255, 0]),
        ([999], [255, 255, 255, 234]),
    ],
)
def test_a_difference_is_the_distances_between_what_differs(positions, encoded):
    manifest = line(300, 700)
    old = some(manifest, 0.5)
    new = ElementMask({name: flags ^ at(manifest, *positions).exists[name] for name, flags in old.exists.items()})
    assert list(difference(old, new)) == encoded
    assert same_elements(apply_difference(manifest, old, bytes(encoded)), new)


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_difference_leads_from_old_to_new(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 7, 254, 255, 256, 511, 1300]), min_size=1, max_size=4))
    manifest = line(*sizes)
    densities = st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.1])
    old = some(manifest, data.draw(densities), data.draw(st.integers(0, 99)))
    changed = some(manifest, data.draw(densities), data.draw(st.integers(100, 199)))
    new = ElementMask({name: flags ^ changed.exists[name] for name, flags in old.exists.items()})
    before, held = old.bits, {name: flags.copy() for name, flags in old.exists.items()}
    encoded = difference(old, new)
    found = apply_difference(manifest, old, encoded)
    assert same_elements(found, new)
    assert found.digest == new.digest
    assert old.bits == before
    assert same_elements(old, ElementMask(held)), "what a difference is applied to stays as it is"
    assert same_elements(apply_difference(manifest, new, difference(new, old)), old)
    assert changed.count <= len(encoded) <= changed.count + sum(sizes) // 255


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([255], "ends within a distance; send the whole file"),
        ([3, 255], "ends within a distance"),
        ([255] * 500, "ends within a distance"),
        ([10], "names position 10, there are 10 weights"),
        ([9, 0], "names position 10, there are 10 weights"),
        ([0] * 11, "names position 10, there are 10 weights"),
        ([255, 0], "names position 255, there are 10 weights"),
        ([255] * 10_000 + [254], "names position 2550254, there are 10 weights"),
    ],
)
def test_differences_that_lead_nowhere_are_refused(data, said):
    manifest = line(4, 6)
    with pytest.raises(ManifestError, match=said):
        apply_difference(manifest, everything(manifest), bytes(data))


def test_any_bytes_are_a_difference_or_refused():
    """No byte string leads to a position twice, nor to anything but a mask of the model."""
    manifest, generator = line(40, 300), np.random.default_rng(0)
    old, outcomes = some(manifest, 0.5), set()
    for _ in range(500):
        data = generator.choice([0, 1, 30, 254, 255], size=generator.integers(0, 12)).astype(np.uint8).tobytes()
        try:
            new = apply_difference(manifest, old, data)
        except ManifestError:
            outcomes.add("refused")
        else:
            check_elements(manifest, new)
            assert difference(old, new) == data, "there is one way to write a difference"
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


def test_without_maskable_weights_there_is_nothing_to_differ():
    nothing = everything(NOTHING_MASKABLE)
    assert difference(nothing, nothing) == b""
    assert apply_difference(NOTHING_MASKABLE, nothing, b"").exists == {}
    with pytest.raises(ManifestError, match="names position 0, there are 0 weights"):
        apply_difference(NOTHING_MASKABLE, nothing, b"\0")


# --- points ------------------------------------------------------------------------------------------------------


def test_points_take_put_and_add_what_lies_at_their_index():
    points = Points((2, 3), np.array([0, 2, 4]))
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (points.size, points.shape) == (3, (3,))
    assert points.take(tensor).tolist() == [0, 2, 4]
    out = np.empty(3, dtype=np.float32)
    points.take_into(tensor, out)
    assert out.tolist() == [0, 2, 4]
    points.put(tensor, np.array([7, 8, 9], dtype=np.float32))
    assert tensor.tolist() == [[7, 1, 8], [3, 9, 5]]
    sums = np.ones((2, 3))
    points.add(sums, np.array([1, 2, 3], dtype=np.float32), scale=0.1)
    points.add(sums, 2.0)
    np.testing.assert_array_equal(sums, [[1 + 0.1 * 1 + 2, 1, 1 + 0.1 * 2 + 2], [1, 1 + 0.1 * 3 + 2, 1]])


def test_sums_are_of_float64_whatever_the_values_are():
    sums = np.zeros(2)
    Points((2,), np.array([1])).add(sums, np.array([0.1], dtype=np.float32), scale=3.0)
    assert sums[1] == float(np.float32(0.1)) * 3.0


# --- packing -----------------------------------------------------------------------------------------------------


def dense_reference(manifest, tensors, mask):
    """Boolean indexing, tensor after tensor."""
    parts = [
        tensors[spec.name][mask.exists[spec.name]] if spec.name in mask.exists else tensors[spec.name].ravel()
        for spec in manifest.shared
    ]
    return np.concatenate(parts)


def numbered(manifest):
    """Every shared value another number."""
    start, tensors = 1, {}
    for spec in manifest.shared:
        tensors[spec.name] = np.arange(start, start + spec.size, dtype=np.float32).reshape(spec.shape)
        start += spec.size
    return tensors


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.1])
@pytest.mark.parametrize("manifest", [MIXED, load_builtin("digits").manifest], ids=["mixed", "digits"])
def test_packing_is_boolean_indexing(manifest, density):
    mask, tensors = some(manifest, density), numbered(manifest)
    packed = pack(manifest, tensors, mask)
    assert packed.dtype == np.float32
    np.testing.assert_array_equal(packed, dense_reference(manifest, tensors, mask))
    assert count_values(manifest, mask) == len(packed)
    assert len(packed) == manifest.shared_values - mask.size + mask.count


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.1])
def test_merging_overwrites_what_exists_alone(density):
    mask, tensors = some(MIXED, density), numbered(MIXED)
    merged = {name: np.array(tensor) for name, tensor in tensors.items()}
    values = -np.arange(count_values(MIXED, mask), dtype=np.float32) - 1
    merge_in_place(MIXED, merged, values, mask)
    np.testing.assert_array_equal(pack(MIXED, merged, mask), values)
    for name, exists in mask.exists.items():
        np.testing.assert_array_equal(merged[name][~exists], tensors[name][~exists])
    assert sum(int((tensor < 0).sum()) for tensor in merged.values()) == len(values)


def test_unpacking_names_each_tensor_with_its_points_and_copies_nothing():
    mask = some(MIXED, 0.4)
    packed = pack(MIXED, numbered(MIXED), mask)
    met = []
    for spec, block, values in unpack(MIXED, packed, mask):
        assert isinstance(block, Points) == (spec.name in mask.exists)
        assert values.shape == block.shape
        assert np.shares_memory(values, packed)
        np.testing.assert_array_equal(values, block.take(numbered(MIXED)[spec.name]))
        met.append(spec.name)
    assert met == [spec.name for spec in MIXED.shared]
    assert block_of(MIXED, MIXED.tensors[0], mask).size == mask.counts["conv.weight"]


def test_a_mask_of_everything_packs_as_no_mask_does():
    manifest = load_builtin("digits").manifest
    tensors = initial_values(manifest, 3)
    np.testing.assert_array_equal(pack(manifest, tensors, everything(manifest)), pack(manifest, tensors, None))


def test_neuron_groups_do_not_matter_to_masks_of_elements(small):
    """Tensors behind a flatten have a view of their own for neurons; elements go by the tensor's plain order."""
    mask = at(small, 0, 13, 71)
    tensors = numbered(small)
    values = {spec.name: part for spec, _, part in unpack(small, pack(small, tensors, mask), mask)}
    assert values["fc.weight"].tolist() == tensors["fc.weight"].ravel()[[0, 13, 71]].tolist()


def test_one_mask_without_another_and_zeros_without_a_sign():
    one, other = (ElementMask({"w": np.array(flags)}) for flags in ([True, True, False], [True, False, True]))
    assert one.without(other).exists["w"].tolist() == [False, True, False]
    applied = one.apply({"w": np.full(3, -2, dtype=np.float32), "b": np.ones(1, dtype=np.float32)})
    assert {name: tensor.tobytes() for name, tensor in applied.items()} == {"w": np.float32([-2, -2, 0]).tobytes()}
