"""Types for argparse that several commands share."""

from __future__ import annotations

import argparse
from contextlib import suppress

MIB = 2**20


def budget(text: str) -> float:
    """Return a budget: a share of each layer's neurons to train, in (0, 1]."""
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")


def count(text: str) -> int:
    """Return a whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def mebibytes(text: str) -> int:
    """Return bytes, from MiB."""
    return count(text) * MIB
