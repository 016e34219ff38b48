"""Records of rounds, for observers, and the form of errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..fields import Answer
from .federations import PrivacySpent
from .reports import Phase, Receipt, UpdateReport
from .work import Kind


class PhaseSum(Answer):
    """A phase summed over devices. Measured and estimated joules stay separate. Throttling and heat are None if no
    device can measure them."""

    seconds: float = 0.0
    paused_seconds: float = 0.0
    throttled_seconds: float | None = None
    celsius_peak: float | None = None
    joules_measured: float = 0.0
    joules_estimated: float = 0.0
    seconds_without_joules: float = 0.0


class PerUpdate(Answer):
    """Joules of a device's whole round, including transfers: means over the counted updates, None without any."""

    joules_measured: float | None = None
    joules_estimated: float | None = None
    measured_updates: int = 0
    estimated_updates: int = 0


class RoundRecord(Answer):
    """``GET /v1/federations/{name}/rounds``: the record of one round.

    Bytes are bodies of training's payloads and updates as counted by devices; evaluation is separate. parts_*: bytes by
    part of a bundle. Accuracies and losses are unweighted means over devices at the next evaluation; the decile is the
    floor(N/10)-th worst. counts: sums over device halves. notes: remarks of the coordinator and the server half. Round
    0 prepares the model. privacy: cost of the models up to this one. unreadable: devices whose reports cannot be read.
    left_out: updates not in the model, with reasons. capped: samples that updates count with. clipped: remaining share
    of their length. joules_per_point_*: training's joules since the last evaluation per percentage point of accuracy
    gained; None without a gain.
    """

    round: int
    status: Literal["open", "closed"]
    cohort: tuple[str, ...]
    updates: int
    stopped: tuple[str, ...]
    handed_back: int
    expired: int
    num_examples: int
    training_flops: int
    finetune_flops: int = 0
    train_loss: float | None
    accuracy_personal: float | None
    accuracy_personal_decile: float | None = None
    accuracy_global: float | None
    loss_personal: float | None
    loss_global: float | None
    metrics_personal: dict[str, float] = Field(default_factory=dict)
    metrics_global: dict[str, float] = Field(default_factory=dict)
    evaluated_devices: int
    bytes_down: int
    bytes_up: int
    parts_down: dict[str, int] = Field(default_factory=dict)
    parts_up: dict[str, int] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)
    notes: dict[str, int] = Field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    left_out: dict[str, str] = Field(default_factory=dict)
    capped: dict[str, int] = Field(default_factory=dict)
    clipped: dict[str, float] = Field(default_factory=dict)
    privacy: PrivacySpent | None = None
    evaluation_bytes_down: int
    evaluation_bytes_up: int
    download: PhaseSum
    train: PhaseSum
    upload: PhaseSum
    evaluation: PhaseSum
    per_update: PerUpdate = PerUpdate()
    joules_per_point_measured: float | None = None
    joules_per_point_estimated: float | None = None
    opened_at: str
    closed_at: str | None
    seconds: float | None = Field(description="From opening to closing")
    device_seconds_median: float | None = Field(
        default=None, description="Download, training and upload of the median device whose update counts"
    )
    device_seconds_slowest: float | None = Field(default=None, description="Likewise of the slowest")
    slowest: str | None = Field(default=None, description="The name of that device")
    model_sha256: str | None
    base_version: int | None = Field(default=None, description="Global model at the round's start")
    model_version: int | None = Field(default=None, description="Global model at the round's end")
    undone: bool = Field(default=False, description="Whether an operator has since rolled back to an older model")


class DeviceReport(Answer):
    """``GET /v1/federations/{name}/rounds/{number}/reports``: a device's report on one assignment of a round."""

    device: str
    kind: Kind
    report: UpdateReport | Receipt
    upload: Phase

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the personal model, or else of the global model; None if neither was evaluated."""
        judged = (self.report.personal or self.report.global_model) if isinstance(self.report, Receipt) else None
        return None if judged is None else judged.accuracy


class Problem(Answer):
    """RFC 9457 problem document; ``detail`` says how to fix the call."""

    type: str
    title: str
    status: int
    detail: str
