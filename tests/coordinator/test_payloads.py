"""Payloads that are remembered: packed once, however many ask at once, and again where that failed."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparrow.coordinator.models import payloads
from sparrow.coordinator.models.payloads import Payloads


def test_who_asks_at_the_same_moment_waits_for_the_one_that_packs():
    found, packing, go_on, calls = Payloads(), threading.Event(), threading.Event(), []

    def pack():
        calls.append(1)
        packing.set()
        assert go_on.wait(30)
        return b"values"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(found.get, (1, 0, None), pack)
        assert packing.wait(30)
        others = [pool.submit(found.get, (1, 0, None), pack) for _ in range(3)]
        go_on.set()
        assert {each.result().body for each in (first, *others)} == {b"values"}
    assert calls == [1]
    assert first.result().sha256 == hashlib.sha256(b"values").hexdigest()


def test_what_could_not_be_packed_is_tried_again():
    found = Payloads()

    def fail():
        raise FileNotFoundError("the model has gone")

    with pytest.raises(FileNotFoundError):
        found.get((1, 0, None), fail)
    assert found.get((1, 0, None), lambda: b"values").body == b"values"


def test_payloads_of_older_models_and_the_least_used_are_dropped(monkeypatch):
    monkeypatch.setattr(payloads, "PAYLOAD_CACHE_BYTES", 3)
    found, packed = Payloads(), []

    def get(federation, version, whose):
        def pack():
            packed.append((federation, version, whose))
            return b"x"

        found.get((federation, version, whose), pack)

    for whose in ("a", "b", "c", "a", "d", "a"):
        get(1, 0, whose)
    assert [whose for _, _, whose in packed] == ["a", "b", "c", "d"], "a was used last"
    get(1, 0, "b")
    assert packed[-1] == (1, 0, "b"), "it went when d came"
    get(2, 0, "a")
    get(1, 1, "a")
    get(2, 0, "a")
    assert packed[-2:] == [(2, 0, "a"), (1, 1, "a")]
