"""An update is looked up, masked and decoded once on its way, and hops between threads once."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sparrow.coordinator.calls import threads, uploads
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds import acceptance
from sparrow.coordinator.rounds.acceptance import Acceptance
from sparrow.coordinator.rounds.intake import DecodedUpdates
from sparrow.protocol import bundle
from sparrow.protocol.settings import FederationSettings

from .test_contract import DIGITS, ask, enrol, put

# The first round measures what is usual, and reads its updates once more for it.
SETTINGS = FederationSettings(rounds=1, evaluation_interval=0, early_stopping="off", relative_clip=0)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def calls(monkeypatch):
    """The calls of what an update passes, counted by name."""
    counts = Counter()

    def count(owner, name):
        plain = getattr(owner, name)

        def counted(*arguments, **named):
            counts[name] += 1
            return plain(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (acceptance, "owned"),
        (Models, "mask"),
        (bundle, "decode"),
        (Acceptance, "accept_all"),
        (uploads, "run_in_threadpool"),
        (threads, "run_in_threadpool"),
    ):
        count(owner, name)
    return counts


def test_each_step_is_taken_once(open_app, calls, train):
    client = open_app()
    tokens = [enrol(client, name)[1] for name in ("one", "two")]
    assignments = [ask(client, token) for token in tokens]
    bodies = [train(DIGITS.manifest, assignment) for assignment in assignments]
    calls.clear()
    for token, assignment, body in zip(tokens, assignments, bodies, strict=True):
        assert put(client, token, assignment, body).status_code == 201
    until = time.monotonic() + 20
    while client.get("/v1/federations/default").json()["round"] < 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert calls == {"owned": 2, "mask": 2, "decode": 2, "accept_all": 2}


def decoded(size):
    return bundle.Bundle(np.zeros(size // 4, dtype=np.float32), None, None, "fp32", "")


def test_decoded_updates_are_few(monkeypatch):
    monkeypatch.setattr("sparrow.coordinator.rounds.intake.DECODED_BYTES", 10)
    kept, updates = DecodedUpdates(), {key: decoded(4) for key in ("1/a", "1/b", "2/c")}
    for key, update in updates.items():
        kept.put(key, update)
    assert kept.take("1/a") is None, "the oldest one has gone"
    assert kept.take("2/c") is updates["2/c"]
    kept.forget("1")
    assert kept.take("1/b") is None
    kept.put("1/d", decoded(12))
    assert kept.take("1/d") is None, "one that is too large is not kept"
