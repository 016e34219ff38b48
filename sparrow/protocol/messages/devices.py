"""Messages about devices: enrolment, budget, conditions, and descriptions for observers."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field

from ..fields import Answer, Count, DeviceName, Id, Request, Secret, Share
from ..secure.messages import Key32
from ..tags import MOST_KEYS, TagKey, Tags, TagValue
from .reports import Moved
from .work import Failed, Kind, PauseReason, Why

DataWarnings = Annotated[
    tuple[Annotated[str, Field(max_length=300)], ...],
    Field(
        max_length=5, description="Columns or channels in which the device's data differ strongly from the publisher's"
    ),
]


StartId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
MOST_STARTS = 32
"""Number of earlier starts that a device keeps and sends."""


class Start(Request):
    """A start of a device's process: its identifier, and the earlier identifiers of the same state folder."""

    id: StartId
    after: Annotated[tuple[StartId, ...], Field(max_length=MOST_STARTS)] = ()
    again: bool = Field(default=False, description="Sent because a call was answered with 409 OtherStart")
    take_over: bool = Field(default=False, description="Refuse other copies of the state folder from now on")


class DeviceProfile(Request):
    """A device's description at enrolment."""

    board: str = Field(default="", max_length=200)
    system: str = Field(default="", max_length=200)
    cores: int = Field(default=1, ge=1, le=4096)
    memory_bytes: Count = 0
    sensors: tuple[Annotated[str, Field(max_length=300)], ...] = Field(default=(), max_length=32)
    sdk_version: str = Field(default="", max_length=50)
    data_warnings: DataWarnings = ()


class Enrol(Request):
    """``POST /v1/federations/{name}/devices``."""

    name: DeviceName
    # A secret that the device makes and stores before it enrols. If the answer is lost, enrolling again with the key
    # gives the same device a new token, and protects its name. The old token is valid until the new one is used. A
    # device that cannot join has no valid token, and its name stays free.
    enrolment_key: str = Field(min_length=32, max_length=128)
    budget: Share = 1.0
    limited_by: BudgetLimit | None = None
    num_examples: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Samples in the device's training data; its updates count with at most these",
    )
    identity_key: Key32 | None = Field(
        default=None, description="Public Ed25519 key with which others verify the device's keys in secure rounds"
    )
    hosted: bool = Field(
        default=False,
        description="One of many devices that a process hosts in turn: it may be silent until its turn, so only "
        "deadlines apply",
    )
    failure: Failed | None = Field(
        default=None, description="Reason why the device cannot join: it is listed with it, and gets no work"
    )
    profile: DeviceProfile = DeviceProfile()
    tags: Tags | None = Field(default=None, description="The device's tags, in place of those that it gave before")
    start: Start | None = None


class Enrolled(Answer):
    """The device's identity. The token is secret."""

    device_id: Id
    token: Secret
    notice: str | None = Field(default=None, description="Notice for the device's user")


class RenewToken(Request):
    """``POST /v1/devices/{id}/token``. Requires the key, so that a stolen token cannot be renewed."""

    enrolment_key: str = Field(min_length=32, max_length=128)


class NewToken(Answer):
    """A device's new token. The old one is valid until the new one is first used."""

    token: Secret


class BudgetLimit(str, Enum):
    """The reason why a device's budget is not larger."""

    memory = "memory"
    deadline = "deadline"
    heat = "heat"


class Conditions(Request):
    """The conditions of a device."""

    # False if it leaves for now.
    available: bool = True
    reason: Why = ""


class ChangeDevice(Request):
    """``PATCH /v1/devices/{id}``: a device changes its budget or conditions, an admin revokes it."""

    budget: Share | None = None
    limited_by: BudgetLimit | None = None
    num_examples: int | None = Field(default=None, ge=1, le=2**40)
    # False if the state was lost, to get the whole model again.
    holds_model: bool | None = None
    data_warnings: DataWarnings | None = None
    conditions: Conditions | None = None
    exported: Literal[True] | None = Field(default=None, description="It has exported its personal model")
    continues: Literal[True] | None = Field(
        default=None, description="It has new data: it trains again if it has stopped early"
    )
    revoked: Literal[True] | None = None
    tags: Tags | None = Field(default=None, description="The device's tags, in place of those that it gave before")
    set_tags: dict[TagKey, TagValue | None] | None = Field(
        default=None,
        max_length=MOST_KEYS,
        description="Tags that an administrator sets, in place of the device's; null: the device's again",
    )
    start: Start | None = Field(default=None, description="Its process has started; 409 if its state was copied")


class Doing(str, Enum):
    """A device's current activity, or the reason why it does not train; the first kind that applies."""

    revoked = "revoked"
    # It has told why it cannot join.
    not_joined = "not_joined"
    # It has stopped early, and is only asked to evaluate.
    stopped = "stopped"
    training = "training"
    # Its federation has ended, and it handed back all training.
    untrained = "untrained"
    # By its policy.
    paused = "paused"
    # It missed a deadline, fell silent during work, or left.
    away = "away"
    # It has been silent for longer than a device that waits for work, and since before the end of its federation.
    offline = "offline"
    # Its federation has ended.
    done = "done"
    # Its budget is too small for the federation's method.
    small_budget = "small_budget"
    # The federation's cohorts are selected by tags that it does not have.
    not_selected = "not_selected"
    evaluating = "evaluating"
    # It has handed its work back, or its updates were refused.
    resting = "resting"
    # It has not been drawn.
    ready = "ready"


class DeviceFailure(Answer):
    """The reason why a device's work failed: an explained failure, or the text of another client."""

    reason: str
    round: int | None = Field(description="null if it had no work")
    kind: Kind | None = None
    at: str


class DeviceInfo(Answer):
    """The description of a device for an observer."""

    device_id: str
    name: str
    status: Literal["active", "stopped", "revoked", "not_joined"]
    stopped_round: int | None
    doing: Doing
    present: bool = Field(description="False after a missed deadline, silence or leaving, until it asks for work")
    paused: PauseReason | None = Field(default=None, description="Reason why its policy pauses it")
    budget: float
    limited_by: BudgetLimit | None = Field(
        default=None, description="Reason why its budget is not larger, if the device chose it"
    )
    failure: DeviceFailure | None = Field(
        default=None,
        description="Reason why its last work failed, or why it cannot join; a failure of training lasts until an "
        "update is accepted, one of an evaluation until an evaluation is",
    )
    refusals: int = Field(default=0, description="Refused updates in a row")
    exported: bool = Field(
        default=False, description="Whether it has exported its personal model, and not trained since"
    )
    accuracy: float | None = Field(
        default=None, description="Last reported accuracy on its test data: of its personal model, else the global one"
    )
    accuracy_alone: float | None = Field(
        default=None,
        description="Of training alone: of the device's local-only model (the method's alone), else of the device of "
        "this name in the newest federation of the method local with this task",
    )
    gain: float | None = Field(default=None, description="accuracy less accuracy_alone: what the federation brings it")
    seconds: float | None = Field(default=None, description="Download and training for its last update")
    tags: dict[str, str] = Field(default={}, description="Its tags; those that an administrator set replace its own")
    set_tags: tuple[str, ...] = Field(default=(), description="Keys of the tags that an administrator set")
    profile: DeviceProfile
    everything: Moved = Field(default=Moved(), description="Bodies of all its calls so far, as counted by it")
    enrolled_at: str
    seen_at: str = Field(description="Time of its last call, to about 15 seconds")


class DeviceStates(Answer):
    """``GET /v1/federations/{name}/devices/states``: the first devices by name, in natural order, without revoked
    ones."""

    names: tuple[str, ...]
    doing: tuple[Doing, ...]
    total: int = Field(description="Number of devices; the lists may be shorter, as asked for")


class DeviceRound(Answer):
    """One assignment of a device: its outcome, quality and cost."""

    round: int
    kind: Kind
    status: Literal["open", "done", "returned", "expired"]
    reason: str | None = Field(default=None, description="Reason why it was handed back or given up")
    began_at: str
    loss: float | None = Field(default=None, description="Of training; of an evaluation, of the personal model")
    accuracy: float | None = Field(default=None, description="Of the personal model on the device's test data")
    accuracy_global: float | None = None
    seconds: float | None = Field(default=None, description="Download, training or evaluation, and upload")
    bytes_up: int | None = None
    bytes_down: int | None = None
    joules: float | None = None


class DeviceHistory(Answer):
    """``GET /v1/devices/{id}``: a device, and its work, newest first."""

    device: DeviceInfo
    federation: str
    work: tuple[DeviceRound, ...]
