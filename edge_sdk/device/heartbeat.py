"""Signs of life of a device at work, so that whoever waits for it can tell a long step from a dead device."""

from __future__ import annotations

import threading
from types import TracebackType

from .transport import Transport

BEATS = 3
"""Heartbeats in the time after which silence ends an assignment: one or two may be lost on the way."""


class Heartbeat:
    """From ``with`` to its end, says every third of ``silence_seconds`` that the device works on an assignment.

    It does so on a thread of its own, which neither a long step nor a pause nor a slow transfer holds up, and which
    keeps no process alive. A coordinator that does not answer is told again the next time; where it says that nobody
    waits any more, the work goes on, and what it makes of the personal model stays.
    """

    def __init__(self, transport: Transport, assignment_id: str, silence_seconds: float) -> None:
        self._transport = transport
        self._assignment_id = assignment_id
        self._seconds = silence_seconds / BEATS
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()  # and not waited for: it may be in a call that nobody answers

    def _beat(self) -> None:
        while not self._over.wait(self._seconds):
            if not self._transport.heartbeat(self._assignment_id):
                return
