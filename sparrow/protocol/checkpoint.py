"""Checkpoints: the tensors of a full model by name, as a plain safetensors file.

The metadata has one entry, ``sparrow``, a string (usually JSON): safetensors writes several entries in no fixed order,
and the same model must give the same bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from .errors import BundleError
from .manifest import Tensors

MEDIA_TYPE = "application/octet-stream"
MAX_HEADER = 16 * 1024 * 1024


def save(tensors: Tensors, note: str = "") -> bytes:
    """Return the safetensors file of tensors and a note; the same input gives the same bytes."""
    contiguous = {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in tensors.items()}
    return bytes(safetensors.numpy.save(contiguous, {"sparrow": note}))


def load(body: bytes) -> tuple[Tensors, str]:
    """Return tensors (writable copies) and note of a safetensors file. Raises BundleError if it is invalid."""
    note = read_note(body)
    try:
        loaded: Tensors = safetensors.numpy.load(body)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BundleError(f"not a safetensors file that can be read: {error}") from None
    return {name: np.array(tensor) for name, tensor in loaded.items()}, note


def read_note(body: bytes) -> str:
    """Return the note, or "" if there is none, without reading tensors. Raises BundleError if the header is invalid."""
    if len(body) < 8:
        raise BundleError(f"{len(body)} bytes are too few for a safetensors file; send the whole file")
    (length,) = struct.unpack("<Q", body[:8])
    if length > min(MAX_HEADER, len(body) - 8):
        raise BundleError("the header is longer than the file or than 16 MiB; send the whole file")
    try:
        header: Any = json.loads(body[8 : 8 + length])
        return str(header.get("__metadata__", {}).get("sparrow", ""))
    except (ValueError, RecursionError, AttributeError):
        raise BundleError("the header is not that of a safetensors file") from None
