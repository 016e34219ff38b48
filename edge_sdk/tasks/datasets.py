"""A data set that many devices share, whatever format it comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparrow.protocol.manifest import Array

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples: first the ``published`` ones of the published training part, then those of the test part, if any.

    inputs [N, ...]: bytes or floats as stored, in memory or mapped from disk, or ``Decoded``. targets [N]: int64,
    classes from 0. people [N] or None: who made each sample, or its domain, by number, and ``names`` of the numbers;
    those who made none of the published training part come last. sources [N] or None: the name of what it was recorded
    with. runs [N] or None: the number of its unbroken recording. classes: how many there are. Two sets are equal only
    if they are the same object, so that what was computed of one can be kept by it.
    """

    inputs: Any
    targets: Array
    people: Array | None
    classes: int
    published: int
    sources: Array | None = None
    names: tuple[str, ...] = ()
    runs: Array | None = None
