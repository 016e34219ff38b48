"""Data sets that many devices share, independent of their file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparrow.protocol.manifest import Array

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples: the published training part, then the test part, if any; compared by identity, for caches.

    inputs [N, ...]: bytes or floats as stored, or ``Decoded``. targets [N]: int64, classes from 0. people [N]: index
    into ``names`` of each sample's person or domain; people without training samples come last. published: size of the
    training part. sources [N]: recording devices. runs [N]: unbroken recordings.
    """

    inputs: Any
    targets: Array
    people: Array | None
    classes: int
    published: int
    sources: Array | None = None
    names: tuple[str, ...] = ()
    runs: Array | None = None
