"""Training steps for pages, optimised here for the number of neurons that a page trains.

Browsers cannot rewrite the published graph. This takes long for thousands of nodes, so steps are made in a few
processes with a deadline, and shared by all callers.
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
"""Steps are made for multiples of 1 / ``RATIOS`` of the neurons."""
REWRITERS = 2
"""Steps made at a time."""
MOST_WAITING = 16
SECONDS = 60.0
"""Time limit of one step."""
MEMORY = 2**30
"""Memory limit of one step, bytes."""

Key = tuple[str, tuple[int, ...]]


def check_ratio(ratio: float) -> None:
    """Raise BadContent unless a ratio is a multiple of 1 / ``RATIOS``."""
    if abs(ratio * RATIOS - round(ratio * RATIOS)) > 1e-6:
        raise BadContent(f"ratio: {ratio} is not a multiple of {1 / RATIOS}; choose such a budget on the page")


class Steps:
    """Cache of the last ``MOST_KEPT`` steps, for use on the event loop."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        busy = "the training steps of other models are being made"
        self._threads = Threads(REWRITERS, 2 * SECONDS, most_waiting=MOST_WAITING, busy=busy)
        self._made: OrderedDict[Key, asyncio.Task[Packed]] = OrderedDict()

    async def get(self, manifest: Manifest, ratio: float, read: Callable[[], bytes]) -> Packed:
        """Return a manifest's step for this ratio, which ``check_ratio`` accepts.

        read: returns the published step. Raises Unavailable if the step cannot be made now, and the errors of ``read``.
        """
        key = manifest.graphs.get("step", ""), tuple(counts_at(manifest, ratio).values())
        task = self._made.get(key)
        if task is None:
            task = self._made[key] = asyncio.ensure_future(self._threads.run(self._make, manifest, ratio, read))
            task.add_done_callback(lambda done: self._settle(key, done))
        self._made.move_to_end(key)
        # Others may wait for this step when this caller disconnects.
        return await asyncio.shield(task)

    def _settle(self, key: Key, done: asyncio.Task[Packed]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._made.get(key) is done:
            del self._made[key]
        for old in [each for each, task in self._made.items() if task.done()][:-MOST_KEPT]:
            del self._made[old]

    def _make(self, manifest: Manifest, ratio: float, read: Callable[[], bytes]) -> Packed:
        step = read()
        if hashlib.sha256(step).hexdigest() != manifest.graphs.get("step"):
            raise Unavailable("the model was just replaced by a new version; reload the page")
        request = page_steps.request_of(step, manifest, ratio)
        try:
            made = run_limited(page_steps.__name__, request, seconds=SECONDS, memory=MEMORY, stop=self._stop)
        except NotAnswered as error:
            log.warning("the training step of %s cannot be made for pages: %s", manifest.task, error)
            raise Unavailable(
                f"the training step cannot be made for pages: {error}; try again, or publish a smaller model"
            ) from None
        return Packed(made, hashlib.sha256(made).hexdigest())
