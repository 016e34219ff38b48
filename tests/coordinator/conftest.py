"""Whole federations in one process, for the tests of methods."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack, closing

import pytest

from sparrow.coordinator.storage.store import Store

from .postgresql import serving


@pytest.fixture(scope="session")
def postgresql():
    """A server for many tests; who stops it starts it again."""
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _records(request, monkeypatch):
    """SPARROW_TEST_DATABASE=postgresql: stores whose tests name no database keep their records there, by folder."""
    if os.environ.get("SPARROW_TEST_DATABASE") != "postgresql":
        return
    server, urls, plain = request.getfixturevalue("postgresql"), {}, Store.__init__

    def opened(self, data_dir, database_url=None, blobs=None):
        if database_url is None:
            key = data_dir.resolve()
            database_url = urls[key] = urls.get(key) or server.new_database()
        plain(self, data_dir, database_url, blobs)

    monkeypatch.setattr(Store, "__init__", opened)


@pytest.fixture
def new_coordinator(tmp_path, clock):
    """Opens coordinators, each over a folder of its own."""
    from .sessions import CoordinatorWithDevices  # not above: it brings torch, and most tests here need none

    with ExitStack() as stack:
        count = itertools.count()
        yield lambda: stack.enter_context(closing(CoordinatorWithDevices(tmp_path / str(next(count)), clock)))


@pytest.fixture
def coordinator(new_coordinator):
    return new_coordinator()


@pytest.fixture
def open_coordinator(tmp_path, clock):
    """Opens coordinators over one folder; every call is a restart."""
    from .fakes import LocalCoordinator

    opened = []

    def open_one(store=Store):
        close()
        opened.append(LocalCoordinator(tmp_path / "data", clock, store))
        return opened[-1]

    def close():
        if opened:
            opened.pop().store.close()

    yield open_one
    close()


@pytest.fixture
def without_rest(monkeypatch):
    """No device rests, however many of its updates are refused."""
    monkeypatch.setattr("sparrow.coordinator.rounds.acceptance.MOST_REFUSALS", 10**6)


@pytest.fixture
def answer(train):
    from .fakes import answering

    return answering(train)


@pytest.fixture
def play(answer):
    from .fakes import playing

    return playing(answer)
