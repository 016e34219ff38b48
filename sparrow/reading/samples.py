"""Raw samples of a file, before any preparation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import Column, Reader
from .decoded import Decoded

Kind = Literal["classes", "numbers"]


@dataclass(frozen=True)
class Raw:
    """Samples of one use.

    source: their name in messages. inputs: [N, *shape], C-contiguous, of a raw type in native byte order; rows of a
    table are float32 [N, columns]; files are ``Decoded``. labels: class names (str) or float32 numbers, [N]; None, as
    ``kind`` is, if unlabelled. label: the file's name of the label column. axes: letters of one sample's axes, such as
    HWC; "" for rows. people: who made each sample, str [N]. runs: its unbroken recording, int [N]. classes: those that
    the file declares, in order. said: remarks for the user. reader, rate, step, channels: as in ``Preparation``.
    """

    source: str
    inputs: NDArray[Any] | Decoded
    labels: NDArray[Any] | None
    kind: Kind | None
    columns: tuple[Column, ...] = ()
    label: str | None = None
    axes: str = ""
    people: NDArray[np.str_] | None = None
    runs: NDArray[np.int64] | None = None
    classes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    reader: Reader = "arrays"
    rate: float | None = None
    step: float | None = None
    channels: tuple[str, ...] = ()


_INTEGER = re.compile(r"[+-]?[0-9]+")


def is_integer(text: str) -> bool:
    """Return whether the text is an integer in decimal digits."""
    return _INTEGER.fullmatch(text) is not None


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, in numerical order if all are integers, else in alphabetical order."""
    found = set(names)
    if all(is_integer(name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def some(names: Iterable[object], most: int = 8) -> str:
    """Return the first ``most`` names for a message, separated by commas."""
    listed = [" ".join(str(name).split()) for name in names]
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


def plural(count: int, thing: str) -> str:
    """Return ``1 row`` or ``3 rows``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
