"""Messages about devices: enrolment, budget, conditions, and descriptions for observers."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field

from ..fields import Answer, Count, DeviceName, Id, Request, Secret, Share
from ..secure.messages import Key32
from .reports import Moved
from .work import Kind, PauseReason, Why

DataWarnings = Annotated[
    tuple[Annotated[str, Field(max_length=300)], ...],
    Field(
        max_length=5, description="Columns or channels in which the device's data differ wildly from the publisher's"
    ),
]


class DeviceProfile(Request):
    """The profile that a device sends when it enrols."""

    board: str = Field(default="", max_length=200)
    system: str = Field(default="", max_length=200)
    cores: int = Field(default=1, ge=1, le=4096)
    memory_bytes: Count = 0
    sensors: tuple[Annotated[str, Field(max_length=300)], ...] = Field(default=(), max_length=32)
    sdk_version: str = Field(default="", max_length=50)
    data_warnings: DataWarnings = ()


class Enrol(Request):
    """``POST /v1/federations/{name}/devices``.

    enrolment_key: a secret that the device makes and stores before it asks. If the answer is lost, asking again with
    the key gives the same device a new token, and nobody else can take its name. The token of before is good until the
    new one is used.
    """

    name: DeviceName
    enrolment_key: str = Field(min_length=32, max_length=128)
    budget: Share = 1.0
    limited_by: BudgetLimit | None = None
    num_examples: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Samples in the device's training data; its updates count with no more",
    )
    identity_key: Key32 | None = Field(
        default=None, description="Public Ed25519 key by which others know the device's keys in secure rounds"
    )
    hosted: bool = Field(
        default=False,
        description="One of many that a process hosts in turn: until its turn it may be silent, so only deadlines hold",
    )
    profile: DeviceProfile = DeviceProfile()


class Enrolled(Answer):
    """The device's identity: keep the token secret."""

    device_id: Id
    token: Secret
    notice: str | None = Field(default=None, description="What the device's user should know, where there is something")


class RenewToken(Request):
    """``POST /v1/devices/{id}/token``. A token alone renews nothing, so that whoever has taken it loses it."""

    enrolment_key: str = Field(min_length=32, max_length=128)


class NewToken(Answer):
    """A device's new token. The old one is good until this one is used for the first time."""

    token: Secret


class BudgetLimit(str, Enum):
    """The limit of a device's budget."""

    memory = "memory"
    deadline = "deadline"
    heat = "heat"


class Conditions(Request):
    """The conditions of a device; ``available`` False says that it leaves for now."""

    available: bool = True
    reason: Why = ""


class ChangeDevice(Request):
    """``PATCH /v1/devices/{id}``: a device changes its budget or conditions, an admin revokes it. holds_model: False
    asks for the whole model again, as the state was lost."""

    budget: Share | None = None
    limited_by: BudgetLimit | None = None
    num_examples: int | None = Field(default=None, ge=1, le=2**40)
    holds_model: bool | None = None
    data_warnings: DataWarnings | None = None
    conditions: Conditions | None = None
    revoked: Literal[True] | None = None


class Doing(str, Enum):
    """The activity of a device, or the reason why it is not training: the first of these that holds."""

    revoked = "revoked"
    stopped = "stopped"  # it has stopped early: it is only asked to evaluate
    training = "training"
    untrained = "untrained"  # its federation has ended, and it handed all of its training back
    done = "done"  # its federation has ended
    paused = "paused"  # by its policy
    away = "away"  # it missed a deadline, fell silent during work, or left
    offline = "offline"  # it has not been heard of for longer than a device is that waits for work
    small_budget = "small_budget"  # too small for its federation's method
    evaluating = "evaluating"
    resting = "resting"  # it has handed its work back, or its updates were refused
    ready = "ready"  # not drawn


class DeviceFailure(Answer):
    """The reason why a device's work came to nothing: a failure in words, or a sentence of another client than the
    SDK."""

    reason: str
    round: int | None = Field(description="None where it had no work")
    kind: Kind | None = None
    at: str


class DeviceInfo(Answer):
    """The description of a device for an observer."""

    device_id: str
    name: str
    status: Literal["active", "stopped", "revoked"]
    stopped_round: int | None
    doing: Doing
    present: bool = Field(description="False after a missed deadline, silence or a goodbye, until it asks for work")
    paused: PauseReason | None = Field(default=None, description="Why its policy keeps it from working, if it does")
    budget: float
    limited_by: BudgetLimit | None = Field(
        default=None, description="What keeps its budget from being larger, where the device chose it"
    )
    failure: DeviceFailure | None = Field(
        default=None,
        description="Why its last work came to nothing; None once such work of it was accepted: of a round, if it "
        "failed in one",
    )
    accuracy: float | None = Field(
        default=None, description="On its test data, as it last told: of its personal model, else of the global one"
    )
    seconds: float | None = Field(default=None, description="Download and training of its last update")
    profile: DeviceProfile
    everything: Moved = Field(default=Moved(), description="Bodies of all its calls so far, as it counted them")
    enrolled_at: str
    seen_at: str = Field(description="Last sign of life, to about 15 seconds")


class DeviceStates(Answer):
    """``GET /v1/federations/{name}/devices/states``: the first devices in natural order of names, without revoked
    ones."""

    names: tuple[str, ...]
    doing: tuple[Doing, ...]
    total: int = Field(description="Devices in all: beyond the most that was asked for, the lists have not all")


class DeviceRound(Answer):
    """One piece of work of a device: what became of it, how good it was, and what it cost."""

    round: int
    kind: Kind
    status: Literal["open", "done", "returned", "expired"]
    reason: str | None = Field(default=None, description="Why it was handed back or given up")
    began_at: str
    loss: float | None = Field(default=None, description="Of training; of an evaluation, of the personal model")
    accuracy: float | None = Field(default=None, description="Of the personal model on the device's test data")
    accuracy_global: float | None = None
    seconds: float | None = Field(default=None, description="Download, training or evaluation, and upload")
    bytes_up: int | None = None
    bytes_down: int | None = None
    joules: float | None = None


class DeviceHistory(Answer):
    """``GET /v1/devices/{id}``: a device, and what it did, the newest first."""

    device: DeviceInfo
    federation: str
    work: tuple[DeviceRound, ...]
