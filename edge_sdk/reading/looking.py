"""Each file of many is looked at once, so that a broken one is found before training."""

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
    """Call ``look`` with each file. Return the positions of those that can be read, and remarks.

    Raises DataError of the first that cannot, unless these are to be left out.
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
