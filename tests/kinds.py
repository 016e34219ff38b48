"""Which of many similar cases a run tests: in CI one of each kind, and with ``make ... ALL=1`` all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

ALL = bool(os.environ.get("TEST_ALL"))

METHODS = (
    "fedavg",
    "fedspu",
    "fedsgc",
    "dmpfl",
    "pfedgate",
    "ditto",
    "fedem",
    "fedmd",
    "fedper",
    "heterofl",
    "perfedavg",
)
"""The four methods that the project exists for, and one of each kind of the others: the whole model, one beside the
global one, a mixture, scores of public data, a part, narrow networks, a step of its own."""


def chosen(cases: Iterable[str], kinds: Collection[str] = METHODS) -> list[str]:
    """Return the cases that this run tests, in their order. kinds: those that are tested without ``ALL=1``."""
    return [case for case in cases if ALL or case in kinds]
