"""The composition root: one coordinator, built from its settings."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable

from anyio import CapacityLimiter, to_thread
from starlette.types import Scope

from .calls.bodies import Downloads
from .calls.buckets import AtOnce, RateLimit, Turns
from .calls.hosts import Hosts
from .calls.live_views import LiveViews
from .calls.signals import FoundNothing, LongPolls, Signal
from .calls.threads import (
    EVALUATIONS,
    LOOK_UPS,
    PUBLICATIONS,
    WAITING_EVALUATIONS,
    WRITERS,
    Batches,
    Threads,
)
from .calls.uploads import Uploads
from .clock import SteadyClock
from .errors import Unavailable
from .fleet.access import Tokens
from .fleet.devices import Devices
from .fleet.federations import Federations
from .fleet.polling import Polling
from .fleet.publishing import Publisher
from .fleet.serving import ServedModels
from .fleet.sessions import Sessions
from .models.global_models import Models, Retention
from .models.payloads import Packed
from .reports.device_list import DeviceLists
from .reports.metrics import Metrics
from .reports.open_work import OpenAssignments
from .reports.overview import Overviews
from .reports.records import Records
from .rounds.acceptance import Acceptance
from .rounds.cleanup import clear_all
from .rounds.costs import UploadCosts
from .rounds.dispatch import Ask, Asked, Dispatch
from .rounds.engine import Rounds
from .rounds.intake import DecodedUpdates
from .rounds.last_seen import LastSeen
from .settings import Settings
from .storage.database import BUSY_SECONDS, check_revision
from .storage.store import Store
from .web.steps import Steps

log = logging.getLogger(__name__)

DAY = 24 * 3600.0

STALLED_SECONDS = 30.0
"""How long the thread of the rounds may take for one step, update or file before this process is not ready: as long as
slow storage takes for one file that does come."""
HANGS_SECONDS = 90.0
"""How long it may take before another process moves rounds: that would begin the round's sums anew, and slow storage is
as slow for all."""
LONGEST_REST = 0.05
"""The longest pause of the thread of the rounds between two looks, s; it rests for as long as a look took."""
PUBLISHING_SECONDS = 120.0
"""Seconds without the end of a publication after which waiting ones give up."""
READY_SECONDS = 3.0
"""How long an answer on readiness waits for records and blobs."""


class Progress:
    """When the thread of the rounds was last seen to move. Any thread may use it."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def note(self) -> None:
        """Note that it moves."""
        self._at = time.monotonic()

    def seconds(self) -> float:
        """Return how long it has not moved."""
        return time.monotonic() - self._at


class Coordinator:
    """One coordinator: its store, its domain objects, and the thread that moves rounds on.

    It is built without an event loop and does nothing by itself before ``open``.

    moved: sent when a round moved, to long polls. changed: sent when anything was recorded, to live views. open_calls:
    calls in progress, by device. stopping: set when the process is about to stop.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] | None = None, store: Store | None = None
    ) -> None:
        """Build all parts. store: one that is open already; by default that of the settings."""
        self.settings = settings
        url = settings.database_url
        self.store = store or Store(settings.data_dir, None if url is None else url.get_secret_value(), settings.blobs)
        self._clock = SteadyClock(settings.data_dir) if clock is None else None
        clock = clock or self._clock
        assert clock is not None, "one of the two"
        self.metrics = Metrics()
        self.metrics.measure(self.store)
        self.metrics.observe_records(self.store)
        self.progress = Progress()
        self.metrics.observe_rounds(self.progress.seconds, lambda: self.store.moves_now)
        self.models = Models(self.store, Retention(settings.keep_models, settings.keep_every))
        self.federations = Federations(self.store, self.models, clock)
        self.publisher = Publisher(self.store, self.models, clock, self.federations)
        self.served = ServedModels(self.store, self.models)
        self.tokens = Tokens(self.store, clock, settings.tokens())
        self.sessions = Sessions(self.store, clock, self.tokens)
        lifetime = settings.device_token_lifetime_days
        self.devices = Devices(
            self.store,
            clock,
            rotation_seconds=settings.device_token_rotation_days * DAY or None,
            lifetime_seconds=None if lifetime is None else lifetime * DAY,
        )
        self.by_device = _limit(settings.device_calls_per_second, clock)
        self.by_address = _limit(settings.address_calls_per_second, clock)
        self.at_once, self.turns = AtOnce(), Turns()
        self.writers, self.look_ups = Threads(WRITERS, BUSY_SECONDS), Threads(LOOK_UPS, BUSY_SECONDS)
        self.publishing = Threads(PUBLICATIONS, PUBLISHING_SECONDS, busy="other models are being published")
        self.evaluating = Threads(
            EVALUATIONS,
            settings.max_test_seconds + BUSY_SECONDS,
            most_waiting=WAITING_EVALUATIONS,
            busy="another evaluation goes on",
        )
        self.dispatch = Dispatch(self.store, self.models, clock)
        self.asking: Batches[Ask, Asked] = Batches("asking", self.dispatch.answer_all, BUSY_SECONDS)
        self.fetching: Batches[tuple[str, str], Packed] = Batches("payloads", self.dispatch.payloads, BUSY_SECONDS)
        self.found_nothing = FoundNothing()
        decoded = DecodedUpdates()
        self.acceptance = Acceptance(self.store, self.models, decoded, clock)
        self.costs = UploadCosts(self.store)
        self.last_seen = LastSeen(self.store, clock)
        self.polling = Polling(self.store, clock, least=settings.retry_after_seconds, calls=settings.polls_per_second)
        self.rounds = Rounds(
            self.store,
            self.models,
            clock,
            self.costs,
            self.last_seen,
            decoded,
            longest_pause=self.polling.longest,
            on_closed=self._count_round,
            progress=self.progress.note,
        )
        self.records = Records(self.store, self.costs.write)
        self.open_assignments = OpenAssignments(self.store, clock, self.last_seen)
        self.uploads = Uploads(
            *(settings.data_dir / "uploads", self.store, self.acceptance, self.dispatch, clock, self.writers),
        )
        self.stopping = threading.Event()
        self.page_steps = Steps(self.stopping)
        self.device_lists = DeviceLists(self.store, clock, lambda: self.polling.longest() + self.last_seen.lag)
        self.overviews = Overviews(
            *(self.store, self.models, self.federations, self.records, self.open_assignments, self.metrics),
            *(self.device_lists, clock),
        )
        self.hosts = Hosts(settings.hosts)
        self.downloads = Downloads(settings.download_bytes)
        self.open_calls: Counter[str] = Counter()
        self.polls = LongPolls()
        self.moved = Signal()
        self.changed = Signal()
        self.live_views = LiveViews(self.overviews, self.changed, self.stopping.is_set)
        self._facts = threading.Event()
        self._ended = threading.Event()
        self._mover: threading.Thread | None = None
        self._checking: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Go on from where the last process ended, and begin to move rounds. At the first start, make the default
        federation."""
        if self.settings.default_task:
            self.publisher.ensure_default(self.settings.default_task, self.settings.default_settings)
        if self.store.is_first:
            self.rounds.resume_after_restart()
            clear_all(self.store, self.models)
        self.hosts.learn()
        self.store.settled()
        self.store.listen(self._hear)
        self.store.keep_lease(lambda: self._moves_on(HANGS_SECONDS))
        self.progress.note()
        self._mover = threading.Thread(target=self._move, name="rounds", daemon=True)
        self._mover.start()

    def close(self) -> None:
        """Stop moving rounds, and close the store."""
        self.leave()
        self._ended.set()
        self._facts.set()
        if self._mover is not None:
            self._mover.join(STALLED_SECONDS)  # one that hangs ends with the process
        self.asking.close()
        self.fetching.close()
        self.uploads.close()
        try:
            self.costs.write()
        except Unavailable as error:
            log.warning("what the last uploads cost is not recorded: %s", error)
        finally:
            self.store.close()

    async def check_ready(self) -> None:
        """Raise an error if the coordinator does not move rounds, or cannot read its records or write its folder, now
        or soon.

        All who ask at a time share one look, in a thread of its own, and wait no longer than ``READY_SECONDS``.
        """
        if not self._moves_on(STALLED_SECONDS):
            runs = self._mover is not None and self._mover.is_alive()
            stalled = f"has not moved for {self.progress.seconds():.0f} s"
            raise Unavailable(f"the thread of the rounds {stalled if runs else 'has ended: start the process again'}")
        self.store.troubles.check()
        if self._checking is None or self._checking.done():
            look = to_thread.run_sync(self._check_storage, limiter=CapacityLimiter(1))
            self._checking = asyncio.ensure_future(look)
            self._checking.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits
        done, _ = await asyncio.wait({self._checking}, timeout=READY_SECONDS)
        if not done:
            raise Unavailable(f"the records or the data folder have not answered for {READY_SECONDS:.0f} s")
        self._checking.result()

    def _moves_on(self, seconds: float) -> bool:
        """Return whether the thread of the rounds runs, if it was ever started, and has moved within ``seconds``."""
        return self._mover is None or (self._mover.is_alive() and self.progress.seconds() < seconds)

    def _check_storage(self) -> None:
        with self.store.reading() as db:
            check_revision(db.connection())
        self.store.check_whole()
        self.store.check_lease()
        self.store.check_turn()
        self.store.probe()
        free = shutil.disk_usage(self.settings.data_dir).free
        if free < self.settings.min_free_bytes:
            raise Unavailable(f"the disk of the data folder has {free:,} bytes left")

    def leave(self) -> None:
        """Answer the calls that wait, since the process is about to stop. May be called from a signal handler."""
        self.stopping.set()
        self.wake()

    def fact_recorded(self) -> None:
        """Have the thread of the rounds look whether they can move. May be called from any thread."""
        self._facts.set()
        self.changed.send()

    def wake(self) -> None:
        """Have the calls that wait look again, though no round moved. May be called from any thread."""
        self.moved.send()
        self.changed.send()

    def _hear(self, moved: bool) -> None:
        """Handle a message of another process: it has moved rounds, or written a fact."""
        if moved:
            self.wake()
        self.fact_recorded()

    def _look_after(self) -> bool:
        """Do what is due at every fact and tick; return whether a round moved."""
        if self._clock is not None:
            self._clock.keep()
        self.store.check()
        self.uploads.sweep()
        self.last_seen.write()
        return self._advance()

    def _advance(self) -> bool:
        """Move rounds on, if this process is the one that does; return whether one moved."""
        moves, newly = self.store.moves()
        self.progress.note()
        if not moves:
            self.costs.write()  # with several processes, the one that closes a round may not know them
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

    def _move(self) -> None:
        """Move rounds on whenever a fact was recorded, and every tick for their deadlines."""
        tick = self.settings.tick_seconds
        while not self._ended.is_set():
            self.progress.note()
            began = time.monotonic()
            try:
                if self._look_after():
                    self.wake()
            except Unavailable:  # a full disk, a lost database: the store has logged it; tried again at the next tick
                self._ended.wait(tick)
            except Exception:
                log.exception("rounds could not be moved on; trying again")
                self._ended.wait(tick)
            else:  # facts that come together are looked at together
                self._ended.wait(min(time.monotonic() - began, LONGEST_REST))
            self._facts.wait(tick)
            self._facts.clear()


def coordinator_of(scope: Scope) -> Coordinator | None:
    """Return the coordinator of the application that a call came to; None before it has started."""
    coordinator: Coordinator | None = getattr(scope["app"].state, "coordinator", None)
    return coordinator


def _limit(per_second: float, clock: Callable[[], float]) -> RateLimit | None:
    return RateLimit(per_second, clock) if per_second else None
