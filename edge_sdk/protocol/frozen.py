"""The file of a model's frozen values: what nobody trains, and so travels once.

Its bytes are the frozen tensors of the manifest in their order, one after the other, without names: little-endian and
row-major, in their own type, or those of float32 with at least two axes in float16 where the manifest says so. So the
same backbone in two federations is one file, whatever its modules are called. The manifest names its SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Array, Manifest, Tensors, TensorSpec


def pack(manifest: Manifest, tensors: Mapping[str, Array]) -> bytes:
    """Return the file of these values, by name, in the manifest's precision. Raises ManifestError, naming the tensor,
    for a value that is not finite, or too large for float16."""
    parts = []
    for spec, kind in _stored(manifest):
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(tensors[spec.name]).astype(kind)
        if kind.kind == "f" and not np.isfinite(values).all():
            raise ManifestError(f"{spec.name}: a frozen value is not finite in {kind.name}; publish a sound model")
        parts.append(values.tobytes())
    return b"".join(parts)


def size(manifest: Manifest) -> int:
    """Return the bytes of the file."""
    return sum(spec.size * kind.itemsize for spec, kind in _stored(manifest))


def unpack(manifest: Manifest, file: bytes | memoryview | NDArray[np.uint8]) -> Tensors:
    """Return the frozen tensors by name, read-only: parts of ``file``, or of float16 copies in float32.

    Raises ManifestError unless it is the file that the manifest names.
    """
    data = np.frombuffer(file, np.uint8)
    if not matches(manifest, file):
        raise ManifestError(
            f"the file of frozen values has {len(data)} bytes and another SHA-256 than the manifest names, "
            f"{manifest.frozen_sha256}; download it again"
        )
    tensors, begin = Tensors(), 0
    for spec, kind in _stored(manifest):
        end = begin + spec.size * kind.itemsize
        part = data[begin:end]
        aligned = part.ctypes.data % kind.itemsize == 0
        values = (part if aligned else part.copy()).view(kind).reshape(spec.shape)
        values = np.asarray(values, np.dtype(spec.dtype))
        values.flags.writeable = False
        tensors[spec.name], begin = values, end
    return tensors


def matches(manifest: Manifest, file: bytes | memoryview | NDArray[np.uint8]) -> bool:
    """Return whether a file is the one that the manifest names."""
    data = np.frombuffer(file, np.uint8).data
    return len(data) == size(manifest) and hashlib.sha256(data).hexdigest() == manifest.frozen_sha256


def _stored(manifest: Manifest) -> Iterator[tuple[TensorSpec, np.dtype[np.generic]]]:
    """Yield each frozen tensor, and the type in which it is stored."""
    for spec in manifest.frozen:
        halved = manifest.frozen_precision == "float16" and spec.dtype == "float32" and len(spec.shape) > 1
        yield spec, np.dtype("<f2" if halved else spec.dtype).newbyteorder("<")
