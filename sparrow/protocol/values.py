"""Value files of a manifest: frozen values, and initial values of personal tensors.

A file has the tensors in manifest order without names, little-endian and row-major, in their own type. Frozen float32
tensors with at least two axes may be float16 (``frozen_precision``). Without names, the same backbone has the same file
in any federation.
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
    """Serialise these values to a file. Raises ManifestError if a value is not finite."""
    parts = []
    for spec, kind in _stored(manifest, which):
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(tensors[spec.name]).astype(kind)
        if kind.kind == "f" and not np.isfinite(values).all():
            raise ManifestError(
                f"{spec.name}: a {which} value is not finite in {kind.name}; publish a model with finite values"
            )
        parts.append(values.tobytes())
    return b"".join(parts)


def size(manifest: Manifest, which: Values) -> int:
    """Return the file's size in bytes."""
    return sum(spec.size * kind.itemsize for spec, kind in _stored(manifest, which))


def unpack(manifest: Manifest, which: Values, file: File) -> Tensors:
    """Return the tensors by name, read-only: views of ``file``, or float32 copies of float16.

    Raises ManifestError if the file differs from the manifest's digest.
    """
    data = np.frombuffer(file, np.uint8)
    wanted = manifest.files.get(which)
    if len(data) != size(manifest, which) or hashlib.sha256(data.data).hexdigest() != wanted:
        raise ManifestError(
            f"the file of {which} values has {len(data)} bytes and another SHA-256 than the manifest names, "
            f"{wanted}; download it again"
        )
    tensors = Tensors()
    begin = 0
    for spec, kind in _stored(manifest, which):
        end = begin + spec.size * kind.itemsize
        part = data[begin:end]
        aligned = part.ctypes.data % kind.itemsize == 0
        values = (part if aligned else part.copy()).view(kind).reshape(spec.shape)
        values = np.asarray(values, np.dtype(spec.dtype))
        values.flags.writeable = False
        tensors[spec.name] = values
        begin = end
    return tensors


def _stored(manifest: Manifest, which: Values) -> Iterator[tuple[TensorSpec, np.dtype[np.generic]]]:
    """Yield the tensors of the file with their stored types."""
    specs: tuple[TensorSpec, ...] = getattr(manifest, which)
    for spec in specs:
        halved = manifest.frozen_precision == "float16" and spec.dtype == "float32" and len(spec.shape) > 1
        yield spec, np.dtype("<f2" if halved and which == "frozen" else spec.dtype).newbyteorder("<")
