"""Masks of blocks: packing under them against plain dense indexing, and their bundles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.protocol.blocks import BlockMask, BlockTable, Runs
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import MAX_HEADER, decode, encode, largest_bundle
from sparrow.protocol.errors import BundleError, ManifestError
from sparrow.protocol.flops import block_flops, forward_flops
from sparrow.protocol.manifest import Manifest, Segment, TensorSpec, initial_values
from sparrow.protocol.masks import block_of, check_mask, count_values, merge_in_place, pack, same_mask, unpack
from sparrow.protocol.messages import UpdateReport
from sparrow.protocol.quantization import Quantised, quantise, row_lengths

PIPELINE = Manifest(
    task="pipeline",
    input_shape=(1,),
    output_shape=(1,),
    tensors=(TensorSpec(name="a", shape=(4, 5)), TensorSpec(name="b", shape=(6,))),
    blocks={"a": (4, 8, 8), "b": (1, 3, 2)},
)
"""A convolution, a flatten and a linear layer."""


def mask_of(length, *places):
    on = np.zeros(length, dtype=bool)
    on[list(places)] = True
    return BlockMask(on)


def cut(manifest, **how):
    """``manifest`` with all its trainable, shared tensors in blocks."""
    shapes = {spec.name: spec.shape for spec in manifest.shared if spec.trainable}
    return manifest.with_blocks(BlockTable.of(shapes, **how).tensors)


def draw(manifest, seed):
    return BlockMask(np.random.default_rng(seed).random(len(manifest.block_table.sizes)) < 0.5)


def marked(manifest, mask):
    """Name -> which of the tensor's values belong to ``mask``, from the table alone."""
    table = manifest.block_table
    return {
        spec.name: np.repeat(mask.on[table.places[spec.name]], table.tensors[spec.name]).reshape(spec.shape)
        if spec.name in table.tensors
        else np.ones(spec.shape, dtype=bool)
        for spec in manifest.shared
    }


@pytest.fixture(scope="module")
def models(small):
    """The small model, whose batch norm has running statistics that travel; cut through rows, and at rows."""
    return {"cut": cut(small, count=4, smallest_share=0.1), "rows": cut(small, count=3, align_rows=True)}


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "rows"])
@pytest.mark.parametrize("seed", range(5))
def test_packing_is_dense_indexing(models, how, seed):
    manifest = models[how]
    mask, flags = draw(manifest, seed), marked(manifest, draw(manifest, seed))
    one, other = initial_values(manifest, 1), initial_values(manifest, 2)
    packed = pack(manifest, one, mask)
    assert packed.tobytes() == np.concatenate([one[name][on] for name, on in flags.items()]).tobytes()
    assert len(packed) == count_values(manifest, mask) == sum(np.count_nonzero(on) for on in flags.values())
    merged = {name: tensor.copy() for name, tensor in other.items()}
    merge_in_place(manifest, merged, packed, mask)
    for name, on in flags.items():
        assert merged[name].tobytes() == np.where(on, one[name], other[name]).tobytes()
    for spec, block, values in unpack(manifest, packed, mask):
        sums = np.ones(spec.shape)
        block.add(sums, values, scale=3.0)
        np.testing.assert_array_equal(sums, 1 + 3 * np.where(flags[spec.name], one[spec.name].astype(np.float64), 0))
        block.add(sums, 1.0, scale=2.0)
        assert sums.sum() - 2 * block.size == pytest.approx(spec.size + 3 * values.sum(dtype=np.float64))


def test_neighbouring_blocks_are_one_run():
    on = mask_of(3, 0, 1).on
    assert Runs.of((4, 5), (4, 8, 8), on).spans == ((0, 12),)
    assert Runs.of((4, 5), (4, 8, 8), ~on).spans == ((12, 20),)
    assert Runs.of((4, 5), (4, 8, 8), on & False) == Runs((4, 5), ())
    assert Runs.of((4, 5), (4, 8, 8), mask_of(3, 0, 2).on).spans == ((0, 4), (12, 20))


def test_buffers_belong_to_every_mask_of_blocks(models):
    manifest = models["cut"]
    statistics = {spec.name for spec in manifest.shared if not spec.trainable}
    assert statistics
    nothing = mask_of(len(manifest.block_table.sizes))
    assert {spec.name for spec in manifest.shared if block_of(manifest, spec, nothing).size} == statistics
    everything = BlockMask(~nothing.on)
    assert count_values(manifest, everything) == manifest.shared_values
    tensors = initial_values(manifest, 0)
    assert pack(manifest, tensors, everything).tobytes() == pack(manifest, tensors, None).tobytes()


def test_the_same_blocks_are_the_same_mask():
    assert same_mask(mask_of(6, 1), mask_of(6, 1))
    assert not same_mask(mask_of(6, 1), mask_of(6, 2))
    assert not same_mask(mask_of(6, 1), None)


@pytest.mark.parametrize("on", [np.ones(5, bool), np.ones(7, bool), np.ones(6, np.uint8), np.ones((6, 1), bool)])
def test_masks_of_other_models_are_refused(on):
    with pytest.raises(ManifestError, match="for 6 blocks; give booleans of each"):
        check_mask(PIPELINE, BlockMask(on))
    check_mask(PIPELINE, mask_of(6))


# --- manifests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"a": (4, 8, 9)}, "'a' has blocks of 21 values"),
        ({"a": (20,), "c": (6,)}, "'c' has blocks of 6 values"),
        ({"b": ()}, "'b' has blocks of 0 values"),
        ({"b": (6, 0)}, "greater than or equal to 1"),
    ],
)
def test_a_manifest_cuts_whole_trainable_tensors(blocks, said):
    with pytest.raises(ValueError, match=said):
        PIPELINE.with_blocks(blocks)


def test_only_shared_and_trainable_tensors_are_cut(small):
    statistic = next(spec for spec in small.shared if not spec.trainable)
    with pytest.raises(ValueError, match="cut whole, shared, trainable tensors"):
        small.with_blocks({statistic.name: (statistic.size,)})
    private = small.with_private(["out.weight"])
    with pytest.raises(ValueError, match="cut whole, shared, trainable tensors"):
        private.with_blocks({"out.weight": (12,)})


def test_another_table_is_another_model():
    other = PIPELINE.with_blocks({"a": (8, 4, 8), "b": (1, 3, 2)})
    assert other.digest != PIPELINE.digest == Manifest.model_validate_json(PIPELINE.model_dump_json()).digest
    turned = PIPELINE.with_blocks(dict(reversed(PIPELINE.blocks.items())))
    assert list(turned.block_table.tensors) == ["a", "b"], "numbered as the state dict is"
    body = encode(PIPELINE, np.zeros(4, np.float32), mask_of(6, 0))
    with pytest.raises(BundleError, match="made for another model"):
        decode(body, other)


@pytest.mark.parametrize("name", ["digits", "mnist:fedsgc", "har"])
def test_flops_of_blocks_add_up_to_the_models(name):
    manifest = cut(load_builtin(name).manifest)
    flops = block_flops(manifest)
    assert flops.sum() == forward_flops(manifest)
    table = manifest.block_table
    for spec in manifest.shared:
        if len(spec.shape) < 2 and spec.name in table.tensors:
            assert not flops[table.places[spec.name]].any()


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_v8_an_update_of_the_pipeline_model(take_apart):
    """Blocks 0, 1, 3 and 5 of six: 15 of 26 values, a bitmap of one byte, and the samples in the report."""
    mask = mask_of(6, 0, 1, 3, 5)
    tensors = {"a": np.arange(20, dtype=np.float32).reshape(4, 5), "b": np.arange(20, 26, dtype=np.float32)}
    report = UpdateReport(num_examples=30, steps=1, train_loss=0.5).model_dump_json(exclude_defaults=True)
    body = encode(PIPELINE, pack(PIPELINE, tensors, mask), mask, report=report)
    header, data = take_apart(body)
    assert header["__metadata__"]["mask"] == '{"form":"blocks"}'
    assert (len(data), data[-1]) == (4 * 15 + 1, 0b11010100)
    assert len(body) - len(data) < 600
    found = decode(body, PIPELINE)
    assert same_mask(found.mask, mask)
    assert found.values.tolist() == [*range(12), 20, 24, 25]
    assert found.sizes["values"] == 60
    assert found.sizes["mask"] == 1


def test_v8_a_whole_model_of_the_cifar_network():
    manifest = cut(load_builtin("cifar10:pfedgate").manifest)
    body = encode(manifest, np.zeros(manifest.shared_values, np.float32), None)
    assert 0 < len(body) - 1_027_320 < 1000
    assert len(manifest.block_table.sizes) == 50
    assert len(mask_of(50, 0).packed()) == 7


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("how", ["cut", "rows"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_encoded_comes_back(models, how, precision, seed):
    manifest = models[how]
    mask = draw(manifest, seed)
    values = np.random.default_rng(seed).normal(size=count_values(manifest, mask)).astype(np.float32)
    lengths = row_lengths(manifest, mask)
    given = quantise(values, lengths, seed) if precision == "int8" else values
    body = encode(manifest, given, mask, precision=precision)
    found = decode(body, manifest)
    assert same_mask(found.mask, mask)
    assert found.precision == precision
    np.testing.assert_allclose(found.values, values, atol=0.05, rtol=0.01)
    if isinstance(given, Quantised):
        assert found.values.tobytes() == given.values(lengths).tobytes()
    assert len(body) <= largest_bundle(manifest.shared_values, precision, manifest)


@pytest.mark.parametrize("how", ["cut", "rows"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_blocks_are_those_of_the_weights(models, how, seed):
    manifest = models[how]
    mask = draw(manifest, seed)
    wanted = []
    for on in marked(manifest, mask).values():
        rows = on.reshape(len(on), -1).sum(1) if on.ndim > 1 else [on.sum()]
        wanted += [int(count) for count in rows if count]
    assert row_lengths(manifest, mask).tolist() == wanted


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes, but 6 blocks need 1"),
        (b"\xff\x00", "2 bytes, but 6 blocks need 1"),
        (b"\xfe", "padding bits must be zero"),
        (b"\x80", "has 26 values, but its mask covers 4"),
    ],
)
def test_bitmaps_that_do_not_fit_are_refused(data, said, sign, take_apart):
    header, body = take_apart(encode(PIPELINE, np.zeros(26, np.float32), mask_of(6, *range(6))))
    header["mask"] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [104, 104 + len(data)]}
    with pytest.raises(BundleError, match=said):
        decode(sign(header, body[:104] + data), PIPELINE)


def test_the_largest_bundle_has_room_for_the_bitmap():
    """Many small blocks: no bitmap makes an update too large to be read."""
    tensors = (TensorSpec(name="w", shape=(9999,)),)
    manifest = cut(Manifest(task="t", input_shape=(1,), output_shape=(1,), tensors=tensors), count=9999)
    everything = BlockMask(np.ones(9999, dtype=bool))
    body = encode(manifest, np.zeros(9999, np.float32), everything, report="x" * (MAX_HEADER - 1000))
    assert len(body) <= largest_bundle(9999, "fp32", manifest)


@st.composite
def cut_models(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4))
    tensors = tuple(TensorSpec(name=f"t{place}", shape=tuple(shape)) for place, shape in enumerate(shapes))
    blocks = {}
    for spec in draw(st.lists(st.sampled_from(tensors), unique_by=lambda spec: spec.name)):
        ends = draw(st.lists(st.integers(1, spec.size), unique=True).map(sorted))
        ends = [end for end in ends if end < spec.size] + [spec.size]
        blocks[spec.name] = tuple(int(size) for size in np.diff([0, *ends]))
    return Manifest(task="t", input_shape=(1,), output_shape=(1,), tensors=tensors, blocks=blocks)


@given(data=st.data(), manifest=cut_models())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_table_mask_and_values_come_back(data, manifest):
    length = len(manifest.block_table.sizes)
    mask = BlockMask(np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool))
    count = count_values(manifest, mask)
    values = np.arange(count, dtype=np.float32)
    found = decode(encode(manifest, values, mask), manifest)
    assert found.values.tobytes() == values.tobytes()
    assert same_mask(found.mask, mask)
    tensors = {spec.name: np.full(spec.shape, -1, dtype=np.float32) for spec in manifest.shared}
    merge_in_place(manifest, tensors, found.values, found.mask)
    assert pack(manifest, tensors, mask).tobytes() == values.tobytes()
    assert sum(np.count_nonzero(tensor >= 0) for tensor in tensors.values()) == count
    assert row_lengths(manifest, mask).sum() == count


def test_channels_behind_a_flatten_stay_with_their_blocks():
    """A tensor that has no blocks of its own goes whole, though its view is of neurons."""
    tensors = (
        TensorSpec(name="norm", shape=(12,), axes=((Segment(group="conv", repeat=4),),)),
        TensorSpec(name="w", shape=(2, 2)),
    )
    manifest = Manifest(
        task="t",
        input_shape=(1,),
        output_shape=(1,),
        tensors=tensors,
        groups=({"name": "conv", "size": 3},),
        blocks={"w": (2, 2)},
    )
    values = {"norm": np.arange(12, dtype=np.float32), "w": np.arange(4, dtype=np.float32).reshape(2, 2)}
    assert pack(manifest, values, mask_of(2, 1)).tolist() == [*range(12), 2, 3]
    assert row_lengths(manifest, mask_of(2, 1)).tolist() == [12, 2]
