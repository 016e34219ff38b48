"""The data that the coordinator's page shows of a federation: ``GET /v1/federations/{name}/overview`` and
``.../events``.

Bounded in size, whatever the fleet and however long it has trained: rounds are summed into few points, and of devices
there are counts. The whole is in ``GET .../rounds`` and ``GET .../devices``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .fields import Answer
from .messages import Doing, FederationInfo, FederationStatus, OpenAssignment


class RoundPoint(Answer):
    """Closed rounds ``first`` to ``round``, as one point of a chart.

    Counts, bytes, joules and seconds are sums over rounds and devices; accuracy and loss the last that were measured.
    Bytes and joules are training's, transfers included. whole_bytes: what the whole model in float32 would have taken
    both ways. seconds: from opening to closing; ``*_seconds``: of devices. device_seconds_* and slowest: of the last
    round.
    """

    first: int
    round: int
    updates: int
    accuracy_personal: float | None
    accuracy_personal_decile: float | None
    accuracy_global: float | None
    loss_personal: float | None
    loss_global: float | None
    train_loss: float | None
    bytes_up: int
    bytes_down: int
    evaluation_bytes: int
    whole_bytes: int
    joules_measured: float
    joules_estimated: float
    seconds: float
    download_seconds: float
    train_seconds: float
    upload_seconds: float
    evaluation_seconds: float
    device_seconds_median: float | None = Field(description="Of the devices whose updates count")
    device_seconds_slowest: float | None
    slowest: str | None = Field(description="The name of the slowest device")


class OpenRound(Answer):
    """The round that is open. In buffered rounds ``done`` are the updates that wait to count."""

    round: int
    phase: str | None = Field(default=None, description="Of a secure round; the counts below are this phase's")
    opened_at: str
    deadline_at: str
    extensions: int = Field(description="How often its deadline was moved")
    target: int = Field(description="Updates that close it before its deadline")
    cohort: int
    done: int
    returned: int
    expired: int
    waiting_for: tuple[OpenAssignment, ...] = Field(description="The first 25 answers that are still to come")


class FederationLine(Answer):
    """One federation among others."""

    name: str
    method: str
    task: str
    status: FederationStatus
    round: int
    rounds: int


class Notice(Answer):
    """Something an operator should know of."""

    kind: Literal["method", "refused", "left_out", "lost", "failed", "offline", "personal"]
    text: str
    since: str | None = Field(default=None, description="When it began, where that is known")
    remedy: str | None = Field(default=None, description="What to do about it")


class Overview(Answer):
    """A federation at a glance. In later events ``points`` are only those that changed, or all if ``span`` did."""

    at: str = Field(description="When the coordinator looked")
    federation: FederationInfo
    federations: tuple[FederationLine, ...] = Field(description="At most a hundred, the newest first")
    span: int = Field(description="Rounds in a point: a power of two")
    points: tuple[RoundPoint, ...]
    open_round: OpenRound | None
    began_at: str | None = Field(description="When its first round was opened")
    ends_at: str | None = Field(
        description="When its last round will have closed, if the rest take as long as the last ones did"
    )
    metrics_personal: dict[str, float] = Field(
        default={}, description="The task's metrics, means over devices of the last evaluation: of personal models"
    )
    metrics_global: dict[str, float] = Field(default={}, description="Likewise of the global model")
    everything_bytes: int = Field(
        description="Bodies of all calls of its devices so far, both ways, as they counted them, and its publication"
    )
    evaluating: int = Field(description="Evaluations that are still to come")
    evaluating_since: int | None = Field(description="The round that the oldest of them is of")
    doing: dict[Doing, int] = Field(description="Devices by what they are doing")
    smallest_budget: float = Field(description="The budget below which a device is not drawn")
    notices: tuple[Notice, ...]
    enrolment_guarded: bool = Field(default=False, description="Whether a device needs an enrolment token to join")
    may_change: bool = Field(default=False, description="Whether the caller may change the federation")
    signed_in: bool = Field(default=False, description="Whether the caller has an operator's token")
