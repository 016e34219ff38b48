"""The name that was probably meant, where one is misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (is 'fedspu' meant?)`` for the name of ``known`` that is most like ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (is {close[0]!r} meant?)" if close else ""
