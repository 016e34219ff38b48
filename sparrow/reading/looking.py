"""Check each file before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .errors import DataError
from .options import ReadOptions
from .samples import plural


def look_at_each(
    paths: Sequence[Path], look: Callable[[Path], None], thing: str, options: ReadOptions
) -> tuple[NDArray[np.intp], list[str]]:
    """Call ``look`` with each file; return the positions of readable ones, and remarks.

    Raises DataError for the first unreadable file, unless unreadable=skip.
    """
    kept = []
    lost: list[DataError] = []
    shown = tqdm(paths, desc=f"looking at {thing}s", unit=thing, disable=None, delay=2)
    for place, path in enumerate(shown):
        try:
            look(path)
        except DataError as error:
            if options.unreadable != "skip":
                shown.close()
                raise DataError(f"{error}; --skip-unreadable leaves such files out") from None
            lost.append(error)
        else:
            kept.append(place)
    if not kept:
        raise DataError(f"{lost[0]}; none of {plural(len(lost), f'{thing} file')} can be read")
    if not lost:
        return np.array(kept, np.intp), []
    return np.array(kept, np.intp), [f"{plural(len(lost), f'{thing} file')} left out, the first: {lost[0]}"]
