"""Bundles: what is encoded comes back, other tools can read it, and hostile bytes meet a wall."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.bundle import (
    MAX_HEADER,
    MAX_MEMORY_FACTOR,
    MAX_MEMORY_FIXED,
    Bundle,
    decode,
    encode,
    largest_bundle,
)
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.manifest import Manifest, NeuronGroup, Segment, TensorSpec
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, check_mask, count_values, draw_neurons, same_mask

PRECISIONS = ("fp32", "fp16", "bf16")
DRAW = NeuronDraw("job:0", 3, "dev-7", 0.5)


def wide(*sizes):
    """A model of nothing but biases: one group of each size."""
    groups = tuple(NeuronGroup(name=f"g{number}", size=size) for number, size in enumerate(sizes))
    return Manifest(
        task="wide",
        input_shape=(1,),
        output_shape=(1,),
        tensors=tuple(
            TensorSpec(name=f"{group.name}.bias", shape=(group.size,), axes=((Segment(group=group.name),),))
            for group in groups
        ),
        groups=groups,
    )


def every(step, *sizes):
    return NeuronMask({f"g{number}": np.arange(0, size, step) for number, size in enumerate(sizes)})


def noise(count, seed=0):
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def same(one: Bundle, other: Bundle):
    return (
        one.values.tobytes() == other.values.tobytes()
        and same_mask(one.mask, other.mask)
        and (one.draw, one.precision, one.report) == (other.draw, other.precision, other.report)
    )


# --- there and back ----------------------------------------------------------------------------------------------

LONG_NAMES = NeuronDraw("j" * 64 + ":0", 3, "d" * 64, 0.5)
FORMS = {
    "full": (wide(40), None, None),
    "draw": (wide(4000), NeuronDraw("job:0", 3, "dev-7", 0.5), "drawn"),
    "bits": (wide(40, 9), None, every(2, 40, 9)),
    "bits although drawn": (wide(40, 9), LONG_NAMES, "drawn"),
    "index": (wide(40, 4000), None, every(500, 40, 4000)),
    "index of a layer beyond 65536": (wide(70_000), None, every(30_000, 70_000)),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", FORMS)
def test_what_is_encoded_comes_back(case, precision, take_apart):
    manifest, draw, mask = FORMS[case]
    if mask == "drawn":
        mask = draw_neurons(manifest, draw)
    values = np.round(noise(count_values(manifest, mask)) * 8) / 8  # exact in all three precisions
    body = encode(manifest, values, mask, draw=draw, precision=precision, report='{"steps": 1}')
    header, _ = take_apart(body)
    assert json.loads(header["__metadata__"]["mask"])["form"] == case.split()[0]
    decoded = decode(body, manifest)
    assert decoded.values.tolist() == values.tolist()
    assert same_mask(decoded.mask, mask)
    assert decoded.draw == (draw if case == "draw" else None)
    assert (decoded.precision, decoded.report) == (precision, '{"steps": 1}')
    assert len(body) <= largest_bundle(len(values), precision, manifest)


@pytest.mark.parametrize("case", FORMS)
def test_a_mask_takes_its_shortest_form(case, take_apart):
    """Beside a form there is none that a reader would accept and that is shorter."""
    manifest, draw, mask = FORMS[case]
    if mask is None:
        return
    mask = draw_neurons(manifest, draw) if mask == "drawn" else mask
    body = encode(manifest, noise(count_values(manifest, mask)), mask, draw=draw)
    bits = (sum(manifest.group_sizes.values()) + 7) // 8
    index = sum(
        4 + (2 if size <= 2**16 else 4) * len(mask.active[group]) for group, size in manifest.group_sizes.items()
    )
    chosen = take_apart(body)[0].get("mask", {"shape": [0]})["shape"][0]
    assert chosen <= min(bits, index)


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_mask_and_values_come_back(data, small):
    active = {
        group: np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
        for group, size in small.group_sizes.items()
    }
    mask = data.draw(st.sampled_from([None, NeuronMask(active)]))
    count = count_values(small, mask)
    precision = data.draw(st.sampled_from(PRECISIONS))
    width = 32 if precision == "fp32" else 16
    number = st.floats(width=width, allow_nan=False, allow_infinity=False)
    values = np.resize(np.array(data.draw(st.lists(number, min_size=1, max_size=9)), dtype=np.float32), count)
    report = data.draw(st.text(max_size=30))
    decoded = decode(encode(small, values, mask, precision=precision, report=report), small)
    assert same_mask(decoded.mask, mask)
    assert decoded.report == report
    if precision == "bf16":
        assert decoded.values == pytest.approx(values, rel=2**-8, abs=1e-40)
    else:
        assert decoded.values.tobytes() == values.tobytes()


def test_the_same_bundle_has_the_same_bytes(small):
    mask = draw_neurons(small, DRAW)
    values = noise(count_values(small, mask))
    assert encode(small, values, mask, draw=DRAW) == encode(small, values.copy(), mask, draw=DRAW)


def test_the_digest_is_what_the_format_says(small, sign, take_apart):
    body = encode(small, noise(small.shared_values), None, report="r")
    header, data = take_apart(body)
    digest = header["__metadata__"].pop("sha256")
    unsigned = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert digest == hashlib.sha256(unsigned + data).hexdigest()
    assert same(decode(sign(header, data), small), decode(body, small))


def test_the_worked_example_of_the_format(take_apart):
    """conv(1->3)-fc(5)-out(2) with conv neuron 1 and fc neurons 0 and 2: bits 0b010_10100, and the values by hand."""
    conv, fc = Segment(group="conv"), Segment(group="fc")
    manifest = Manifest(
        task="example",
        input_shape=(1, 2, 2),
        output_shape=(2,),
        tensors=(
            TensorSpec(name="conv.weight", shape=(3, 1, 1, 1), axes=((conv,), (), (), ())),
            TensorSpec(name="fc.weight", shape=(5, 12), axes=((fc,), (Segment(group="conv", repeat=4),))),
            TensorSpec(name="out.weight", shape=(2, 5), axes=((), (fc,))),
        ),
        groups=(NeuronGroup(name="conv", size=3), NeuronGroup(name="fc", size=5)),
    )
    mask = NeuronMask({"conv": np.array([1]), "fc": np.array([0, 2])})
    _, data = take_apart(encode(manifest, np.arange(13, dtype=np.float32), mask))
    assert data[13 * 4 :] == bytes([0b01010100])
    assert np.frombuffer(data[: 13 * 4], "<f4").tolist() == list(range(13))


# --- a second opinion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_the_safetensors_library_reads_what_we_write(small, precision, dtype):
    mask = NeuronMask({"conv": np.array([1]), "fc": np.array([0, 2])})
    values = noise(count_values(small, mask))
    loaded = safetensors.numpy.load(encode(small, values, mask, precision=precision))
    assert loaded["values"].dtype == dtype
    assert loaded["values"].tolist() == values.astype(dtype).tolist()
    assert loaded["mask"].tolist() == [0b01010100, 0]


def test_the_safetensors_library_reads_the_header_of_a_bf16_bundle(small, tmp_path):
    file = tmp_path / "update"
    file.write_bytes(encode(small, noise(small.shared_values), None, precision="bf16", report="r"))
    with safetensors.safe_open(file, "np") as opened:
        assert opened.get_slice("values").get_dtype() == "BF16"
        assert opened.get_slice("values").get_shape() == [small.shared_values]
        assert opened.metadata()["report"] == "r"


def test_bf16_rounds_as_torch_does():
    """To nearest, ties to even: random bit patterns, and every pattern around a tie."""
    bits = np.random.default_rng(0).integers(0, 2**32, size=200_000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, dtype=np.uint32)[:, None] << 16) + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    values = np.concatenate([bits, ties.ravel()]).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(np.nan_to_num(values)) < 3.3e38)]
    manifest = wide(len(values))
    decoded = decode(encode(manifest, values, None, precision="bf16"), manifest)
    wanted = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert decoded.values.tobytes() == wanted.tobytes()


# --- what is not encoded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "precision", "said"),
    [
        (math.nan, "fp32", "not finite: training diverged; lower the learning rate or set a clip"),
        (-math.inf, "bf16", "not finite: training diverged"),
        (7e4, "fp16", "the value 70000 does not fit fp16 (largest 65504); use precision bf16 or fp32"),
        (-65520.0, "fp16", "does not fit fp16"),
        (3.4e38, "bf16", "rounds to infinity in bf16; use precision fp32"),
    ],
)
def test_values_that_would_not_survive_are_refused(value, precision, said):
    manifest = wide(3)
    with pytest.raises(BundleError) as refused:
        encode(manifest, np.array([0, value, 1], dtype=np.float32), None, precision=precision)
    assert said in str(refused.value)


def test_the_largest_fp16_and_the_smallest_float_survive():
    manifest = wide(3)
    values = np.array([65504, -65504, 2**-24], dtype=np.float32)
    assert decode(encode(manifest, values, None, precision="fp16"), manifest).values.tolist() == values.tolist()
    tiny = np.array([1e-45, -1e-45, 0.0], dtype=np.float32)
    assert decode(encode(manifest, tiny, None), manifest).values.tolist() == tiny.tolist()


def test_values_are_counted_before_they_are_written(small):
    with pytest.raises(BundleError, match=r"\(3,\) values given, the mask covers 134; pack them with masks.pack"):
        encode(small, np.zeros(3, dtype=np.float32), None)


def test_a_bundle_of_another_model_is_refused(small):
    with pytest.raises(BundleError, match="made for another model; fetch the federation's manifest again"):
        decode(encode(small, noise(small.shared_values), None), wide(small.shared_values))


@pytest.mark.parametrize("place", [8, 60, 700, -1])
def test_damage_on_the_way_is_noticed(small, place):
    body = bytearray(encode(small, noise(small.shared_values), None))
    body[place] ^= 1
    with pytest.raises(BundleError, match=r"send|update|encode|bundle"):
        decode(bytes(body), small)


def test_a_value_that_is_not_finite_is_named_by_its_tensor(small, sign, take_apart):
    header, data = take_apart(encode(small, np.zeros(small.shared_values, np.float32), None))
    place = sum(spec.size for spec in small.shared[:6]) * 4  # the first value of fc.weight
    data = data[:place] + struct.pack("<f", math.nan) + data[place + 4 :]
    with pytest.raises(BundleError, match=r"fc\.weight: a value is not finite; do not send this update"):
        decode(sign(header, data), small)


# --- hostile bytes -----------------------------------------------------------------------------------------------


def bodies(small):
    """Valid bundles of every form and precision that the small model has."""
    mask = NeuronMask({"conv": np.array([1]), "fc": np.array([0, 2])})
    most = NeuronMask({"conv": np.array([0, 1, 2]), "fc": np.array([0, 1, 3, 4])})
    valid = []
    for number, precision in enumerate(PRECISIONS):
        valid.append(encode(small, noise(small.shared_values, number), None, precision=precision, report="{}"))
        valid.extend(
            encode(small, noise(count_values(small, chosen), number), chosen, precision=precision)
            for chosen in (mask, most)
        )
        drawn = draw_neurons(small, DRAW)
        valid.append(encode(small, noise(count_values(small, drawn)), drawn, draw=DRAW, precision=precision))
    return valid


ODD = (
    -1, 0, 1, 4, 548, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 10**30, int("9" * 4300), True, False, None, 0.5,
    4.0, math.nan, math.inf, -math.inf, "", "0", "F32", "F16", "BF16", "U8", "F64", "\ud800", "a" * 5000, "|", [], [[]],
    {}, [0], [0, 4], [4, 0], [0, 2**62], [-4, 0], [0.0, 4.0], {"form": "full"}, [1, 2, 3],
)  # fmt: skip

MASKS = (
    "", "null", "[]", "{}", "1", '"full"', "NaN", "[" * 5000, '{"form":' * 5000, '{"form":"full"}',
    '{"form":"full","x":1}', '{"form":"bits"}', '{"form":"bits","x":1}', '{"form":"index"}', '{"form":["bits"]}',
    '{"form":"draw"}', '{"form":"none"}', '{"form":"full","form":"bits"}', "\ud800", '{"form":"\\ud800"}', "1" * 5000,
)  # fmt: skip


def random_bytes(rng, body, parts, sign):
    return rng.randbytes(rng.randrange(400))


def random_after_a_length(rng, body, parts, sign):
    junk = rng.randbytes(rng.randrange(200))
    return struct.pack("<Q", rng.choice([0, 1, len(junk), len(junk) // 2])) + junk


def truncated(rng, body, parts, sign):
    header = len(body) - len(parts[1])
    places = [rng.randrange(9), rng.randrange(header + 1), header, rng.randrange(header, len(body)), len(body) - 1]
    return body[: rng.choice(places)]


def longer(rng, body, parts, sign):
    return body + rng.randbytes(rng.randrange(1, 20))


def shorter_but_signed(rng, body, parts, sign):
    header, data = parts
    return sign(header, data[: rng.randrange(len(data))])


def longer_but_signed(rng, body, parts, sign):
    header, data = parts
    return sign(header, data + bytes(rng.randrange(1, 20)))


def flipped(rng, body, parts, sign):
    changed = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flipped_data_but_signed(rng, body, parts, sign):
    header, data = parts
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return sign(header, bytes(changed))


def header_length(rng, body, parts, sign):
    (length,) = struct.unpack("<Q", body[:8])
    wrong = [
        0,
        1,
        length - 1,
        length + 1,
        len(body) - 8,
        len(body),
        MAX_HEADER,
        MAX_HEADER + 1,
        2**32,
        2**63,
        2**64 - 1,
    ]
    return struct.pack("<Q", rng.choice(wrong)) + body[8:]


def nodes(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from nodes(child, (*path, key))


def mutated_header(rng, body, parts, sign):
    """Something odd in place of any one node of the header, an extra key, or a missing one; signed."""
    header, data = json.loads(json.dumps(parts[0])), parts[1]
    *way, last = rng.choice([path for path in nodes(header) if path])
    parent = header
    for key in way:
        parent = parent[key]
    action = rng.randrange(4)
    if action == 0 and isinstance(parent, dict):
        del parent[last]
    elif action == 1 and isinstance(parent, dict):
        parent[rng.choice(["x", "values ", "mask", "__metadata__", ""])] = rng.choice(ODD)
    else:
        parent[last] = rng.choice(ODD)
    try:
        return sign(header, data)
    except (TypeError, AttributeError, KeyError):
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data


def numbers(rng, body, parts, sign):
    """Counts and offsets that are plausible, wrong, overlapping, negative or huge; signed."""
    header, data = json.loads(json.dumps(parts[0])), parts[1]
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    some = [-8, -4, -1, 0, 1, 2, 4, 8, len(data), len(data) // 2, len(data) + 4, 2**62, 2**64, int("9" * 4299)]
    count = rng.choice([*some, *entry["shape"]])
    low, width = rng.choice(some), rng.choice([1, 2, 4])
    entry["shape"] = [count]
    entry["data_offsets"] = rng.choice([[low, low + count * width] if abs(count) < 2**70 else [low, count], [0, low]])
    entry["dtype"] = rng.choice(["F32", "F16", "BF16", "U8", "I8", entry["dtype"]])
    return sign(header, data)


def wrong_count_consistently(rng, body, parts, sign):
    """Every length agrees with every other, only the mask says otherwise."""
    header = json.loads(json.dumps(parts[0]))
    dtype = rng.choice(["F32", "F16", "BF16"])
    count, width = rng.choice([0, 1, rng.randrange(300), header["values"]["shape"][0]]), 4 if dtype == "F32" else 2
    header["values"] = {"dtype": dtype, "shape": [count], "data_offsets": [0, count * width]}
    header.pop("mask", None)
    return sign(header, bytes(count * width))


def any_bits_as_values(rng, body, parts, sign):
    """NaN of all kinds, infinities, denormals, under a right digest."""
    header, data = parts
    low, high = header["values"]["data_offsets"]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 200])):
        place = rng.randrange(low, high - 3)
        pattern = rng.choice(
            [rng.randbytes(4), b"\x00\x00\x80\x7f", b"\x01\x00\x80\x7f", b"\x80\x7f\x80\xff", b"\x01\x7c"]
        )
        changed[place : place + len(pattern)] = pattern
    return sign(header, bytes(changed[: len(data)]))


def with_mask(parts, sign, form, mask, values=None):
    header = json.loads(json.dumps(parts[0]))
    low, high = header["values"]["data_offsets"]
    data = parts[1][low:high]
    if values is not None:
        dtype = header["values"]["dtype"]
        data = bytes(values * (4 if dtype == "F32" else 2))
        header["values"] = {"dtype": dtype, "shape": [values], "data_offsets": [0, len(data)]}
    header["__metadata__"]["mask"] = form
    header.pop("mask", None)
    if mask:
        header["mask"] = {"dtype": "U8", "shape": [len(mask)], "data_offsets": [len(data), len(data) + len(mask)]}
    return sign(header, data + mask)


def covered(conv, fc):
    """The values of the small model between so many neurons, by hand: kernels, bias and norm, fc, fc.bias, out."""
    return 9 * conv + 5 * conv + 4 * conv * fc + fc + 2 * fc + 2


def bits(rng, body, parts, sign):
    """Any bits, right or wrong padding, no neuron at all, a byte too many or too few, a right or wrong count."""
    mask = bytes([rng.randrange(256), rng.choice([0, 0x80, 0x80, 0x40, 0xFF])]) + rng.choice([b"", b"", b"", b"\0"])
    conv, fc = (mask[0] >> 5).bit_count(), ((mask[0] & 0x1F) << 1 | mask[1] >> 7).bit_count()
    mask = rng.choice([mask, mask, mask, mask[:1]])
    return with_mask(parts, sign, '{"form":"bits"}', mask, rng.choice([covered(conv, fc), rng.randrange(135)]))


def index(rng, body, parts, sign):
    """Lists unsorted, repeated, out of range, empty, too long, cut off, or right."""
    lists = []
    for size in (3, 6):
        neurons = [rng.randrange(size + 1) for _ in range(rng.randrange(size + 2))]
        if rng.random() < 0.7:
            neurons = sorted({neuron % size for neuron in neurons} or {0})
        count = rng.choice([len(neurons)] * 9 + [0, 2**31, 2**32 - 1, len(neurons) + 1])
        lists.append(struct.pack("<I", count) + np.array(neurons, dtype="<u2").tobytes())
    mask = b"".join(lists)
    count = covered(*(len(part) // 2 - 2 for part in lists))
    mask = rng.choice([mask, mask, mask, mask[: rng.randrange(len(mask))], mask + b"\0"])
    return with_mask(parts, sign, '{"form":"index"}', mask, rng.choice([count, count, rng.randrange(135)]))


def draws(rng, body, parts, sign):
    form = {"form": "draw", "job": "job:0", "round": 3, "device": "dev-7", "ratio": 0.5}
    key = rng.choice([*form, "x"])
    odd = [*ODD, 1e-300, 0.33, 0.989, 1.0000001, -0.0, "dev-8"]
    if rng.random() < 0.7:
        form[key] = rng.choice(odd)
    count = rng.choice([None, rng.randrange(135)])
    return with_mask(parts, sign, json.dumps(form), rng.choice([b"", b"", b"", b"\x54"]), count)


def descriptions(rng, body, parts, sign):
    return with_mask(parts, sign, rng.choice(MASKS), rng.choice([b"", b"\x54"]))


def duplicate_keys(rng, body, parts, sign):
    """The header says two things; readers that pick different ones must not be fooled into a broken bundle."""
    header, data = parts
    text = json.dumps(header)
    odd = json.dumps({"dtype": "F32", "shape": [rng.choice([0, 1, 2**40])], "data_offsets": [0, rng.choice([0, 4])]})
    extra = rng.choice([f'"values": {odd}', '"__metadata__": {}', f'"mask": {odd}'])
    text = "{" + extra + ", " + text[1:] if rng.random() < 0.5 else text[:-1] + ", " + extra + "}"
    return struct.pack("<Q", len(text)) + text.encode() + data


def extra_tensors(rng, body, parts, sign):
    header, data = json.loads(json.dumps(parts[0])), parts[1]
    extra = rng.randbytes(4)
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    header[rng.choice(["mask", "extra", "fc.weight", "valuеs"])] = entry
    return sign(header, data + extra)


def nested(rng, body, parts, sign):
    _, data = parts
    depth = rng.choice([10, 900, 20_000])
    kind = rng.choice(["[", '{"a":'])
    text = rng.choice([kind * depth, "[" * depth + "]" * depth, '{"values":' + "[" * depth + "]" * depth + "}"])
    return struct.pack("<Q", len(text)) + text.encode() + data


def other_texts(rng, body, parts, sign):
    """Encodings and things that are JSON but no header."""
    header, data = parts
    text = json.dumps(header)
    encoded = rng.choice(
        [
            text.encode("utf-16"),
            text.encode("utf-32"),
            text.encode("utf-8-sig"),
            text.encode() + b"\0",
            b"\xff" + text.encode(),
            b" " * 50 + text.encode(),
            b"null",
            b"[]",
            b"NaN",
            b"1" * 5000,
            b'{"__metadata__": 1, "values": 2}',
            b'{"__metadata__": {}, "values": {}}',
        ]
    )
    return struct.pack("<Q", len(encoded)) + encoded + data


ATTACKS = (
    random_bytes, random_after_a_length, truncated, longer, shorter_but_signed, longer_but_signed, flipped,
    flipped_data_but_signed, header_length, mutated_header, numbers, wrong_count_consistently, any_bits_as_values, bits,
    index, draws, descriptions, duplicate_keys, extra_tensors, nested, other_texts,
)  # fmt: skip


def assert_promises(decoded: Bundle, manifest: Manifest):
    """All that code behind ``decode`` relies on."""
    assert decoded.values.dtype == np.float32
    assert decoded.values.shape == (count_values(manifest, decoded.mask),)
    assert np.isfinite(decoded.values).all()
    assert decoded.precision in PRECISIONS
    assert isinstance(decoded.report, str)
    if decoded.mask is not None:
        check_mask(manifest, decoded.mask)
    if decoded.draw is not None:
        assert same_mask(decoded.mask, draw_neurons(manifest, decoded.draw))
    again = encode(manifest, decoded.values, decoded.mask, draw=decoded.draw, precision=decoded.precision)
    assert decode(again, manifest).values.tobytes() == decoded.values.tobytes()


WALLS = (
    "too few for a bundle", "header claims", "truncated", "not JSON", "must hold __metadata__", "metadata must hold",
    "must be a string", "has format", "another model", "must give a dtype", "whole numbers", "accepted are", "take",
    "begins at byte", "accounts for", "digest does not match", "description is not JSON", "not allowed in this form",
    "a draw has exactly", "cannot be drawn", "none of the forms", "neurons take", "padding bits", "end too early",
    "too few bytes", "index lists end after", "must be sorted", "its mask covers", "is not finite",
)  # fmt: skip


def test_hostile_bytes_are_refused_or_keep_every_promise(small, sign, take_apart):
    """12,600 generated bundles: ``decode`` raises BundleError, or what it returns is sound; and never anything else."""
    rng = random.Random(20240601)
    valid = [(body, take_apart(body)) for body in bodies(small)]
    accepted = {attack.__name__: 0 for attack in ATTACKS}
    met = set()
    for attack in ATTACKS:
        for _ in range(600):
            body, parts = rng.choice(valid)
            hostile = attack(rng, body, parts, sign)
            try:
                decoded = decode(hostile, small)
            except BundleError as refused:
                text = str(refused)
                met.update(wall for wall in WALLS if wall in text)
                text.encode()  # it goes into a problem document
            else:
                assert_promises(decoded, small)
                accepted[attack.__name__] += 1
    assert met == set(WALLS), "every check was reached, those behind the digest too"
    for attack in ("random_bytes", "truncated", "longer", "shorter_but_signed", "longer_but_signed", "nested"):
        assert accepted[attack] == 0, attack
    for attack in ("flipped_data_but_signed", "bits", "index", "draws", "any_bits_as_values"):
        assert accepted[attack] > 0, f"{attack} never came through: it tests nothing behind its first wall"


def peak_of_decoding(body, manifest):
    tracemalloc.start()
    try:
        decode(body, manifest)
    except BundleError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def test_memory_is_bounded_whatever_the_bytes_claim(small, sign, take_apart):
    rng = random.Random(7)
    valid = [(body, take_apart(body)) for body in bodies(small)]
    for attack in ATTACKS:
        for _ in range(12):
            body, parts = rng.choice(valid)
            hostile = attack(rng, body, parts, sign)
            assert peak_of_decoding(hostile, small) <= MAX_MEMORY_FACTOR * len(hostile) + MAX_MEMORY_FIXED


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", ["full", "bits", "index"])
def test_memory_is_bounded_for_large_models_too(form, precision, sign, take_apart):
    hidden, inputs = 2000, 1000
    manifest = Manifest(
        task="large",
        input_shape=(inputs,),
        output_shape=(hidden,),
        tensors=(TensorSpec(name="fc.weight", shape=(hidden, inputs), axes=((Segment(group="fc"),), ())),),
        groups=(NeuronGroup(name="fc", size=hidden),),
    )
    step = {"full": None, "bits": 2, "index": 50}[form]
    mask = None if step is None else NeuronMask({"fc": np.arange(0, hidden, step)})
    body = encode(manifest, noise(count_values(manifest, mask)), mask, precision=precision)
    assert peak_of_decoding(body, manifest) <= MAX_MEMORY_FACTOR * len(body) + MAX_MEMORY_FIXED
    header, data = take_apart(body)
    everywhere_nan = sign(
        header, b"\xff" * header["values"]["data_offsets"][1] + data[header["values"]["data_offsets"][1] :]
    )
    assert peak_of_decoding(everywhere_nan, manifest) <= MAX_MEMORY_FACTOR * len(body) + MAX_MEMORY_FIXED
    header["values"]["shape"] = [2**40]
    header["values"]["data_offsets"] = [0, 2**42]
    assert peak_of_decoding(sign(header, data), manifest) <= MAX_MEMORY_FACTOR * len(body) + MAX_MEMORY_FIXED
