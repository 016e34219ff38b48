"""The parts of one running coordinator, and how handlers get at them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from sparrow.coordinator.api.rate_limits import RateLimit
from sparrow.coordinator.api.uploads import Uploads
from sparrow.coordinator.api.watch import Watches
from sparrow.coordinator.errors import Unavailable
from sparrow.coordinator.fleet.access import Tokens
from sparrow.coordinator.fleet.devices import Devices
from sparrow.coordinator.fleet.federations import Federations
from sparrow.coordinator.fleet.last_heard import Heard
from sparrow.coordinator.fleet.polling import Pace
from sparrow.coordinator.models.global_models import Models, Retention
from sparrow.coordinator.reports.device_list import Roster
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.coordinator.reports.overview import Overviews
from sparrow.coordinator.reports.records import Records
from sparrow.coordinator.rounds.acceptance import Acceptance
from sparrow.coordinator.rounds.cleanup import clear_all
from sparrow.coordinator.rounds.costs import UploadCosts
from sparrow.coordinator.rounds.dispatch import Dispatch
from sparrow.coordinator.rounds.engine import Rounds
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.store import MOVED, Store

log = logging.getLogger(__name__)

DAY = 24 * 3600.0


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that never jump: a machine without a battery-backed clock sets it after start, and every
    open deadline would pass at once."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Bell:
    """Wakes those who wait for something: for a round to move, or (``House.stir``) for any fact, an update say.

    Take ``next_ring()`` before looking, then wait for it: what moves in between is not missed.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def next_ring(self) -> asyncio.Event:
        """The event that the next ring sets."""
        return self._next

    def ring(self) -> None:
        """Wake everybody."""
        self._next.set()
        self._next = asyncio.Event()


class House:
    """One coordinator: its store, its domain objects, and the task that moves rounds on."""

    def __init__(self, settings: Settings, clock: Callable[[], float] | None = None) -> None:
        self.settings = settings
        clock = clock or steady_clock()
        url = settings.database_url
        self.store = Store(settings.data_dir, None if url is None else url.get_secret_value(), settings.blobs)
        self.metrics = Metrics()
        self.metrics.measure(self.store)
        self.metrics.observe_records(self.store)
        self.models = Models(self.store, Retention(settings.keep_models, settings.keep_every))
        self.federations = Federations(self.store, self.models, clock)
        self.tokens = Tokens(self.store, clock, settings.tokens())
        lifetime = settings.device_token_lifetime_days
        self.devices = Devices(
            self.store,
            clock,
            rotation_seconds=settings.device_token_rotation_days * DAY or None,
            lifetime_seconds=None if lifetime is None else lifetime * DAY,
        )
        self.by_device = _limit(settings.device_calls_per_second, clock)
        self.by_address = _limit(settings.address_calls_per_second, clock)
        self.dispatch = Dispatch(self.store, self.models, clock)
        self.acceptance = Acceptance(self.store, self.models)
        self.costs = UploadCosts(self.store)
        self.heard = Heard(self.store, clock)
        self.pace = Pace(self.store, clock, least=settings.retry_after_seconds, calls=settings.polls_per_second)
        self.rounds = Rounds(
            self.store,
            self.models,
            clock,
            self.costs,
            self.heard,
            longest_pause=self.pace.longest,
            on_closed=self._count_round,
        )
        self.records = Records(self.store, self.costs.write, clock, self.heard)
        self.uploads = Uploads(settings.data_dir / "uploads", self.store, clock)
        self.roster = Roster(self.store, clock)
        self.overviews = Overviews(self.store, self.models, self.federations, self.records, self.metrics, clock)
        self.closing = False
        self.bell = Bell()
        self.stir = Bell()
        self.watches = Watches(self.overviews, self.stir.next_ring, lambda: self.closing)
        self._facts = asyncio.Event()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._mover: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """First start: make the default federation. Every start: go on where the last process was."""
        if self.settings.default_task:
            await run_in_threadpool(
                self.federations.ensure_default, self.settings.default_task, self.settings.default_settings
            )
        if self.store.is_first:
            await run_in_threadpool(self.rounds.resume_after_restart)
            await run_in_threadpool(clear_all, self.store, self.models)
        await run_in_threadpool(self.store.settled)
        self.store.listen(self._hear)
        self._mover = asyncio.create_task(self._move())

    async def close(self) -> None:
        """Stop moving, and let go of the store."""
        self.leave()
        if self._mover is not None:
            # Not cancelled: what it does in a thread would go on, with records that others may have by then.
            self._ended.set()
            self._facts.set()
            await self._mover
        try:
            await run_in_threadpool(self.costs.write)
        except Unavailable as error:
            log.warning("what the last uploads cost is not recorded: %s", error)
        finally:
            await run_in_threadpool(self.store.close)

    def check_ready(self) -> None:
        """Raise whatever keeps the coordinator from reading its records or writing its folder, now or soon."""
        with self.store.reading() as db:
            db.execute(select(1))
        self.store.check()
        self.store.probe()
        free = shutil.disk_usage(self.settings.data_dir).free
        if free < self.settings.min_free_bytes:
            raise Unavailable(f"the disk of the data folder has {free:,} bytes left")

    def was_here(self, token: str) -> bool:
        """Whether this token was somebody's when it was last looked up; reads no records."""
        return self.devices.was_here(token) or self.tokens.known_holder(token) is not None

    def leave(self) -> None:
        """The process is about to stop: send waiting callers home. May be called from a signal handler."""
        self.closing = True
        self.wake()

    def something_happened(self) -> None:
        """A fact was recorded: see soon whether rounds can move. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._facts.set)
        self._loop.call_soon_threadsafe(self.stir.ring)

    def wake(self) -> None:
        """Let those who wait look again, though no round moved. May be called from any thread."""
        self._loop.call_soon_threadsafe(self.bell.ring)
        self._loop.call_soon_threadsafe(self.stir.ring)

    def _hear(self, what: str) -> None:
        """Another process of this coordinator says that something was written, or moved."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if what == MOVED:
                self.wake()
            self.something_happened()

    def _look_after(self) -> bool:
        """What is to be done at every fact and tick; True when something moved."""
        self.store.check()
        self.uploads.sweep()
        self.heard.write()
        return self._advance()

    def _advance(self) -> bool:
        """Move rounds on, where this process is the one to do it; True when something moved."""
        moves, newly = self.store.moves()
        if not moves:
            self.costs.write()  # with several processes, who closes a round may not know them
            return False
        if newly:
            self.rounds.forget_sums()
        moved = self.rounds.advance()
        if moved:
            self.store.say_moved()
        return moved

    def _count_round(self, federation: str, seconds: float, left_out: int) -> None:
        self.metrics.rounds.labels(federation).observe(seconds)
        self.metrics.left_out.labels(federation).inc(left_out)

    async def _move(self) -> None:
        while not self._ended.is_set():
            try:
                if await run_in_threadpool(self._look_after):
                    self.bell.ring()
                    self.stir.ring()
            except Unavailable:  # a full disk, a lost database: the store has said so; tried again at the next tick
                await self._wait(self._ended)
            except Exception:
                log.exception("rounds could not be moved on; trying again")
                await self._wait(self._ended)
            await self._wait(self._facts)
            self._facts.clear()

    async def _wait(self, event: asyncio.Event) -> None:
        """For the event, or until the next tick."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), self.settings.tick_seconds)


def _limit(per_second: float, clock: Callable[[], float]) -> RateLimit | None:
    return RateLimit(per_second, clock) if per_second else None


async def get_house(request: Request) -> House:
    """The coordinator that this application runs."""
    house: House = request.app.state.house
    return house


TheHouse = Annotated[House, Depends(get_house)]
