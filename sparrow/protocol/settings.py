"""The settings of a federation: groups, each of which checks itself, and all of them together.

Settings are flat on the wire, on the command line and in records. ``FederationSettings`` has every group as a base, so
what needs the settings of one group takes these alone, and can be given all. docs/settings.md describes every field; a
test holds it to these classes. What holds between groups is checked in ``FederationSettings``; what depends on the
method or the model, by the coordinator when a federation is made or changed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .bundle import Precision
from .fields import Limit, OwnSetting, Request, Share
from .secure.messages import LARGEST_RANGE

AUTO = "auto"
"""The method of settings that leave the choice of one to ``sparrow.protocol.auto``."""


class MethodChoice(Request):
    """The method, and what only it knows."""

    method: str = Field(
        default="fedspu",
        max_length=64,
        description="The federated method; auto: chosen with its settings when the federation is created",
    )
    method_settings: dict[Annotated[str, Field(max_length=64)], OwnSetting] = Field(
        default_factory=dict, max_length=100, description="What only this method knows, as names with values"
    )


class Schedule(Request):
    """How many rounds, when one closes, and when models are judged."""

    rounds: int = Field(default=30, ge=1, le=1_000_000, description="Most rounds, T")
    quorum: Share = Field(
        default=1.0, description="Share of the cohort whose updates close a round before its deadline; 1 waits for all"
    )
    deadline_seconds: float = Field(default=300.0, gt=0, le=7 * 86400, description="Longest duration of a round, s")
    silence_seconds: float = Field(
        default=60.0,
        ge=1,
        le=7 * 86400,
        description="Silence after which a round goes on without a device, s; at work it is heard every third of it",
    )
    min_updates: int = Field(
        default=1, ge=1, le=1_000_000, description="Updates below which a round is extended, and in the end skipped"
    )
    extensions: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How often a round that lacks updates gets another deadline_seconds, and more devices",
    )
    buffer: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Asynchronous rounds (FedBuff): a round closes at so many updates; late ones count in the next",
    )
    staleness_exponent: float = Field(
        default=0.5,
        ge=0,
        le=10,
        description="With buffer: a: what an update t models old has moved counts (1 + t)^-a",
    )
    evaluation_interval: int = Field(
        default=5,
        ge=0,
        le=1_000_000,
        description="Rounds between evaluations of personal models, or, for methods without any, of the global model; "
        "0: only at the end",
    )
    global_evaluation_interval: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Rounds between evaluations at which devices judge the global model beside their own, for which "
        "they download it; 0: only at the end",
    )
    global_evaluation_devices: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="Most devices that judge the global model in an evaluation; at the end all do that may mix it in",
    )


class Selection(Request):
    """The devices that are drawn for a round."""

    min_devices: int = Field(
        default=2, ge=1, le=1_000_000, description="Enrolled devices at which the first round opens"
    )
    cohort: int = Field(default=10, ge=1, le=1_000_000, description="Devices drawn per round, m")
    cohort_policy: Literal["uniform", "least_recently", "budget"] = Field(
        default="uniform",
        description="Who is drawn: all alike, those first who took part longest ago, or more often by budget",
    )
    over_selection: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Devices drawn beyond cohort, as a share of it, so that a round need not wait for the slowest",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Decides initial weights (of own models: of `Seeded` ones), batches, and with draws seed the rest",
    )
    draws: Literal["secret", "seed"] = Field(
        default="secret",
        description="What cohorts and drawn neurons follow from: random bytes that no device can know, or name and "
        "seed, which make a simulation repeatable and let every device compute the draws of all",
    )


class Training(Request):
    """The work of a device in a round and at the end."""

    optimizer: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="Local optimiser")
    learning_rate: float = Field(default=0.05, gt=0, le=100, description="Local learning rate of the first round")
    learning_rate_decay: Share = Field(default=1.0, description="Factor on the learning rate per round")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="SGD momentum; starts at zero every round")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Weight decay, on active parameters only")
    batch_size: int = Field(
        default=16,
        ge=1,
        le=1_000_000,
        description="Samples per local step of built-in tasks; DataLoaders of your own decide for themselves",
    )
    local_epochs: int = Field(default=5, ge=1, le=10_000, description="Passes over the local data per round, E")
    local_steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Local steps per round, instead of local_epochs"
    )
    clip: Limit | None = Field(default=None, description="Largest 2-norm of a step's gradient; none where unset")
    logit_adjustment: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Strength with which the logarithms of a device's class frequencies are added to its outputs, in "
        "training and prediction, so that the shared model need not learn them; 0: not at all",
    )
    logit_adjustment_from: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="With logit_adjustment: label skew between devices, the intraclass correlation of labels, from "
        "which outputs are adjusted; in the first round they are not, and devices tell a sketch of their class "
        "frequencies; 0: outputs are adjusted from the first round on, and nothing is told",
    )
    personal_model: Literal["best", "last", "fleet"] = Field(
        default="best",
        description="The personal model that a device judges and exports: the best on its validation data, newer ones "
        "preferred, or that of its last round; fleet: as best until the end, then by all devices' validation data "
        "and its own together, of the finished global model, its own, their mean, this trained once more, and one "
        "trained alone",
    )
    finetune_epochs: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Local epochs of a copy of the finished global model; of copy, model and their mixtures the "
        "personal model is the best on validation data (personal_model=last: the copy), judged at every evaluation; "
        "under fedspu: local epochs, within the budget, of one more training at the end, of personal and "
        "global model mixed in equal parts, which is kept where validation data speak for it",
    )
    finetune_learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Learning rate with which the finished global model becomes a personal one; unset: its round's",
    )

    @model_validator(mode="after")
    def _check_training(self) -> Training:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to the optimizer sgd; {self.optimizer} has its own, remove it")
        return self

    @property
    def keeps_best(self) -> bool:
        """True if devices keep the best of their rounds' personal models."""
        return self.personal_model != "last"

    def learning_rate_of(self, round_number: int) -> float:
        """Learning rate of a round, counted from 1; adapting before the first round has that of the first."""
        return self.learning_rate * self.learning_rate_decay ** max(0, round_number - 1)


class Stopping(Request):
    """The moment at which a device leaves training for good."""

    early_stopping: Literal["validation", "paper", "off"] = Field(
        default="validation",
        description="When a device leaves training for good: once its smoothed validation loss no longer falls; paper: "
        "on rises of FedSPU's stop-rule loss; off: never",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Participations in a row without improvement that stop a device; unset: 10, or 1 under paper",
    )
    min_participations: int = Field(
        default=15, ge=1, le=1_000_000, description="Participations before which no device stops, unless under paper"
    )
    min_improvement: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share by which the smoothed validation loss must fall below its lowest value to be an improvement",
    )
    stop_weight: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Under paper: weight λ of the training loss in the stop-rule loss; the rest is validation's",
    )
    joules_per_device: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Energy of downloads and training, measured or estimated, after which a device leaves training for "
        "good, as by early stopping; of devices that cannot know theirs none does; unset: no limit",
    )

    @property
    def stop_patience(self) -> int:
        """Participations without improvement that stop a device: ``patience``, or its rule's own where it is unset."""
        return self.patience or (1 if self.early_stopping == "paper" else 10)


class Wire(Request):
    """The values on the wire."""

    precision: Precision = Field(
        default="fp32",
        description="Number format of values on the wire; int8: updates alone, as differences, and fp32 downwards",
    )

    def precision_of(self, direction: Literal["down", "up"], kind: str) -> Precision:
        """Return the number format of an assignment's payload, or of its update. kind: of work, ``messages.Kind``.

        int8 is for the differences that training makes: what goes down, and what is prepared, would lose too much.
        """
        differences = direction == "up" and kind == "train"
        return "fp32" if self.precision == "int8" and not differences else self.precision


class Robustness(Request):
    """Bounds of what one update does to the global model."""

    update_norm_limit: Limit | None = Field(
        default=None,
        description="Largest 2-norm of an update less what was sent to the device; a larger one is refused (422)",
    )
    update_clip: Limit | None = Field(
        default=None,
        description="Largest 2-norm of an update less what was sent, as it counts: a larger one is scaled down to it",
    )
    relative_clip: float = Field(
        default=10.0,
        ge=0,
        le=1e12,
        description="Times the usual 2-norm of an update less what was sent (median of the last rounds): a longer one "
        "is scaled down to it as it counts; 0: off. Without effect under secure, noise_multiplier or robust",
    )
    outlier_mads: Limit | None = Field(
        default=None,
        description="Deviations (1.4826 MAD) from the round's median size beyond which an update is left out; e.g. 5",
    )
    max_examples: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Most samples that one update counts with, even where ten times its cohort's median are more",
    )
    robust: Literal["trimmed_mean", "median", "krum"] | None = Field(
        default=None,
        description="In place of the weighted mean, a rule that resists a few bad updates: trimmed_mean, median, krum",
    )
    robust_share: float = Field(
        default=0.2,
        gt=0,
        lt=0.5,
        description="Share of a round's devices that may lie (trimmed at each end; Krum's f/n)",
    )

    @model_validator(mode="after")
    def _check_robustness(self) -> Robustness:
        if 0 < self.relative_clip <= 1:
            raise ValueError(
                f"relative_clip: at {self.relative_clip:g} updates become shorter from round to round; give more than "
                f"1, or 0 for none"
            )
        return self


class Privacy(Request):
    """Differential privacy of the global model."""

    noise_multiplier: float | None = Field(
        default=None,
        ge=1e-3,
        le=1e6,
        description="Central differential privacy: deviation of the noise on a round's sum, times update_clip",
    )
    privacy_delta: float = Field(
        default=1e-5, gt=0, lt=1, description="Delta at which the models' epsilon is told; below 1 / devices"
    )
    privacy_adjacency: Literal["replacement", "zero_out"] = Field(
        default="replacement",
        description="What epsilon tells apart: a device's updates or any others; or (half the distance) or zeros",
    )


class SecureSums(Request):
    """Secure aggregation."""

    secure: bool = Field(
        default=False,
        description="Secure aggregation: sums of updates come out, never one of them",
    )
    secure_bits: Literal[16, 32] = Field(default=16, description="With secure: bits of a masked value on the wire")
    secure_range: float = Field(
        default=0.5,
        gt=0,
        le=LARGEST_RANGE,
        description="With secure: largest magnitude by which training may move a value; beyond it is clipped",
    )
    secure_colluders: int = Field(
        default=1, ge=0, le=1000, description="With secure: devices of a round that may collude with the coordinator"
    )
    secure_dropouts: float = Field(
        default=0.3, ge=0, le=0.9, description="With secure: share of a round's devices that may vanish in a phase"
    )
    secure_metrics: bool | None = Field(
        default=None,
        description="With secure: losses and accuracies are summed under the masks, too, and reported of no single "
        "device; unset: yes; false: sent in clear by devices whose owners agree (--plain-metrics)",
    )
    secure_phase_seconds: float = Field(
        default=60.0, gt=0, le=7 * 86400, description="With secure: longest duration of a phase that trains nothing, s"
    )

    @model_validator(mode="after")
    def _check_secure(self) -> SecureSums:
        if self.secure_metrics and not self.secure:
            raise ValueError("secure_metrics: metrics go through the masks of secure rounds; give secure as well")
        return self

    @property
    def masks_metrics(self) -> bool:
        """True if losses and accuracies go under the masks of secure rounds."""
        return self.secure and self.secure_metrics is not False


class FederationSettings(SecureSums, Privacy, Robustness, Wire, Stopping, Training, Selection, Schedule, MethodChoice):
    """All settings of a federation."""

    @model_validator(mode="after")
    def _check_together(self) -> FederationSettings:
        if self.min_updates > self.cohort:
            raise ValueError(f"min_updates: {self.min_updates} cannot come of a cohort of {self.cohort}; ask for fewer")
        if self.logit_adjustment_from and self.noise_multiplier is not None:
            raise ValueError(
                "logit_adjustment_from: what devices would tell of their labels has no noise, which noise_multiplier "
                "promises; leave it out"
            )
        if self.buffer is not None:
            if self.buffer > self.cohort:
                raise ValueError(
                    f"buffer: a round would wait for {self.buffer} updates while {self.cohort} devices train at a time "
                    f"(cohort); give a smaller buffer or a larger cohort"
                )
            if self.quorum < 1 or self.over_selection or self.min_updates > 1 or self.extensions:
                raise ValueError(
                    "buffer: quorum, over_selection, min_updates and extensions are of rounds that wait for a cohort; "
                    "with a buffer a round closes when it is full, so leave them out"
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
)
"""The groups, in the order in which people read them."""
