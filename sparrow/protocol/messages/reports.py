"""Reports of devices: costs of a round, training, and evaluations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..evidence import Evidence
from ..fields import CELSIUS, Count, Flops, Joules, Request, Score, Seconds, Total
from ..manifest import MOST_METRICS, MetricName
from ..secure.messages import Statement
from ..skew import LabelSketch


class Moved(Request):
    """Bytes of HTTP bodies, including repetitions."""

    bytes_down: Total = 0
    bytes_up: Total = 0
    # The part of ``bytes_down`` for frozen values.
    frozen_down: Total = 0

    def plus(self, down: int, up: int, frozen: int = 0) -> Moved:
        """Return the sum with these bytes."""
        return Moved(
            bytes_down=self.bytes_down + down, bytes_up=self.bytes_up + up, frozen_down=self.frozen_down + frozen
        )


class Phase(Request):
    """The costs of one phase of a round. Bytes are of HTTP bodies, including repetitions."""

    seconds: Seconds = 0.0
    paused_seconds: Seconds = 0.0
    throttled_seconds: Seconds | None = None
    celsius_peak: float | None = Field(default=None, ge=CELSIUS[0], le=CELSIUS[1])
    bytes_down: Count = 0
    bytes_up: Count = 0
    # None if ``quality`` is unavailable.
    joules: Joules | None = None
    quality: Literal["measured", "derived", "estimated", "unavailable"] = "unavailable"
    # The sensor or estimate. ``paused_seconds`` and ``throttled_seconds`` are parts of ``seconds``.
    source: str = Field(default="", max_length=300)

    @model_validator(mode="after")
    def _check(self) -> Phase:
        if (self.joules is None) != (self.quality == "unavailable"):
            raise ValueError("joules must be given unless their quality is 'unavailable', and only then")
        return self


class Telemetry(Request):
    """Cost of a round's phases; the upload's comes with the next call (UploadCost)."""

    download: Phase = Phase()
    train: Phase = Phase()


class UploadCost(Request):
    """Header ``Sparrow-Upload-Cost``: cost of the last upload, sent with the device's next call."""

    assignment_id: str = Field(max_length=64)
    upload: Phase
    # Bodies of all calls of this device so far.
    everything: Moved = Moved()


class UpdateReport(Request):
    """A device's report inside an update's bundle."""

    num_examples: int = Field(ge=1, le=2**40)
    status: Literal["active", "stopped"] = "active"
    steps: Count
    training_flops: Flops = Field(default=0, description="FLOPs of local training, from shapes and masks")
    train_loss: Score | None = Field(default=None, description="null if it is masked (secure_metrics)")
    validation_loss: Score | None = None
    stop_loss: Score | None = None
    counts: dict[Annotated[str, Field(max_length=64)], Count] = Field(
        default_factory=dict, max_length=32, description="The method's counts on the device"
    )
    received: dict[Annotated[str, Field(max_length=64)], Count] = Field(
        default_factory=dict, max_length=16, description="Bytes of the payload's parts"
    )
    secure: Statement | None = Field(default=None, description="The device's signed statement in a secure round")
    labels: LabelSketch | None = Field(
        default=None, description="With logit_adjustment_from, until it is decided: a sketch of class frequencies"
    )
    telemetry: Telemetry = Telemetry()


class Evaluation(Request):
    """Evaluation of one model on a device's held-out data."""

    num_examples: int = Field(ge=1, le=2**40)
    loss: Score
    accuracy: float | None = Field(default=None, ge=0, le=1, description="null if the task has no accuracy")
    metrics: dict[MetricName, Score] = Field(
        default_factory=dict, max_length=MOST_METRICS, description="The task's other metrics, by name"
    )


class Receipt(Request):
    """The update of every kind except train, without values."""

    # On test data; for ``adapt``, the final personal model.
    personal: Evaluation | None = None
    global_model: Evaluation | None = None
    # Evaluation of the personal model, or else the global one, on validation data, for tuning settings.
    validation: Evaluation | None = None
    others: dict[Annotated[str, Field(max_length=64)], Evaluation] = Field(
        default_factory=dict, max_length=16, description="The method's other ways to predict, on test data"
    )
    finetune_flops: Flops = Field(default=0, description="FLOPs of training before the evaluation")
    inference_flops: Flops = Field(default=0, description="FLOPs of one sample in this model, without zero weights")
    # Evidence for ``compare``.
    evidence: Evidence | None = Field(default=None, description="For compare: gains of the device's candidates")
    taken: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="With personal_model=fleet, at the end: the candidate that the device has chosen"
    )
    usual: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="With personal_model=fleet, at the end: the candidate that is best for all devices"
    )
    state_bytes: Count = Field(default=0, description="Bytes of the device's state between rounds")
    telemetry: Telemetry = Telemetry()
