"""Whole federations in one process, for the tests of methods."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing

import pytest


@pytest.fixture
def new_house(tmp_path, clock):
    """Opens houses, each over a folder of its own."""
    from .house import House  # not above: it brings torch, and most tests here need none

    with ExitStack() as stack:
        count = itertools.count()
        yield lambda: stack.enter_context(closing(House(tmp_path / str(next(count)), clock)))


@pytest.fixture
def house(new_house):
    return new_house()
