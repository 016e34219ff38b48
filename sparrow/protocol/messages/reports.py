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
    """Bytes of HTTP bodies, repetitions included. frozen_down: those of ``bytes_down`` that were values nobody
    trains."""

    bytes_down: Total = 0
    bytes_up: Total = 0
    frozen_down: Total = 0

    def plus(self, down: int, up: int, frozen: int = 0) -> Moved:
        """Return the sum with so many more."""
        return Moved(
            bytes_down=self.bytes_down + down, bytes_up=self.bytes_up + up, frozen_down=self.frozen_down + frozen
        )


class Phase(Request):
    """The costs of one phase of a round. Bytes are those of its HTTP bodies, repetitions included. joules: None if
    ``quality`` is unavailable. source: the sensor or estimate. Of ``seconds`` the device paused, or was throttled, for
    so many."""

    seconds: Seconds = 0.0
    paused_seconds: Seconds = 0.0
    throttled_seconds: Seconds | None = None
    celsius_peak: float | None = Field(default=None, ge=CELSIUS[0], le=CELSIUS[1])
    bytes_down: Count = 0
    bytes_up: Count = 0
    joules: Joules | None = None
    quality: Literal["measured", "derived", "estimated", "unavailable"] = "unavailable"
    source: str = Field(default="", max_length=300)

    @model_validator(mode="after")
    def _check(self) -> Phase:
        if (self.joules is None) != (self.quality == "unavailable"):
            raise ValueError("joules are given exactly when their quality is not 'unavailable'")
        return self


class Telemetry(Request):
    """Cost of a round's phases; the upload's is known only afterwards and comes with the next call (UploadCost)."""

    download: Phase = Phase()
    train: Phase = Phase()


class UploadCost(Request):
    """Header ``Sparrow-Upload-Cost``: what the last upload cost, sent with the device's next call. everything: the
    bodies of all calls of this device so far."""

    assignment_id: str = Field(max_length=64)
    upload: Phase
    everything: Moved = Moved()


class UpdateReport(Request):
    """Travels inside an update's bundle."""

    num_examples: int = Field(ge=1, le=2**40)
    status: Literal["active", "stopped"] = "active"
    steps: Count
    training_flops: Flops = Field(default=0, description="What local training computed, from shapes and masks")
    train_loss: Score | None = Field(default=None, description="None where it goes under masks (secure_metrics)")
    validation_loss: Score | None = None
    stop_loss: Score | None = None
    counts: dict[Annotated[str, Field(max_length=64)], Count] = Field(
        default_factory=dict, max_length=32, description="What the method counted on the device"
    )
    received: dict[Annotated[str, Field(max_length=64)], Count] = Field(
        default_factory=dict, max_length=16, description="Bytes of the payload's parts"
    )
    secure: Statement | None = Field(default=None, description="What the device was told in a secure round, signed")
    labels: LabelSketch | None = Field(
        default=None, description="With logit_adjustment_from, until it is decided: a sketch of the class frequencies"
    )
    telemetry: Telemetry = Telemetry()


class Evaluation(Request):
    """One model on a device's held-out data."""

    num_examples: int = Field(ge=1, le=2**40)
    loss: Score
    accuracy: float | None = Field(default=None, ge=0, le=1, description="None where the task has no accuracy")
    metrics: dict[MetricName, Score] = Field(
        default_factory=dict, max_length=MOST_METRICS, description="What else the task measures, by name"
    )


class Receipt(Request):
    """The update of every kind but train: nothing of the model goes up.

    personal and global_model: on test data; ``adapt`` reports the personal model it ended with. validation: the
    personal model, or the global one, on validation data, on which settings are tuned. evidence: of ``compare``.
    """

    personal: Evaluation | None = None
    global_model: Evaluation | None = None
    validation: Evaluation | None = None
    others: dict[Annotated[str, Field(max_length=64)], Evaluation] = Field(
        default_factory=dict, max_length=16, description="The method's other ways to predict, on test data"
    )
    finetune_flops: Flops = Field(default=0, description="What was trained to be judged, from shapes and masks")
    inference_flops: Flops = Field(default=0, description="One sample through the judged model, without zero weights")
    evidence: Evidence | None = Field(default=None, description="Of compare: what the device's candidates gain")
    taken: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="With personal_model=fleet, at the end: which candidate the device has taken"
    )
    usual: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="With personal_model=fleet, at the end: which candidate is best for all devices"
    )
    state_bytes: Count = Field(default=0, description="What the device keeps between rounds, bytes")
    telemetry: Telemetry = Telemetry()
