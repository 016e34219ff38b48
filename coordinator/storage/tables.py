"""The records as SQLAlchemy tables. A change needs a migration (``migrations/versions``).

Times are seconds since the epoch (UTC). JSON columns hold validated wire messages.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint, false, text
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BY_BYTES = String(160).with_variant(String(160, collation="C"), "postgresql")
"""Text with the same order in every database."""


def natural(name: str) -> str:
    """Return a key for the natural, case-insensitive order of names: ``device-2`` before ``device-10``."""
    numbered = re.sub(r"[0-9]+", lambda found: f"{len(found[0].lstrip('0')):02d}{found[0].lstrip('0')}", name)
    return numbered.lower()


def _sort_name(context: DefaultExecutionContext) -> str:
    given: dict[str, Any] = context.get_current_parameters()  # type: ignore[no-untyped-call]
    return natural(given["name"])


class Base(DeclarativeBase):
    """Base of all tables."""


class Federation(Base):
    """One learning problem with a method and its settings. An ``id`` is never reused."""

    __tablename__ = "federations"

    id: Mapped[int] = mapped_column(primary_key=True)
    # Distinguishes it from a federation of the same name on another or recreated coordinator.
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    # Key of the draws (``draws``). It leaves the records only in backups, like ``noise_key``.
    secret: Mapped[bytes] = mapped_column(LargeBinary(32))
    name: Mapped[str] = mapped_column(String(64), unique=True)
    task: Mapped[str] = mapped_column(String(200))
    method: Mapped[str] = mapped_column(String(64))
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    # Long, and cached by coordinator.models.
    manifest: Mapped[str] = mapped_column(Text, deferred=True)
    # Manifest of a new version of the model, which replaces ``manifest`` after the open round.
    replacement: Mapped[str | None] = mapped_column(Text)
    replacement_publication: Mapped[str | None] = mapped_column(Text, deferred=True)
    # Number of replaced versions.
    replacements: Mapped[int] = mapped_column(default=0, server_default="0")
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(String(32))
    # The method's last warning.
    warning: Mapped[str | None] = mapped_column(Text)
    # Number of closed rounds.
    round: Mapped[int] = mapped_column(default=0)
    # Number of the global model, 0 for w^0.
    model_version: Mapped[int] = mapped_column(default=0)
    # The global model to restore after the open round.
    rollback_version: Mapped[int | None]
    # Number of updates of buffered rounds so far.
    arrivals: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    model_sha256: Mapped[str] = mapped_column(String(64))
    # Size of the publication, 0 for a built-in task.
    published_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    # Completed settings and model digest at publication, needed only when it is published again.
    published: Mapped[dict[str, Any] | None] = mapped_column(JSON, deferred=True)
    # Key of a private federation's noise.
    noise_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    # The signed publication (``signatures.Published``), needed only when a device joins.
    publication: Mapped[str | None] = mapped_column(Text, deferred=True)
    # Key of the publication's author.
    publisher: Mapped[str | None] = mapped_column(String(64))
    # Digest of the publication's statement.
    publication_sha256: Mapped[str | None] = mapped_column(String(64))


class DeletedFederation(Base):
    """A deleted federation. Its id is not reused, because a killed process may have left blobs."""

    __tablename__ = "deleted_federations"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(64))
    # 0 while a federation is being created, also if that failed.
    deleted_at: Mapped[float]


class DeletedDevice(Base):
    """Token of a device of a deleted federation; its calls get FederationDeleted."""

    __tablename__ = "deleted_devices"

    token_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("deleted_federations.id"))


class Device(Base):
    """A device of one federation."""

    __tablename__ = "devices"
    __table_args__ = (
        Index(
            "devices_name_in_use",
            "federation_id",
            "name",
            unique=True,
            sqlite_where=text("status != 'revoked'"),
            postgresql_where=text("status != 'revoked'"),
        ),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    # Key of natural order.
    sort_name: Mapped[str] = mapped_column(BY_BYTES, default=_sort_name, server_default="")
    token_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), index=True)
    token_issued_at: Mapped[float] = mapped_column(server_default="0")
    # A new token that replaces ``token_sha256`` at its first use.
    next_token_sha256: Mapped[bytes | None] = mapped_column(LargeBinary(32), index=True)
    enrolment_key_sha256: Mapped[bytes] = mapped_column(LargeBinary(32))
    # Identifier of its last start; ``fleet.devices.COPIED`` while copies of its state folder contend.
    start: Mapped[str | None] = mapped_column(String(32))
    # Public key in secure rounds, which never changes.
    identity_key: Mapped[str | None] = mapped_column(String(64))
    # Its own tags, and those of administrators, which replace them.
    own_tags: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    set_tags: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    # Both together, for queries.
    tags: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    # Needed only for observers.
    profile: Mapped[dict[str, Any]] = mapped_column(JSON, deferred=True)
    budget: Mapped[float]
    # Limit of its budget.
    limited_by: Mapped[str | None] = mapped_column(String(16))
    # active, stopped, revoked, not_joined
    status: Mapped[str] = mapped_column(String(16))
    stopped_round: Mapped[int | None]
    # False after a missed deadline, silence or leaving, until the device asks again; it is not drawn then.
    present: Mapped[bool] = mapped_column(default=True)
    # Its policy's reason for being away.
    paused: Mapped[str | None] = mapped_column(String(16))
    # Time until which it is not drawn, after a returned assignment or refused updates.
    rest_until: Mapped[float] = mapped_column(default=0.0)
    # Refused updates in a row.
    refusals: Mapped[int] = mapped_column(default=0, server_default="0")
    # Revoked, and no longer listed or counted.
    removed: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Reason of its failure, until it is over (``rounds.failing``), or why it cannot join (``messages.DeviceFailure``).
    failure: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Whether it has exported its model, and not trained since.
    exported: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Last reported accuracy of its personal or else the global model.
    accuracy: Mapped[float | None]
    # Accuracy, reported together with that, of its model trained only on its own data.
    accuracy_alone: Mapped[float | None]
    # Download and training of its last update.
    seconds: Mapped[float | None]
    # Whether it has proved that it downloaded the whole model once.
    holds_model: Mapped[bool] = mapped_column(default=False)
    # Digest of the mask that it last reported.
    mask: Mapped[str | None] = mapped_column(String(64))
    # Digest of the global model that it can rebuild.
    model: Mapped[str | None] = mapped_column(String(64))
    # Training samples, reported at enrolment, later, or first with an update.
    num_examples: Mapped[int | None] = mapped_column(BigInteger)
    # Total traffic.
    bytes_down: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    bytes_up: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # Whether its silence has no meaning.
    hosted: Mapped[bool] = mapped_column(default=False, server_default=false())
    enrolled_at: Mapped[float]
    # Time of its last call, to about 15 seconds.
    seen_at: Mapped[float]


class Round(Base):
    """One round."""

    __tablename__ = "rounds"
    __table_args__ = (UniqueConstraint("federation_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"), index=True)
    number: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))  # open, closed
    opened_at: Mapped[float]
    deadline_at: Mapped[float]
    # Number of updates that closes it before its deadline.
    target: Mapped[int]
    # Number of extended deadlines.
    extensions: Mapped[int] = mapped_column(default=0, server_default="0")
    closed_at: Mapped[float | None]
    model_sha256: Mapped[str | None] = mapped_column(String(64))
    # The global model before it.
    base_version: Mapped[int | None]
    # The global model after it.
    model_version: Mapped[int | None]
    # Whether an operator rolled it back.
    undone: Mapped[bool] = mapped_column(default=False, server_default=false())
    # The method's counts at closing; ``left_out`` has the reasons of updates not in the model, by assignment id.
    notes: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    # Bytes of its updates by part.
    parts: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    # State of a secure round (``rounds.secure_state``).
    secure: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    # Cache of its record.
    summary: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    # Whether a fact has arrived since.
    stale: Mapped[bool] = mapped_column(default=True)
    # Number of facts, to detect those that arrive while the record is made.
    facts: Mapped[int] = mapped_column(default=0, server_default="0")


class Model(Base):
    """A stored global model of a committed round or of the publication.

    Only models in this table are served.
    """

    __tablename__ = "models"

    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # Digest of the file of its values.
    sha256: Mapped[str] = mapped_column(String(64))
    # Digest of the method's own state, if any.
    state_sha256: Mapped[str | None] = mapped_column(String(64))
    # Size of the file of its values.
    bytes: Mapped[int] = mapped_column(BigInteger)
    # The round that made it, 0 for the first model.
    round: Mapped[int | None]
    # Whether an operator rolled it back.
    undone: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Means of devices' evaluations, and the number of these devices, noted while it is one of the newest
    # (``rounds.quality``).
    accuracy: Mapped[float | None]
    loss: Mapped[float | None]
    devices: Mapped[int] = mapped_column(default=0, server_default="0")
    # Time until which it is kept for an operator who looks at it; 0 if not pinned.
    pinned_until: Mapped[float] = mapped_column(default=0.0, server_default="0")


class Event(Base):
    """An event of a federation or of one of its devices (``storage.events``). An ``id`` is never reused."""

    __tablename__ = "events"
    __table_args__ = (Index("events_of_federation", "federation_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"))
    # One of ``protocol.events.EventKind``.
    kind: Mapped[str] = mapped_column(String(24))
    at: Mapped[float]
    # Number of closed rounds at that time.
    round: Mapped[int]
    # Name, None for the whole federation.
    device: Mapped[str | None] = mapped_column(String(64))
    # A reason's code, or changed settings.
    detail: Mapped[str] = mapped_column(Text)


class Delivered(Base):
    """The last event that the webhook has delivered, in one row (``webhook``)."""

    __tablename__ = "delivered"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    event_id: Mapped[int]


class Lease(Base):
    """The right to advance rounds, one row for all processes that share the records (``storage.processes``)."""

    __tablename__ = "lease"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # Number of its holders so far; transactions of earlier ones are refused.
    epoch: Mapped[int] = mapped_column(server_default="0")
    # Time on the database's clock.
    expires_at: Mapped[float] = mapped_column(server_default="0")


class Assignment(Base):
    """The work of one device in a round; its update's digest and report once accepted."""

    __tablename__ = "assignments"
    __table_args__ = (
        UniqueConstraint("federation_id", "round", "device_id", "kind"),
        Index("assignments_of_device", "device_id", "status"),
        # Prometheus counts open assignments, which are few, at every scrape.
        Index(
            "assignments_open",
            "federation_id",
            "kind",
            sqlite_where=text("status = 'open'"),
            postgresql_where=text("status = 'open'"),
        ),
        Index(
            "assignments_arrived",
            "federation_id",
            "counted_round",
            "arrival",
            sqlite_where=text("arrival IS NOT NULL"),
            postgresql_where=text("arrival IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    kind: Mapped[str] = mapped_column(String(16))
    round: Mapped[int]
    # Order of the devices of a cohort, in which their updates are folded.
    position: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))  # open, done, returned, expired
    model_version: Mapped[int]
    # Whether the payload is the whole model.
    full: Mapped[bool]
    # Active ratio.
    ratio: Mapped[float | None]
    # Key of its neurons if it shares them.
    draw_key: Mapped[str | None] = mapped_column(String(32))
    # The method's further instructions.
    plan: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    # Largest weight of its update, None for no limit.
    most_examples: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float]
    deadline_at: Mapped[float]
    update_sha256: Mapped[str | None] = mapped_column(String(64))
    update_bytes: Mapped[int | None] = mapped_column(BigInteger)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    upload_cost: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    return_reason: Mapped[str | None] = mapped_column(Text)
    # Order of a federation's updates in buffered rounds.
    arrival: Mapped[int | None] = mapped_column(BigInteger)
    # The buffered round in which its update counts.
    counted_round: Mapped[int | None]


class Token(Base):
    """A token of an operator; only the SHA-256 of its secret is stored.

    Tokens are never deleted, even with their federation: their kind remains guarded.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    # admin, observer or enrolment.
    kind: Mapped[str] = mapped_column(String(16))
    note: Mapped[str] = mapped_column(String(200))
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    federation_id: Mapped[int | None] = mapped_column(ForeignKey("federations.id"))
    # Selection of the devices that may enrol with it, empty for all.
    where: Mapped[str] = mapped_column(String(500), default="", server_default="")
    max_uses: Mapped[int | None]
    # Devices enrolled with it, at most ``max_uses``.
    uses: Mapped[int] = mapped_column(default=0)
    # Id of the admin token whose call made it, ``settings`` for the setting's, None on the coordinator's machine.
    made_by: Mapped[str | None] = mapped_column(String(16))
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class BrowserSession(Base):
    """A browser signed in with an operator's token (``fleet.sessions``); only the SHA-256 of its id is stored."""

    __tablename__ = "browser_sessions"

    id_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    # Kind of the token.
    kind: Mapped[str] = mapped_column(String(16))
    # The token in the records.
    token_id: Mapped[str | None] = mapped_column(ForeignKey("tokens.id"))
    # For a token of the settings: HMAC-SHA-256 of its digest with the id as key, useless without the id.
    proof: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    expires_at: Mapped[float]
