"""Records of rounds, as an observer gets them, and the form of errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..fields import Answer
from .federations import PrivacySpent
from .reports import Phase, Receipt, UpdateReport
from .work import Kind


class PhaseSum(Answer):
    """A phase summed over devices. Measured and estimated joules are never blended.

    ``throttled_seconds`` are those of devices that can tell, ``celsius_peak`` is the highest of all; None where no
    device can.
    """

    seconds: float = 0.0
    paused_seconds: float = 0.0
    throttled_seconds: float | None = None
    celsius_peak: float | None = None
    joules_measured: float = 0.0
    joules_estimated: float = 0.0
    seconds_without_joules: float = 0.0


class PerUpdate(Answer):
    """Joules of a device's whole round, transfers included: the mean over updates, those measured (or derived) apart
    from those estimated; None where there is none of a kind. ``measured_updates`` and ``estimated_updates`` say over
    how many."""

    joules_measured: float | None = None
    joules_estimated: float | None = None
    measured_updates: int = 0
    estimated_updates: int = 0


class RoundRecord(Answer):
    """``GET /v1/federations/{name}/rounds``: what happened in one round.

    ``updates`` counts each acknowledged update once. ``bytes_down`` and ``bytes_up`` are bodies of payloads and updates
    of training as the devices counted them; evaluation is apart, and so are ``finetune_flops``, of what was trained to
    be judged. ``parts_down`` and ``parts_up`` say what the payloads and updates that counted consist of, bytes by part
    of a bundle. ``accuracy`` and ``loss`` are means over devices,
    unweighted, of the evaluation that followed the round; ``None`` where there was none. ``accuracy_personal_decile``
    is that of the floor(N/10)-th worst of N devices. ``counts`` are those of the method's device halves, added up:
    what devices say. ``notes`` are what the coordinator and the method's server half counted. Round 0 is the one that
    prepares the model. ``privacy`` is what the models up to this round's have cost. ``unreadable`` names devices whose
    stored reports cannot be read, which are missing in all sums and means. ``left_out`` says which devices' updates,
    acknowledged all the same, its model is without, and why; ``capped`` which reported more samples than their updates
    count with, and how many those are; ``clipped`` whose updates count shortened, and to which share of their length.
    ``joules_per_point_*``: training's joules, transfers included, since the last evaluation before this one, for each
    percentage point that ``accuracy_personal`` (else ``accuracy_global``) has risen by; None where it has not risen.
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
