"""The webhook: events and alerts, posted to an address.

The last delivered event is in the records, so a restart repeats at most the deliveries in progress and loses none. The
process in charge of rounds posts the start and the end of each alert.

A body is JSON (``protocol.events.Notification``). ``Sparrow-Signature`` is ``v1=`` and the hexadecimal HMAC-SHA-256 of
``Sparrow-Timestamp``, a dot and the body, with the secret of the settings as key.
"""

from __future__ import annotations

import hmac
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import func, select

from sparrow.protocol.events import Alert, AlertKind, Notification, SentEvent
from sparrow.transport.pinned import Destination, NotDelivered

from .clock import iso
from .errors import Unavailable
from .reports.metrics import Metrics, stalled
from .reports.timeline import tell
from .storage.store import Store
from .storage.tables import Delivered, Event, Federation

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Interval at which conditions are looked for, and events that no signal announced."""
REST_SECONDS = 0.5
"""Least pause between two looks for events, which gathers those of a busy moment."""
BATCH = 50
"""Maximum number of events of a delivery."""
MOST_WAITING = 1000
MOST_ALERTS = 100
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 600.0
LOW_DISK = 4
"""Multiple of the reserve below which the disk is nearly full."""


@dataclass(frozen=True)
class Wanted:
    """Configuration of the webhook. kinds: event kinds to send; empty for all. secret: the key of signatures."""

    destination: Destination
    secret: str = field(repr=False)
    kinds: frozenset[str] = frozenset()


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the header that proves a body's origin and time."""
    return "v1=" + hmac.digest(secret.encode(), timestamp.encode() + b"." + body, "sha256").hex()


class Webhook:
    """The thread that posts. trouble: returns why the process is not ready, or None."""

    def __init__(
        self,
        wanted: Wanted,
        store: Store,
        clock: Callable[[], float],
        metrics: Metrics,
        trouble: Callable[[], str | None],
        reserve: int,
    ) -> None:
        self._wanted = wanted
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._trouble = trouble
        self._reserve = reserve
        self._alerts: deque[Alert] = deque(maxlen=MOST_ALERTS)
        # Conditions that hold, and the text of each.
        self._holds: dict[tuple[AlertKind, str | None], str] = {}
        self._dropped = 0
        self._failed = False
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def begin(self) -> None:
        """At the first start, let the events from now on wait for delivery."""
        with self._store.writing() as db:
            if db.get(Delivered, 1) is None:
                db.add(Delivered(id=1, event_id=db.scalar(select(func.max(Event.id))) or 0))

    def start(self) -> None:
        """Post the events after the last delivered one, in a thread."""
        self.begin()
        self._thread.start()

    def wake(self) -> None:
        """Look for events now. Thread-safe."""
        self._woken.set()

    def close(self) -> None:
        """Stop; events that wait are posted after the next start."""
        self._ended.set()
        self._woken.set()
        if self._thread.is_alive():
            # A delivery in progress ends with the process.
            self._thread.join(1.0)

    def look(self) -> None:
        """Queue alerts for conditions that have begun or ended."""
        found: dict[tuple[AlertKind, str | None], str] = {}
        trouble = self._trouble()
        if trouble is not None:
            found[AlertKind.not_ready, None] = trouble
        free = shutil.disk_usage(self._store.folder).free
        if free < LOW_DISK * self._reserve:
            found[AlertKind.disk_low, None] = f"{free:,} bytes free on the disk of the data folder"
        try:
            with self._store.reading() as db:
                for name, seconds in stalled(db, self._clock()):
                    found[AlertKind.stalled, name] = f"no round has opened or closed for {seconds:,.0f} s"
        except Unavailable:
            # The trouble is noted above; whether a federation is stalled is unknown until the records can be read.
            found |= {key: text for key, text in self._holds.items() if key[0] is AlertKind.stalled}
        for key in found.keys() - self._holds.keys():
            self._note(key, found[key], over=False)
        for key in self._holds.keys() - found.keys():
            self._note(key, self._holds[key], over=True)
        self._holds = found

    def deliver(self) -> bool:
        """Post one batch of alerts and events; return whether more may wait.

        Raises NotDelivered; Unavailable if the records cannot be read and no alerts wait.
        """
        alerts = tuple(self._alerts)
        events: tuple[SentEvent, ...] = ()
        last = None
        try:
            self._drop_oldest()
            events, last = self._waiting()
        except Unavailable:
            if not alerts:
                raise
        if alerts or events:
            self._post(Notification(sent_at=iso(self._clock()), dropped=self._dropped, events=events, alerts=alerts))
            self._dropped = 0
            for _ in alerts:
                self._alerts.popleft()
            self._metrics.webhook_events.labels("sent").inc(len(events) + len(alerts))
        if last is not None:
            with self._store.writing() as db:
                db.get_one(Delivered, 1).event_id = last
        return last is not None

    def _run(self) -> None:
        pause = FIRST_PAUSE
        looked_at = -LOOK_SECONDS
        while not self._ended.is_set():
            self._woken.clear()
            try:
                if self._store.moves_now:
                    if time.monotonic() - looked_at >= LOOK_SECONDS:
                        self.look()
                        looked_at = time.monotonic()
                    while not self._ended.is_set() and self.deliver():
                        pause = FIRST_PAUSE
                self._woken.wait(LOOK_SECONDS)
                self._ended.wait(REST_SECONDS)
            except NotDelivered as error:
                self._fail(error)
                self._ended.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Unavailable:
                # The store has logged it. Alerts are posted without the records; events wait.
                self._ended.wait(FIRST_PAUSE)
            except Exception:
                log.exception("the webhook failed; retrying")
                self._ended.wait(FIRST_PAUSE)

    def _note(self, key: tuple[AlertKind, str | None], text: str, *, over: bool) -> None:
        kind, federation = key
        self._alerts.append(Alert(kind=kind, federation=federation, at=iso(self._clock()), over=over, text=text))

    def _waiting(self) -> tuple[tuple[SentEvent, ...], int | None]:
        """Return the next events, and the id of the last one that was looked at; None if there is none."""
        with self._store.reading() as db:
            after = db.get_one(Delivered, 1).event_id
            rows = db.execute(
                select(Event, Federation.name)
                .join(Federation, Federation.id == Event.federation_id)
                .where(Event.id > after)
                .order_by(Event.id)
                .limit(BATCH)
            ).all()
            kinds = self._wanted.kinds
            events = tuple(
                SentEvent(**tell(event).model_dump(), federation=name)
                for event, name in rows
                if not kinds or event.kind in kinds
            )
        return events, rows[-1][0].id if rows else None

    def _drop_oldest(self) -> None:
        """Count and skip the oldest events if more than ``MOST_WAITING`` wait."""
        with self._store.reading() as db:
            waiting = Event.id > db.get_one(Delivered, 1).event_id
            last = db.scalar(select(Event.id).where(waiting).order_by(Event.id.desc()).offset(MOST_WAITING).limit(1))
            if last is None:
                return
            kinds = self._wanted.kinds
            chosen = [Event.kind.in_(kinds)] if kinds else []
            count = db.scalar(select(func.count()).select_from(Event).where(waiting, Event.id <= last, *chosen)) or 0
        with self._store.writing() as db:
            db.get_one(Delivered, 1).event_id = last
        self._dropped += count
        self._metrics.webhook_events.labels("dropped").inc(count)

    def _post(self, notification: Notification) -> None:
        body = notification.model_dump_json().encode()
        # Receivers compare it with their clocks, from which the coordinator's may differ.
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "sparrow",
            "Sparrow-Timestamp": timestamp,
            "Sparrow-Signature": signature(self._wanted.secret, timestamp, body),
        }
        self._wanted.destination.post(body, headers)
        if self._failed:
            self._failed = False
            log.info("the webhook works again")

    def _fail(self, error: NotDelivered) -> None:
        self._metrics.webhook_failures.inc()
        if not self._failed:
            self._failed = True
            log.error("the webhook's events wait: %s; retrying", error)
