"""Suggest correct spellings of misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean fedspu?)`` with the most similar of the ``known`` names, or ``""``."""
    # Dashes of options would make them alike.
    bare = {each.lstrip("-"): each for each in known}
    word = name.lstrip("-")
    close = difflib.get_close_matches(word, list(bare), n=1, cutoff=0.6)
    close = close or [each for each in bare if word in each.split("-")]
    return f" (did you mean {bare[close[0]]}?)" if close else ""
