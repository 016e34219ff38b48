"""Signs of life of a device at work, so that whoever waits for it can tell a long step from a dead device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .transport import Transport

BEATS = 3
"""Heartbeats in the time after which silence ends an assignment: one or two may be lost on the way."""


@contextmanager
def heartbeat(transport: Transport, assignment_id: str, silence_seconds: float) -> Iterator[None]:
    """Report every third of ``silence_seconds`` that the device works on an assignment.

    Runs on a thread of its own, which neither a long step nor a pause nor a slow transfer holds up, and which keeps no
    process alive. If the coordinator does not answer, the next beat tries again; if it says that nobody waits any more,
    the work continues without.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(silence_seconds / BEATS):
            if not transport.heartbeat(assignment_id):
                return

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()  # and not waited for: it may be in a call that nobody answers
