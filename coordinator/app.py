"""The composition root: builds one coordinator from its settings."""

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
from .calls.parts import Parts
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
from .fleet.issuing import Issuing
from .fleet.polling import Polling
from .fleet.publishing import Publisher
from .fleet.serving import ServedModels
from .fleet.sessions import Sessions
from .models.global_models import Models
from .models.payloads import Packed
from .models.retention import Retention
from .reports.device_list import DeviceLists
from .reports.federation_list import FederationList
from .reports.metrics import Metrics
from .reports.open_work import OpenAssignments
from .reports.overview import Overviews
from .reports.records import Records
from .reports.timeline import Timeline
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
from .webhook import Wanted, Webhook

log = logging.getLogger(__name__)

DAY = 24 * 3600.0

STALLED_SECONDS = 30.0
"""Time without progress of the rounds thread after which the process is not ready; slow storage may need as long for
one file."""
HANGS_SECONDS = 90.0
"""Time without progress after which another process advances rounds. It is long, because the other process must
restart the round's sums, on the same storage."""
LONGEST_REST = 0.05
"""Longest pause of the rounds thread between two steps, s; it pauses for as long as a step took."""
PUBLISHING_SECONDS = 120.0
"""Time without a finished publication after which waiting ones give up."""
READY_SECONDS = 3.0
"""Longest wait of ``/readyz`` for records and blobs."""


class Progress:
    """Time since the last progress of the rounds thread. Thread-safe."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def note(self) -> None:
        """Note progress."""
        self._at = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self._at


class Coordinator:
    """One coordinator: its store, its domain objects, and the thread that advances rounds.

    Passive until ``open``. moved: sent to long polls when a round moved. changed: sent to live views when anything was
    recorded.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] | None = None, store: Store | None = None
    ) -> None:
        self.settings = settings
        url = settings.database_url
        self.store = store or Store(settings.data_dir, None if url is None else url.get_secret_value(), settings.blobs)
        self._clock = SteadyClock(settings.data_dir) if clock is None else None
        clock = clock or self._clock
        assert clock is not None, "one of the two"
        self.metrics = Metrics()
        self.metrics.measure(self.store)
        self.metrics.observe_records(self.store, clock, sorted(settings.metric_keys))
        self.metrics.observe_disk(settings.data_dir, settings.min_free_bytes)
        self.progress = Progress()
        self.metrics.observe_rounds(self.progress.seconds, lambda: self.store.moves_now)
        self.models = Models(self.store, Retention(settings.keep_models, settings.keep_every))
        self.federations = Federations(self.store, self.models, clock)
        self.publisher = Publisher(self.store, self.models, clock, self.federations)
        self.served = ServedModels(self.store, self.models)
        self.tokens = Tokens(self.store, clock, settings.tokens())
        self.sessions = Sessions(self.store, clock, self.tokens)
        self.issuing = Issuing(self.store, clock, self.tokens, self.sessions)
        lifetime = settings.device_token_lifetime_days
        self.devices = Devices(
            self.store,
            clock,
            rotation_seconds=settings.device_token_rotation_days * DAY or None,
            lifetime_seconds=None if lifetime is None else lifetime * DAY,
        )
        self.by_device = _limit(settings.device_calls_per_second, clock)
        self.by_address = _limit(settings.address_calls_per_second, clock)
        self.at_once = AtOnce()
        self.turns = Turns()
        self.writers = Threads(WRITERS, BUSY_SECONDS)
        self.look_ups = Threads(LOOK_UPS, BUSY_SECONDS)
        self.publishing = Threads(PUBLICATIONS, PUBLISHING_SECONDS, busy="other models are being published")
        self.evaluating = Threads(
            EVALUATIONS,
            settings.max_test_seconds + BUSY_SECONDS,
            most_waiting=WAITING_EVALUATIONS,
            busy="another evaluation is running",
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
        parts = settings.data_dir / "uploads"
        self.uploads = Uploads(parts, self.store, self.acceptance, self.dispatch, clock, self.writers)
        self.parts = Parts(parts / "bodies", self.store)
        self.stopping = threading.Event()
        self.page_steps = Steps(self.stopping)
        self.device_lists = DeviceLists(self.store, clock, lambda: self.polling.longest() + self.last_seen.lag)
        self.timeline = Timeline(self.store)
        self.summaries = FederationList(self.store)
        self.overviews = Overviews(
            self.store,
            self.models,
            self.federations,
            self.records,
            self.open_assignments,
            self.metrics,
            self.device_lists,
            clock,
        )
        self.hosts = Hosts(settings.hosts)
        self.downloads = Downloads(settings.download_bytes)
        self.open_calls: Counter[str] = Counter()
        self.polls = LongPolls()
        self.moved = Signal()
        self.changed = Signal()
        self.live_views = LiveViews(self.overviews, self.changed, self.stopping.is_set)
        self.webhook = self._new_webhook(clock)
        self._facts = threading.Event()
        self._ended = threading.Event()
        self._mover: threading.Thread | None = None
        self._checking: asyncio.Future[None] | None = None

    def _new_webhook(self, clock: Callable[[], float]) -> Webhook | None:
        settings = self.settings
        destination = settings.destination()
        if destination is None or settings.webhook_secret is None:
            return None
        wanted = Wanted(destination, settings.webhook_secret.get_secret_value(), settings.webhook_kinds())
        return Webhook(wanted, self.store, clock, self.metrics, self._trouble, settings.min_free_bytes)

    def open(self) -> None:
        """Resume the state of the last process and start the rounds thread; at the first start, create the default
        federation.
        """
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
        if self.webhook is not None:
            self.webhook.start()

    def close(self) -> None:
        """Stop the rounds thread, and close the store."""
        self.leave()
        self._ended.set()
        self._facts.set()
        if self.webhook is not None:
            self.webhook.close()
        if self._mover is not None:
            # If it hangs, it ends with the process.
            self._mover.join(STALLED_SECONDS)
        self.asking.close()
        self.fetching.close()
        self.uploads.close()
        try:
            self.costs.write()
            # After the end of a federation, they tell devices that have heard of it from lost ones.
            self.last_seen.flush()
        except Unavailable as error:
            log.warning("the cost of the last uploads and the last calls of devices are not recorded: %s", error)
        finally:
            self.store.close()

    async def check_ready(self) -> None:
        """Raise an error if rounds do not progress, the records cannot be read, or the data folder is nearly full."""
        self._check_progress()
        if self._checking is None or self._checking.done():
            look = to_thread.run_sync(self._check_storage, limiter=CapacityLimiter(1))
            self._checking = asyncio.ensure_future(look)
            # Retrieve the error of a check that is no longer awaited.
            self._checking.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait({self._checking}, timeout=READY_SECONDS)
        if not done:
            raise Unavailable(f"the records or the data folder have not answered for {READY_SECONDS:.0f} s")
        self._checking.result()

    def _trouble(self) -> str | None:
        try:
            self._check_progress()
            self._check_storage()
        except Exception as error:
            return str(error)
        return None

    def _check_progress(self) -> None:
        if not self._moves_on(STALLED_SECONDS):
            runs = self._mover is not None and self._mover.is_alive()
            stalled = f"has not moved for {self.progress.seconds():.0f} s"
            raise Unavailable(f"the round thread {stalled if runs else 'has ended: restart the process'}")
        self.store.troubles.check()

    def _moves_on(self, seconds: float) -> bool:
        """Return whether the rounds thread is alive and made progress within ``seconds``, or was never started."""
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
            raise Unavailable(f"the disk of the data folder has only {free:,} bytes left")

    def leave(self) -> None:
        """Answer waiting calls before the process stops. May be called from a signal handler."""
        self.stopping.set()
        self.wake()

    def fact_recorded(self) -> None:
        """Wake the rounds thread and live views. Thread-safe."""
        self._facts.set()
        self.changed.send()
        if self.webhook is not None:
            self.webhook.wake()

    def wake(self) -> None:
        """Wake waiting calls and live views. Thread-safe."""
        self.moved.send()
        self.changed.send()
        if self.webhook is not None:
            self.webhook.wake()

    def _hear(self, moved: bool) -> None:
        """Handle another process's message: it advanced rounds (``moved``) or recorded a fact."""
        if moved:
            self.wake()
        self.fact_recorded()

    def _look_after(self) -> bool:
        """Run the work that is due after each fact and tick; return whether a round advanced."""
        if self._clock is not None:
            self._clock.keep()
        self.store.check()
        self.uploads.sweep()
        self.last_seen.write()
        return self._advance()

    def _advance(self) -> bool:
        moves, newly = self.store.moves()
        self.progress.note()
        if not moves:
            # The process that closes the round may not have received them.
            self.costs.write()
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
        tick = self.settings.tick_seconds
        while not self._ended.is_set():
            self.progress.note()
            began = time.monotonic()
            try:
                if self._look_after():
                    self.wake()
            except Unavailable:
                # The store has logged it, such as a full disk or a lost database.
                self._ended.wait(tick)
            except Exception:
                log.exception("rounds could not be advanced; retrying")
                self._ended.wait(tick)
            else:
                # Facts recorded during the pause are handled together.
                self._ended.wait(min(time.monotonic() - began, LONGEST_REST))
            self._facts.wait(tick)
            self._facts.clear()


def coordinator_of(scope: Scope) -> Coordinator | None:
    """Return the coordinator of the application in this scope, or None before it has started."""
    coordinator: Coordinator | None = getattr(scope["app"].state, "coordinator", None)
    return coordinator


def _limit(per_second: float, clock: Callable[[], float]) -> RateLimit | None:
    return RateLimit(per_second, clock) if per_second else None
