"""Whole models by name: the same bytes for the same model, readable by other tools, and no trust in the input."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from sparrow.protocol import checkpoint
from sparrow.protocol.errors import BundleError

TENSORS = {
    "fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bn.num_batches_tracked": np.array(7, dtype=np.int64),
    "mask": np.array([True, False]),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


def test_what_is_saved_comes_back():
    tensors, note = checkpoint.load(checkpoint.save(TENSORS, '{"version": 3}'))
    assert note == '{"version": 3}'
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert tensors[name].tolist() == tensor.tolist()
    tensors["fc.weight"][0, 0] = 9  # a copy that can be trained on


def test_the_same_model_has_the_same_bytes_whatever_the_order():
    backwards = dict(reversed(TENSORS.items()))
    assert checkpoint.save(TENSORS, "n") == checkpoint.save(backwards, "n")


def test_the_safetensors_library_reads_what_we_write(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(checkpoint.save(TENSORS, "note"))
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"sparrow": "note"}
        assert opened.get_tensor("fc.weight").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_file_of_another_tool_has_an_empty_note():
    body = safetensors.numpy.save({"w": np.zeros(2, np.float32)})
    assert checkpoint.read_note(body) == ""
    assert checkpoint.load(body)[0]["w"].tolist() == [0, 0]


def test_an_empty_model_keeps_its_note():
    assert checkpoint.load(checkpoint.save({}, "note")) == ({}, "note")


BODY = checkpoint.save(TENSORS, "note")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "0 bytes are too few for a safetensors file; send the whole file"),
        (BODY[:7], "7 bytes are too few"),
        (BODY[:40], "send the whole file"),
        (BODY[:-1], "not a safetensors file that can be read"),
        (BODY + b"\0", "not a safetensors file that can be read"),
        (struct.pack("<Q", 2**60) + BODY[8:], "the header is longer than the file or than 16 MiB"),
        (struct.pack("<Q", 4) + b"null", "the header is not that of a safetensors file"),
        (struct.pack("<Q", 4) + b"\xff\xfe[[", "the header is not that of a safetensors file"),
        (struct.pack("<Q", 50_000) + b"[" * 50_000, "the header is not that of a safetensors file"),
        (struct.pack("<Q", 21) + b'{"__metadata__":null}', "the header is not that of a safetensors file"),
    ],
)
def test_what_is_no_checkpoint_is_refused(body, said):
    with pytest.raises(BundleError) as refused:
        checkpoint.load(body)
    assert said in str(refused.value)


def test_damaged_bytes_are_refused_or_read_but_nothing_else():
    rng = random.Random(5)
    for _ in range(2000):
        changed = bytearray(BODY)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            tensors, note = checkpoint.load(bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed))])]))
        except BundleError:
            continue
        assert isinstance(note, str)
        assert all(isinstance(tensor, np.ndarray) for tensor in tensors.values())
