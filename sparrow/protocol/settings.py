"""The settings of a federation, in groups.

``FederationSettings`` inherits from every group, so that functions can take only the groups they need. docs/settings.md
lists every field. Groups check themselves, ``FederationSettings`` checks across groups, and the coordinator checks
method and model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .bundle import Precision
from .errors import ProtocolError
from .fields import Limit, OwnSetting, Request, Share
from .secure.messages import LARGEST_RANGE
from .tags import AllowedTags, Where
from .tags import Selection as TagSelection

AUTO = "auto"
"""The value of ``method`` that lets ``sparrow.protocol.auto`` choose one."""


class MethodChoice(Request):
    """The method and its own settings."""

    method: str = Field(
        default="fedspu",
        max_length=64,
        description="Federated method; auto: chosen with its settings when the federation is created",
    )
    method_settings: dict[Annotated[str, Field(max_length=64)], OwnSetting] = Field(
        default_factory=dict, max_length=100, description="Settings of the method, as names with values"
    )


class Consent(Request):
    """Information for people before their phone takes part."""

    operator: str = Field(default="", max_length=120, description="Operator of the federation, for people who join it")
    purpose: str = Field(default="", max_length=300, description="Purpose of the model, for people who join it")


class Schedule(Request):
    """Rounds, their ends, and evaluations."""

    rounds: int = Field(default=30, ge=1, le=1_000_000, description="Largest number of rounds, T")
    quorum: Share = Field(
        default=1.0, description="Share of the cohort's updates that closes a round before its deadline; 1: all"
    )
    deadline_seconds: float = Field(default=300.0, gt=0, le=7 * 86400, description="Longest duration of a round, s")
    silence_seconds: float = Field(
        default=60.0,
        ge=1,
        le=7 * 86400,
        description="Silence after which a round drops a device, s; working devices report every third of it",
    )
    min_updates: int = Field(
        default=1, ge=1, le=1_000_000, description="Least number of updates; a round with fewer is extended or skipped"
    )
    extensions: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Number of times that a round with too few updates gets another deadline_seconds and more devices",
    )
    buffer: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Asynchronous rounds (FedBuff): number of updates that closes a round; late ones count in the next",
    )
    staleness_exponent: float = Field(
        default=0.5,
        ge=0,
        le=10,
        description="With buffer: exponent a of the weight (1 + t)^-a of an update that is t models old",
    )
    evaluation_interval: int = Field(
        default=5,
        ge=0,
        le=1_000_000,
        description="Rounds between evaluations of personal models, or of the global model if the method has no "
        "personal ones; 0: only at the end",
    )
    global_evaluation_interval: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Rounds between evaluations that also cover the global model, which devices download for this; 0: "
        "only at the end",
    )
    global_evaluation_devices: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="Largest number of devices that evaluate the global model; at the end, all that may mix it in do",
    )


class Selection(Request):
    """Selection of the devices of a round."""

    min_devices: int = Field(
        default=2,
        ge=1,
        le=1_000_000,
        description="Number of enrolled devices that opens the first round, and of present ones that opens the first "
        "after a reopening; under secure at least secure_colluders + 2",
    )
    cohort: int = Field(default=10, ge=1, le=1_000_000, description="Devices drawn per round, m")
    cohort_policy: Literal["uniform", "least_recently", "budget"] = Field(
        default="uniform",
        description="Choice of devices: uniform; least recently drawn first; or proportional to budget",
    )
    over_selection: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Additional devices per round, as a share of cohort, so that a round need not wait for the slowest",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of initial weights (of custom models: of `Seeded` ones) and batches; with draws=seed, of all",
    )
    draws: Literal["secret", "seed"] = Field(
        default="secret",
        description="Source of cohorts and drawn neurons: secret random bytes, or name and seed, which make a "
        "simulation repeatable but let every device compute all draws",
    )
    tags: AllowedTags = Field(
        default={},
        description="Keys and values with which devices can be tagged, such as board=orin,pi site=lab: at most 10 keys "
        "with 50 values each",
    )
    cohort_where: Where = Field(
        default="",
        description="Only devices with these tags train, such as board=orin and site!=lab; empty: all",
    )

    @model_validator(mode="after")
    def _check_tags(self) -> Selection:
        try:
            TagSelection.parse(self.cohort_where).check(self.tags)
        except ProtocolError as error:
            raise ValueError(f"cohort_where: {error}") from None
        return self


class Training(Request):
    """Training on a device, in a round and at the end."""

    optimizer: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="Local optimiser")
    learning_rate: float = Field(default=0.05, gt=0, le=100, description="Local learning rate in the first round")
    learning_rate_decay: Share = Field(default=1.0, description="Factor on the learning rate per round")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="SGD momentum; reset in every round")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Weight decay of active parameters")
    batch_size: int = Field(
        default=16,
        ge=1,
        le=1_000_000,
        description="Samples per local step of built-in tasks; custom DataLoaders set their own",
    )
    local_epochs: int = Field(default=5, ge=1, le=10_000, description="Passes over the local data per round, E")
    local_steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Local steps per round, instead of local_epochs"
    )
    clip: Limit | None = Field(default=None, description="Largest 2-norm of a step's gradient; unset: no limit")
    logit_adjustment: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Factor on the logarithms of a device's class frequencies, added to its outputs in training and "
        "prediction, so that the shared model need not learn them; 0: off",
    )
    logit_adjustment_from: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="With logit_adjustment: label skew between devices (intraclass correlation of labels) from which "
        "outputs are adjusted; for its estimate, the first round is not adjusted, and devices send a sketch of their "
        "class frequencies; 0: always adjusted, and no sketch",
    )
    personal_model: Literal["best", "last", "fleet"] = Field(
        default="best",
        description="Personal model that a device evaluates and exports: best on its validation data, preferring newer "
        "ones; last: of its last round; fleet: as best until the end, then the best on all devices' validation data "
        "with its own, among the finished global model, its own, their mean, this mean trained once more, and a "
        "local-only one",
    )
    finetune_epochs: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Local epochs that fine-tune a copy of the finished global model; the personal model is the best "
        "of copy, global model and mixtures on validation data (personal_model=last: the copy), also at every "
        "evaluation. Under fedspu: local epochs, within the budget, of a last training of the equal mixture of "
        "personal and global model, kept if validation data favour it",
    )
    finetune_learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Learning rate of fine-tuning the finished global model; unset: that of the round",
    )

    @model_validator(mode="after")
    def _check_training(self) -> Training:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to the optimizer sgd; remove it for {self.optimizer}")
        return self

    @property
    def keeps_best(self) -> bool:
        """True if devices keep their best personal model."""
        return self.personal_model != "last"

    def learning_rate_of(self, round_number: int) -> float:
        """Return the learning rate of a round, counted from 1; before round 1, the learning rate of round 1."""
        return self.learning_rate * self.learning_rate_decay ** max(0, round_number - 1)


class Stopping(Request):
    """Early stopping and the personal model."""

    early_stopping: Literal["validation", "paper", "off"] = Field(
        default="validation",
        description="Rule by which a device stops training for good: validation: its smoothed validation loss no "
        "longer falls; paper: FedSPU's stop-rule loss rises; off: never",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Participations in a row without improvement that stop a device; unset: 10, or 1 under paper",
    )
    min_participations: int = Field(
        default=15, ge=1, le=1_000_000, description="Participations before a device may stop; ignored under paper"
    )
    min_improvement: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Improvement: share by which the smoothed validation loss must fall below its minimum",
    )
    stop_weight: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Under paper: weight λ of the training loss in the stop-rule loss; validation has the rest",
    )
    joules_per_device: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Energy of downloads and training, measured or estimated, after which a device stops training for "
        "good; without effect on devices that cannot estimate it; unset: no limit",
    )

    @property
    def stop_patience(self) -> int:
        """Number of participations without improvement after which a device stops: ``patience``, or the rule's
        default.
        """
        return self.patience or (1 if self.early_stopping == "paper" else 10)


class Wire(Request):
    """The number format of transfers."""

    precision: Precision = Field(
        default="fp32",
        description="Number format of transferred values; int8: for updates, as differences; downloads stay fp32",
    )

    def precision_of(self, direction: Literal["down", "up"], kind: str) -> Precision:
        """Return the number format of a payload or an update. kind: the kind of work, a ``messages.Kind``."""
        # int8 is precise enough only for the differences of training.
        differences = direction == "up" and kind == "train"
        return "fp32" if self.precision == "int8" and not differences else self.precision


class Robustness(Request):
    """Limits on the effect of a single update on the global model."""

    update_norm_limit: Limit | None = Field(
        default=None,
        description="Largest 2-norm of an update's change; a larger one is refused (422)",
    )
    update_clip: Limit | None = Field(
        default=None,
        description="Largest 2-norm of an update's change; a larger one is scaled down",
    )
    relative_clip: float = Field(
        default=10.0,
        ge=0,
        le=1e12,
        description="Largest 2-norm of an update's change, in multiples of the median of the last rounds; a larger one "
        "is scaled down; 0: off. Without effect under secure, noise_multiplier or robust",
    )
    outlier_mads: Limit | None = Field(
        default=None,
        description="Deviation from the round's median size, in 1.4826 MAD, beyond which an update is left out; e.g. 5",
    )
    max_examples: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Largest number of samples per update, in addition to the limit of ten times its cohort's median",
    )
    robust: Literal["trimmed_mean", "median", "krum"] | None = Field(
        default=None,
        description="Rule that replaces the weighted mean and resists a few bad updates: trimmed_mean, median, krum",
    )
    robust_share: float = Field(
        default=0.2,
        gt=0,
        lt=0.5,
        description="Share of a round's devices that may be malicious (trimmed at each end; Krum's f/n)",
    )

    @model_validator(mode="after")
    def _check_robustness(self) -> Robustness:
        if 0 < self.relative_clip <= 1:
            raise ValueError(
                f"relative_clip: {self.relative_clip:g} would shrink updates from round to round; set more than 1, or "
                f"0 to turn it off"
            )
        return self


class Privacy(Request):
    """Differential privacy of the global model."""

    noise_multiplier: float | None = Field(
        default=None,
        ge=1e-3,
        le=1e6,
        description="Central differential privacy: noise deviation on a round's sum, in multiples of update_clip",
    )
    privacy_delta: float = Field(
        default=1e-5, gt=0, lt=1, description="Delta for the reported epsilon of the models; below 1 / devices"
    )
    privacy_adjacency: Literal["replacement", "zero_out"] = Field(
        default="replacement",
        description="Neighbouring data sets of epsilon: a device's updates replaced by any others, or by zeros (half "
        "the distance)",
    )


class SecureSums(Request):
    """Secure aggregation."""

    secure: bool = Field(
        default=False,
        description="Secure aggregation: the coordinator sees only sums of updates",
    )
    secure_bits: Literal[16, 32] = Field(default=16, description="With secure: bits of a masked value on the wire")
    secure_range: float = Field(
        default=0.5,
        gt=0,
        le=LARGEST_RANGE,
        description="With secure: largest magnitude of a value's change in training; larger ones are clipped",
    )
    secure_colluders: int = Field(
        default=1, ge=0, le=1000, description="With secure: devices of a round that may collude with the coordinator"
    )
    secure_dropouts: float = Field(
        default=0.3, ge=0, le=0.9, description="With secure: share of a round's devices that may drop out in a phase"
    )
    secure_metrics: bool | None = Field(
        default=None,
        description="With secure: sum losses and accuracies under the masks, too, instead of reporting each device's; "
        "unset: yes; false: devices whose owners agree send them in clear (--plain-metrics)",
    )
    secure_phase_seconds: float = Field(
        default=60.0, gt=0, le=7 * 86400, description="With secure: longest duration of a phase without training, s"
    )

    @model_validator(mode="after")
    def _check_secure(self) -> SecureSums:
        if self.secure_metrics and not self.secure:
            raise ValueError("secure_metrics: only secure rounds mask metrics; set secure as well")
        return self

    @property
    def masks_metrics(self) -> bool:
        """True if losses and accuracies are masked in secure rounds."""
        return self.secure and self.secure_metrics is not False


class FederationSettings(
    Consent, SecureSums, Privacy, Robustness, Wire, Stopping, Training, Selection, Schedule, MethodChoice
):
    """All settings of a federation."""

    @model_validator(mode="after")
    def _check_together(self) -> FederationSettings:
        if self.min_updates > self.cohort:
            raise ValueError(f"min_updates: {self.min_updates} is more than cohort, {self.cohort}; set fewer")
        if self.logit_adjustment_from and self.noise_multiplier is not None:
            raise ValueError(
                "logit_adjustment_from: devices would send class frequencies without noise, which conflicts with "
                "noise_multiplier; leave it out"
            )
        if self.buffer is not None:
            if self.buffer > self.cohort:
                raise ValueError(
                    f"buffer: a round would wait for {self.buffer} updates, but only {self.cohort} devices train at a "
                    f"time (cohort); set a smaller buffer or a larger cohort"
                )
            if self.quorum < 1 or self.over_selection or self.min_updates > 1 or self.extensions:
                raise ValueError(
                    "buffer: a round closes when the buffer is full, so quorum, over_selection, min_updates and "
                    "extensions have no effect; leave them out"
                )
        return self


GROUPS: tuple[type[Request], ...] = (
    MethodChoice,
    Schedule,
    Selection,
    Training,
    Stopping,
    Wire,
    Robustness,
    Privacy,
    SecureSums,
    Consent,
)
"""The groups, in the order of docs/settings.md."""
