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
    """Samples of one use."""

    # Name of the samples in messages.
    source: str
    # [N, *shape], C-contiguous, of a raw type in native byte order; rows of a table are float32 [N, columns]; files
    # are ``Decoded``.
    inputs: NDArray[Any] | Decoded
    # Class names (str) or float32 numbers, [N]; None, as ``kind`` is, if unlabelled.
    labels: NDArray[Any] | None
    kind: Kind | None
    columns: tuple[Column, ...] = ()
    # The file's name of the label column.
    label: str | None = None
    # Letters of one sample's axes, such as HWC; "" for rows.
    axes: str = ""
    # Who made each sample, str [N].
    people: NDArray[np.str_] | None = None
    # Its unbroken recording, int [N].
    runs: NDArray[np.int64] | None = None
    # Classes that the file declares, in order.
    classes: tuple[str, ...] = ()
    # Remarks for the user.
    said: tuple[str, ...] = ()
    # As in ``Preparation``.
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
