"""Masks of single weights, for methods with one sparse model for all devices.

An ``ElementMask`` gives the existing elements of every *maskable* tensor (``Manifest.maskable``); other tensors exist
in full. A tensor's elements are a list of positions (``Points``), packed in row-major order.

A mask is identified by its ``digest``. It is sent by digest; as bits, one per maskable weight in manifest order, most
significant first; or as its difference from a mask that both sides have: distances between changed positions, a byte
each (255 means 255 plus the next byte).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .errors import ManifestError
from .manifest import Array, Manifest, Tensors

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ElementMask:
    """Name of every maskable tensor, in manifest order -> bool of its shape, C-contiguous: the existing elements. The
    arrays must not be modified."""

    exists: Mapping[str, Flags]

    @cached_property
    def index(self) -> dict[str, Index]:
        """Tensor name -> sorted flat positions of existing elements."""
        return {name: np.flatnonzero(flags) for name, flags in self.exists.items()}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Tensor name -> number of existing elements, K_l."""
        return {name: int(np.count_nonzero(flags)) for name, flags in self.exists.items()}

    @property
    def count(self) -> int:
        """Number of existing elements, K."""
        return sum(self.counts.values())

    @property
    def size(self) -> int:
        """Number of maskable weights, n_w."""
        return sum(flags.size for flags in self.exists.values())

    @cached_property
    def bits(self) -> bytes:
        """One bit per maskable weight."""
        return np.packbits(_flat(self)).tobytes()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bits, which identifies the mask."""
        return hashlib.sha256(self.bits).hexdigest()

    def without(self, other: ElementMask) -> ElementMask:
        """Return the mask of elements that are in this mask but not in ``other``."""
        return ElementMask({name: flags & ~other.exists[name] for name, flags in self.exists.items()})

    def apply(self, tensors: Tensors) -> Tensors:
        """Return the maskable tensors, float32, with 0 at missing elements."""
        # A product would leave zeros of both signs.
        return {name: np.where(flags, tensors[name], np.float32(0)) for name, flags in self.exists.items()}


@dataclass(frozen=True)
class Points:
    """The existing elements of one tensor, with the methods of ``masks.Block``."""

    view: tuple[int, ...]
    # Sorted, unique flat positions.
    index: Index

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed elements."""
        return (len(self.index),)

    def take(self, tensor: Array) -> Array:
        """Return the elements of ``tensor``, copied."""
        return np.take(tensor.reshape(-1), self.index)

    def take_into(self, tensor: Array, out: Array) -> None:
        """Copy the elements of ``tensor`` into ``out``, a C-contiguous array of ``size`` values of its dtype."""
        # Indices are never out of range; with "raise" numpy would buffer the output.
        np.take(tensor.reshape(-1), self.index, out=out.reshape(-1), mode="clip")

    def put(self, tensor: Array, values: Array) -> None:
        """Overwrite the elements of ``tensor`` in place."""
        tensor.reshape(-1)[self.index] = values.reshape(-1)

    def add(self, tensor: NDArray[np.float64], values: Array | float, scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` (``size`` of them, or one for all) to the elements, in place, in float64."""
        flat = tensor.reshape(-1)
        flat[self.index] = np.take(flat, self.index) + np.multiply(values, scale, dtype=np.float64)


def everything(manifest: Manifest) -> ElementMask:
    """Return the mask with all maskable elements."""
    return ElementMask({spec.name: np.ones(spec.shape, dtype=bool) for spec in manifest.maskable})


def check_elements(manifest: Manifest, mask: ElementMask) -> None:
    """Raise ManifestError unless the mask has the maskable tensors, in order, as booleans of their shapes."""
    wanted = {spec.name: spec.shape for spec in manifest.maskable}
    if list(mask.exists) != list(wanted):
        raise ManifestError(f"the mask has the tensors {list(mask.exists)}, but the maskable ones are {list(wanted)}")
    for name, flags in mask.exists.items():
        if flags.shape != wanted[name] or flags.dtype != np.bool_:
            raise ManifestError(f"{name}: a mask of {flags.dtype} {flags.shape}; give booleans of {wanted[name]}")


def from_bits(manifest: Manifest, data: bytes | memoryview) -> ElementMask:
    """Return the mask with these bits. Raises ManifestError for a wrong length or set padding bits."""
    return _split(manifest, unpack_flags(data, manifest.maskable_values, "weights"))


def unpack_flags(data: bytes | memoryview, count: int, what: str) -> Flags:
    """Return ``count`` flags of a mask's bits. Raises ManifestError for a wrong length or set padding bits."""
    if len(data) != (count + 7) // 8:
        raise ManifestError(f"the mask has {len(data)} bytes, but {count} {what} need {(count + 7) // 8}")
    flags = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).view(np.bool_)
    if flags[count:].any():
        raise ManifestError("the mask's padding bits must be zero")
    return flags[:count]


def difference(old: ElementMask, new: ElementMask) -> bytes:
    """Return the difference between two masks of one manifest, as distances between positions."""
    changed = _flat(old) != _flat(new)
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    lengths = gaps // 255 + 1
    encoded = np.full(int(lengths.sum()), 255, dtype=np.uint8)
    encoded[np.cumsum(lengths) - 1] = gaps % 255
    return encoded.tobytes()


def apply_difference(manifest: Manifest, old: ElementMask, data: bytes | memoryview) -> ElementMask:
    """Apply the difference ``data`` to the mask ``old``.

    Raises ManifestError if it is cut off or names a position that does not exist.
    """
    encoded = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(encoded != 255)
    if len(encoded) and (len(ends) == 0 or ends[-1] != len(encoded) - 1):
        raise ManifestError("the mask's difference ends within a distance; send the whole file")
    # A distance of k*255 + rest is k bytes of 255 and one of rest: sums up to each end, plus its index, are positions.
    positions = np.cumsum(encoded, dtype=np.int64)[ends] + np.arange(len(ends))
    flags = _flat(old)
    if len(positions) and positions[-1] >= len(flags):
        raise ManifestError(f"the mask's difference names position {positions[-1]}, there are {len(flags)} weights")
    flags[positions] ^= True
    return _split(manifest, flags)


def _flat(mask: ElementMask) -> Flags:
    return np.concatenate([np.zeros(0, dtype=bool), *(flags.reshape(-1) for flags in mask.exists.values())])


def _split(manifest: Manifest, flags: Flags) -> ElementMask:
    exists = {}
    start = 0
    for spec in manifest.maskable:
        exists[spec.name] = flags[start : start + spec.size].reshape(spec.shape)
        start += spec.size
    return ElementMask(exists)
