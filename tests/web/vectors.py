"""Numbers that the page's own arithmetic must reproduce, computed by numpy and the SDK: python -m tests.web.vectors.

They stand in ``vectors.json`` beside this file, so that a change of numpy or the SDK shows, too. Seeds are texts,
because JavaScript's numbers end at 2^53.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.tasks.partition import split

PATH = Path(__file__).with_suffix(".json")

LENGTHS = (0, 1, 3, 55, 56, 63, 64, 65, 119, 120, 1000)
"""Of texts to hash: around a block's end and around the place where its padding needs another block."""

SEEDS: tuple[list[int], ...] = ([0], [1], [2**63 - 1], [5, 1], [2**40, 1], [2**128 - 1], [1, 2**100 + 7])
COUNTS = (3, 10, 797)
SPLIT_SEEDS = (0, 1, 2**32 + 7, 2**63 - 1)

CALLS = (
    *(("random32", 3), ("raw", 1), ("random32", 2), ("permutation", 6), ("raw", 2), ("normal32", 5)),
    *(("permutation", 2), ("random32", 1), ("raw", 1), ("normal32", 2), ("permutation", 9), ("random32", 4)),
)
"""A stream's calls one after another; those of 32 bits leave and find half of an output."""

DRAWS: dict[str, Callable[[np.random.Generator, int], list[Any]]] = {
    "raw": lambda generator, count: [str(one) for one in generator.bit_generator.random_raw(count)],
    "random32": lambda generator, count: generator.random(count, dtype=np.float32).tolist(),
    "normal32": lambda generator, count: generator.standard_normal(count, dtype=np.float32).tolist(),
    "permutation": lambda generator, count: generator.permutation(count).tolist(),
}
"""Name of the page's method -> what numpy gives for it."""


def pattern(length: int) -> bytes:
    """Bytes that differ from their neighbours."""
    return bytes((7 * position + 3) % 256 for position in range(length))


def generator_of(seed: list[int]) -> np.random.Generator:
    """Return numpy's generator; a list of one number is taken as that number."""
    return np.random.Generator(np.random.PCG64(seed if len(seed) > 1 else seed[0]))


def make() -> dict[str, Any]:
    """Return all vectors, as JSON can hold them."""
    streams = []
    for seed in SEEDS:
        counts = {"raw": 20, "random32": 40, "normal32": 120, "permutation": 100}
        drawn = {name: DRAWS[name](generator_of(seed), count) for name, count in counts.items()}
        streams.append({"seed": list(map(str, seed)), **drawn})
    mixed = []
    for seed in SEEDS:
        generator = generator_of(seed)
        calls = [{"call": name, "count": count, "gives": DRAWS[name](generator, count)} for name, count in CALLS]
        mixed.append({"seed": list(map(str, seed)), "calls": calls})
    splits = []
    for count in COUNTS:
        for number in SPLIT_SEEDS:
            parts = split(count, number)
            splits.append(
                {"count": count, "seed": str(number)}
                | {use: getattr(parts, use).tolist() for use in ("train", "validation", "test")}
            )
    digests = [{"length": length, "digest": hashlib.sha256(pattern(length)).hexdigest()} for length in LENGTHS]
    return {"sha256": digests, "streams": streams, "mixed": mixed, "splits": splits}


def read() -> dict[str, Any]:
    """Return the vectors of the file."""
    vectors: dict[str, Any] = json.loads(PATH.read_text())
    return vectors


if __name__ == "__main__":
    made = make()
    blocks = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, made[name])) + "\n]" for name in made)
    PATH.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
