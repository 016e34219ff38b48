"""The records, as SQLAlchemy tables. Changing one takes a migration beside it (``migrations/versions``).

Times are seconds since the epoch (UTC). JSON columns hold what the wire's messages validated before.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint, false, text
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BY_BYTES = String(160).with_variant(String(160, collation="C"), "postgresql")
"""Text that every database puts in the same order."""


def natural(name: str) -> str:
    """Return text whose order is the natural one of names: ``device-2`` before ``device-10``, in any case."""
    numbered = re.sub(r"[0-9]+", lambda found: f"{len(found[0].lstrip('0')):02d}{found[0].lstrip('0')}", name)
    return numbered.lower()


def _sort_name(context: DefaultExecutionContext) -> str:
    given: dict[str, Any] = context.get_current_parameters()  # type: ignore[no-untyped-call]
    return natural(given["name"])


class Base(DeclarativeBase):
    """Base of all tables."""


class Federation(Base):
    """One learning problem with one method and its settings.

    ``uid`` tells it from another of the same name on a coordinator that was set up anew. ``round`` counts closed
    rounds; ``model_version`` the global models, 0 being w^0; ``model_sha256`` is the digest of today's file.
    ``rollback_version`` is one to go back to when the open round has closed. ``warning`` is what its method found
    wrong, last. ``secret`` is what its draws follow from (``draws``), ``noise_key`` what a private federation's
    noise follows from; both leave the records in backups alone. ``published_bytes`` is the size of its publication, 0
    for a built-in task; ``published``: its settings as they were asked for, completed, and the digest of its model.
    ``publication``: the signed publication of the model (``signatures.Published``), ``publisher`` the author's key
    and ``publication_sha256`` the digest of the statement; ``replacement_publication`` is that of ``replacement``.
    ``arrivals`` numbers the updates of buffered rounds. ``replacement`` is the manifest of a new version of the model,
    which takes the place of ``manifest`` when the open round has closed; ``replacements`` counts these. An ``id`` is
    never given twice.
    """

    __tablename__ = "federations"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    secret: Mapped[bytes] = mapped_column(LargeBinary(32))
    name: Mapped[str] = mapped_column(String(64), unique=True)
    task: Mapped[str] = mapped_column(String(200))
    method: Mapped[str] = mapped_column(String(64))
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    manifest: Mapped[str] = mapped_column(Text, deferred=True)  # long, and read once: coordinator.models keeps it
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
    published: Mapped[dict[str, Any] | None] = mapped_column(JSON, deferred=True)  # only who publishes again asks
    noise_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    publication: Mapped[str | None] = mapped_column(Text, deferred=True)  # only who joins asks
    publisher: Mapped[str | None] = mapped_column(String(64))
    publication_sha256: Mapped[str | None] = mapped_column(String(64))


class DeletedFederation(Base):
    """A deleted federation. Its id is not used again, since blobs that a kill left lie under it.

    ``deleted_at`` is 0 while a federation is being created, and for good if that failed.
    """

    __tablename__ = "deleted_federations"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(64))
    deleted_at: Mapped[float]


class DeletedDevice(Base):
    """The token of a device whose federation was deleted; its calls are answered with FederationDeleted."""

    __tablename__ = "deleted_devices"

    token_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    federation_id: Mapped[int] = mapped_column(ForeignKey("deleted_federations.id"))


class Device(Base):
    """A device of one federation.

    ``present`` is False from a missed deadline, silence or a leave-taking until the device asks again: it is not drawn.
    ``seen_at`` is when it was last heard of, to about 15 seconds; ``hosted`` says that its silence means nothing.
    After it handed an assignment back, or ``refusals`` updates in a row were refused, it is not drawn before
    ``rest_until``.
    ``holds_model`` says that an answer of the device proved that it has downloaded the whole model once. ``mask`` is
    the digest of the mask that it last said it holds, ``model`` that of the global model that it can rebuild;
    ``num_examples`` its training samples, as it told when it enrolled or later, else as it first reported them;
    ``bytes_down`` and ``bytes_up`` what it moved in all.
    ``paused`` is the word of its policy that keeps it away, ``limited_by`` what keeps its budget from being larger.
    ``next_token_sha256`` is that of a token which the device was given and has not used yet: its first use puts it in
    the place of ``token_sha256``. ``failure``: why its last work came to nothing (``messages.DeviceFailure``), until
    an update of it is accepted. ``identity_key``: its public key in secure rounds, which never changes.
    ``sort_name`` puts names in natural order. ``accuracy`` is what it last told, of its personal model or else of the
    global one; ``seconds`` what its last update took, download and training.
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
    profile: Mapped[dict[str, Any]] = mapped_column(JSON, deferred=True)  # only observers look at it
    budget: Mapped[float]
    limited_by: Mapped[str | None] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16))  # active, stopped, revoked
    stopped_round: Mapped[int | None]
    present: Mapped[bool] = mapped_column(default=True)
    paused: Mapped[str | None] = mapped_column(String(16))
    rest_until: Mapped[float] = mapped_column(default=0.0)
    refusals: Mapped[int] = mapped_column(default=0, server_default="0")
    failure: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    accuracy: Mapped[float | None]
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
    """One round. ``summary`` caches its record; ``stale`` says that a fact has come since it was made; ``facts`` counts
    these, so that one is noticed which comes while the record is being made.

    ``target`` is the number of updates that closes it before its deadline; ``extensions`` how often that was moved.

    ``base_version`` is the global model it began from, ``model_version`` the one it ended with; ``undone`` says that an
    operator went back to an older one. ``notes`` and ``parts`` are what its closing found: the method's counts, with
    ``left_out``, assignment id -> why its update is not in the model, among them; and bytes of its updates by part.
    ``secure`` is what a secure round's phases go by (``rounds.secure_state``).
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
    """A global model of a federation that a round, or the publication, has committed and that is kept.

    What is here may be served, and nothing else: a file whose transaction failed is named nowhere. ``sha256`` is of the
    file of its values, of ``bytes`` bytes, ``state_sha256`` of what its method keeps beside them, None for nothing.
    """

    __tablename__ = "models"

    federation_id: Mapped[int] = mapped_column(ForeignKey("federations.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str] = mapped_column(String(64))
    state_sha256: Mapped[str | None] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)


class Lease(Base):
    """The right to move rounds, in one row, where several processes share the records (``storage.processes``).

    ``epoch`` counts its holders: a transaction of an earlier one is refused. ``expires_at`` is by the database's clock.
    """

    __tablename__ = "lease"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(server_default="0")
    expires_at: Mapped[float] = mapped_column(server_default="0")


class Assignment(Base):
    """The work of one device in a round; its update's digest and report once accepted.

    ``position`` orders the devices of a cohort: updates are folded in this order. ``full`` says that the payload is the
    whole model; ``ratio`` the active ratio it trains at; ``plan`` what the method asks of it beyond the settings;
    ``most_examples`` the largest weight that its update may have, whatever it reports, and None for any. ``draw_key``
    is what its neurons are drawn from, where they are not its own alone.
    In buffered rounds ``arrival`` orders a federation's updates, and ``counted_round`` is the round that one counts in.
    """

    __tablename__ = "assignments"
    __table_args__ = (
        UniqueConstraint("federation_id", "round", "device_id", "kind"),
        Index("assignments_of_device", "device_id", "status"),
        # Only what is open, which is little: counted at every look of Prometheus, whatever came before.
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
    """A token that an operator made (``sparrow token``); of its secret only the SHA-256.

    ``kind``: admin, observer, enrolment. ``uses``: devices that an enrolment token has let in, at most ``max_uses``.
    None is ever deleted, not even with its federation: its kind remains guarded.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    note: Mapped[str] = mapped_column(String(200))
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    federation_id: Mapped[int | None] = mapped_column(ForeignKey("federations.id"))
    max_uses: Mapped[int | None]
    uses: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class BrowserSession(Base):
    """A browser that has signed in with an operator's token (``fleet.sessions``); of its id only the SHA-256.

    ``kind`` is that of the token, ``token_id`` the token in the records. For a token of the settings there is
    ``proof`` instead: the HMAC-SHA-256 of its digest with the id as key. Without the id the token cannot be guessed
    from it.
    """

    __tablename__ = "browser_sessions"

    id_sha256: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    token_id: Mapped[str | None] = mapped_column(ForeignKey("tokens.id"))
    proof: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    expires_at: Mapped[float]
