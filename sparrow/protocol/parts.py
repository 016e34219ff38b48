"""Additional parts of a message: vectors that a method sends with the values, such as signs or squared gradients.

There are two types of numbers, distinguished by the array's dtype:

    float32   four bytes each, finite
    sign      -1, 0 or 1, int8 in memory. On the wire: their number (uint32), a bit for each that is set if the sign is
              not 0, and a bit for each sign other than 0 that is set if it is positive

Secure rounds have no parts, since parts are not masked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import BundleError
from .manifest import Manifest

PartType = Literal["float32", "sign"]
Plan = Mapping[str, bool | int | float | str]
Numbers = NDArray[Any]
"""A part's numbers: float32 [n], or int8 [n] in -1..1."""
Signs = NDArray[np.int8]

WIRE_TYPES: dict[PartType, str] = {"float32": "F32", "sign": "U8"}
RESERVED = ("values", "extras", "scales", "mask")
"""Names of a bundle's own entries."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a method's messages."""

    # Lowercase letters, digits and underscores.
    name: str
    dtype: PartType
    # The number of values in a message of a round with this plan; for payloads the largest number.
    count: Callable[[Manifest, Plan], int]

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid name."""
        plain = self.name.isascii() and self.name.replace("_", "").isalnum() and self.name == self.name.lower()
        if not plain or len(self.name) > 32 or self.name in RESERVED:
            raise ValueError(
                f"a part cannot be named {self.name!r}: give at most 32 lowercase letters, digits and underscores, and "
                f"none of {', '.join(RESERVED)}"
            )


@dataclass(frozen=True)
class Expected:
    """Type and largest number of a part's values in a message."""

    dtype: PartType
    most: int

    @property
    def most_bytes(self) -> int:
        """The longest encoding, in bytes."""
        return 4 * self.most if self.dtype == "float32" else 4 + 2 * ((self.most + 7) // 8)


def expected(parts: Iterable[Part], manifest: Manifest, plan: Plan) -> dict[str, Expected]:
    """Return the parts of a message of a round with this plan, sorted by name."""
    counts = {part.name: (part.dtype, part.count(manifest, plan)) for part in sorted(parts, key=lambda each: each.name)}
    return {name: Expected(dtype, count) for name, (dtype, count) in counts.items() if count}


def all_maskable(manifest: Manifest, plan: Plan) -> int:
    """Return the number of maskable weights, as the count of a part."""
    return manifest.maskable_values


def type_of(name: str, numbers: Numbers) -> PartType:
    """Return the type of a part's numbers. Raises BundleError for another dtype or shape."""
    if numbers.ndim == 1 and numbers.dtype == np.float32:
        return "float32"
    if numbers.ndim == 1 and numbers.dtype == np.int8:
        return "sign"
    raise BundleError(f"{name}: {numbers.dtype} {list(numbers.shape)} cannot be sent; give float32 [n], or int8 [n]")


def pack_signs(signs: Signs) -> bytes:
    """Return the wire encoding of signs."""
    nonzero = signs != 0
    positive = np.compress(nonzero, signs) > 0
    return struct.pack("<I", len(signs)) + np.packbits(nonzero).tobytes() + np.packbits(positive).tobytes()


def unpack_signs(name: str, data: memoryview, most: int) -> Signs:
    """Return at most ``most`` signs, int8 [n]. Raises BundleError before it allocates."""
    count = struct.unpack("<I", data[:4])[0] if len(data) >= 4 else 0
    if count > most:
        raise BundleError(f"{name}: the bundle has {count} signs; it must have at most {most}: fetch it again")
    end = 4 + (count + 7) // 8
    if len(data) < end:
        raise BundleError(f"{name}: {count} signs take more than {len(data)} bytes; send the whole file")
    nonzero = np.unpackbits(np.frombuffer(data[4:end], dtype=np.uint8), count=count).view(np.bool_)
    others = np.count_nonzero(nonzero)
    if len(data) != end + (others + 7) // 8:
        raise BundleError(f"{name}: {len(data) - end} bytes for {others} signs other than 0; send the whole file")
    positive = np.unpackbits(np.frombuffer(data[end:], dtype=np.uint8), count=others).view(np.int8)
    signs = np.zeros(count, dtype=np.int8)
    signs[nonzero] = 2 * positive - 1
    return signs
