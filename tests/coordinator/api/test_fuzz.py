"""Mutated bundles, against the decoder and a running coordinator: refused in words, and nothing is left of them.

100,000 in all by ``make test-slow``, the same ones every time; a few by ``make test``.
"""

from __future__ import annotations

import gc
import json
import random
import struct
import tracemalloc
from collections import Counter

import numpy as np
import psutil
import pytest

from edge_sdk.protocol import bundle
from edge_sdk.protocol.blocks import BlockMask, BlockTable
from edge_sdk.protocol.builtin import load_builtin
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.manifest import initial_values
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, pack
from edge_sdk.protocol.messages import FederationSettings, UpdateReport
from edge_sdk.protocol.quantization import quantise, row_lengths
from edge_sdk.protocol.sparsity import layer_counts, random_mask

from .test_contract import ask, enrol, open_app, put, settings_of  # noqa: F401 (two are fixtures)

DIGITS = load_builtin("digits").manifest
REPORT = UpdateReport(num_examples=10, steps=3, train_loss=0.5).model_dump_json()
DECODED = [1_000, pytest.param(97_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
SENT = [60, pytest.param(3_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
MEGABYTE = 2**20

STRANGE = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "F32", "I8", "U8", "BF16", "{}", "[]", "null", '{"form":"full"}', '{"form":"bits"}', '{"form":"known"}'),
    *("\x00", "é" * 50, "\ud800", "0" * 64, "9" * 5000, [], [0], [[]], {}, {"form": {}}, [0, 2**63], [0, -8]),
)


def seeds(manifest):
    """Valid bundles of every kind, and the mask that their reader holds."""
    chance = np.random.default_rng(0)
    held = random_mask(manifest, layer_counts(manifest, 0.5), 0)
    other = random_mask(manifest, layer_counts(manifest, 0.5), 1)
    draw = NeuronDraw("a", 0.5)
    drawn = draw_neurons(manifest, draw)
    table = manifest.block_table
    masks = {
        "full": (None, {}),
        "draw": (drawn, {"draw": draw}),
        "bits": (drawn, {}),
        "index": (NeuronMask({name: np.array([size - 1]) for name, size in manifest.group_sizes.items()}), {}),
        "first": (NeuronMask({name: np.arange(1) for name in manifest.group_sizes}), {}),
        "known": (held, {"known": held}),
        "changed": (other, {"known": held}),
        "elements": (other, {}),
        "blocks": (BlockMask(table.forced), {}),
    }
    found = []
    weights = sum(spec.size for spec in manifest.maskable)
    for mask, more in masks.values():
        values = chance.normal(size=count_values(manifest, mask)).astype(np.float32)
        for precision in ("fp32", "fp16", "bf16"):
            found.append(bundle.encode(manifest, values, mask, precision=precision, report=REPORT, **more))
        found.append(
            bundle.encode(manifest, quantise(values, row_lengths(manifest, mask), 0), mask, report=REPORT, **more)
        )
    signs = chance.integers(-1, 2, weights).astype(np.int8)
    gradients = chance.normal(size=weights).astype(np.float32)
    values = pack(manifest, initial_values(manifest, 0), held)
    found.append(bundle.encode(manifest, values, held, known=held, signs=signs, gradients=gradients, report=REPORT))
    return found, held


def spoil_bytes(body, others, chance):
    """Bytes changed, lost, added, or taken from another bundle; most die of the digest."""
    data = bytearray(body)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        if not data:
            break
        place, length = chance.randrange(len(data)), chance.choice((1, 1, 4, 8, 64))
        match chance.randrange(7):
            case 0:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = chance.randbytes(length)
            case 4:
                data[place : place + length] = bytes(min(length, len(data) - place))
            case 5:
                other = chance.choice(others)
                data[place:] = other[chance.randrange(len(other)) :]
            case 6:
                data[:8] = struct.pack("<Q", chance.choice((0, 1, 7, len(data), 2**16, 2**32, 2**63, 2**64 - 1)))
    return bytes(data)


def spoil_signed(body, chance, take_apart, sign):
    """Header fields and data changed, and the digest made right again: these reach what lies behind it."""
    header, data = take_apart(body)
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        where = chance.choice(list(header))
        match chance.randrange(6):
            case 0 if where != "__metadata__":
                header[where][chance.choice(("dtype", "shape", "data_offsets", "more"))] = chance.choice(STRANGE)
            case 1 if where != "__metadata__" and isinstance(header[where].get("data_offsets"), list):
                header[where]["data_offsets"] = [chance.choice((0, 8, len(data), 2**40)) for _ in range(2)]
            case 2:
                header["__metadata__"][chance.choice(("mask", "report", "manifest", "sparrow"))] = chance.choice(
                    STRANGE
                )
            case 3:
                spoil_mask(header["__metadata__"], chance)
            case 4 if data:
                for _ in range(chance.choice((1, 4, 32))):
                    data[chance.randrange(len(data))] = chance.choice((0, 255, 127, 128, chance.randrange(256)))
            case _:
                data = data[: chance.randrange(len(data) + 1)] if chance.random() < 0.5 else data + chance.randbytes(8)
    return sign(header, bytes(data))


def spoil_mask(metadata, chance):
    """One field of the mask's description is something else."""
    if not isinstance(metadata["mask"], str):
        return
    try:
        mask = json.loads(metadata["mask"])
    except (ValueError, RecursionError):
        return
    if isinstance(mask, dict):
        mask[chance.choice((*mask, "form", "ratio", "counts"))] = chance.choice(
            (*STRANGE, "draw", "bits", "index", "first", "known", "changed", "elements", "blocks", "full")
        )
        metadata["mask"] = json.dumps(mask)


def mutants(bodies, count, take_apart, sign):
    """``count`` spoilt bundles, the same every time."""
    chance = random.Random(20)
    for _ in range(count):
        body = chance.choice(bodies)
        yield (
            spoil_bytes(body, bodies, chance) if chance.random() < 0.4 else spoil_signed(body, chance, take_apart, sign)
        )


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("count", DECODED)
def test_the_decoder_refuses_in_words_and_remembers_nothing(small, take_apart, sign, count):
    shapes = {spec.name: spec.shape for spec in small.shared if spec.trainable}
    manifest = small.with_blocks(BlockTable.of(shapes, count=3).tensors)
    bodies, held = seeds(manifest)
    for body in bodies:
        bundle.decode(body, manifest, held)
    came = Counter()
    before = 0
    for number, body in enumerate(mutants(bodies, count, take_apart, sign)):
        if number == count // 10:
            before = resident()
        if number % 500 == 0:
            tracemalloc.start()
        try:
            decoded = bundle.decode(body, manifest, held)
        except ProtocolError as refusal:
            came["refused" if str(refusal) else "refused without a word"] += 1
        else:
            assert decoded.values.shape == (count_values(manifest, decoded.mask),)
            assert np.isfinite(decoded.values).all()
            came["accepted"] += 1
        if number % 500 == 0:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < bundle.MAX_MEMORY_FACTOR * len(body) + bundle.MAX_MEMORY_FIXED
    assert resident() - before < 16 * MEGABYTE
    assert came["refused"] > 0.7 * count
    assert not came["refused without a word"]
    assert came["accepted"] > 0.01 * count, "values that changed are values, too"


@pytest.mark.parametrize("count", SENT)
def test_a_running_coordinator_answers_and_keeps_no_file_and_no_memory(
    open_app,  # noqa: F811
    tmp_path,
    train,
    take_apart,
    sign,
    count,
):
    settings = FederationSettings(
        rounds=1_000_000, evaluation_interval=0, early_stopping="off", min_devices=1, cohort=1, deadline_seconds=7200
    )
    client = open_app(default_settings=settings)
    _, headers = enrol(client, "a", budget=0.5)
    assignment = ask(client, headers)
    chance = random.Random(21)
    others = [train(DIGITS, assignment, salt=str(number)) for number in range(3)]
    came = Counter()
    before = 0
    for number in range(count):
        if number == count // 10:
            before = resident()
        body = train(DIGITS, assignment)
        spoilt = spoil_bytes(body, others, chance) if number % 3 else spoil_signed(body, chance, take_apart, sign)
        answer = put(client, headers, assignment, spoilt)
        came[answer.status_code] += 1
        assert answer.status_code in (201, 413, 422), answer.text
        if answer.status_code == 201:  # what it changed was values
            assignment = ask(client, headers)
        else:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"]
    assert resident() - before < 64 * MEGABYTE
    assert came[422] > count / 2
    assert put(client, headers, assignment, train(DIGITS, assignment)).status_code == 201
    ask(client, headers)
    blobs = [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]
    assert not [path for path in blobs if path.suffix == ".partial"]
    # The skeleton, the model and the one before while it may be asked for, and nothing of any update.
    assert not [path for path in blobs if "updates" in path.parts]
    assert len(blobs) <= 4
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {
        "blobs",
        "lock",
        "coordinator.sqlite3",
        "coordinator.sqlite3-wal",
        "coordinator.sqlite3-shm",
    }
