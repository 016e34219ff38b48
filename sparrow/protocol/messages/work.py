"""Messages about work: assignments, and what becomes of them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import Field

from ..fields import Answer, Digest, Id, Request, Share, Total
from ..secure.messages import SecureWork
from ..settings import FederationSettings
from .federations import FederationStatus


class PauseReason(str, Enum):
    """Why a device does not work now: all that its policy tells a coordinator."""

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


Why = Annotated[PauseReason | Annotated[str, Field(max_length=500)], Field(union_mode="left_to_right")]
"""A word of the fixed set if a policy decides; else a failure (``protocol.failures``), or a sentence of another
client."""


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
"""The kinds of work that judge models, none of which changes."""


class Payload(Answer):
    """The bundle that belongs to an assignment, at ``GET /v1/assignments/{id}/payload``."""

    bytes: Total
    sha256: Digest


class Work(Answer):
    """The neurons to train, in seed form: ``masks.NeuronDraw`` of these values. None where all are trained."""

    key: str = Field(pattern=r"^[0-9a-f]{32}$", description="Of this device and round alone")
    ratio: Share


ASSIGNMENT_TYPE = "application/vnd.sparrow.assignment"
"""The media type of an answer that brings a small payload along: one line of JSON, then the payload's bytes, if any."""


class Assignment(Answer):
    """``GET /v1/federations/{name}/assignment``: one piece of work for one device."""

    assignment_id: Id
    kind: Kind
    round: int = Field(ge=0, le=1_000_000)
    deadline_seconds: float = Field(
        ge=0, le=8 * 86400, allow_inf_nan=False, description="Seconds left when this answer was written"
    )
    settings: FederationSettings
    payload: Payload | None = None
    work: Work | None = None
    plan: dict[str, bool | int | float | str] = Field(
        default_factory=dict, max_length=100, description="What the method asks of this round beyond the settings"
    )
    model_sha256: Digest | None = Field(
        default=None, description="The global model that the payload is of, where a device may later hold on to it"
    )
    manifest_digest: Digest | None = Field(
        default=None,
        description="The federation's manifest as it is now; another one than the device's names new graphs",
    )
    secure: SecureWork | None = Field(default=None, description="What a device is told of a secure round")


class OpenAssignment(Answer):
    """Work that a device has been given and has not answered yet."""

    assignment_id: str
    device: str = Field(description="The device's name")
    kind: Kind
    round: int
    since: str = Field(description="When it was given")
    heard_at: str = Field(description="When the device was last heard of, by any call of its own")


class OpenWork(Answer):
    """``GET /v1/federations/{name}/assignments``: who is being waited for, oldest work first."""

    at: str = Field(description="When the coordinator looked")
    status: FederationStatus
    round: int = Field(description="Rounds closed so far")
    assignments: tuple[OpenAssignment, ...]


class HandBack(Request):
    """``DELETE /v1/assignments/{id}``: why the device cannot do it, as ``Why``; the SDK sends no sentences."""

    reason: Annotated[
        PauseReason | Annotated[str, Field(min_length=1, max_length=500)], Field(union_mode="left_to_right")
    ]


class UpdateAccepted(Answer):
    """Answer to an update: 201 with ``new`` True, 200 with False for the same one again."""

    new: bool
    next: Assignment | None = Field(
        default=None, description="The next work, for a caller that accepts it here; None: ask for it"
    )


class UpdateReceived(Answer):
    """The bytes that have arrived of an interrupted update."""

    received: int = Field(description="Bytes; the rest is sent with Content-Range")
