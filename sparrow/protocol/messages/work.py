"""Messages about work: assignments, and their outcomes."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import Field

from ..fields import Answer, Digest, Id, Request, Share, Total
from ..secure.messages import SecureWork
from ..settings import FederationSettings
from .federations import FederationStatus


class PauseReason(str, Enum):
    """Why a device pauses. The coordinator gets no other information about the device's policy."""

    charging = "charging"
    battery = "battery"
    heat = "heat"
    throttled = "throttled"
    power = "power"
    network = "network"
    load = "load"
    memory = "memory"
    storage = "storage"
    hours = "hours"
    energy = "energy"


Failed = Annotated[str, Field(min_length=1, max_length=500)]
"""A failure (``protocol.failures``), or a sentence from another client."""

Why = Annotated[PauseReason | Annotated[str, Field(max_length=500)], Field(union_mode="left_to_right")]
"""A pause reason if a policy decides; else a failure (``protocol.failures``), or a sentence from another client."""


class Kind(str, Enum):
    """The kinds of work (docs/architecture.md, "coordinator/rounds"); keys, shares, agree and unmask: secure rounds."""

    train = "train"
    evaluate = "evaluate"
    compare = "compare"
    personalise = "personalise"
    prepare = "prepare"
    adapt = "adapt"
    keys = "keys"
    shares = "shares"
    agree = "agree"
    unmask = "unmask"


JUDGING = (Kind.evaluate, Kind.compare)
"""The kinds of work that only evaluate models."""


class Payload(Answer):
    """An assignment's bundle, at ``GET /v1/assignments/{id}/payload``."""

    bytes: Total
    sha256: Digest


class Work(Answer):
    """The neurons to train, in seed form: values of ``masks.NeuronDraw``. None if all are trained."""

    key: str = Field(pattern=r"^[0-9a-f]{32}$", description="Only for this device and round")
    ratio: Share


ASSIGNMENT_TYPE = "application/vnd.sparrow.assignment"
"""The media type of an answer with a small payload: one line of JSON, then the payload's bytes, if any."""


class Assignment(Answer):
    """``GET /v1/federations/{name}/assignment``: one piece of work for one device."""

    assignment_id: Id
    kind: Kind
    round: int = Field(ge=0, le=1_000_000)
    deadline_seconds: float = Field(
        ge=0, le=8 * 86400, allow_inf_nan=False, description="Seconds left at the time of this answer"
    )
    settings: FederationSettings
    payload: Payload | None = None
    work: Work | None = None
    plan: dict[str, bool | int | float | str] = Field(
        default_factory=dict, max_length=100, description="The method's plan for this round, beyond the settings"
    )
    model_sha256: Digest | None = Field(
        default=None, description="Global model of the payload, if a device may store it for later rounds"
    )
    manifest_digest: Digest | None = Field(
        default=None,
        description="The federation's current manifest; if it differs from the device's, there are new graphs",
    )
    secure: SecureWork | None = Field(default=None, description="A device's data for a secure round")


class OpenAssignment(Answer):
    """Work that a device has not answered yet."""

    assignment_id: str
    device: str = Field(description="The device's name")
    kind: Kind
    round: int
    since: str = Field(description="Time of the assignment")
    heard_at: str = Field(description="Time of the device's last call of any kind")


class OpenWork(Answer):
    """``GET /v1/federations/{name}/assignments``: the open assignments, oldest first."""

    at: str = Field(description="Time of this answer")
    status: FederationStatus
    round: int = Field(description="Rounds closed so far")
    assignments: tuple[OpenAssignment, ...]


class HandBack(Request):
    """``DELETE /v1/assignments/{id}``."""

    # A reason as ``Why``; the SDK sends no sentences.
    reason: Annotated[
        PauseReason | Annotated[str, Field(min_length=1, max_length=500)], Field(union_mode="left_to_right")
    ]


class UpdateAccepted(Answer):
    """Response to an update: 201 with ``new`` True, or 200 with ``new`` False for a repeated update."""

    new: bool
    next: Assignment | None = Field(
        default=None, description="The next work, for a caller that accepts it here; null: ask for it"
    )


class UpdateReceived(Answer):
    """Number of bytes received of an interrupted update, or of a body sent in parts."""

    received: int = Field(description="Bytes received; send the rest with Content-Range")
