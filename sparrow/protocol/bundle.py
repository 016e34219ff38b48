"""Bundles: packed values for transfer, as a safetensors file that contains only the values of its mask.

    8 bytes   length of the header, little endian
    header    JSON: {"__metadata__": {...}, "values": {...}, "mask": {...}, ...}
    data      values:    one vector, every active value of the shared tensors, packed as in ``masks``
              scales:    beside int8 values, float32, one for each row (``quantization``)
              mask:      in forms with a tensor
              others:    a method's parts, one vector each, sorted by name (``parts``)

Metadata, all strings as in safetensors:

    sparrow   version of this format, "1"
    manifest  digest of the values' names and shapes (``Manifest.values_digest``)
    mask      {"form": "full"} | of neurons: {"form": "draw", key, ratio}, {"form": "bits"},
              {"form": "index"}, {"form": "first", counts} | of elements: {"form": "known", digest},
              {"form": "elements"}, {"form": "changed", digest} | of blocks: {"form": "blocks"}
    report    JSON beside the values (an update's ``UpdateReport``), or ""
    sha256    digest of the header without this entry, and of the data

A mask takes its shortest form. ``draw`` is a seed from which both sides derive it; ``bits`` is one bit per hidden
neuron in manifest order, most significant bit first; ``index`` lists, per group, the active neurons as uint16 or
uint32; ``first`` counts the first neurons of every group. So the conv(1->3)-fc(5)-out(2) network of ``manifest`` with
conv neuron 1 and fc neurons 0 and 2 active packs as bits 0b010_10100 in one byte, then conv.weight[1],
fc.weight[[0,2]][:, 4:8], out.weight[:, [0,2]].

Masks of blocks are a bit for each, most significant bit first. Masks of elements are the digest of one that both sides
have (``known``), the bits of all maskable weights (``elements``), or the difference from the mask of a digest
(``changed``).

Values are float32 (F32), float16 (F16), bfloat16 (BF16, rounded to nearest even) or int8 (I8), which are differences
from the payload.

Decoding does not use the safetensors library, because the input is untrusted: every length is checked against the
manifest before data are copied. Beyond the input it uses at most ``MAX_MEMORY_FACTOR`` times its length, and
``MAX_MEMORY_FIXED`` for header and mask. A mask of elements takes a byte per maskable weight (four more while a
difference is read); signs take five bytes each.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockMask
from .elements import ElementMask, apply_difference, difference, from_bits, unpack_flags
from .errors import BundleError, ManifestError
from .manifest import Array, Manifest
from .masks import Mask, NeuronDraw, NeuronMask, check_mask, count_values, draw_neurons, unpack
from .neurons import neuron_bits, neurons_from_bits
from .parts import RESERVED, WIRE_TYPES, Expected, Numbers, pack_signs, type_of, unpack_signs
from .quantization import LARGEST, Quantised, row_lengths
from .secure.numbers import Words

Precision = Literal["fp32", "fp16", "bf16", "int8"]

FORMAT = "1"
MEDIA_TYPE = "application/octet-stream"
MAX_HEADER = 64 * 1024
MAX_MEMORY_FACTOR = 4
MAX_MEMORY_FIXED = 4 * 1024 * 1024

_DTYPES: dict[Precision, tuple[str, int]] = {
    "fp32": ("F32", 4),
    "fp16": ("F16", 2),
    "bf16": ("BF16", 2),
    "int8": ("I8", 1),
}
LARGEST_VALUE: dict[Precision, float] = {
    "fp32": float(np.finfo(np.float32).max),
    "fp16": float(np.finfo(np.float16).max),
    "bf16": float(np.array(0x7F7F0000, dtype=np.uint32).view(np.float32)),
    "int8": float(np.finfo(np.float32).max),
}
"""The largest magnitude of each precision; int8 values are differences of float32 models."""
_PRECISIONS: dict[str, Precision] = {dtype: precision for precision, (dtype, _) in _DTYPES.items()}
_MASKED = {"U16": 2, "U32": 4}
"""Types of masked values of secure aggregation -> their bytes."""
NO_PARTS: Mapping[str, Expected] = {}


@dataclass(frozen=True)
class Bundle:
    """A decoded and checked bundle."""

    # Float32 [count_values(manifest, mask)], finite; of precision int8 a difference.
    values: NDArray[np.float32]
    # None if everything is active.
    mask: Mask | None
    # The seed form, if the mask has one.
    draw: NeuronDraw | None
    precision: Precision
    report: str
    # A method's, by name.
    parts: Mapping[str, Numbers] = field(default_factory=dict)
    # Bytes of header, values, mask and parts.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # Integers of secure aggregation instead of values, with extras of the same type (``secure.fine``).
    masked: Words | None = None
    extras: Words | None = None


def encode(
    manifest: Manifest,
    values: Array | Quantised | Words,
    mask: Mask | None,
    *,
    draw: NeuronDraw | None = None,
    precision: Precision = "fp32",
    report: str = "",
    known: ElementMask | None = None,
    parts: Mapping[str, Numbers] | None = None,
    extras: Words | None = None,
) -> bytes:
    """Return packed ``values`` (see ``masks.pack``) and their mask as a bundle.

    Values of type uint16 or uint32 are masked by secure aggregation, as are extras. draw: the seed of ``mask``. known:
    a mask of elements that the reader has. Quantised values have precision int8. Raises BundleError if a value is not
    finite in the precision.
    """
    wanted = count_values(manifest, mask)
    quantised = isinstance(values, Quantised)
    vector: Array = values.numbers if isinstance(values, Quantised) else values
    hidden = vector.dtype.kind == "u"
    if vector.shape != (wanted,):
        raise BundleError(f"{vector.shape} values given, but the mask covers {wanted}; pack them with masks.pack")
    if hidden and parts:
        raise BundleError(f"masked values have no parts: {', '.join(parts)} would be sent in clear; leave them out")
    if extras is not None and not hidden:
        raise BundleError("extras belong to masked values; leave them out")
    if precision == "int8" and not quantised and not hidden:
        raise BundleError("values of precision int8 are differences; quantise them with protocol.quantization")
    dtype = f"U{8 * vector.itemsize}" if hidden else _DTYPES["int8" if quantised else precision][0]
    description, mask_bytes = _encode_mask(manifest, mask, draw, known)
    data: dict[str, _Tensor] = {}
    if isinstance(values, Quantised):
        data["values"] = (dtype, wanted, values.numbers.view(np.uint8).data)
        data["scales"] = ("F32", len(values.scales), _to_bytes(values.scales, "fp32"))
    elif hidden:
        data["values"] = (dtype, wanted, vector.astype(vector.dtype.newbyteorder("<")).view(np.uint8).data)
        if extras is not None and len(extras):
            data["extras"] = (dtype, len(extras), extras.astype(vector.dtype.newbyteorder("<")).view(np.uint8).data)
    else:
        data["values"] = (dtype, wanted, _to_bytes(values, precision))
    if mask_bytes:
        data["mask"] = ("U8", len(mask_bytes), mask_bytes)
    for name, numbers in sorted((parts or {}).items()):
        data[name] = _encoded(name, numbers)
    metadata = {"sparrow": FORMAT, "manifest": manifest.values_digest, "mask": _canonical(description)}
    return _written({**metadata, "report": report}, data)


_Tensor = tuple[str, int, bytes | memoryview]
"""A tensor of a bundle: type, length, bytes."""


def _written(metadata: dict[str, str], data: Mapping[str, _Tensor]) -> bytes:
    """Return a bundle with its digest."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (kind, count, part) in data.items():
        header[name] = {"dtype": kind, "shape": [count], "data_offsets": [end, end + len(part)]}
        end += len(part)
    body = [part for _, _, part in data.values()]
    metadata["sha256"] = _digest(header, body)
    text = _canonical(header).encode()
    # safetensors readers want the data aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *body))


def _encoded(name: str, numbers: Numbers) -> _Tensor:
    """Return a part of a method as a tensor."""
    if type_of(name, numbers) == "sign":
        packed = pack_signs(numbers)
        return WIRE_TYPES["sign"], len(packed), packed
    return WIRE_TYPES["float32"], len(numbers), _to_bytes(numbers, "fp32")


def decode(
    body: bytes | memoryview,
    manifest: Manifest,
    known: ElementMask | None = None,
    *,
    parts: Mapping[str, Expected] = NO_PARTS,
    intact: bool = False,
) -> Bundle:
    """Read and check a bundle of ``manifest``: size, header, digest, mask, counts, types, finite, in this order.

    known: the mask of elements that this side has. intact: the digest of these bytes was already checked. Raises
    BundleError if they are not a valid bundle for the manifest.
    """
    buffer = memoryview(body).cast("B")
    header, start = _read_header(buffer)
    _check_names(header, parts)
    metadata = _metadata(header)
    if metadata["manifest"] != manifest.values_digest:
        raise BundleError("the bundle was made for another model; fetch the federation's manifest again and restart")
    entries = {name: _entry(header, name, parts) for name in (*RESERVED, *parts) if name in header}
    _check_layout(entries, len(buffer) - start)
    data = {name: buffer[start + low : start + high] for name, (_, _, low, high) in entries.items()}
    if not intact and _digest(header, list(data.values())) != metadata["sha256"]:
        raise BundleError("the bundle's digest does not match its content; send it again")
    mask, draw = _decode_mask(manifest, metadata["mask"], data.get("mask", memoryview(b"")), known)
    dtype, count, _, _ = entries["values"]
    wanted = count_values(manifest, mask)
    if count != wanted:
        raise BundleError(f"the bundle has {count} values, but its mask covers {wanted}; pack it again")
    sizes = {"header": start, **{name: len(part) for name, part in data.items()}}
    if dtype in _MASKED:
        if entries.get("extras", entries["values"])[0] != dtype:
            raise BundleError("extras have another type than masked values; encode with protocol.bundle")
        return _masked(data, dtype, mask, draw, metadata["report"], sizes)
    if "extras" in data:
        raise BundleError("extras belong to masked values; encode with protocol.bundle")
    precision = _PRECISIONS[dtype]
    if precision == "int8":
        values = _decode_quantised(manifest, mask, data)
    else:
        if "scales" in data:
            raise BundleError("scales belong to int8 values; encode with protocol.bundle")
        values = _from_bytes(data["values"], precision)
    if not _all_finite(values):
        parts_of = unpack(manifest, values, mask)
        name = next(spec.name for spec, _, block in parts_of if not np.isfinite(block).all())
        raise BundleError(f"{name}: a value is not finite; do not send this update")
    return Bundle(
        values,
        mask,
        draw,
        precision,
        metadata["report"],
        parts={name: _numbers(name, data[name], part) for name, part in parts.items() if name in data},
        sizes=sizes,
    )


def _masked(
    data: Mapping[str, memoryview],
    dtype: str,
    mask: Mask | None,
    draw: NeuronDraw | None,
    report: str,
    sizes: Mapping[str, int],
) -> Bundle:
    if not data.keys() <= {"values", "extras", "mask"}:
        raise BundleError("masked values must not have scales or a method's parts; encode with protocol.bundle")
    words, extras = (np.frombuffer(data.get(name, b""), f"<u{_MASKED[dtype]}") for name in ("values", "extras"))
    return Bundle(np.zeros(0, np.float32), mask, draw, "fp32", report, sizes=sizes, masked=words, extras=extras)


def _decode_quantised(manifest: Manifest, mask: Mask | None, data: Mapping[str, memoryview]) -> NDArray[np.float32]:
    lengths = row_lengths(manifest, mask)
    scales = np.frombuffer(data.get("scales", b""), dtype="<f4")
    if len(scales) != len(lengths):
        raise BundleError(f"the bundle has {len(scales)} scales for {len(lengths)} rows; quantise it again")
    numbers = np.frombuffer(data["values"], dtype=np.int8)
    # quantise never returns -128, whose absolute value does not fit int8.
    if (len(numbers) and numbers.min() < -LARGEST) or not _all_finite(scales) or (len(scales) and scales.min() < 0):
        raise BundleError("integers must be in -127..127, scales finite and not negative; quantise the update again")
    # Overflowing values become infinite, and are refused.
    with np.errstate(over="ignore"):
        return Quantised(numbers, scales).values(lengths)


def _numbers(name: str, data: memoryview, wanted: Expected) -> Numbers:
    """Return the numbers in a part of a method."""
    if wanted.dtype == "sign":
        return unpack_signs(name, data, wanted.most)
    numbers = _from_bytes(data, "fp32")
    if not _all_finite(numbers):
        raise BundleError(f"{name}: a number is not finite; do not send this update")
    return numbers


def largest_bundle(
    values: int,
    precision: Precision,
    manifest: Manifest,
    *,
    elements: bool = False,
    parts: Mapping[str, Expected] = NO_PARTS,
) -> int:
    """Return an upper bound on the bytes of a bundle of ``values`` values. elements: it may have a mask of elements."""
    rows = sum(spec.shape[0] if len(spec.shape) > 1 else 1 for spec in manifest.shared)
    scales = 4 * rows if precision == "int8" else 0
    weights = manifest.maskable_values
    mask = (weights + 7) // 8 if elements else 4 * sum(manifest.group_sizes.values()) + 4 * len(manifest.group_sizes)
    mask += len(manifest.block_table.sizes)
    others = sum(part.most_bytes for part in parts.values())
    return 8 + MAX_HEADER + values * _DTYPES[precision][1] + scales + mask + others


def largest_payload(manifest: Manifest, parts: Mapping[str, Expected] = NO_PARTS) -> int:
    """Return an upper bound on the bytes of a coordinator's payload of this model."""
    values = manifest.shared_values
    return max(largest_bundle(values, "fp32", manifest, elements=elements, parts=parts) for elements in (False, True))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(header: dict[str, Any], parts: list[bytes | memoryview] | list[memoryview]) -> str:
    unsigned = dict(header)
    unsigned["__metadata__"] = {key: text for key, text in header["__metadata__"].items() if key != "sha256"}
    hasher = hashlib.sha256(_canonical(unsigned).encode("utf-8", "surrogatepass"))
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _all_finite(values: NDArray[np.floating[Any]]) -> bool:
    """Return whether all values are finite, without an array of flags."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return True
    return values.size == 0 or bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _to_bytes(values: Array, precision: Precision) -> memoryview:
    """Return little-endian bytes in the wire's precision; a view for float32, otherwise a copy."""
    if not _all_finite(cast(NDArray[np.floating[Any]], values)):
        raise BundleError("training diverged: a value is not finite; lower the learning rate or set a clip")
    single = np.ascontiguousarray(values, dtype="<f4")
    if precision == "fp32":
        return single.view(np.uint8).data
    if precision == "fp16":
        with np.errstate(over="ignore"):
            half = single.astype("<f2")
        if not _all_finite(half):
            largest = float(np.abs(single).max())
            raise BundleError(f"the value {largest:g} does not fit fp16 (largest 65504); use precision bf16 or fp32")
        return half.view(np.uint8).data
    bits = single.view("<u4")
    # Round to nearest, ties to even: add half of the dropped part, less one where the kept part is even.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    brain: NDArray[np.uint16] = rounded.astype("<u2")
    if ((brain & 0x7F80) == 0x7F80).any():
        raise BundleError("a value rounds to infinity in bf16; use precision fp32")
    return brain.view(np.uint8).data


def _from_bytes(data: memoryview, precision: Precision) -> NDArray[np.float32]:
    if precision == "fp32":
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    if precision == "fp16":
        # Some processors (aarch64) signal NaNs in this cast; a later check refuses values that are not finite.
        with np.errstate(invalid="ignore"):
            return np.frombuffer(data, dtype="<f2").astype(np.float32)
    return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view(np.float32)


def _read_header(buffer: memoryview) -> tuple[dict[str, Any], int]:
    if len(buffer) < 8:
        raise BundleError(f"{len(buffer)} bytes are too few for a bundle; send the whole file")
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > MAX_HEADER:
        raise BundleError(f"the header claims {length} bytes; it must have at most {MAX_HEADER}: is this a bundle?")
    if length > len(buffer) - 8:
        raise BundleError(f"the header claims {length} bytes, {len(buffer) - 8} follow: truncated; send it again")
    try:
        header = json.loads(bytes(buffer[8 : 8 + length]))
    except (ValueError, RecursionError):
        raise BundleError("the header is not JSON; a bundle is a safetensors file") from None
    if not isinstance(header, dict):
        raise BundleError("the header is not a JSON object; a bundle is a safetensors file")
    return header, 8 + length


def _check_names(header: dict[str, Any], parts: Mapping[str, Expected]) -> None:
    if not {"__metadata__", "values"} <= set(header):
        raise BundleError("the header must have __metadata__ and values; encode with protocol.bundle")
    known = (*RESERVED, *parts)
    unknown = next((name for name in header if name not in known and name != "__metadata__"), None)
    if unknown is not None:
        raise BundleError(
            f"{unknown[:32]!r} is not a part of this message, which may have {', '.join(known)}; use the same "
            f"version of "
            f"the method on both sides"
        )


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    metadata = header["__metadata__"]
    if not isinstance(metadata, dict) or set(metadata) != {"sparrow", "manifest", "mask", "report", "sha256"}:
        raise BundleError("the metadata must have sparrow, manifest, mask, report and sha256; update your SDK")
    if not all(isinstance(text, str) for text in metadata.values()):
        raise BundleError("every entry of the metadata must be a string")
    if metadata["sparrow"] != FORMAT:
        raise BundleError(
            f"the bundle has format {metadata['sparrow'][:20]!r}, this side reads {FORMAT!r}; update the older one"
        )
    return cast(dict[str, str], metadata)


def _entry(header: dict[str, Any], name: str, parts: Mapping[str, Expected]) -> tuple[str, int, int, int]:
    """Return (dtype, count, first byte, end) of one tensor of the header."""
    entry = header[name]
    match entry:
        case {"dtype": str(dtype), "shape": [int(count)], "data_offsets": [int(low), int(high)]} if len(entry) == 3:
            pass
        case _:
            raise BundleError(f"{name}: the header must have a dtype, a shape of one number and two offsets")
    if any(isinstance(number, bool) or not 0 <= number < 2**53 for number in (count, low, high)):
        raise BundleError(f"{name}: shape and offsets must be integers from 0 to 2**53 - 1")
    allowed = _allowed_types(name, parts)
    if dtype not in allowed:
        raise BundleError(f"{name}: unsupported dtype {dtype[:20]!r}; use {' or '.join(allowed)}")
    if high - low != count * allowed[dtype]:
        raise BundleError(f"{name}: {count} values of {dtype} take {count * allowed[dtype]} bytes, not {high - low}")
    if name in parts and high - low > parts[name].most_bytes:
        raise BundleError(f"{name}: {high - low} bytes; it must have at most {parts[name].most_bytes}: fetch it again")
    return dtype, count, low, high


def _allowed_types(name: str, parts: Mapping[str, Expected]) -> dict[str, int]:
    """Return the allowed types of an entry of the header, with their bytes."""
    if name in parts:
        return {WIRE_TYPES[parts[name].dtype]: 4 if parts[name].dtype == "float32" else 1}
    fixed = {"mask": {"U8": 1}, "extras": _MASKED, "scales": {"F32": 4}}
    return fixed.get(name, {**dict(_DTYPES.values()), **_MASKED})


def _check_layout(entries: dict[str, tuple[str, int, int, int]], length: int) -> None:
    """Raise BundleError unless tensors are contiguous and fill the data section."""
    end = 0
    for name, (_, _, low, high) in entries.items():
        if low != end:
            raise BundleError(f"{name}: begins at byte {low} of the data, {end} expected; tensors must be adjacent")
        end = high
    if end != length:
        raise BundleError(f"the header describes {end} bytes of data, but {length} follow; send the whole file")


_Form = tuple[dict[str, object], bytes]


def _encode_mask(manifest: Manifest, mask: Mask | None, draw: NeuronDraw | None, known: ElementMask | None) -> _Form:
    """Return the shortest form of a mask: its description, and the bytes of its tensor or b""."""
    if mask is None:
        return {"form": "full"}, b""
    check_mask(manifest, mask)
    if isinstance(mask, ElementMask):
        forms = _element_forms(mask, known)
    elif isinstance(mask, BlockMask):
        forms = [({"form": "blocks"}, mask.packed())]
    else:
        forms = [({"form": "bits"}, neuron_bits(manifest, mask)), ({"form": "index"}, _index(manifest, mask))]
        if draw is not None:
            forms.append(({"form": "draw", **asdict(draw)}, b""))
        # Indices are sorted and unique, so these are the first neurons.
        if all(index[-1] == len(index) - 1 for index in mask.active.values()):
            counts = [len(mask.active[group]) for group in manifest.group_sizes]
            forms.append(({"form": "first", "counts": counts}, b""))
    # A mask tensor costs its entry in the header too, about 60 bytes.
    return min(forms, key=lambda form: len(_canonical(form[0])) + (60 + len(form[1]) if form[1] else 0))


def _element_forms(mask: ElementMask, known: ElementMask | None) -> list[_Form]:
    if known is not None and known.digest == mask.digest:
        return [({"form": "known", "digest": mask.digest}, b"")]
    forms: list[_Form] = [({"form": "elements"}, mask.bits)]
    if known is not None:
        forms.append(({"form": "changed", "digest": known.digest}, difference(known, mask)))
    return forms


def _index_dtype(size: int) -> str:
    return "<u2" if size <= 2**16 else "<u4"


def _index(manifest: Manifest, mask: NeuronMask) -> bytes:
    """Return, per group, the number of active neurons as uint32 and their indices."""
    parts = []
    for group, size in manifest.group_sizes.items():
        index = mask.active[group]
        parts.append(struct.pack("<I", len(index)) + index.astype(_index_dtype(size)).tobytes())
    return b"".join(parts)


def _decode_mask(
    manifest: Manifest, text: str, data: memoryview, known: ElementMask | None
) -> tuple[Mask | None, NeuronDraw | None]:
    try:
        description = json.loads(text)
    except (ValueError, RecursionError):
        raise BundleError("the mask's description is not JSON; encode with sparrow.protocol.bundle") from None
    try:
        return _mask_of(description, manifest, data, known)
    except ManifestError as error:
        raise BundleError(str(error)) from None


def _mask_of(
    description: Any, manifest: Manifest, data: memoryview, known: ElementMask | None
) -> tuple[Mask | None, NeuronDraw | None]:
    match description:
        case {"form": "bits"} if len(description) == 1:
            return neurons_from_bits(manifest, data), None
        case {"form": "index"} if len(description) == 1:
            return _mask_from_index(manifest, data), None
        case {"form": "blocks"} if len(description) == 1:
            return BlockMask(unpack_flags(data, len(manifest.block_table.sizes), "blocks")), None
        case {"form": "elements"} if len(description) == 1:
            return from_bits(manifest, data), None
        case {"form": "changed", "digest": str(digest)} if len(description) == 2:
            old = _held(known, digest)
            if len(data) > len(old.bits):
                raise BundleError(
                    f"the mask's difference has {len(data)} bytes, all of its bits {len(old.bits)}; encode with "
                    f"protocol.bundle"
                )
            return apply_difference(manifest, old, data), None
    if len(data):
        raise BundleError("a mask tensor is not allowed in this form of mask; encode with protocol.bundle")
    match description:
        case {"form": "known", "digest": str(digest)} if len(description) == 2:
            return _held(known, digest), None
        case {"form": "full"} if len(description) == 1:
            return None, None
        case {"form": "first", "counts": list(counts)} if len(description) == 2:
            return _mask_of_first(manifest, counts), None
        case {"form": "draw", "key": str(key), "ratio": float() | int() as ratio}:
            if len(description) != 3:
                raise BundleError("a draw has exactly key and ratio; encode with protocol.bundle")
            try:
                draw = NeuronDraw(key, float(ratio))
                return draw_neurons(manifest, draw), draw
            except (ValueError, OverflowError) as error:
                raise BundleError(f"the mask cannot be drawn: {error}") from None
    raise BundleError(
        "the mask's form must be full, draw, bits, index, first, known, elements, changed or blocks; update "
        "the older side"
    )


def _held(known: ElementMask | None, digest: str) -> ElementMask:
    if known is None or known.digest != digest:
        raise BundleError(
            f"the bundle refers to the mask {digest[:12]!r}, which is not stored here; ask for the assignment again, "
            f"with the digest of the stored mask"
        )
    return known


def _mask_of_first(manifest: Manifest, counts: list[Any]) -> NeuronMask:
    sizes = manifest.group_sizes
    if len(counts) != len(sizes) or not all(
        type(count) is int and 1 <= count <= size for count, size in zip(counts, sizes.values(), strict=True)
    ):
        raise BundleError(
            "a 'first' mask needs one count per group, from 1 to the group's size; encode it with "
            "sparrow.protocol.bundle"
        )
    return NeuronMask({group: np.arange(count) for group, count in zip(sizes, counts, strict=True)})


def _mask_from_index(manifest: Manifest, data: memoryview) -> NeuronMask:
    active = {}
    start = 0
    for group, size in manifest.group_sizes.items():
        dtype = np.dtype(_index_dtype(size))
        if len(data) < start + 4:
            raise BundleError(f"{group}: the mask's index lists end too early; send the whole file")
        (count,) = struct.unpack("<I", data[start : start + 4])
        end = start + 4 + count * dtype.itemsize
        if count > size:
            raise BundleError(f"{group}: the mask lists {count} neurons, but the group has {size}; encode it again")
        if end > len(data):
            raise BundleError(f"{group}: the mask ends before its {count} neurons; send the whole file")
        active[group] = np.frombuffer(data[start + 4 : end], dtype=dtype).astype(np.intp)
        start = end
    if start != len(data):
        raise BundleError(f"the mask has {len(data)} bytes, its index lists end after {start}")
    mask = NeuronMask(active)
    check_mask(manifest, mask)
    return mask
