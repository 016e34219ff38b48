"""Samples in files, decoded one by one when they are read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError


@dataclass(frozen=True, eq=False)
class Decoded(Sequence[NDArray[Any]]):
    """Samples that are decoded when they are read."""

    # The argument of ``decode`` for each sample; its text names the file.
    places: tuple[Any, ...]
    # Returns one sample, C-contiguous; raises DataError.
    decode: Callable[[Any], NDArray[Any]]
    # Dtype of all samples.
    dtype: str
    # Largest length of each axis.
    shape: tuple[int, ...]
    # Axes of varying length.
    free: tuple[int, ...]
    # SHA-256 over names, sizes and time stamps of the files, and the options that change samples.
    digest: str

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> NDArray[Any]:  # type: ignore[override]
        """Return one sample. Raises DataError if its file cannot be read, or has changed."""
        sample = self.decode(self.places[index])
        fits = len(sample.shape) == len(self.shape) and all(
            length <= most if axis in self.free else length == most
            for axis, (length, most) in enumerate(zip(sample.shape, self.shape, strict=True))
        )
        if not fits:
            raise DataError(
                f"{self.places[index]}: now has shape {sample.shape}, it had at most {self.shape} when the data were "
                "read; start again"
            )
        return sample

    def take(self, chosen: NDArray[Any]) -> Decoded:
        """Return the samples at these positions, or of a mask, with the same shape and free axes."""
        positions = np.arange(len(self))[chosen]
        digest = hashlib.sha256(self.digest.encode() + positions.astype("<i8").tobytes()).hexdigest()
        return replace(self, places=tuple(self.places[place] for place in positions.tolist()), digest=digest)


def join(parts: Sequence[NDArray[Any] | Decoded]) -> NDArray[Any] | Decoded:
    """Return the samples of parts of the same data, one after the other."""
    late = [part for part in parts if isinstance(part, Decoded)]
    if len(late) < len(parts):
        return np.concatenate(parts)
    return _join(late)


def _join(parts: Sequence[Decoded]) -> Decoded:
    first = parts[0]
    assert all(part.decode == first.decode and part.dtype == first.dtype for part in parts), "of the same data"
    shapes = list(zip(*(part.shape for part in parts), strict=True))
    varying = {axis for axis, lengths in enumerate(shapes) if len(set(lengths)) > 1}
    return replace(
        first,
        places=tuple(place for part in parts for place in part.places),
        shape=tuple(map(max, shapes)),
        free=tuple(sorted(varying.union(*(part.free for part in parts)))),
        digest=hashlib.sha256("|".join(part.digest for part in parts).encode()).hexdigest(),
    )


def fingerprint(kind: str, paths: Iterable[Path], *more: object) -> str:
    """Return the SHA-256 of names, sizes and time stamps of files, and ``more``. Raises DataError if one is missing."""
    digest = hashlib.sha256(repr((kind, more)).encode())
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
        # Whole paths: files of several devices may share names, sizes and the time stamps of an archive.
        digest.update(f"|{os.path.abspath(path)}|{stat.st_size}|{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()
