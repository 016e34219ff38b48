"""A text in speeches as samples for the next character: windows of a role's speech, and the character after each.

    text [T]      characters as numbers, 0 to 255
    start [S + 1] speech i is text[start[i]:start[i + 1]]
    people [S]    the speaker
    place [S]     optional order of the speeches

As in LEAF (Caldas et al., arXiv:1812.01097), a role's speeches form one text, and short roles are left out. But a
window starts at every tenth character, because neighbours hardly differ; and a role's text is cut into pieces of 500
characters, so that a split between pieces shares no character.
"""

from __future__ import annotations

import numpy as np

from sparrow.protocol.manifest import Array
from sparrow.reading.errors import DataError

Samples = tuple[Array, Array, Array, Array]

# Characters from one window to the next.
STEP = 10

# Characters of a piece; windows do not cross pieces.
PIECE = 500

# Fewest characters of a role: four pieces, for training, validation and test.
LEAST = 2_000


def windows(text: Array, start: Array, people: Array, place: Array | None, *, length: int) -> Samples:
    """Return windows of ``length`` characters of all roles with enough text. Raises DataError if the arrays do not
    match or no role has enough.

    Returns inputs [N, length], targets [N], the role [N], and the piece within the role [N].
    """
    if text.dtype != np.uint8 or text.ndim != 1:
        raise DataError(f"text is {text.dtype} {text.shape}; provide characters as uint8 [T]")
    count = len(people)
    if len(start) != count + 1 or (np.diff(start) < 0).any() or start[0] < 0 or start[-1] > len(text):
        raise DataError(f"start: give {count + 1} numbers for {count} speeches, rising from 0 to {len(text)}")
    if place is not None and len(place) != count:
        raise DataError(f"place: {len(place)} numbers for {count} speeches; provide one number per speech")
    order = np.arange(count) if place is None else np.argsort(place, kind="stable")
    first = np.arange(0, PIECE - length, STEP)
    found: list[Samples] = []
    for role in np.unique(people):
        own = order[people[order] == role]
        said = np.concatenate([text[start[speech] : start[speech + 1]] for speech in own])
        if len(said) < LEAST:
            continue
        pieces = said[: len(said) // PIECE * PIECE].reshape(-1, PIECE)
        rows = np.lib.stride_tricks.sliding_window_view(pieces, length + 1, axis=1)[:, first].reshape(-1, length + 1)
        whose = np.full(len(rows), role, people.dtype)
        found.append((rows[:, :-1], rows[:, -1], whose, np.repeat(np.arange(len(pieces)), len(first))))
    if not found:
        raise DataError(f"text: none of {len(np.unique(people))} roles has {LEAST:,} characters; provide longer texts")

    inputs, targets, roles, runs = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return inputs, targets, roles, runs
