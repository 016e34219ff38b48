"""Files of values beside a manifest: what nobody trains, and so travels once, and how what stays on devices begins.

The bytes of such a file are those tensors of the manifest in their order, one after the other, without names:
little-endian and row-major, in their own type; of what is frozen, those of float32 with at least two axes in float16
where the manifest says so. So the same backbone in two federations is one file, whatever its modules are called. The
manifest names the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from .errors import ManifestError
from .manifest import Array, Manifest, Tensors, TensorSpec, Values

File = bytes | memoryview | NDArray[np.uint8]


def pack(manifest: Manifest, which: Values, tensors: Mapping[str, Array]) -> bytes:
    """Return the file of these values. Raises ManifestError, naming the tensor, for one that is not finite as
    stored."""
    parts = []
    for spec, kind in _stored(manifest, which):
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(tensors[spec.name]).astype(kind)
        if kind.kind == "f" and not np.isfinite(values).all():
            raise ManifestError(f"{spec.name}: a {which} value is not finite in {kind.name}; publish a sound model")
        parts.append(values.tobytes())
    return b"".join(parts)


def size(manifest: Manifest, which: Values) -> int:
    """Return the bytes of the file."""
    return sum(spec.size * kind.itemsize for spec, kind in _stored(manifest, which))


def unpack(manifest: Manifest, which: Values, file: File) -> Tensors:
    """Return the tensors by name, read-only: parts of ``file``, or of float16 copies in float32. Raises ManifestError
    unless it is the file that the manifest names."""
    data = np.frombuffer(file, np.uint8)
    wanted = manifest.files.get(which)
    if len(data) != size(manifest, which) or hashlib.sha256(data.data).hexdigest() != wanted:
        raise ManifestError(
            f"the file of {which} values has {len(data)} bytes and another SHA-256 than the manifest names, "
            f"{wanted}; download it again"
        )
    tensors, begin = Tensors(), 0
    for spec, kind in _stored(manifest, which):
        end = begin + spec.size * kind.itemsize
        part = data[begin:end]
        aligned = part.ctypes.data % kind.itemsize == 0
        values = (part if aligned else part.copy()).view(kind).reshape(spec.shape)
        values = np.asarray(values, np.dtype(spec.dtype))
        values.flags.writeable = False
        tensors[spec.name], begin = values, end
    return tensors


def _stored(manifest: Manifest, which: Values) -> Iterator[tuple[TensorSpec, np.dtype[np.generic]]]:
    """Yield each tensor of the file, and the type in which it is stored."""
    specs: tuple[TensorSpec, ...] = getattr(manifest, which)
    for spec in specs:
        halved = manifest.frozen_precision == "float16" and spec.dtype == "float32" and len(spec.shape) > 1
        yield spec, np.dtype("<f2" if halved and which == "frozen" else spec.dtype).newbyteorder("<")
