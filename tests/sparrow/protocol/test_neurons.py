"""Masks of first neurons, masks that are kept, and the manifest of a narrow network."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.elements import everything
from sparrow.protocol.errors import BundleError, ManifestError
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import NeuronMask, count_values, pack, same_mask, unpack
from sparrow.protocol.neurons import (
    CLASSES,
    active_count_up,
    first_neurons,
    first_neurons_up,
    fits_ratio,
    mask_digest,
    mask_from_file,
    mask_to_file,
    narrowed,
    with_classes,
)


def mask_of(conv, fc):
    return NeuronMask({"conv": np.array(conv), "fc": np.array(fc)})


@pytest.mark.parametrize(
    ("size", "ratio", "count"),
    [(100, 0.29, 29), (100, 0.57, 57), (6, 0.2, 2), (3, 0.01, 1), (20, 0.4, 8), (84, 0.6, 51), (7, 0.99, 7)],
)
def test_counts_rounded_up(size, ratio, count):
    """HeteroFL's rule, beside FedSPU's."""
    assert active_count_up(size, ratio) == count


def test_the_first_neurons(small):
    assert {name: index.tolist() for name, index in first_neurons(small, 0.7).active.items()} == {
        "conv": [0, 1],
        "fc": [0, 1, 2, 3],
    }
    up = first_neurons(small, 0.7, active_count_up)
    assert [len(index) for index in up.active.values()] == [3, 5]


def test_how_many_are_active_is_what_a_ratio_asks_for(small):
    assert fits_ratio(small, mask_of([2], [1, 5]), 0.4)
    assert not fits_ratio(small, mask_of([2], [1, 5]), 0.7)
    assert not fits_ratio(small, None, 0.4)
    assert not fits_ratio(small, everything(small), 1.0)


def test_first_neurons_are_named_by_their_counts(small):
    mask = first_neurons(small, 0.7)
    values = np.arange(count_values(small, mask), dtype=np.float32)
    body = encode(small, values, mask)
    found = decode(body, small)
    assert same_mask(found.mask, mask)
    assert "mask" not in found.sizes
    assert b"first" in body
    other = mask_of([1], [0])
    assert b"first" not in encode(small, values[: count_values(small, other)], other)


@pytest.mark.parametrize("counts", [[2], [2, 4, 1], [2, 7], [0, 4], [True, 4], [2.0, 4], ["2", 4], [-1, 4]])
def test_counts_that_are_not_the_models_are_refused(small, counts, take_apart, sign):
    mask = first_neurons(small, 0.7)
    header, data = take_apart(encode(small, np.zeros(count_values(small, mask), np.float32), mask))
    header["__metadata__"]["mask"] = json.dumps({"form": "first", "counts": counts})
    with pytest.raises(BundleError, match="needs one count per group"):
        decode(sign(header, data), small)


def test_a_kept_mask_survives_its_file(small):
    for mask in (mask_of([0, 2], [5]), first_neurons(small, 0.5), everything(small)):
        data = mask_to_file(small, mask)
        assert same_mask(mask_from_file(small, data), mask)
        assert mask_digest(small, mask) == mask_digest(small, mask_from_file(small, data))
    assert mask_digest(small, everything(small)) == everything(small).digest
    assert mask_digest(small, mask_of([0], [1])) != mask_digest(small, mask_of([1], [1]))


def test_a_file_that_is_no_mask_of_this_model_is_refused(small):
    data = mask_to_file(small, mask_of([0, 2], [5]))
    for broken in (data[:-1], data + b"\0", b"", data[:-1] + b"\x01"):
        with pytest.raises(ManifestError):
            mask_from_file(small, broken)


def test_a_narrow_manifest_has_the_same_tensors_and_fewer_neurons(small):
    mask = mask_of([0, 2], [5])
    narrow = narrowed(small, mask)
    assert [spec.name for spec in narrow.tensors] == [spec.name for spec in small.tensors]
    assert narrow.group_sizes == {"conv": 2, "fc": 1}
    shapes = {spec.name: spec.shape for spec in narrow.tensors}
    assert shapes["fc.weight"] == (1, 8), "a channel takes its columns along"
    assert shapes["out.weight"] == (2, 1)
    assert shapes["bn.num_batches_tracked"] == ()
    assert narrow.shared_values == count_values(small, mask)


OUT = {"name": "out", "kind": "linear", "tensors": ["out.weight", "out.bias"]}


def changed(manifest, **fields):
    """The manifest with an output layer, and other fields."""
    described = manifest.model_dump()
    return Manifest.model_validate({**described, "layers": [*described["layers"], OUT], **fields})


def test_rows_of_the_output_layer_as_neurons(small):
    """The same values in the same order; under a mask of one class there is that class's row alone."""
    small = changed(small)
    named = with_classes(small)
    assert named.group_sizes == {**small.group_sizes, CLASSES: 2}
    assert (named.shared_values, named.layers) == (small.shared_values, small.layers)
    first = first_neurons_up(named, 0.4).active
    assert {name: index.tolist() for name, index in first.items()} == {"conv": [0, 1], "fc": [0, 1, 2], CLASSES: [0, 1]}
    tensors = {spec.name: np.arange(spec.size, dtype=np.float32).reshape(spec.shape) for spec in small.shared}
    one = NeuronMask({**first, CLASSES: np.array([1])})
    body = encode(named, pack(named, tensors, one), one)
    parts = {spec.name: part for spec, _, part in unpack(named, decode(body, named).values, one)}
    assert parts["out.weight"].tolist() == tensors["out.weight"][1:, :3].tolist()
    assert count_values(named, NeuronMask(first)) == count_values(small, mask_of([0, 1], [0, 1, 2]))


def test_a_model_without_a_row_for_each_output_stays_as_it_is(small):
    tied = [OUT, {"name": "again", "kind": "other", "tensors": ["out.weight"]}]
    for manifest in (small, changed(small, output_shape=(3,)), changed(small, layers=[]), changed(small, layers=tied)):
        assert with_classes(manifest) is manifest
