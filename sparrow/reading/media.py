"""Read the pictures and sounds of a folder or table as raw samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import Preparation, Reader
from .decoded import Decoded
from .errors import DataError
from .options import ReadOptions
from .pictures import read_pictures
from .samples import Kind, Raw
from .sounds import Span, read_sounds
from .windows import is_recordings

Medium = Literal["picture", "sound"]

PICTURES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SOUNDS = (".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".aifc", ".mp3")

_PICTURE_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
_SOUND_STARTS = (b"fLaC", b"OggS", b"ID3\x03", b"ID3\x04")

_IN_FEDERATION = {
    "images": "pictures; give a folder with a folder of pictures for each class",
    "audio": "sounds; give a folder with a folder of sounds for each class",
    "rows": "rows of a table; give a table",
    "arrays": "arrays; give an npz file",
    "recordings": "windows of recordings; give a table with a column of times, or sounds if these were published",
}


def medium_named(name: str) -> Medium | None:
    """Return the medium of a file's suffix, if any."""
    suffix = Path(name).suffix.lower()
    return "picture" if suffix in PICTURES else "sound" if suffix in SOUNDS else None


def medium_of(path: Path) -> Medium | None:
    """Return a file's medium by its suffix, or else by its first bytes; None if it is neither picture nor sound."""
    named = medium_named(path.name)
    if named is not None or path.suffix.lower() in (".csv", ".tsv", ".txt", ".npz", ".npy", ".parquet"):
        return named
    try:
        with path.open("rb") as file:
            start = file.read(12)
    except OSError:
        return None
    if start.startswith(_PICTURE_STARTS) or (start[:4] == b"RIFF" and start[8:] == b"WEBP"):
        return "picture"
    wave = (start[:4] == b"RIFF" and start[8:] == b"WAVE") or (start[:4] == b"FORM" and start[8:11] == b"AIF")
    return "sound" if wave or start.startswith(_SOUND_STARTS) else None


@dataclass(frozen=True)
class Listing:
    """Files in order."""

    source: str
    medium: Medium
    paths: tuple[Path, ...]
    # As in ``Raw``.
    labels: NDArray[Any] | None = None
    kind: Kind | None = None
    label: str | None = None
    people: NDArray[np.str_] | None = None
    # Parts of each file, as in ``read_sounds``.
    spans: tuple[Span, ...] | None = None
    said: tuple[str, ...] = ()


def read_listing(listing: Listing, options: ReadOptions, preparation: Preparation | None) -> tuple[Raw, NDArray[Any]]:
    """Return the samples of the files, and each sample's position among the files.

    Raises DataError if a file is unreadable or does not fit ``preparation``.
    """
    reader = _reader(listing, options, preparation)
    rate: float | None = None
    step: float | None = None
    runs: NDArray[np.int64] | None = None
    inputs: Decoded
    if listing.medium == "picture":
        options.refuse(listing.source, "holds pictures", "rate", "window", "step")
        inputs, places, remarks = read_pictures(listing.paths, options, preparation)
        said = tuple(remarks)
    else:
        found = read_sounds(listing.source, listing.paths, listing.spans, listing.labels, options, preparation)
        inputs = found.samples
        places = found.positions
        said = found.said
        rate = found.rate
        step = found.step
        runs = found.runs
    raw = Raw(
        source=listing.source,
        inputs=inputs,
        labels=None if listing.labels is None else listing.labels[places],
        kind=listing.kind,
        label=listing.label,
        axes="HWC" if listing.medium == "picture" else "T",
        people=None if listing.people is None else listing.people[places],
        runs=runs,
        said=(*listing.said, *said),
        reader=reader,
        rate=rate,
        step=step,
    )
    return raw, places


def _reader(listing: Listing, options: ReadOptions, preparation: Preparation | None) -> Reader:
    reader: Reader = "images"
    if listing.medium == "sound":
        reader = "recordings" if is_recordings(options, preparation) else "audio"
    axes = "HWC" if listing.medium == "picture" else "T"
    if preparation is not None and (preparation.reader != reader or preparation.axes not in ("", axes)):
        raise other_reader(listing.source, f"holds {listing.medium}s", preparation)
    if preparation is not None and reader == "audio":
        options.refuse(listing.source, "the federation takes whole sounds", "window", "step")
    return reader


def other_reader(source: str, found: str, preparation: Preparation) -> DataError:
    """Return the error for data whose kind differs from the federation's samples."""
    return DataError(f"{source}: {found}, the federation's samples are {_IN_FEDERATION[preparation.reader]}")


def take(raw: Raw, chosen: NDArray[np.intp]) -> Raw:
    """Return the samples at these positions."""
    return replace(
        raw,
        inputs=raw.inputs.take(chosen) if isinstance(raw.inputs, Decoded) else raw.inputs[chosen],
        labels=None if raw.labels is None else raw.labels[chosen],
        people=None if raw.people is None else raw.people[chosen],
        runs=None if raw.runs is None else raw.runs[chosen],
    )


def counted(paths: Iterable[Path]) -> str:
    """Return counts by suffix, as in ``2 .txt, 1 without suffix``."""
    suffixes = Counter(path.suffix.lower() or "without suffix" for path in paths)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(suffixes.items()))
