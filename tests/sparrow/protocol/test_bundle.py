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
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.protocol.bundle import (
    MAX_HEADER,
    MAX_MEMORY_FACTOR,
    MAX_MEMORY_FIXED,
    Bundle,
    encode,
    largest_bundle,
)
from sparrow.protocol.bundle import decode as decode_bundle
from sparrow.protocol.elements import ElementMask, difference, everything, from_bits
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Layer, Manifest, NeuronGroup, Segment, TensorSpec
from sparrow.protocol.masks import NeuronDraw, NeuronMask, check_mask, count_values, draw_neurons, same_mask
from sparrow.protocol.parts import Expected, Part, all_maskable
from sparrow.protocol.quantization import Quantised, quantise, row_lengths

PRECISIONS = ("fp32", "fp16", "bf16")
DRAW = NeuronDraw("dev-7-3", 0.5)


def decode(body, manifest, known=None):
    """Read a bundle that may bring signs and gradients of all maskable weights."""
    size = sum(spec.size for spec in manifest.maskable)
    parts = {"gradients": Expected("float32", size), "signs": Expected("sign", size)}
    return decode_bundle(body, manifest, known, parts=parts)


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


def some(manifest, density, seed=0):
    """A mask of elements of about this density."""
    generator = np.random.default_rng(seed)
    return ElementMask({spec.name: generator.random(spec.shape) < density for spec in manifest.maskable})


def but_for(mask, *positions):
    """The mask that differs at these positions of its first tensor."""
    name = next(iter(mask.exists))
    changed = mask.exists[name].copy()
    changed.reshape(-1)[list(positions)] ^= True
    return ElementMask({**mask.exists, name: changed})


def linear(outputs, inputs):
    """One linear layer, without neurons."""
    return Manifest(
        task="linear",
        input_shape=(inputs,),
        output_shape=(outputs,),
        tensors=(TensorSpec(name="fc.weight", shape=(outputs, inputs)), TensorSpec(name="fc.bias", shape=(outputs,))),
        layers=(Layer(name="fc", kind="linear", tensors=("fc.weight", "fc.bias")),),
    )


def quantised(manifest, mask, seed=0):
    return quantise(noise(count_values(manifest, mask), seed), row_lengths(manifest, mask), seed)


def same(one: Bundle, other: Bundle):
    return (
        one.values.tobytes() == other.values.tobytes()
        and same_mask(one.mask, other.mask)
        and (one.draw, one.precision, one.report) == (other.draw, other.precision, other.report)
    )


# --- there and back ----------------------------------------------------------------------------------------------

LONG_NAMES = NeuronDraw("d" * 64, 0.5)
FORMS = {
    "full": (wide(40), None, None),
    "draw": (wide(4000), NeuronDraw("dev-7-3", 0.5), "drawn"),
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


# --- masks of elements -------------------------------------------------------------------------------------------


def form_of(body, take_apart):
    return json.loads(take_apart(body)[0]["__metadata__"]["mask"])


@pytest.mark.parametrize(
    ("changes", "known", "form"),
    [
        ([], True, "known"),
        ([5], True, "changed"),
        (range(0, 4000, 40), True, "changed"),
        (range(0, 4000, 10), True, "changed"),
        (range(0, 4000, 8), True, "elements"),
        (range(4000), True, "elements"),
        ([], False, "elements"),
        ([5], False, "elements"),
    ],
    ids=str,
)
def test_a_mask_of_elements_takes_its_shortest_form(changes, known, form, take_apart):
    manifest = linear(40, 100)
    held = some(manifest, 0.3)
    mask = but_for(held, *changes)
    values = noise(count_values(manifest, mask))
    body = encode(manifest, values, mask, known=held if known else None)
    wanted = {"form": form} if form == "elements" else {"form": form, "digest": held.digest}
    assert form_of(body, take_apart) == wanted
    decoded = decode(body, manifest, held)
    assert same_mask(decoded.mask, mask)
    assert decoded.values.tobytes() == values.tobytes()
    alternatives = [mask.bits, difference(held, mask)] if known else [mask.bits]
    assert decoded.sizes.get("mask", 0) == (0 if form == "known" else min(len(data) for data in alternatives))


def test_a_full_mask_is_not_sent_as_a_whole_model(take_apart):
    manifest = linear(4, 5)
    body = encode(manifest, noise(24), everything(manifest))
    assert form_of(body, take_apart)["form"] == "elements"
    assert decode(body, manifest).mask.count == 20
    assert decode(encode(manifest, noise(24), None), manifest).mask is None


@pytest.mark.parametrize("changes", [[], [5]], ids=["known", "changed"])
@pytest.mark.parametrize("whose", ["none", "another"])
def test_a_mask_that_is_not_held_here_cannot_be_named(changes, whose):
    manifest = linear(40, 100)
    held = some(manifest, 0.3)
    body = encode(manifest, noise(count_values(manifest, but_for(held, *changes))), but_for(held, *changes), known=held)
    other = some(manifest, 0.3, seed=1) if whose == "another" else None
    with pytest.raises(BundleError, match=f"mask '{held.digest[:12]}'"):
        decode(body, manifest, other)


def test_a_mask_is_the_one_that_is_held_when_it_is_named():
    manifest = linear(40, 100)
    held = some(manifest, 0.3)
    body = encode(manifest, noise(count_values(manifest, held)), held, known=held)
    assert decode(body, manifest, held).mask is held


def test_reading_a_change_leaves_what_is_held_as_it_is():
    manifest = linear(40, 100)
    held = some(manifest, 0.3)
    before, mask = held.exists["fc.weight"].copy(), but_for(held, 3, 77)
    decode(encode(manifest, noise(count_values(manifest, mask)), mask, known=held), manifest, held)
    np.testing.assert_array_equal(held.exists["fc.weight"], before)


def test_a_mask_of_elements_of_another_model_is_not_sent():
    manifest = linear(4, 5)
    with pytest.raises(ValueError, match="the maskable ones are"):
        encode(manifest, noise(24), ElementMask({}))


# --- int8, signs and gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all", "neurons", "elements"])
def test_whole_numbers_and_scales_come_back(small, kind):
    mask = {"all": None, "neurons": draw_neurons(small, DRAW), "elements": some(small, 0.4)}[kind]
    numbers = quantised(small, mask)
    body = encode(small, numbers, mask, report="r")
    decoded = decode(body, small)
    lengths = row_lengths(small, mask)
    assert (decoded.precision, decoded.report) == ("int8", "r")
    assert decoded.values.tobytes() == numbers.values(lengths).tobytes()
    assert decoded.sizes["values"] == len(numbers.numbers)
    assert decoded.sizes["scales"] == 4 * len(lengths)


def test_int8_values_must_be_quantised_first(small):
    with pytest.raises(BundleError, match=r"protocol\.quantization"):
        encode(small, noise(small.shared_values), None, precision="int8")
    with pytest.raises(BundleError, match="the mask covers 134"):
        encode(small, Quantised(np.zeros(3, np.int8), np.zeros(1, np.float32)), None)


def of_numbers(numbers, scales):
    return encode(wide(3), Quantised(np.array(numbers, np.int8), np.array(scales, np.float32)), None)


@pytest.mark.parametrize(
    ("numbers", "scales", "said"),
    [
        ([1, -128, 0], [1], "integers must be in -127..127, scales finite and not negative"),
        ([1, 2, 3], [-1], "not negative"),
        ([1, 2, 3], [1, 1], "has 2 scales for 1 rows; quantise it again"),
        ([1, 2, 3], [], "has 0 scales for 1 rows"),
        ([127, 2, 3], [3e38], r"g0\.bias: a value is not finite"),
    ],
)
def test_whole_numbers_and_scales_that_stand_for_nothing_are_refused(numbers, scales, said):
    with pytest.raises(BundleError, match=said):
        decode(of_numbers(numbers, scales), wide(3))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1e-45])
def test_scales_that_are_no_scales_are_refused(scale, sign, take_apart):
    with pytest.raises(BundleError, match="finite"):
        decode(
            sign(*with_part(take_apart(of_numbers([1, 2, 3], [1])), "scales", "F32", struct.pack("<f", scale))), wide(3)
        )


def test_scales_without_whole_numbers_are_refused(small, sign, take_apart):
    header, data = take_apart(encode(small, noise(small.shared_values), None))
    body = sign(*with_part((header, data), "scales", "F32", bytes(4 * len(row_lengths(small, None)))))
    with pytest.raises(BundleError, match="scales belong to int8 values"):
        decode(body, small)


def test_whole_numbers_without_scales_are_refused(take_apart, sign):
    header, data = take_apart(of_numbers([1, 2, 3], [1]))
    del header["scales"]
    with pytest.raises(BundleError, match="has 0 scales for 1 rows"):
        decode(sign(header, data[:3]), wide(3))


@pytest.mark.parametrize(
    "signs",
    [
        [],
        [0],
        [1],
        [-1],
        [0] * 17,
        [1] * 8,
        [-1] * 9,
        [1, 0, -1, 0, 0, 1, 1, -1, -1, 0, 1],
        list(np.arange(72) % 3 - 1),
    ],
    ids=len,
)
def test_signs_come_back(small, signs):
    given_signs = np.array(signs, dtype=np.int8)
    decoded = decode(encode(small, noise(small.shared_values), None, parts={"signs": given_signs}), small)
    assert decoded.parts["signs"].dtype == np.int8
    assert decoded.parts["signs"].tolist() == given_signs.tolist()
    bits = [(len(signs) + 7) // 8, (int(np.count_nonzero(given_signs)) + 7) // 8]
    assert decoded.sizes["signs"] == 4 + sum(bits)


def test_a_bundle_without_parts_has_none(small):
    decoded = decode(encode(small, noise(small.shared_values), None), small)
    assert decoded.parts == {}


def test_the_bits_of_signs_by_hand(small, take_apart):
    body = encode(small, noise(small.shared_values), None, parts={"signs": np.array([0, 1, -1, 1], np.int8)})
    low, high = take_apart(body)[0]["signs"]["data_offsets"]
    assert take_apart(body)[1][low:high] == b"\x04\0\0\0" + bytes([0b01110000, 0b10100000])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "signs: 0 signs take more than 0 bytes"),
        (b"\x01\0\0", "signs: 0 signs take more than 3 bytes"),
        (b"\x09\0\0\0\xff", "signs: 9 signs take more than 5 bytes; send the whole file"),
        (b"\x08\0\0\0\xff", "signs: 0 bytes for 8 signs other than 0"),
        (b"\x08\0\0\0\x00\xff", "signs: 1 bytes for 0 signs other than 0"),
        (b"\x49\0\0\0" + bytes(16), "signs: the bundle has 73 signs; it must have at most 72"),
        (b"\xff\xff\xff\xff" + bytes(16), "signs: the bundle has 4294967295 signs; it must have at most 72"),
        (bytes(23), "signs: 23 bytes; it must have at most 22"),
    ],
)
def test_signs_that_do_not_add_up_are_refused(small, sign, take_apart, data, said):
    parts = take_apart(encode(small, noise(small.shared_values), None))
    with pytest.raises(BundleError, match=said):
        decode(sign(*with_part(parts, "signs", "U8", data)), small)


def test_gradients_come_back(small):
    gradients = noise(72, seed=4)
    decoded = decode(encode(small, noise(small.shared_values), some(small, 1.1), parts={"gradients": gradients}), small)
    assert decoded.parts["gradients"].dtype == np.float32
    assert decoded.parts["gradients"].tobytes() == gradients.tobytes()


@pytest.mark.parametrize("count", [73, 134])
def test_more_numbers_than_are_expected_are_refused(small, count):
    body = encode(small, noise(small.shared_values), None, parts={"gradients": noise(count)})
    with pytest.raises(BundleError, match=rf"gradients: {4 * count} bytes.*\b288\b"):
        decode(body, small)


def test_a_part_that_is_not_expected_is_refused(small):
    body = encode(small, noise(small.shared_values), None, parts={"gradients": noise(72)})
    with pytest.raises(BundleError, match=r"'gradients'.*\bvalues\b"):
        decode_bundle(body, small)


@pytest.mark.parametrize("numbers", [np.zeros((2, 3), np.float32), np.zeros(3), np.zeros(3, np.int32)])
def test_numbers_of_other_types_are_not_sent(small, numbers):
    with pytest.raises(BundleError, match=r"float32 \[n\], or int8 \[n\]"):
        encode(small, noise(small.shared_values), None, parts={"found": numbers})


@pytest.mark.parametrize("name", ["values", "mask", "", "Signs", "a b", "x" * 33, "größe"])
def test_a_part_with_a_name_that_a_bundle_cannot_have_is_refused(name):
    with pytest.raises(ValueError, match="a part cannot be named"):
        Part(name=name, dtype="sign", count=all_maskable)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_neither_sent_nor_read(small, sign, take_apart, value):
    gradients = noise(72)
    gradients[7] = value
    with pytest.raises(BundleError, match="not finite"):
        encode(small, noise(small.shared_values), None, parts={"gradients": gradients})
    parts = take_apart(encode(small, noise(small.shared_values), None))
    with pytest.raises(BundleError, match="gradients: a number is not finite"):
        decode(sign(*with_part(parts, "gradients", "F32", gradients.tobytes())), small)


def everything_at_once(small):
    mask = some(small, 0.4)
    return {
        "values": encode(small, noise(small.shared_values), None),
        "neurons": encode(small, noise(count_values(small, every_other(small))), every_other(small)),
        "elements": encode(small, quantised(small, mask), mask, parts={"gradients": noise(72)}),
        "all": encode(
            small,
            quantised(small, mask),
            mask,
            parts={"signs": np.ones(mask.count, np.int8), "gradients": noise(72)},
        ),
    }


def every_other(small):
    return NeuronMask({group: np.arange(0, size, 2) for group, size in small.group_sizes.items()})


def test_sizes_add_up_to_the_body(small):
    found = {kind: decode(body, small).sizes for kind, body in everything_at_once(small).items()}
    for kind, body in everything_at_once(small).items():
        assert sum(found[kind].values()) == len(body), kind
    assert set(found["all"]) == {"header", "values", "scales", "mask", "signs", "gradients"}


def test_the_safetensors_library_reads_every_part(small):
    loaded = safetensors.numpy.load(everything_at_once(small)["all"])
    assert {name: str(part.dtype) for name, part in loaded.items()} == {
        "values": "int8", "scales": "float32", "mask": "uint8", "signs": "uint8", "gradients": "float32"
    }  # fmt: skip
    assert loaded["gradients"].tolist() == noise(72).tolist()


@pytest.mark.parametrize("precision", [*PRECISIONS, "int8"])
@pytest.mark.parametrize("kind", ["all", "neurons", "elements", "changed elements"])
@pytest.mark.parametrize("gradients", [False, True])
def test_no_update_is_larger_than_the_largest(precision, kind, gradients):
    """With the longest report that fits the header; a batch norm behind a flatten has rows, too."""
    channels = Segment(group="conv", repeat=7)
    manifest = Manifest(
        task="flattened",
        input_shape=(1, 7),
        output_shape=(2,),
        tensors=(
            TensorSpec(name="conv.weight", shape=(900, 1, 3), axes=((Segment(group="conv"),), (), ())),
            TensorSpec(name="norm.weight", shape=(6300,), axes=((channels,),)),
            TensorSpec(name="out.weight", shape=(2, 6300), axes=((), (channels,))),
        ),
        groups=(NeuronGroup(name="conv", size=900),),
        layers=(
            Layer(name="conv", kind="conv1d", tensors=("conv.weight",)),
            Layer(name="out", kind="linear", tensors=("out.weight",)),
        ),
    )
    known = some(manifest, 0.5) if kind == "changed elements" else None
    mask = {"all": None, "neurons": NeuronMask({"conv": np.arange(0, 900, 2)})}.get(kind, some(manifest, 0.5, seed=1))
    count = count_values(manifest, mask)
    weights = sum(spec.size for spec in manifest.maskable)
    body = encode(
        manifest,
        quantised(manifest, mask) if precision == "int8" else noise(count),
        mask,
        precision=precision,
        known=known,
        parts={"gradients": noise(weights)} if gradients else None,
    )
    parts = {"gradients": Expected("float32", weights)} if gradients else {}
    bound = largest_bundle(count, precision, manifest, elements=isinstance(mask, ElementMask), parts=parts)
    header = decode_bundle(body, manifest, known, parts=parts).sizes["header"]
    assert len(body) - header <= bound - MAX_HEADER - 8


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
    torch = pytest.importorskip("torch")  # an emulated device has none
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
        (math.nan, "fp32", "training diverged: a value is not finite; lower the learning rate or set a clip"),
        (-math.inf, "bf16", "training diverged: a value is not finite"),
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
    with pytest.raises(BundleError, match=r"\(3,\).*\b134\b"):
        encode(small, np.zeros(3, dtype=np.float32), None)


def test_a_bundle_of_another_model_is_refused(small):
    with pytest.raises(BundleError, match="another model"):
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
    with pytest.raises(BundleError, match=r"fc\.weight: .*not finite"):
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


HELD_BITS = bytes([0x35, 0, 0xFF, 0x10, 0x81, 0, 0, 0x7E, 0x11])
HELD_DIGEST = hashlib.sha256(HELD_BITS).hexdigest()
HELD_VALUES = 62 + sum(byte.bit_count() for byte in HELD_BITS)
"""The mask of elements that the reader of hostile bundles holds, and the values under it."""


def sparse_bodies(small):
    """Valid bundles with everything else that there is: elements in all forms, int8, signs, gradients."""
    held = from_bits(small, HELD_BITS)
    changed = but_for(held, 3, 70)
    valid = [
        encode(small, quantised(small, None), None),
        encode(small, quantised(small, every_other(small)), every_other(small)),
    ]
    for mask, known in ((held, None), (held, held), (changed, held), (everything(small), None)):
        values = noise(count_values(small, mask))
        signs = np.arange(mask.count).astype(np.int8) % 3 - 1
        valid.append(encode(small, values, mask, known=known, precision="fp16"))
        both = {"signs": signs, "gradients": noise(72)}
        valid.append(encode(small, quantised(small, mask), mask, known=known, parts={"gradients": noise(72)}))
        valid.append(encode(small, values, mask, known=known, parts={"signs": signs}))
        valid.append(encode(small, values, mask, known=known, parts=both))
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
    for name in ("scales", "mask", "signs", "gradients"):
        header.pop(name, None)
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


ORDER = ("values", "scales", "mask", "signs", "gradients")
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


def laid_out(header, pieces):
    """Header and data of these pieces, in their order; every offset is right."""
    end, kept = 0, {"__metadata__": header["__metadata__"]}
    for name in ORDER:
        if name in pieces:
            kept[name] = {**header[name], "data_offsets": [end, end + len(pieces[name])]}
            end += len(pieces[name])
    return kept, b"".join(pieces[name] for name in ORDER if name in pieces)


def pieces_of(parts):
    return {name: parts[1][slice(*parts[0][name]["data_offsets"])] for name in ORDER if name in parts[0]}


def with_part(parts, name, dtype, data):
    """Header and data with one part replaced or added."""
    header = {**json.loads(json.dumps(parts[0])), name: {"dtype": dtype, "shape": [len(data) // WIDTHS[dtype]]}}
    return laid_out(header, {**pieces_of(parts), name: data})


def without(parts, *names):
    """Header and data less these parts."""
    return laid_out(parts[0], {name: piece for name, piece in pieces_of(parts).items() if name not in names})


def with_form(parts, form):
    header = json.loads(json.dumps(parts[0]))
    header["__metadata__"]["mask"] = form if isinstance(form, str) else json.dumps(form)
    return header, parts[1]


def any_elements(rng, body, parts, sign):
    """Any bits of elements, right or wrong padding and length, any other form beside them, a right or wrong count."""
    mask = rng.choice([rng.randbytes(9), rng.randbytes(9), rng.randbytes(8), rng.randbytes(10), bytes(9), b"\xff" * 9])
    count = rng.choice([62 + sum(byte.bit_count() for byte in mask), rng.randrange(135)])
    form = rng.choice([{"form": "elements"}] * 4 + [{"form": "elements", "digest": "0"}, {"form": "bits"}])
    values = b"".join(struct.pack("<f", rng.uniform(-2, 2)) for _ in range(count))
    parts = with_part(without(parts, "scales", "signs"), "values", "F32", values)
    return sign(*with_part(with_form(parts, form), "mask", "U8", mask))


def named_masks(rng, body, parts, sign):
    """Masks that are held or not, with or without a difference, of which some lead nowhere."""
    digest = rng.choice([HELD_DIGEST] * 5 + ["0" * 64, "", HELD_DIGEST[:12], rng.choice(ODD)])
    form = {"form": rng.choice(["known", "changed", "changed"]), "digest": digest}
    if rng.random() < 0.1:
        form[rng.choice(["x", "form"])] = rng.choice(ODD)
    gaps = [rng.choice([0, 1, 5, 30, 71, 72, 254, 255]) for _ in range(rng.choice([0, 1, 1, 2, 3, 9, 10]))]
    count = HELD_VALUES + rng.randrange(-2, 3)
    parts = with_part(without(parts, "scales", "signs", "mask"), "values", "F32", bytes(4 * count))
    if rng.random() < 0.7:
        parts = with_part(parts, "mask", "U8", bytes(gaps))
    return sign(*with_form(parts, form))


def whole_numbers(rng, body, parts, sign):
    """Any numbers and scales, in right or wrong numbers, with or without the other."""
    count = parts[0]["values"]["shape"][0]
    rows = parts[0]["scales"]["shape"][0] if "scales" in parts[0] else 17
    numbers = bytearray(rng.randbytes(rng.choice([count, count, count, count - 1, count + 1])))
    if rng.random() < 0.8:
        numbers = bytearray(byte if byte != 0x80 else 0 for byte in numbers)
    some_scales = [0.0, 1.0, 1e-45, 1e30, 3e38, -1.0, -0.0, math.nan, math.inf]
    weights = [9, 9, 9, 9, 1, 1, 1, 1, 1]
    scales = rng.choices(some_scales, weights, k=rng.choice([rows, rows, rows, 0, rows + 1, 17]))
    if rng.random() < 0.9:
        parts = with_part(parts, "values", rng.choice(["I8", "I8", "I8", "U8"]), bytes(numbers))
    packed = struct.pack(f"<{len(scales)}f", *scales)
    return sign(*(with_part(parts, "scales", "F32", packed) if rng.random() < 0.9 else without(parts, "scales")))


def any_signs(rng, body, parts, sign):
    """Signs of right and wrong numbers, with bits to spare or too few, claims up to four thousand millions."""
    count = rng.choice([0, 1, 8, 9, 29, 72, 73, 80, 2**31, 2**32 - 1])
    known = min(count, 80)
    nonzero = [rng.random() < 0.5 for _ in range(known)]
    first = np.packbits(np.array(nonzero, dtype=bool)).tobytes()
    second = rng.randbytes((sum(nonzero) + 7) // 8)
    data = struct.pack("<I", count) + rng.choice([first + second] * 4 + [first, second, first + second + b"\0", b""])
    data = rng.choice([data, data, data, data[:3], rng.randbytes(30)])
    return sign(*with_part(parts, "signs", rng.choice(["U8", "U8", "U8", "U8", "I8", "F32"]), data))


def any_gradients(rng, body, parts, sign):
    count = rng.choice([72, 72, 72, 0, 71, 73])
    values = rng.choices([0.5, -3.0, 1e-45, 3e38, math.nan, math.inf], [90, 90, 90, 90, 1, 1], k=count)
    dtype = rng.choice(["F32", "F32", "F32", "F32", "F16", "I8"])
    return sign(*with_part(parts, "gradients", dtype, struct.pack(f"<{count}f", *values)))


def parts_in_another_order(rng, body, parts, sign):
    """Offsets that swap two parts, overlap or leave a gap, each of its right length."""
    header, data = json.loads(json.dumps(parts[0])), parts[1]
    names = [name for name in ORDER if name in header]
    rng.shuffle(names)
    end = 0
    for name in names:
        low, high = header[name]["data_offsets"]
        header[name]["data_offsets"] = [end, end + high - low]
        end += high - low + rng.choice([0, 0, 0, 1, -1])
    return sign(header, data)


def with_mask(parts, sign, form, mask, values=None):
    header = json.loads(json.dumps(parts[0]))
    low, high = header["values"]["data_offsets"]
    data = parts[1][low:high]
    if values is not None:
        dtype = header["values"]["dtype"]
        data = bytes(values * WIDTHS[dtype])
        header["values"] = {"dtype": dtype, "shape": [values], "data_offsets": [0, len(data)]}
    header["__metadata__"]["mask"] = form
    for name in ("scales", "mask", "signs", "gradients"):
        header.pop(name, None)
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
    form = {"form": "draw", "key": "dev-7-3", "ratio": 0.5}
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

SPARSE_ATTACKS = (any_elements, named_masks, whole_numbers, any_signs, any_gradients, parts_in_another_order)


def assert_promises(decoded: Bundle, manifest: Manifest):
    """All that code behind ``decode`` relies on."""
    assert decoded.values.dtype == np.float32
    assert decoded.values.shape == (count_values(manifest, decoded.mask),)
    assert np.isfinite(decoded.values).all()
    assert decoded.precision in (*PRECISIONS, "int8")
    assert isinstance(decoded.report, str)
    if decoded.mask is not None:
        check_mask(manifest, decoded.mask)
    if decoded.draw is not None:
        assert same_mask(decoded.mask, draw_neurons(manifest, decoded.draw))
    assert decoded.parts.keys() <= {"signs", "gradients"}
    if "signs" in decoded.parts:
        assert decoded.parts["signs"].dtype == np.int8
        assert set(decoded.parts["signs"].tolist()) <= {-1, 0, 1}
        assert len(decoded.parts["signs"]) <= 72
    if "gradients" in decoded.parts:
        assert decoded.parts["gradients"].dtype == np.float32
        assert len(decoded.parts["gradients"]) <= 72
        assert np.isfinite(decoded.parts["gradients"]).all()
    again = encode(
        manifest,
        decoded.values,
        decoded.mask,
        draw=decoded.draw,
        precision="fp32" if decoded.precision == "int8" else decoded.precision,
        parts=decoded.parts,
    )
    read = decode(again, manifest)
    assert read.values.tobytes() == decoded.values.tobytes()
    assert same_mask(read.mask, decoded.mask)
    assert {name: part.tobytes() for name, part in read.parts.items()} == {
        name: part.tobytes() for name, part in decoded.parts.items()
    }


WALLS = (
    "too few for a bundle", "header claims", "truncated", "not JSON", "must have __metadata__",
    "not a part of this message", "metadata must have",
    "must be a string", "has format", "another model", "must have a dtype", "must be integers", "unsupported dtype",
    "take", "begins at byte", "bytes of data", "digest does not match", "description is not JSON",
    "not allowed in this form", "a draw has exactly", "cannot be drawn", "form must be", "but the group has",
    "padding bits", "end too early",
    "the mask ends before", "index lists end after", "must be sorted", "its mask covers", "is not finite",
)  # fmt: skip


@pytest.mark.integration
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


SPARSE_WALLS = (
    "weights need", "padding bits", "within a distance", "names position", "bytes, all of its bits",
    "not stored here", "not allowed in this form", "form must be", "scales for", "integers must be in",
    "scales belong", "U8", "take more", "signs other than 0", ": fetch it again", "a number is not finite",
    "begins at byte", "its mask covers", "is not finite", "is not JSON", "must have __metadata__",
)  # fmt: skip


@pytest.mark.integration
def test_hostile_bytes_of_sparse_models_are_refused_or_keep_every_promise(small, sign, take_apart):
    """All attacks on bundles of elements, int8, signs and gradients, at a reader who holds a mask, and those made for
    them on bundles of every kind: 16,200."""
    rng = random.Random(20240602)
    held = from_bits(small, HELD_BITS)
    sparse, plain = ([(body, take_apart(body)) for body in made(small)] for made in (sparse_bodies, bodies))
    accepted = {attack.__name__: 0 for attack in (*ATTACKS, *SPARSE_ATTACKS)}
    met = set()
    for attack in (*ATTACKS, *SPARSE_ATTACKS):
        for number in range(600):
            body, parts = rng.choice(plain if attack in SPARSE_ATTACKS and number % 4 == 0 else sparse)
            hostile = attack(rng, body, parts, sign)
            try:
                decoded = decode(hostile, small, held)
            except BundleError as refused:
                text = str(refused)
                met.update(wall for wall in SPARSE_WALLS if wall in text)
                text.encode()
            else:
                assert_promises(decoded, small)
                accepted[attack.__name__] += 1
    assert met == set(SPARSE_WALLS), "every check was reached"
    for attack in ("random_bytes", "truncated", "longer", "shorter_but_signed", "longer_but_signed", "nested"):
        assert accepted[attack] == 0, attack
    for attack in ("flipped_data_but_signed", "any_bits_as_values", *(each.__name__ for each in SPARSE_ATTACKS)):
        assert accepted[attack] > 0, f"{attack} never came through: it tests nothing behind its first wall"


def peak_of_decoding(body, manifest, known=None):
    tracemalloc.start()
    try:
        decode(body, manifest, known)
    except BundleError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def test_memory_is_bounded_whatever_the_bytes_claim(small, sign, take_apart):
    rng = random.Random(7)
    valid = [(body, take_apart(body)) for body in bodies(small) + sparse_bodies(small)]
    held = from_bits(small, HELD_BITS)
    for attack in (*ATTACKS, *SPARSE_ATTACKS):
        for _ in range(12):
            body, parts = rng.choice(valid)
            hostile = attack(rng, body, parts, sign)
            assert peak_of_decoding(hostile, small, held) <= MAX_MEMORY_FACTOR * len(hostile) + MAX_MEMORY_FIXED


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


@pytest.mark.integration
@pytest.mark.parametrize("density", [0.02, 0.3, 1.1])
@pytest.mark.parametrize("form", ["elements", "known", "changed", "int8", "signs", "gradients"])
def test_memory_of_sparse_models_is_what_the_format_says(form, density):
    """A byte for every maskable weight, four more for a difference, five for signs; eight for those in counted rows."""
    manifest = linear(2000, 1000)
    held = some(manifest, density)
    mask = but_for(held, *range(0, 2_000_000, 500)) if form == "changed" else held
    values = quantised(manifest, mask) if form == "int8" else noise(count_values(manifest, mask))
    parts = {"signs": np.ones(2_000_000, np.int8), "gradients": noise(2_000_000)}
    body = encode(
        manifest,
        values,
        mask,
        known=held if form in ("known", "changed") else None,
        parts={form: parts[form]} if form in parts else None,
    )
    promised = MAX_MEMORY_FACTOR * len(body) + MAX_MEMORY_FIXED
    promised += {"signs": 6, "changed": 5, "known": 0}.get(form, 1) * 2_000_000
    promised += 8 * mask.count if form == "int8" else 0
    reader = ElementMask(dict(held.exists))  # as just loaded: nothing is remembered of it
    assert peak_of_decoding(body, manifest, reader) <= promised


def test_bytes_that_claim_many_signs_or_a_long_difference_take_no_more(sign, take_apart):
    """Eight times as many signs as there are weights, and a difference of a byte for each, all of it ones."""
    manifest = linear(2000, 1000)
    held = some(manifest, 0.0)
    parts = take_apart(encode(manifest, noise(2000), held, known=held))
    many = struct.pack("<I", 16_000_000) + b"\xff" * 4_000_000
    form = {"form": "changed", "digest": held.digest}
    for hostile, said in (
        (sign(*with_part(parts, "signs", "U8", many)), "4000004 bytes; it must have at most 500004"),
        (sign(*with_form(with_part(parts, "mask", "U8", bytes(2_000_000)), form)), "bytes, all of its bits 250000"),
    ):
        assert peak_of_decoding(hostile, manifest, held) <= MAX_MEMORY_FIXED
        with pytest.raises(BundleError, match=said):
            decode(hostile, manifest, held)
