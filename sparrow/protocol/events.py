"""Kinds of federation events, for the timeline, chart marks and webhooks.

The end of a failure or a pause is a separate event.
"""

from __future__ import annotations

from enum import Enum

from pydantic import Field

from .fields import Answer


class EventKind(str, Enum):
    """The kind of an event, of a device if the event names one, otherwise of the whole federation."""

    # Of a device.
    joined = "joined"
    removed = "removed"
    failed = "failed"
    recovered = "recovered"
    # An administrator has changed its tags.
    tagged = "tagged"
    # Of a federation.
    created = "created"
    started = "started"
    finished = "finished"
    reopened = "reopened"
    rolled_back = "rolled_back"
    settings_changed = "settings_changed"
    model_replaced = "model_replaced"
    # Of either. A device pauses by its policy and stops early; an operator pauses and stops a federation.
    paused = "paused"
    resumed = "resumed"
    stopped = "stopped"


class Event(Answer):
    """One event."""

    id: int = Field(description="Increases with each event of the coordinator")
    at: str
    kind: EventKind
    round: int = Field(description="Rounds that had closed: charts mark the event after this one")
    device: str | None = Field(description="Name of the device; null for the whole federation")
    text: str = Field(description="The event in words")


class Events(Answer):
    """Events of a federation, the newest first."""

    events: tuple[Event, ...]
    total: int = Field(description="Number of kept events that match")


class AlertKind(str, Enum):
    """The kind of an alert of a webhook: a condition of the coordinator or of a federation."""

    # Of the coordinator.
    not_ready = "not_ready"
    disk_low = "disk_low"
    # Of a running federation: no round has opened or closed for two deadlines.
    stalled = "stalled"


class Alert(Answer):
    """The start or end of an alert condition."""

    kind: AlertKind
    federation: str | None = Field(description="Null for the whole coordinator")
    at: str
    over: bool = Field(description="Whether the condition has ended")
    text: str


class SentEvent(Event):
    """An event of a webhook."""

    federation: str


class Notification(Answer):
    """The body of a webhook delivery. An event may be delivered twice, with the same id."""

    sent_at: str
    dropped: int = Field(description="Events that were dropped before these, because too many waited")
    events: tuple[SentEvent, ...]
    alerts: tuple[Alert, ...]
