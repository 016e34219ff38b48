"""int8 updates: right to one scale, right on average, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask, everything
from sparrow.protocol.manifest import Layer, Manifest, NeuronGroup, Segment, TensorSpec
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, count_values, draw_neurons
from sparrow.protocol.quantization import LARGEST, Quantised, quantise, row_lengths

NETWORKS = ("digits", "mnist:fedsgc", "har")

FLATTENED_VECTOR = Manifest(
    task="flattened",
    input_shape=(1, 2, 2),
    output_shape=(2,),
    tensors=(
        TensorSpec(name="conv.weight", shape=(3, 1, 1, 1), axes=((Segment(group="conv"),), (), (), ())),
        TensorSpec(name="norm.weight", shape=(12,), axes=((Segment(group="conv", repeat=4),),)),
        TensorSpec(name="out.weight", shape=(2, 12), axes=((), (Segment(group="conv", repeat=4),))),
    ),
    groups=(NeuronGroup(name="conv", size=3),),
    layers=(Layer(name="out", kind="linear", tensors=("out.weight",)),),
)
"""A batch norm behind a flatten: a vector whose entries channels own four by four."""


def rows(*lengths):
    return np.array(lengths, dtype=np.intp)


def noise(count, seed=0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=count) * scale).astype(np.float32)


# --- rows --------------------------------------------------------------------------------------------------------


def slow_row_lengths(manifest, mask):
    """Put a mark on every packed value, and count marks row by row."""
    lengths = []
    for spec in manifest.shared:
        marks = np.zeros(spec.shape, dtype=bool)
        block = block_of(manifest, spec, mask)
        block.put(marks, np.ones(block.shape, dtype=bool))
        counts = marks.reshape(spec.shape[0], -1).sum(1) if len(spec.shape) > 1 else np.array([marks.sum()])
        lengths.extend(int(count) for count in counts if count)
    return lengths


def masks_of(manifest):
    generator = np.random.default_rng(0)
    sparse = {spec.name: generator.random(spec.shape) < 0.05 for spec in manifest.maskable}
    gone = {
        name: flags & (np.arange(len(flags)) % 3 > 0).reshape(-1, *[1] * (flags.ndim - 1))
        for name, flags in sparse.items()
    }
    return {
        "all": None,
        "neurons": draw_neurons(manifest, NeuronDraw("pi", 0.4)),
        "all elements": everything(manifest),
        "elements": ElementMask(sparse),
        "elements without whole rows": ElementMask(gone),
        "no element": ElementMask({name: np.zeros_like(flags) for name, flags in sparse.items()}),
    }


@pytest.mark.parametrize(
    "kind", ["all", "neurons", "all elements", "elements", "elements without whole rows", "no element"]
)
@pytest.mark.parametrize(
    "manifest", [*(load_builtin(name).manifest for name in NETWORKS), FLATTENED_VECTOR], ids=lambda each: each.task
)
def test_rows_are_output_neurons_and_vectors_are_one(manifest, kind):
    mask = masks_of(manifest)[kind]
    lengths = row_lengths(manifest, mask)
    assert lengths.tolist() == slow_row_lengths(manifest, mask)
    assert lengths.sum() == count_values(manifest, mask)
    assert (lengths > 0).all()


def test_a_vector_behind_a_flatten_is_one_row_like_any_other():
    assert row_lengths(FLATTENED_VECTOR, None).tolist() == [1, 1, 1, 12, 12, 12]
    narrow = NeuronMask({"conv": np.array([0, 2])})
    assert row_lengths(FLATTENED_VECTOR, narrow).tolist() == [1, 1, 8, 8, 8]


def test_a_manifest_without_shared_values_has_no_rows():
    personal = Manifest(
        task="own", input_shape=(1,), output_shape=(1,), tensors=(TensorSpec(name="w", shape=(2,), policy="personal"),)
    )
    assert row_lengths(personal, None).tolist() == []
    empty = quantise(np.zeros(0, dtype=np.float32), row_lengths(personal, None), 0)
    assert (len(empty.numbers), len(empty.scales)) == (0, 0)
    assert empty.values(row_lengths(personal, None)).tolist() == []


# --- rounding ----------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_value_is_wrong_by_more_than_its_scale(data):
    lengths = rows(*data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)))
    exponents = st.sampled_from([-30, -6, 0, 3, 30])
    scale = np.repeat([10.0 ** data.draw(exponents) for _ in lengths], lengths)
    values = (noise(lengths.sum(), data.draw(st.integers(0, 999))) * scale).astype(np.float32)
    found = quantise(values, lengths, data.draw(st.integers(0, 2**63 - 1)))
    assert found.numbers.dtype == np.int8
    assert found.scales.dtype == np.float32
    assert np.abs(found.numbers.astype(int)).max() <= LARGEST
    wrong = np.abs(found.values(lengths).astype(np.float64) - values)
    # A hair more than one scale: the quotient and the product are rounded to float32.
    assert (wrong <= np.repeat(found.scales.astype(np.float64), lengths) * (1 + 1e-4)).all()


def test_the_largest_of_a_row_is_its_scales_127():
    values = np.array([0.5, -2.0, 1.0, 0.0, 3.0], dtype=np.float32)
    found = quantise(values, rows(3, 2), 0)
    np.testing.assert_allclose(found.scales, [2 / 127, 3 / 127], rtol=1e-6)
    assert found.numbers[[1, 4]].tolist() == [-127, 127]
    assert found.numbers[3] == 0


def test_whole_scales_stay_as_they_are_whatever_the_seed():
    values = np.arange(-127, 128, dtype=np.float32) / 4
    for seed in range(20):
        found = quantise(values, rows(255), seed)
        assert found.numbers.tolist() == list(range(-127, 128))
        assert found.values(rows(255)).tolist() == values.tolist()


def test_rounding_is_right_on_average():
    """Over S seeds a mean is wrong by about scale/(2·sqrt(S)) at most: 6 of these for every one of 600 values."""
    values, lengths, seeds = noise(600), rows(100, 200, 300), 400
    total = np.zeros(600)
    for seed in range(seeds):
        total += quantise(values, lengths, seed).values(lengths)
    scales = np.repeat(quantise(values, lengths, 0).scales, lengths)
    error = (total / seeds - values) / scales
    assert np.abs(error).max() < 6 * 0.5 / np.sqrt(seeds)
    assert abs(error.mean()) < 6 * 0.5 / np.sqrt(seeds * 600), "neither up nor down over all"


def test_small_values_beside_a_large_one_are_not_lost_on_average():
    values = np.full(2000, 0.001, dtype=np.float32)
    values[0] = 1.0
    found = quantise(values, rows(2000), 3)
    assert set(found.numbers[1:].tolist()) == {0, 1}
    assert found.values(rows(2000))[1:].mean() == pytest.approx(0.001, rel=0.25)


def test_a_row_of_zeros_has_no_scale():
    found = quantise(np.array([0, 0, 1, 0, -0.0], dtype=np.float32), rows(2, 1, 2), 0)
    assert found.scales.tolist() == [0, pytest.approx(1 / 127), 0]
    assert found.numbers.tolist() == [0, 0, 127, 0, 0]
    assert found.values(rows(2, 1, 2)).tolist() == [0, 0, pytest.approx(1), 0, 0]


def test_the_same_seed_rounds_alike_and_another_does_not():
    values, lengths = noise(1000), rows(400, 600)
    one, again, other = (quantise(values, lengths, seed) for seed in (5, 5, 6))
    assert one.numbers.tobytes() == again.numbers.tobytes()
    assert one.numbers.tobytes() != other.numbers.tobytes()
    assert one.scales.tobytes() == other.scales.tobytes(), "chance decides numbers, not scales"


@pytest.mark.parametrize("largest", [3.4e38, 1e-36])
def test_extreme_values(largest):
    values = np.array([largest, -largest, largest / 2, 0], dtype=np.float32)
    found = quantise(values, rows(4), 0)
    assert found.numbers[[0, 1, 3]].tolist() == [127, -127, 0]
    assert np.isfinite(found.values(rows(4))).all()
    np.testing.assert_allclose(found.values(rows(4)), values, atol=largest / 127)


def test_values_too_small_for_any_scale_are_zero():
    tiny = np.array([1e-45, -1e-45, 1e-45], dtype=np.float32)
    found = quantise(tiny, rows(3), 0)
    assert found.scales.tolist() == [0]
    assert found.values(rows(3)).tolist() == [0, 0, 0]


def test_what_is_rounded_stays_as_it_is():
    values, lengths = noise(50), rows(50)
    before = values.copy()
    quantise(values, lengths, 0)
    assert values.tobytes() == before.tobytes()


def test_values_of_numbers_and_scales_by_hand():
    found = Quantised(np.array([1, -2, 127], np.int8), np.array([0.5, 2], np.float32)).values(rows(2, 1))
    assert found.dtype == np.float32
    assert found.tolist() == [0.5, -1, 254]
