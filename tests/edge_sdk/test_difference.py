"""A personal model as its difference from a shared one: nothing is lost, and what has not changed costs nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.device import difference
from sparrow.protocol.errors import BundleError


def stored_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def assert_same(found, wanted):
    """The same tensors, bit for bit."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.fixture
def reference():
    random = np.random.default_rng(1)
    return {
        "conv.weight": random.normal(size=(8, 4, 3, 3)).astype(np.float32),
        "conv.bias": np.zeros(8, np.float32),
        "scale": np.array(1.5, np.float32),
        "none": np.zeros((0, 3), np.float32),
        "steps": np.array(3, np.int64),
    }


def copied(reference):
    return {name: tensor.copy() for name, tensor in reference.items()}


def test_an_unchanged_model_stores_only_values_that_are_not_floats(reference):
    found = difference.subtract(copied(reference), reference)
    assert set(found) == {"steps"}
    assert_same(difference.add(found, reference), reference)


def test_a_model_that_has_changed_everywhere_is_stored_whole(reference):
    tensors = {name: tensor + 1 for name, tensor in copied(reference).items() if tensor.size}
    tensors |= {"steps": np.array(4, np.int64), "scale": np.array(9, np.float32), "none": reference["none"]}
    found = difference.subtract(tensors, reference)
    assert set(found) == {"conv.weight", "conv.bias", "scale", "steps"}
    assert_same(difference.add(found, reference), tensors)


def test_a_part_that_has_changed_costs_a_bit_a_value_and_its_values(reference):
    tensors = copied(reference)
    tensors["conv.weight"][2] += 1  # a neuron: 36 of 288 values
    found = difference.subtract(tensors, reference)
    assert set(found) == {"conv.weight:where", "conv.weight:values", "steps"}
    assert stored_bytes(found) == 288 // 8 + 36 * 4 + 8
    assert_same(difference.add(found, reference), tensors)


def test_no_difference_is_larger_than_the_model_itself(reference):
    size = reference["conv.weight"].size
    for changed in range(size + 1):
        tensors = copied(reference)
        tensors["conv.weight"].reshape(-1)[:changed] += 1
        found = difference.subtract(tensors, reference)
        assert stored_bytes(found) <= stored_bytes(tensors), changed
        assert_same(difference.add(found, reference), tensors)


def test_signs_of_zero_and_values_that_are_no_numbers_come_back_bit_for_bit(reference):
    reference["conv.bias"][:3] = [np.nan, 0.0, -0.0]
    tensors = copied(reference)
    tensors["conv.bias"][1:5] = [-0.0, 0.0, np.nan, np.inf]
    found = difference.subtract(tensors, reference)
    assert np.unpackbits(found["conv.bias:where"]).tolist() == [0, 1, 1, 1, 1, 0, 0, 0], "NaN is what it was"
    assert_same(difference.add(found, reference), tensors)


def test_a_tensor_that_the_reference_lacks_is_stored_whole(reference):
    tensors = {**copied(reference), "bn.running_mean": np.zeros(8, np.float32)}
    found = difference.subtract(tensors, reference)
    assert_same({"bn.running_mean": found["bn.running_mean"]}, {"bn.running_mean": np.zeros(8, np.float32)})
    assert_same(difference.add(found, reference), tensors)


def test_the_layout_of_neither_in_memory_matters(reference):
    """Tensors of torch may lie channels last; what is added into must be written where it is read."""
    tensors = copied(reference)
    tensors["conv.weight"][:, 1] -= 1
    for turn in (tensors, reference):
        turn["conv.weight"] = np.asfortranarray(turn["conv.weight"])
        assert_same(difference.add(difference.subtract(tensors, reference), reference), tensors)


def test_what_is_given_back_can_be_trained_on_without_touching_the_reference(reference):
    before = copied(reference)
    found = difference.add(difference.subtract(copied(reference), reference), reference)
    for tensor in found.values():
        tensor[...] = 7
    assert_same(reference, before)


@pytest.mark.parametrize("lost", ["conv.weight:where", "conv.weight:values"])
def test_a_difference_that_lacks_a_half_is_refused(reference, lost):
    tensors = copied(reference)
    tensors["conv.weight"][2] += 1
    found = difference.subtract(tensors, reference)
    del found[lost]
    with pytest.raises(BundleError, match=r"conv\.weight"):
        difference.add(found, reference)


def test_a_difference_from_another_model_is_refused(reference):
    tensors = copied(reference)
    tensors["conv.weight"].reshape(-1)[-3:] += 1  # positions that a smaller tensor does not have
    found = difference.subtract(tensors, reference)
    with pytest.raises(BundleError, match=r"conv\.weight: .*"):
        difference.add(found, {**reference, "conv.weight": np.zeros((4, 4, 3, 3), np.float32)})


FLOATS = st.lists(st.floats(width=32), min_size=24, max_size=24)


@settings(max_examples=60, deadline=None)
@given(FLOATS, FLOATS, st.lists(st.booleans(), min_size=24, max_size=24))
def test_whatever_is_subtracted_is_there_when_it_is_added(before, after, changed):
    reference = {"w": np.array(before, np.float32).reshape(2, 3, 4)}
    tensors = {
        "w": np.where(np.reshape(changed, (2, 3, 4)), np.array(after, np.float32).reshape(2, 3, 4), reference["w"])
    }
    assert_same(difference.add(difference.subtract(tensors, reference), reference), tensors)
