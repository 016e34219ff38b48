"""Records of rounds, as an observer gets them, and the form of errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..fields import Answer
from .federations import PrivacySpent
from .reports import Phase, Receipt, UpdateReport
from .work import Kind


class PhaseSum(Answer):
    """A phase summed over devices. Measured and estimated joules are never blended. Throttling and heat are None if no
    device can tell."""

    seconds: float = 0.0
    paused_seconds: float = 0.0
    throttled_seconds: float | None = None
    celsius_peak: float | None = None
    joules_measured: float = 0.0
    joules_estimated: float = 0.0
    seconds_without_joules: float = 0.0


class PerUpdate(Answer):
    """Joules of a device's whole round, transfers included: means over so many updates; None if there is none of a
    kind."""

    joules_measured: float | None = None
    joules_estimated: float | None = None
    measured_updates: int = 0
    estimated_updates: int = 0


class RoundRecord(Answer):
    """``GET /v1/federations/{name}/rounds``: what happened in one round.

    Bytes are bodies of training's payloads and updates as devices counted them; evaluation, and finetune_flops of what
    was trained to be judged, are apart. parts_*: bytes by part of a bundle. Accuracies and losses are unweighted means
    over devices, of the evaluation that followed; the decile that of the floor(N/10)-th worst. counts: of devices'
    halves, added up. notes: of the coordinator and the server half. Round 0 prepares the model. privacy: the cost of
    models up to this one. unreadable: devices whose reports cannot be read. left_out: updates that the model is
    without, and why. capped: samples with which updates count. clipped: to which share of their length.
    joules_per_point_*: training's joules since the last evaluation for each percentage point of accuracy gained; None
    without a gain.
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
    seconds: float | None = Field(description="From its opening to its closing")
    device_seconds_median: float | None = Field(
        default=None, description="Download, training and upload of the median device whose update counts"
    )
    device_seconds_slowest: float | None = Field(default=None, description="Likewise of the slowest")
    slowest: str | None = Field(default=None, description="The name of that device")
    model_sha256: str | None
    base_version: int | None = Field(default=None, description="The global model that the round began from")
    model_version: int | None = Field(default=None, description="The one that it ended with")
    undone: bool = Field(default=False, description="An operator went back to an older model since")


class DeviceReport(Answer):
    """``GET /v1/federations/{name}/rounds/{number}/reports``: what one device answered to one assignment of a round."""

    device: str
    kind: Kind
    report: UpdateReport | Receipt
    upload: Phase

    @property
    def accuracy(self) -> float | None:
        """The accuracy that an evaluation found, of the personal model, or else of the global one; else None."""
        judged = (self.report.personal or self.report.global_model) if isinstance(self.report, Receipt) else None
        return None if judged is None else judged.accuracy


class Problem(Answer):
    """RFC 9457 problem document; ``detail`` says what to do."""

    type: str
    title: str
    status: int
    detail: str
