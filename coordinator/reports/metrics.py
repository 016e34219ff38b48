"""Prometheus metrics: counters of this process, and values from the records in a bounded number of queries.

All series of a federation exist from its first scrape, because an alert on a counter's increase would otherwise miss
the first events.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, literal_column, select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import FederationStatus, PrivacySpent
from sparrow.protocol.settings import FederationSettings

from ..errors import Unavailable, Unreadable, read_stored
from ..models.global_models import settings_of
from ..rounds.candidates import ENROLLED
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROUND_SECONDS = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 3 * 3600, 12 * 3600, 24 * 3600)
STATUSES = ("active", "stopped", "revoked", "not_joined")
REASONS = (
    "BadContent",
    "DifferentUpdate",
    "DiskFull",
    "LengthRequired",
    "NotAllowed",
    "NotFound",
    "RoundClosed",
    "TooLarge",
    "Unavailable",
    "WrongMediaType",
    "WrongRange",
)
"""Errors that refuse an update; other errors, such as bugs, get a series when they first occur."""
DIRECTIONS = ("up", "down")
STALLED_DEADLINES = 2
"""Number of deadlines without an opened or closed round after which a running federation is stalled."""


class Metrics:
    """Counters and histograms of one coordinator, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = histogram(
            "sparrow_http_request_duration_seconds",
            "Calls by route, from the first byte to the end of the answer, including the waiting of long polls",
            ["method", "route", "status"],
            buckets=SECONDS,
        )
        self.accepted = counter(
            "sparrow_updates_accepted", "New updates acknowledged, without duplicates", ["federation"]
        )
        self.refused = counter("sparrow_updates_refused", "Updates refused, by reason", ["federation", "reason"])
        self.left_out = counter(
            "sparrow_updates_left_out", "Acknowledged updates left out of the model", ["federation"]
        )
        self.traffic = counter(
            "sparrow_transferred_bytes",
            "Bodies of accepted updates and sent payloads",
            ["federation", "direction"],
        )
        self.rounds = histogram(
            "sparrow_round_duration_seconds",
            "Durations of closed rounds, from opening to closing",
            ["federation"],
            buckets=ROUND_SECONDS,
        )
        self.commits = histogram(
            "sparrow_database_commit_duration_seconds", "Commits of write transactions", buckets=SECONDS
        )
        self.blobs = histogram(
            "sparrow_blob_write_duration_seconds", "Durable writes of models and updates", buckets=SECONDS
        )

        self.webhook_events = counter("sparrow_webhook_events", "Events and alerts of the webhook", ["outcome"])
        for outcome in ("sent", "dropped"):
            self.webhook_events.labels(outcome)
        self.webhook_failures = counter("sparrow_webhook_failures", "Failed deliveries of the webhook")
        self.ready = Gauge(
            "sparrow_ready",
            "1 if rounds progress and records and disk can be used, as /readyz reports",
            registry=self.registry,
        )

    def text(self, store: Store, *, ready: bool) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.ready.set(float(ready))
        try:
            with store.reading() as db:
                names = list(db.scalars(select(Federation.name)))
        except Unavailable:
            # ``ready`` and other metrics of the process show the cause.
            names = []
        for name in names:
            for metric in (self.accepted, self.left_out, self.rounds):
                metric.labels(name)
            for direction in DIRECTIONS:
                self.traffic.labels(name, direction)
            for reason in REASONS:
                self.refused.labels(name, reason)
        return generate_latest(self.registry)

    def observe_disk(self, folder: Path, reserve: int) -> None:
        """Report the disk's free space, and the space below which the process is not ready."""
        free = Gauge("sparrow_disk_free_bytes", "Free space on the disk of the data folder", registry=self.registry)
        free.set_function(lambda: float(shutil.disk_usage(folder).free))
        kept = Gauge(
            "sparrow_disk_reserve_bytes",
            "Free space below which the coordinator is not ready (COORDINATOR_MIN_FREE_BYTES)",
            registry=self.registry,
        )
        kept.set(reserve)

    def measure(self, store: Store) -> None:
        """Time this store's commits and blob writes from now on."""
        store.on_commit = self.commits.observe
        timed: Any = _TimedBlobs(store.blobs, self.blobs)
        store.blobs = timed

    def observe_rounds(self, still_seconds: Callable[[], float], moves: Callable[[], bool]) -> None:
        """Report the state of the rounds thread: time without progress, and whether it advances rounds."""
        still = Gauge(
            "sparrow_rounds_thread_still_seconds",
            "Time since the thread of the rounds last finished a step, update or file",
            registry=self.registry,
        )
        still.set_function(still_seconds)
        holder = Gauge(
            "sparrow_moves_rounds",
            "1 in the process that opens and closes rounds, 0 in other processes of the coordinator",
            registry=self.registry,
        )
        holder.set_function(lambda: float(moves()))

    def observe_records(self, store: Store, clock: Callable[[], float], tags: Sequence[str] = ()) -> None:
        """Report the metrics that come from a store's records. tags: keys to count."""
        self.registry.register(_Records(store, clock, tags))


class _TimedBlobs:
    """Blob store with timed writes."""

    def __init__(self, blobs: Any, seconds: Histogram) -> None:
        self._blobs = blobs
        self._seconds = seconds

    def put(self, key: str, data: bytes) -> None:
        with self._seconds.time():
            self._blobs.put(key, data)

    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        with self._seconds.time():
            self._blobs.write(key, data, file)

    def settle(self, keys: Iterable[str]) -> None:
        with self._seconds.time():
            self._blobs.settle(keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self._blobs, name)


class _Records(Collector):
    """State of all federations, from four queries plus two per federation."""

    def __init__(self, store: Store, clock: Callable[[], float], tags: Sequence[str]) -> None:
        self._store = store
        self._clock = clock
        self._tags = tags

    def describe(self) -> Iterable[Metric]:
        # Without this method, registering would read the records.
        return []

    def collect(self) -> Iterable[Metric]:
        try:
            return self._collect()
        except Unavailable:
            # Other metrics of the process show the cause.
            return []

    def _collect(self) -> Iterable[Metric]:
        label = ["federation"]
        rounds = CounterMetricFamily("sparrow_rounds_closed", "Closed rounds", labels=label)
        devices = GaugeMetricFamily("sparrow_devices", "Devices by status", labels=["federation", "status"])
        waiting = GaugeMetricFamily("sparrow_open_assignments", "Open assignments", labels=["federation", "kind"])
        accuracy = GaugeMetricFamily("sparrow_accuracy_ratio", "Latest mean accuracy", labels=["federation", "model"])
        still = GaugeMetricFamily(
            "sparrow_federation_still_seconds",
            "Time since a round of a running federation last opened or closed",
            labels=label,
        )
        deadlines = GaugeMetricFamily("sparrow_federation_deadline_seconds", "Deadline of a round", labels=label)
        privacy = GaugeMetricFamily(
            "sparrow_privacy_epsilon",
            "Epsilon of the global models' differential privacy",
            labels=["federation", "delta"],
        )
        with self._store.reading() as db:
            federations = {federation.id: federation for federation in db.scalars(select(Federation))}
            by_status = (Device.federation_id, Device.status)
            counts = {
                (row[0], row[1]): row[2] for row in db.execute(select(*by_status, func.count()).group_by(*by_status))
            }
            # A literal, because SQLite uses a partial index only for the expression in its definition.
            opened = db.execute(
                select(Assignment.federation_id, Assignment.kind, func.count())
                .where(Assignment.status == literal_column("'open'"))
                .group_by(Assignment.federation_id, Assignment.kind)
            )
            for federation_id, kind, count in opened:
                waiting.add_metric([federations[federation_id].name, kind], count)
            moved_at = _moved_at(db)
            for federation in federations.values():
                if federation.status == FederationStatus.running.value and federation.id in moved_at:
                    still.add_metric([federation.name], max(0.0, self._clock() - moved_at[federation.id]))
                rounds.add_metric([federation.name], federation.round)
                for status in STATUSES:
                    devices.add_metric([federation.name, status], counts.get((federation.id, status), 0))
                try:
                    settings = settings_of(federation)
                except Unreadable:
                    # The list of federations logs it.
                    continue
                deadlines.add_metric([federation.name], settings.deadline_seconds)
                for model, value in _accuracies(db, federation, settings).items():
                    accuracy.add_metric([federation.name, model], value)
                spent = _privacy(db, federation, settings)
                if spent is not None:
                    privacy.add_metric([federation.name, f"{spent.delta:g}"], spent.epsilon)
            # Read before the transaction ends.
            tagged = list(self._tagged(db, federations))
        return [rounds, devices, waiting, accuracy, still, deadlines, privacy, *tagged]

    def _tagged(self, db: Session, federations: Mapping[int, Federation]) -> Iterator[Metric]:
        """Yield the devices that take part by each tag that the operator has listed."""
        if not self._tags:
            return
        found = GaugeMetricFamily("sparrow_tagged_devices", "Devices by tag", labels=["federation", "tag", "value"])
        for key in self._tags:
            value = Device.tags[key].as_string()
            counts = (
                select(Device.federation_id, value, func.count())
                .where(Device.status.in_(ENROLLED), value.is_not(None))
                .group_by(Device.federation_id, value)
            )
            for federation_id, text, count in db.execute(counts):
                found.add_metric([federations[federation_id].name, key, text], count)
        yield found


def _moved_at(db: Session) -> dict[int, float]:
    last = func.max(func.coalesce(Round.closed_at, Round.opened_at))
    newest = (
        select(Round.federation_id, last)
        .join(Federation, Federation.id == Round.federation_id)
        .where(Federation.status == FederationStatus.running.value, Round.number >= Federation.round)
        .group_by(Round.federation_id)
    )
    return {row[0]: row[1] for row in db.execute(newest)}


def stalled(db: Session, now: float) -> Iterator[tuple[str, float]]:
    """Yield each running federation without a new round for ``STALLED_DEADLINES``, and the seconds."""
    moved_at = _moved_at(db)
    for federation in db.scalars(select(Federation).where(Federation.id.in_(moved_at))):
        still = now - moved_at[federation.id]
        with suppress(Unreadable):
            if still > STALLED_DEADLINES * settings_of(federation).deadline_seconds:
                yield federation.name, still


def _privacy(db: Session, federation: Federation, settings: FederationSettings) -> PrivacySpent | None:
    if settings.noise_multiplier is None:
        return None
    last = select(Round.notes).where(Round.federation_id == federation.id, Round.number == federation.round)
    notes = db.scalars(last).first() or {}
    return read_stored(PrivacySpent, notes.get("privacy"))


def _accuracies(db: Session, federation: Federation, settings: FederationSettings) -> dict[str, float]:
    # The database computes the means, over the last evaluated rounds only.
    interval = settings.evaluation_interval or federation.round or 1
    last = federation.round - federation.round % interval
    personal = Assignment.report["personal"]["accuracy"].as_float()
    shared = Assignment.report["global_model"]["accuracy"].as_float()
    row = db.execute(
        select(func.avg(personal), func.avg(shared))
        .where(
            Assignment.federation_id == federation.id,
            Assignment.round.in_({federation.round, last, last - interval}),
            Assignment.kind == "evaluate",
            Assignment.status == "done",
        )
        .group_by(Assignment.round)
        .order_by(Assignment.round.desc())
        .limit(1)
    ).first()
    found = {} if row is None else {"personal": row[0], "global": row[1]}
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def counted_refusals(refused: Counter, federation: str) -> Iterator[None]:
    """Context manager: count errors by their class."""
    try:
        yield
    except Exception as error:
        refused.labels(federation, type(error).__name__).inc()
        raise
