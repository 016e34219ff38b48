"""A data set that many devices share: read once per process, whatever format it comes in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparrow.protocol.manifest import Array

from ..reading.errors import BadOption, DataError, NoData
from .formats import SampleFormat, read

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


def read_dataset(path: str | None, wanted: SampleFormat) -> Dataset:
    """Return the set at ``path``, a file or a folder; a process reads it once, until the path's time stamp changes.

    Raises DataError, which names what was looked for and where the public set is described.
    """
    if not path:
        raise BadOption(f"the task {wanted.task} needs to know where its data are: add --data PATH; {wanted.advice}")
    place = Path(path).expanduser().resolve()
    try:
        stamp = place.stat().st_mtime_ns
    except OSError as error:
        kind = NoData if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"{path}: {error.strerror}; {wanted.advice}") from None
    return _read(place, stamp, wanted)


@lru_cache(maxsize=8)
def _read(place: Path, stamp: int, wanted: SampleFormat) -> Dataset:
    parts = read(place, wanted)
    return Dataset(
        parts.inputs,
        parts.targets,
        parts.people,
        wanted.classes,
        parts.published,
        parts.sources,
        parts.names,
        parts.runs,
    )
