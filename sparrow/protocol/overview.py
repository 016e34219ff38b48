"""The data of the coordinator's page about a federation: ``GET /v1/federations/{name}/overview`` and ``.../events``.

Its size is bounded for any fleet and training time: rounds are summed into few points, and devices are counted.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .fields import Answer
from .messages import Doing, FederationInfo, FederationStatus, OpenAssignment


class RoundPoint(Answer):
    """Closed rounds ``first`` to ``round``, as one point of a chart.

    Counts, bytes, joules and seconds are sums over rounds and devices; accuracy and loss are the last measured. Bytes
    and joules are of training, including transfers.
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
    # Bytes of whole float32 models both ways.
    whole_bytes: int
    joules_measured: float
    joules_estimated: float
    # Seconds from opening to closing; ``*_seconds``: of devices. device_seconds_* and slowest: of the last round.
    seconds: float
    download_seconds: float
    train_seconds: float
    upload_seconds: float
    evaluation_seconds: float
    device_seconds_median: float | None = Field(description="Of devices whose updates count")
    device_seconds_slowest: float | None
    slowest: str | None = Field(description="The name of the slowest device")


class OpenRound(Answer):
    """The open round. In buffered rounds ``done`` counts waiting updates."""

    round: int
    phase: str | None = Field(default=None, description="Of a secure round; the counts below are for this phase")
    opened_at: str
    deadline_at: str
    extensions: int = Field(description="Number of extensions of its deadline")
    target: int = Field(description="Number of updates that closes it before its deadline")
    cohort: int
    done: int
    returned: int
    expired: int
    waiting_for: tuple[OpenAssignment, ...] = Field(description="The first 25 open assignments")


class FederationLine(Answer):
    """One of several federations."""

    name: str
    method: str
    task: str
    status: FederationStatus
    round: int
    rounds: int


class FederationSummary(FederationLine):
    """A federation in a line, for the list of all federations."""

    reason: str | None = Field(default=None, description="Reason of its end")
    created_at: str
    devices: int
    failed: int = Field(description="Devices whose last work failed")
    away: int = Field(description="Devices away after a missed deadline, silence or leaving")
    paused: int = Field(description="Devices that their policy pauses")
    accuracy: float | None = Field(description="Mean of the accuracies that devices reported last")
    heard_at: str | None = Field(description="Time of the last call of a device, to about 15 seconds")
    warning: str | None = Field(description="The method's last warning")


class Summaries(Answer):
    """All federations that the caller may observe, the newest first, at most a thousand."""

    federations: tuple[FederationSummary, ...]
    may_change: bool = Field(default=False, description="Whether the caller may create federations")
    signed_in: bool = Field(default=False, description="Whether the caller has an operator's token")


class Notice(Answer):
    """A notice for an operator."""

    kind: Literal["method", "left_out", "lost", "failed", "offline", "personal", "no_sum"]
    text: str
    since: str | None = Field(default=None, description="Time of its start, if known")
    remedy: str | None = Field(default=None, description="Remedy")


class Overview(Answer):
    """A federation at a glance. Later events have only changed ``points``, or all if ``span`` changed."""

    at: str = Field(description="Time of this overview")
    federation: FederationInfo
    federations: tuple[FederationLine, ...] = Field(description="At most a hundred, the newest first")
    span: int = Field(description="Rounds in a point: a power of two")
    points: tuple[RoundPoint, ...]
    open_round: OpenRound | None
    began_at: str | None = Field(description="Time when its first round was opened")
    ends_at: str | None = Field(
        description="Expected time of the last round's end, if the rest take as long as the last ones did"
    )
    metrics_personal: dict[str, float] = Field(
        default={}, description="The task's metrics, means over devices of the last evaluation: of personal models"
    )
    metrics_global: dict[str, float] = Field(default={}, description="Likewise of the global model")
    everything_bytes: int = Field(
        description="Bodies of all calls of its devices so far, both ways, as counted by them, and its publication"
    )
    evaluating: int = Field(description="Number of open evaluations")
    evaluating_since: int | None = Field(description="Round of the oldest open evaluation")
    doing: dict[Doing, int] = Field(description="Number of devices by activity")
    smallest_budget: float = Field(description="Budget below which a device is not drawn")
    failing: int = Field(description="Number of devices whose work fails or that could not join")
    not_exported: int = Field(description="Number of devices that have not exported their personal model")
    notices: tuple[Notice, ...]
    newest_event: int = Field(default=0, description="Id of the newest event of the timeline; 0 before the first")
    enrolment_guarded: bool = Field(default=False, description="Whether a device needs an enrolment token to join")
    may_change: bool = Field(default=False, description="Whether the caller may change the federation")
    makes_tokens: bool = Field(default=False, description="Whether the caller may make and revoke tokens")
    signed_in: bool = Field(default=False, description="Whether the caller has an operator's token")
