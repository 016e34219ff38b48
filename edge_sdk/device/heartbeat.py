"""Heartbeats of a working device, which distinguish a long step from a crash."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .transport import Transport

# Heartbeats per silence interval, so that two may be lost.
BEATS = 3


@contextmanager
def heartbeat(transport: Transport, assignment_id: str, silence_seconds: float) -> Iterator[None]:
    """Send heartbeats for an assignment from a daemon thread, every third of ``silence_seconds``.

    If the coordinator no longer waits for the assignment, heartbeats end, but work continues.
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
        # Not joined: the thread may be in a call without an answer.
        over.set()
