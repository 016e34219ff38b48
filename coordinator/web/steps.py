"""The training step as pages run it: made fast here, and for as many neurons as a page trains.

A device with the SDK changes the published graph itself; a browser has nothing that could. For a graph of thousands of
nodes that takes long, so steps are made in processes with a deadline, few at a time, once for all who ask for the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from sparrow.graphs import page_steps
from sparrow.limited import NotAnswered, run_limited
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.neurons import counts_at

from ..calls.threads import Threads
from ..errors import BadContent, Unavailable
from ..models.payloads import Packed

log = logging.getLogger(__name__)

MOST_KEPT = 32
RATIOS = 20
"""Shares of the neurons that steps are made for: its multiples of one part."""
REWRITERS, MOST_WAITING = 2, 16
"""Steps that are made at a time, and those that wait."""
SECONDS = 60.0
"""How long one may take."""
MEMORY = 2**30
"""Bytes of memory that one may take."""

Key = tuple[str, tuple[int, ...]]


def check_ratio(ratio: float) -> None:
    """Raise BadContent unless an active ratio is a multiple of 1 / ``RATIOS``."""
    if abs(ratio * RATIOS - round(ratio * RATIOS)) > 1e-6:
        raise BadContent(f"ratio: {ratio} is no multiple of {1 / RATIOS}; give the page's device such a budget")


class Steps:
    """Steps that were made, the last ``MOST_KEPT`` of them kept. stop: ends those that are being made.

    To be used on the event loop.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        busy = "the training steps of other models are being made"
        self._threads = Threads(REWRITERS, 2 * SECONDS, most_waiting=MOST_WAITING, busy=busy)
        self._made: OrderedDict[Key, asyncio.Task[Packed]] = OrderedDict()

    async def get(self, manifest: Manifest, ratio: float, read: Callable[[], bytes]) -> Packed:
        """Return a manifest's step for masks of this active ratio, which ``check_ratio`` accepts.

        read: returns the published step. Raises Unavailable for a step that cannot be made now, and the errors of
        ``read``.
        """
        key = manifest.graphs.get("step", ""), tuple(counts_at(manifest, ratio).values())
        task = self._made.get(key)
        if task is None:
            task = self._made[key] = asyncio.ensure_future(self._threads.run(self._make, manifest, ratio, read))
            task.add_done_callback(lambda done: self._settle(key, done))
        self._made.move_to_end(key)
        # Others wait for the same step when this caller has gone.
        return await asyncio.shield(task)

    def _settle(self, key: Key, done: asyncio.Task[Packed]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._made.get(key) is done:
            del self._made[key]
        for old in [each for each, task in self._made.items() if task.done()][:-MOST_KEPT]:
            del self._made[old]

    def _make(self, manifest: Manifest, ratio: float, read: Callable[[], bytes]) -> Packed:
        step = read()
        if hashlib.sha256(step).hexdigest() != manifest.graphs.get("step"):
            raise Unavailable("a new version of the model has just come in the place of this; try again")
        request = page_steps.request_of(step, manifest, ratio)
        try:
            made = run_limited(page_steps.__name__, request, seconds=SECONDS, memory=MEMORY, stop=self._stop)
        except NotAnswered as error:
            log.warning("the training step of %s cannot be made for pages: %s", manifest.task, error)
            raise Unavailable(
                f"the training step cannot be made for pages now: {error}; try again, or publish a smaller model"
            ) from None
        return Packed(made, hashlib.sha256(made).hexdigest())
