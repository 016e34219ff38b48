"""Data sets that many devices share, independent of their file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparrow.protocol.manifest import Array

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples: first those of the published training part, then those of the test part, if any.

    inputs [N, ...]: bytes or floats as stored, in memory or mapped from disk, or ``Decoded``. targets [N]: int64,
    classes from 0. people [N]: number of each sample's person or domain, and ``names`` of the numbers; people without
    published training samples come last. published: size of the training part. sources [N]: name of the recording
    device. runs [N]: number of the unbroken recording. Sets are compared by identity, so that results can be cached by
    set.
    """

    inputs: Any
    targets: Array
    people: Array | None
    classes: int
    published: int
    sources: Array | None = None
    names: tuple[str, ...] = ()
    runs: Array | None = None
