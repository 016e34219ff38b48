"""Windows of recordings: length, step and rate, from options or the federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import Preparation
from .errors import BadOption, DataError
from .options import ReadOptions
from .samples import class_order, plural, some

# Readings of a window.
SHORTEST = 4


@dataclass(frozen=True)
class Cut:
    """window, step: seconds as float, samples as int; None: half the window."""

    window: float
    step: float | None

    def samples(self, source: str, rate: float) -> tuple[int, int]:
        """Return window and step in samples. Raises BadOption if one is too short."""
        window = count(self.window, rate)
        step = max(1, window // 2) if self.step is None else count(self.step, rate)
        for key, given, length in (("window", self.window, window), ("step", self.step, step)):
            if length < 1:
                raise BadOption(f"{source}: {key}={given}s holds no sample at {rate:g} per second; make it longer")
        if window < SHORTEST:
            raise BadOption(
                f"{source}: window={self.window} is {plural(window, 'reading')}, {window / rate:.3g} s at {rate:g} per "
                f"second, at least {SHORTEST} are needed; for seconds write window={self.window:g}s"
            )
        return window, step


def count(length: float, rate: float) -> int:
    """Return a length in samples; it is in seconds if it is a float."""
    return length if isinstance(length, int) else round(length * rate)


def is_recordings(options: ReadOptions, preparation: Preparation | None) -> bool:
    """Return whether samples are windows of recordings. Raises BadOption for a step without a window."""
    if preparation is not None:
        return preparation.reader == "recordings"
    if options.step is not None and options.window is None:
        raise BadOption(f"--data: step={options.step} needs a window; add it, as in window=2.56s")
    return options.window is not None


def cut_of(source: str, options: ReadOptions, preparation: Preparation | None) -> Cut:
    """Return the windows of the federation or of the options. Raises BadOption if they differ."""
    if preparation is None:
        assert options.window is not None, "checked by is_recordings"
        return Cut(options.window, options.step)
    window = preparation.shape[0]
    rate = preparation.rate
    wanted = Cut(window, preparation.step)
    if rate is None:
        return wanted
    sizes = wanted.samples(source, rate)
    for key, given, size in zip(("window", "step"), (options.window, options.step), sizes, strict=True):
        if given is not None and count(given, rate) != size:
            unit = "" if isinstance(given, int) else "s"
            raise BadOption(
                f"{source}: {key}={given}{unit}, but the federation's {key} is {plural(size, 'sample')} "
                f"({size / rate:g} s); leave {key}= out"
            )
    return wanted


def rate_of(source: str, options: ReadOptions, preparation: Preparation | None) -> float | None:
    """Return the rate of the federation or of the options, if any. Raises BadOption if they differ."""
    if preparation is None or preparation.rate is None:
        return options.rate
    if options.rate is not None and options.rate != preparation.rate:
        raise BadOption(
            f"{source}: rate={options.rate:g}, but the federation has {preparation.rate:g} samples per second; leave "
            "rate= out"
        )
    return preparation.rate


def starts(length: int, window: int, step: int) -> range:
    """Return the starts of a recording's windows."""
    return range(0, length - window + 1, step)


def remark(source: str, counts: Sequence[int], labels: NDArray[np.str_] | None) -> str:
    """Return the number of recordings and windows, in all and by class, as text. Raises DataError without windows.

    counts: windows of each recording. labels: class of each recording.
    """
    windows = np.array(counts, np.intp)
    short = int(np.count_nonzero(windows == 0))
    used = len(windows) - short
    if not used:
        raise DataError(
            f"{source}: none of {plural(len(windows), 'recording')} is as long as a window; make the window shorter, "
            "and check that rows are in order of time within each recording"
        )
    text = f"{plural(used, 'recording')}, {plural(int(windows.sum()), 'window')}"
    if labels is not None and labels.dtype.kind == "U":
        each = []
        for name in class_order(map(str, labels)):
            found = windows[labels == name]
            each.append(f"{name} {np.count_nonzero(found)} with {found.sum():,}")
        text += f" ({some(each, 12)})"
    if short:
        were = "was" if short == 1 else "were"
        text += f"; {plural(short, 'recording')} shorter than a window {were} left out"
    return text
