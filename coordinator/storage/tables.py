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
    """One learning problem with a method and its settings.

    ``uid`` distinguishes it from a federation of the same name on another or recreated coordinator. ``round`` counts
    closed rounds; ``model_version`` counts global models from w^0 = 0; ``model_sha256`` is the digest of the current
    file. ``rollback_version`` is restored after the open round. ``warning``: the method's last warning. ``secret``: key
    of the draws (``draws``); ``noise_key``: key of a private federation's noise; both leave the records only in
    backups. ``published_bytes``: size of the publication, 0 for a built-in task. ``published``: completed settings and
    model digest at publication. ``publication``: the signed publication (``signatures.Published``), ``publisher``: its
    author's key, ``publication_sha256``: digest of the statement, ``replacement_publication``: that of ``replacement``.
    ``arrivals`` numbers the updates of buffered rounds. ``replacement``: manifest of a new version of the model, which
    replaces ``manifest`` after the open round; ``replacements`` counts them. An ``id`` is never reused.
    """

    __tablename__ = "federations"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    secret: Mapped[bytes] = mapped_column(LargeBinary(32))
    name: Mapped[str] = mapped_column(String(64), unique=True)
    task: Mapped[str] = mapped_column(String(200))
    method: Mapped[str] = mapped_column(String(64))
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    # Long, and cached by coordinator.models.
    manifest: Mapped[str] = mapped_column(Text, deferred=True)
    replacement: Mapped[str | None] = mapped_column(Text)
    replacement_publication: Mapped[str | None] = mapped_column(Text, deferred=True)
    replacements: Mapped[int] = mapped_column(default=0, server_default="0")
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(String(32))
    warning: Mapped[str | None] = mapped_column(Text)
    round: Mapped[int] = mapped_column(default=0)
    model_version: Mapped[int] = mapped_column(default=0)
    rollback_version: Mapped[int | None]
    arrivals: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    model_sha256: Mapped[str] = mapped_column(String(64))
    published_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    # Needed only when it is published again.
    published: Mapped[dict[str, Any] | None] = mapped_column(JSON, deferred=True)
    noise_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    # Needed only when a device joins.
    publication: Mapped[str | None] = mapped_column(Text, deferred=True)
    publisher: Mapped[str | None] = mapped_column(String(64))
    publication_sha256: Mapped[str | None] = mapped_column(String(64))


class DeletedFederation(Base):
    """A deleted federation. Its id is not reused, since a killed process may have left blobs.

    ``deleted_at`` is 0 while a federation is being created, and stays 0 if that failed.
    """

    __tablename__ = "deleted_federations"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(64))
    deleted_at: Mapped[float]


class DeletedDevice(Base):
    """Token of a device of a deleted federation; its calls get FederationDeleted."""

    __tablename__ = "deleted_devices"

    token_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("deleted_federations.id"))


class Device(Base):
    """A device of one federation.

    ``present`` is False after a missed deadline, silence or leaving, until the device asks again; it is not drawn then.
    ``seen_at``: last call, to about 15 seconds; ``hosted``: silence has no meaning. After a returned assignment, or
    ``refusals`` refused updates in a row, it is not drawn before ``rest_until``. ``holds_model``: it has proved that it
    downloaded the whole model once. ``mask``: digest of the mask it last reported; ``model``: digest of the global
    model it can rebuild. ``num_examples``: training samples, reported at enrolment, later, or first with an update.
    ``bytes_down``, ``bytes_up``: total traffic. ``paused``: its policy's reason for being away; ``limited_by``: limit
    of its budget. ``next_token_sha256``: a new token that replaces ``token_sha256`` at its first use. ``failure``:
    reason of its last failed work (``messages.DeviceFailure``), until an update is accepted. ``removed``: revoked, and
    no longer listed or counted. ``identity_key``: public
    key in secure rounds, which never changes. ``sort_name``: key of natural order. ``accuracy``: last reported, of its
    personal or else the global model; ``accuracy_alone``: with that, of its model trained only on its own data;
    ``seconds``: download and training of its last update.
    """

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
    sort_name: Mapped[str] = mapped_column(BY_BYTES, default=_sort_name, server_default="")
    token_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), index=True)
    token_issued_at: Mapped[float] = mapped_column(server_default="0")
    next_token_sha256: Mapped[bytes | None] = mapped_column(LargeBinary(32), index=True)
    enrolment_key_sha256: Mapped[bytes] = mapped_column(LargeBinary(32))
    identity_key: Mapped[str | None] = mapped_column(String(64))
    # Needed only for observers.
    profile: Mapped[dict[str, Any]] = mapped_column(JSON, deferred=True)
    budget: Mapped[float]
    limited_by: Mapped[str | None] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16))  # active, stopped, revoked
    stopped_round: Mapped[int | None]
    present: Mapped[bool] = mapped_column(default=True)
    paused: Mapped[str | None] = mapped_column(String(16))
    rest_until: Mapped[float] = mapped_column(default=0.0)
    refusals: Mapped[int] = mapped_column(default=0, server_default="0")
    removed: Mapped[bool] = mapped_column(default=False, server_default=false())
    failure: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    accuracy: Mapped[float | None]
    accuracy_alone: Mapped[float | None]
    seconds: Mapped[float | None]
    holds_model: Mapped[bool] = mapped_column(default=False)
    mask: Mapped[str | None] = mapped_column(String(64))
    model: Mapped[str | None] = mapped_column(String(64))
    num_examples: Mapped[int | None] = mapped_column(BigInteger)
    bytes_down: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    bytes_up: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    hosted: Mapped[bool] = mapped_column(default=False, server_default=false())
    enrolled_at: Mapped[float]
    seen_at: Mapped[float]


class Round(Base):
    """One round.

    ``summary`` caches its record; ``stale``: a fact arrived since; ``facts`` counts them, to detect facts that arrive
    while the record is made. ``target``: number of updates that closes it before its deadline; ``extensions``: number
    of extended deadlines. ``base_version``, ``model_version``: global models before and after it; ``undone``: an
    operator rolled it back. ``notes``: the method's counts at closing, with ``left_out``, reasons of updates not in the
    model by assignment id; ``parts``: bytes of its updates by part. ``secure``: state of a secure round
    (``rounds.secure_state``).
    """

    __tablename__ = "rounds"
    __table_args__ = (UniqueConstraint("federation_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"), index=True)
    number: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))  # open, closed
    opened_at: Mapped[float]
    deadline_at: Mapped[float]
    target: Mapped[int]
    extensions: Mapped[int] = mapped_column(default=0, server_default="0")
    closed_at: Mapped[float | None]
    model_sha256: Mapped[str | None] = mapped_column(String(64))
    base_version: Mapped[int | None]
    model_version: Mapped[int | None]
    undone: Mapped[bool] = mapped_column(default=False, server_default=false())
    notes: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    parts: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    secure: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    summary: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    stale: Mapped[bool] = mapped_column(default=True)
    facts: Mapped[int] = mapped_column(default=0, server_default="0")


class Model(Base):
    """A global model that a round or the publication has committed and that is kept.

    Only models in this table are served: a file of a failed transaction is unreferenced. ``sha256``, ``bytes``: of the
    file of its values; ``state_sha256``: of the method's own state, if any. ``round``: that made it, 0 for the first
    model; ``undone``: an operator rolled it back. ``accuracy``, ``loss``: means of devices' evaluations, noted while it
    is one of the newest (``rounds.quality``). ``pinned_until``: kept for an operator who looks at it; 0 if not pinned.
    """

    __tablename__ = "models"

    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str] = mapped_column(String(64))
    state_sha256: Mapped[str | None] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    round: Mapped[int | None]
    undone: Mapped[bool] = mapped_column(default=False, server_default=false())
    accuracy: Mapped[float | None]
    loss: Mapped[float | None]
    pinned_until: Mapped[float] = mapped_column(default=0.0, server_default="0")


class Event(Base):
    """An event of a federation or of one of its devices (``storage.events``).

    ``kind``: of ``protocol.events.EventKind``. ``round``: closed rounds at that time. ``device``: name, None for the
    whole federation. ``detail``: a reason's code, or changed settings. An ``id`` is never reused.
    """

    __tablename__ = "events"
    __table_args__ = (Index("events_of_federation", "federation_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"))
    kind: Mapped[str] = mapped_column(String(24))
    at: Mapped[float]
    round: Mapped[int]
    device: Mapped[str | None] = mapped_column(String(64))
    detail: Mapped[str] = mapped_column(Text)


class Lease(Base):
    """The right to move rounds, one row for all processes that share the records (``storage.processes``).

    ``epoch`` counts its holders; transactions of earlier ones are refused. ``expires_at``: by the database's clock.
    """

    __tablename__ = "lease"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(server_default="0")
    expires_at: Mapped[float] = mapped_column(server_default="0")


class Assignment(Base):
    """The work of one device in a round; its update's digest and report once accepted.

    ``position`` orders the devices of a cohort, and their updates are folded in this order. ``full``: the payload is
    the whole model; ``ratio``: active ratio; ``plan``: the method's further instructions; ``most_examples``: largest
    weight of its update, None for no limit. ``draw_key``: key of its neurons if it shares them. In buffered rounds
    ``arrival`` orders a federation's updates, and ``counted_round`` is the round in which an update counts.
    """

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
    position: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))  # open, done, returned, expired
    model_version: Mapped[int]
    full: Mapped[bool]
    ratio: Mapped[float | None]
    draw_key: Mapped[str | None] = mapped_column(String(32))
    plan: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    most_examples: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float]
    deadline_at: Mapped[float]
    update_sha256: Mapped[str | None] = mapped_column(String(64))
    update_bytes: Mapped[int | None] = mapped_column(BigInteger)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    upload_cost: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    return_reason: Mapped[str | None] = mapped_column(Text)
    arrival: Mapped[int | None] = mapped_column(BigInteger)
    counted_round: Mapped[int | None]


class Token(Base):
    """A token of an operator; only the SHA-256 of its secret is stored.

    ``kind``: admin, observer, enrolment. ``uses``: devices enrolled with it, at most ``max_uses``. ``made_by``: id of
    the admin token of the call that made it, ``settings`` for the one of the settings, None if it was made on the
    coordinator's machine. Tokens are never deleted, even with their federation: their kind remains guarded.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    note: Mapped[str] = mapped_column(String(200))
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    federation_id: Mapped[int | None] = mapped_column(ForeignKey("federations.id"))
    max_uses: Mapped[int | None]
    uses: Mapped[int] = mapped_column(default=0)
    made_by: Mapped[str | None] = mapped_column(String(16))
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class BrowserSession(Base):
    """A browser signed in with an operator's token (``fleet.sessions``); only the SHA-256 of its id is stored.

    ``kind``: that of the token. ``token_id``: the token in the records; for a token of the settings, ``proof`` instead:
    the HMAC-SHA-256 of its digest with the id as key, from which the token cannot be guessed without the id.
    """

    __tablename__ = "browser_sessions"

    id_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    token_id: Mapped[str | None] = mapped_column(ForeignKey("tokens.id"))
    proof: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    expires_at: Mapped[float]
