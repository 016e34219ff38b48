"""Every request and response of the HTTP contract, version 1.

A model here is what crosses the wire; it checks itself when made. What one side sends, the other may not know yet, so
answers ignore unknown fields and requests refuse them: a misspelt setting must not pass in silence.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .evidence import Evidence
from .fields import (
    CELSIUS,
    LONGEST_LINK,
    Answer,
    Count,
    DeviceName,
    Digest,
    FederationName,
    Flops,
    Id,
    Joules,
    Request,
    Score,
    Seconds,
    Secret,
    Share,
    Total,
)
from .manifest import MOST_METRICS, MetricName
from .secure.messages import Key32, SecureWork, Statement
from .settings import FederationSettings
from .signatures import Publication
from .skew import LabelSketch


class Moved(Request):
    """Bytes of HTTP bodies, repetitions included; ``frozen_down`` are those of ``bytes_down`` that were values which
    nobody trains."""

    bytes_down: Total = 0
    bytes_up: Total = 0
    frozen_down: Total = 0

    def plus(self, down: int, up: int, frozen: int = 0) -> Moved:
        """Return the sum with so many more."""
        return Moved(
            bytes_down=self.bytes_down + down, bytes_up=self.bytes_up + up, frozen_down=self.frozen_down + frozen
        )


class CreateFederation(Request):
    """``POST /v1/federations`` for a built-in task; for a model of one's own it is the note of a checkpoint.

    Such a checkpoint (``POST /v1/federations/from-model``) holds the initial values by name and, as uint8 vectors
    named ``sparrow.manifest`` and ``sparrow.skeleton``, the manifest's JSON and the ONNX skeleton; where the manifest
    names them, ``sparrow.step`` and ``sparrow.evaluation`` as well.
    """

    name: FederationName
    task: str | None = Field(
        default=None, max_length=200, description="A built-in task; none where a manifest is published"
    )
    settings: FederationSettings = FederationSettings()
    publication: Publication | None = Field(
        default=None, description="What its author has signed; in a checkpoint the vector sparrow.publication"
    )

    def as_given(self) -> str:
        """Return it as JSON without what nobody has given: ``method=auto`` decides about these settings alone."""
        return self.model_dump_json(exclude_unset=True)


class CompareFederation(Request):
    """``POST /v1/federations/{name}/comparison``: what its publisher would ask for.

    ``model_digest`` is the manifest's (``Manifest.model_digest``), left out for a built-in task.
    """

    task: str = Field(max_length=200)
    model_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    settings: FederationSettings = FederationSettings()


class ChangeFederation(Request):
    """``PATCH /v1/federations/{name}``."""

    action: Literal["pause", "resume", "stop", "reopen", "rollback"] | None = None
    model_version: int | None = Field(
        default=None, ge=0, lt=2**31, description="With rollback: the global model to go back to"
    )
    rounds: int | None = Field(default=None, ge=1, le=1_000_000)
    cohort: int | None = Field(default=None, ge=1, le=1_000_000)
    deadline_seconds: float | None = Field(default=None, gt=0, le=7 * 86400)
    silence_seconds: float | None = Field(default=None, ge=1, le=7 * 86400)


class ModelInfo(Answer):
    """A global model that is kept."""

    version: int
    round: int | None = Field(description="The round that made it; 0: the first model; null: not known any more")
    bytes: int
    model_sha256: str | None
    undone: bool = Field(description="Whether an operator went back to an older one since")
    current: bool = Field(description="Whether the next round begins from it")


class FederationStatus(str, Enum):
    """The states of a federation."""

    waiting = "waiting"
    running = "running"
    paused = "paused"
    finished = "finished"
    stopped = "stopped"


class PrivacySpent(Answer):
    """The privacy that global models have cost a device so far: (epsilon, delta), for the one drawn most often."""

    epsilon: float = Field(
        description="Upper bound, of the published models alone: not of reports, nor of what the coordinator sees"
    )
    delta: float
    adjacency: Literal["replacement", "zero_out"] = Field(
        description="What the models hardly tell apart: a device's updates from any others, or from zeros"
    )
    most_draws: int = Field(description="Rounds for which the device drawn most often was drawn")


class FederationInfo(Answer):
    """The description of a federation."""

    uid: str = Field(description="Tells it from another of the same name, on a coordinator set up anew")
    name: str
    method: str
    task: str
    status: FederationStatus
    reason: str | None = Field(default=None, description="Why it ended: all_stopped, max_rounds or operator")
    waiting_for: str | None = Field(default=None, description="What keeps a running federation from its next round")
    warning: str | None = Field(default=None, description="What its method finds wrong with how it goes")
    notice: str | None = Field(default=None, description="What its settings leave open that its operator should know")
    round: int = Field(description="Rounds closed so far")
    rounds: int
    devices: int
    devices_stopped: int
    model_version: int
    rollback_version: int | None = Field(
        default=None, description="The global model to go back to when the open round has closed"
    )
    model_sha256: str
    privacy: PrivacySpent | None = Field(default=None, description="Where the federation has a noise_multiplier")
    parameters: int = Field(description="Trained values of the model")
    frozen_parameters: int = Field(default=0, description="Values of the model that nobody trains")
    frozen_bytes: int = Field(default=0, description="Bytes of these, which a device downloads once")
    published_bytes: int = Field(
        default=0, description="Bytes of the publication: weights, manifest and graphs; 0: built in"
    )
    manifest_digest: str
    publisher: Digest | None = Field(
        default=None, description="Public key of who has signed the model; none: it is built in, or not signed"
    )
    publication: Digest | None = Field(default=None, description="SHA-256 of the signed statement")
    replacing: bool = Field(
        default=False, description="Whether a new version of the model takes its place when the open round has closed"
    )
    input_shape: tuple[int, ...] = Field(default=(), description="Shape of a sample, as the model takes it")
    output_shape: tuple[int, ...] = Field(default=(), description="Shape of what the model answers to a sample")
    global_model_usable: bool
    device_kinds: tuple[str, ...] = Field(
        default=("sdk",), description="What can take part: sdk, and page for a browser at /join/NAME"
    )
    no_pages_because: str | None = Field(default=None, description="Why no page can take part, where none can")
    settings: FederationSettings


class MakeJoinLink(Request):
    """``POST /v1/federations/{name}/join-link``. Neither field is kept or logged."""

    server: str | None = Field(
        default=None, description="The coordinator's address as phones call it; null: the one that this call came to"
    )
    token: str | None = Field(
        default=None, repr=False, description="The enrolment token for the link; left out where none is needed"
    )


class JoinLink(Answer):
    """The link with which a browser becomes a device of a federation. Whoever has it may enrol."""

    link: str = Field(
        pattern=rf"^https?://[!-~]{{1,{LONGEST_LINK}}}$",
        repr=False,
        description="An address: /join/NAME, behind # token=SECRET where an enrolment token is needed, and "
        "publisher=FINGERPRINT where the model is signed",
    )
    svg: str = Field(repr=False, description="Its QR code, an SVG document")
    hints: tuple[str, ...] = Field(default=(), description="What whoever hands it out should know")


# --- devices -----------------------------------------------------------------------------------------------------


DataWarnings = Annotated[
    tuple[Annotated[str, Field(max_length=300)], ...],
    Field(
        max_length=5, description="Columns or channels in which the device's data differ wildly from the publisher's"
    ),
]


class DeviceProfile(Request):
    """The profile that a device sends when it enrols."""

    board: str = Field(default="", max_length=200)
    system: str = Field(default="", max_length=200)
    cores: int = Field(default=1, ge=1, le=4096)
    memory_bytes: Count = 0
    sensors: tuple[Annotated[str, Field(max_length=300)], ...] = Field(default=(), max_length=32)
    sdk_version: str = Field(default="", max_length=50)
    data_warnings: DataWarnings = ()


class Enrol(Request):
    """``POST /v1/federations/{name}/devices``.

    ``enrolment_key`` is a secret that the device makes and stores before it asks: should the answer be lost, asking
    again with the same key gives the same device a new token, while nobody else can take its name. The token of before
    is good until the new one is used for the first time, so that it does not matter if a call comes twice.
    """

    name: DeviceName
    enrolment_key: str = Field(min_length=32, max_length=128)
    budget: Share = 1.0
    limited_by: BudgetLimit | None = None
    num_examples: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Samples in the device's training data; its updates count with no more",
    )
    identity_key: Key32 | None = Field(
        default=None, description="Public Ed25519 key by which others know the device's keys in secure rounds"
    )
    hosted: bool = Field(
        default=False,
        description="One of many that a process hosts in turn: until its turn it may be silent, so only deadlines hold",
    )
    profile: DeviceProfile = DeviceProfile()


class Enrolled(Answer):
    """The device's identity: keep the token secret."""

    device_id: Id
    token: Secret
    notice: str | None = Field(default=None, description="What the device's user should know, where there is something")


class RenewToken(Request):
    """``POST /v1/devices/{id}/token``: the key that the device enrolled with. A token alone renews nothing, so that
    whoever has taken it loses it when the device renews."""

    enrolment_key: str = Field(min_length=32, max_length=128)


class NewToken(Answer):
    """A device's new token. The old one is good until this one is used for the first time."""

    token: Secret


class PauseReason(str, Enum):
    """Why a device does not work now: all that its policy tells a coordinator, which needs to know how long it may be
    without the device, and no more."""

    charging = "charging"
    battery = "battery"
    heat = "heat"
    throttled = "throttled"
    power = "power"
    network = "network"
    load = "load"
    memory = "memory"
    storage = "storage"
    hours = "hours"
    energy = "energy"


Why = Annotated[PauseReason | Annotated[str, Field(max_length=500)], Field(union_mode="left_to_right")]
"""A word of the fixed set if a policy decides; else a failure of ``protocol.failures``, or a sentence of a client that
does not use the SDK."""


class BudgetLimit(str, Enum):
    """The limit of a device's budget."""

    memory = "memory"
    deadline = "deadline"
    heat = "heat"


class Conditions(Request):
    """The conditions of a device; ``available`` False says that it leaves for now."""

    available: bool = True
    reason: Why = ""


class ChangeDevice(Request):
    """``PATCH /v1/devices/{id}``: a device changes its budget or conditions, an admin revokes it.

    ``holds_model`` is what a device finds when it starts: False asks for the whole model again, its state was lost.
    ``limited_by`` belongs to ``budget``. ``num_examples`` and ``data_warnings`` are those of ``Enrol``, if the data
    have changed since.
    """

    budget: Share | None = None
    limited_by: BudgetLimit | None = None
    num_examples: int | None = Field(default=None, ge=1, le=2**40)
    holds_model: bool | None = None
    data_warnings: DataWarnings | None = None
    conditions: Conditions | None = None
    revoked: Literal[True] | None = None


class Doing(str, Enum):
    """The activity of a device, or the reason why it is not training: the first of these that holds."""

    revoked = "revoked"
    stopped = "stopped"  # it has stopped early: it is only asked to evaluate
    training = "training"
    untrained = "untrained"  # its federation has ended, and it handed all of its training back
    done = "done"  # its federation has ended
    paused = "paused"  # by its policy
    away = "away"  # it missed a deadline, fell silent during work, or left
    offline = "offline"  # it has not been heard of for longer than a device is that waits for work
    small_budget = "small_budget"  # too small for its federation's method
    evaluating = "evaluating"
    resting = "resting"  # it has handed its work back, or its updates were refused
    ready = "ready"  # not drawn


class Kind(str, Enum):
    """The kinds of work; see docs/architecture.md, "A round". Keys, shares, agree and unmask are of secure rounds."""

    train = "train"
    evaluate = "evaluate"
    compare = "compare"
    personalise = "personalise"
    prepare = "prepare"
    adapt = "adapt"
    keys = "keys"
    shares = "shares"
    agree = "agree"
    unmask = "unmask"


JUDGING = (Kind.evaluate, Kind.compare)
"""The kinds of work that judge models, none of which changes."""


class DeviceFailure(Answer):
    """The reason why a device's work came to nothing: a failure in words, or a sentence of the coordinator or of
    another client than the SDK."""

    reason: str
    round: int | None = Field(description="None where it had no work")
    kind: Kind | None = None
    at: str


class DeviceInfo(Answer):
    """The description of a device for an observer."""

    device_id: str
    name: str
    status: Literal["active", "stopped", "revoked"]
    stopped_round: int | None
    doing: Doing
    present: bool = Field(description="False after a missed deadline, silence or a goodbye, until it asks for work")
    paused: PauseReason | None = Field(default=None, description="Why its policy keeps it from working, if it does")
    budget: float
    limited_by: BudgetLimit | None = Field(
        default=None, description="What keeps its budget from being larger, where the device chose it"
    )
    failure: DeviceFailure | None = Field(
        default=None,
        description="Why its last work came to nothing; None once such work of it was accepted: of a round, if it "
        "failed in one",
    )
    accuracy: float | None = Field(
        default=None, description="On its test data, as it last told: of its personal model, else of the global one"
    )
    seconds: float | None = Field(default=None, description="Download and training of its last update")
    profile: DeviceProfile
    everything: Moved = Field(default=Moved(), description="Bodies of all its calls so far, as it counted them")
    enrolled_at: str
    seen_at: str = Field(description="Last sign of life, to about 15 seconds")


# --- assignments -------------------------------------------------------------------------------------------------


class DeviceStates(Answer):
    """``GET /v1/federations/{name}/devices/states``: the first devices in natural order of their names, and what each
    is doing; two lists of one length. Those that were revoked are left out."""

    names: tuple[str, ...]
    doing: tuple[Doing, ...]
    total: int = Field(description="Devices in all: beyond the most that was asked for, the lists have not all")


class DeviceRound(Answer):
    """One piece of work of a device: what became of it, how good it was, and what it cost."""

    round: int
    kind: Kind
    status: Literal["open", "done", "returned", "expired"]
    reason: str | None = Field(default=None, description="Why it was handed back or given up")
    began_at: str
    loss: float | None = Field(default=None, description="Of training; of an evaluation, of the personal model")
    accuracy: float | None = Field(default=None, description="Of the personal model on the device's test data")
    accuracy_global: float | None = None
    seconds: float | None = Field(default=None, description="Download, training or evaluation, and upload")
    bytes_up: int | None = None
    bytes_down: int | None = None
    joules: float | None = None


class DeviceHistory(Answer):
    """``GET /v1/devices/{id}``: a device, and what it did, the newest first."""

    device: DeviceInfo
    federation: str
    work: tuple[DeviceRound, ...]


class Payload(Answer):
    """The bundle that belongs to an assignment, at ``GET /v1/assignments/{id}/payload``."""

    bytes: Total
    sha256: Digest


class Work(Answer):
    """The neurons to train, in seed form: ``masks.NeuronDraw`` of these values. None where all are trained."""

    key: str = Field(pattern=r"^[0-9a-f]{32}$", description="Of this device and round alone")
    ratio: Share


ASSIGNMENT_TYPE = "application/vnd.sparrow.assignment"
"""The media type of an answer that brings a small payload along: one line of JSON, then the payload's bytes, if any."""


class Assignment(Answer):
    """``GET /v1/federations/{name}/assignment``: one piece of work for one device."""

    assignment_id: Id
    kind: Kind
    round: int = Field(ge=0, le=1_000_000)
    deadline_seconds: float = Field(
        ge=0, le=8 * 86400, allow_inf_nan=False, description="Seconds left when this answer was written"
    )
    settings: FederationSettings
    payload: Payload | None = None
    work: Work | None = None
    plan: dict[str, bool | int | float | str] = Field(
        default_factory=dict, max_length=100, description="What the method asks of this round beyond the settings"
    )
    model_sha256: Digest | None = Field(
        default=None, description="The global model that the payload is of, where a device may later hold on to it"
    )
    manifest_digest: Digest | None = Field(
        default=None,
        description="The federation's manifest as it is now; another one than the device's names new graphs",
    )
    secure: SecureWork | None = Field(default=None, description="What a device is told of a secure round")


class OpenAssignment(Answer):
    """Work that a device has been given and has not answered yet."""

    assignment_id: str
    device: str = Field(description="The device's name")
    kind: Kind
    round: int
    since: str = Field(description="When it was given")
    heard_at: str = Field(description="When the device was last heard of, by any call of its own")


class OpenWork(Answer):
    """``GET /v1/federations/{name}/assignments``: who is being waited for, oldest work first."""

    at: str = Field(description="When the coordinator looked")
    status: FederationStatus
    round: int = Field(description="Rounds closed so far")
    assignments: tuple[OpenAssignment, ...]


class HandBack(Request):
    """``DELETE /v1/assignments/{id}``: why the device cannot do it, as ``Why``; the SDK sends no sentences."""

    reason: Annotated[
        PauseReason | Annotated[str, Field(min_length=1, max_length=500)], Field(union_mode="left_to_right")
    ]


# --- what a device reports ---------------------------------------------------------------------------------------


class Phase(Request):
    """The costs of one phase of a round. Bytes are those of its HTTP bodies (payload or update), repetitions included.

    ``joules`` is None where ``quality`` is unavailable; ``source`` names the sensor or the estimate. Of ``seconds``
    the device paused ``paused_seconds`` for its policy and was throttled for ``throttled_seconds``, None where it
    cannot tell; ``celsius_peak`` is the highest temperature that it saw, None without a sensor.
    """

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
    """Header ``Sparrow-Upload-Cost``: what the last upload cost, sent with the device's next call.

    ``everything`` counts the bodies of all calls of this device so far: training, evaluation, and what is around them.
    """

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

    ``personal`` and ``global_model`` are what an evaluation found on test data; ``adapt`` reports the personal model it
    ended with. ``validation`` is the personal model, or where there is none the global one, on validation data: what
    settings are tuned on. ``evidence`` is what ``compare`` ends with. ``finetune_flops`` are of what was trained for
    this, such as a fine-tuned copy; ``inference_flops`` those of one sample through the model that counts, weights of
    zero left out; 0 if unknown.
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


class UpdateAccepted(Answer):
    """Answer to an update: 201 with ``new`` True, 200 with False for the same one again."""

    new: bool
    next: Assignment | None = Field(
        default=None, description="The next work, for a caller that accepts it here; None: ask for it"
    )


class UpdateReceived(Answer):
    """The bytes that have arrived of an interrupted update."""

    received: int = Field(description="Bytes; the rest is sent with Content-Range")


# --- records and errors ------------------------------------------------------------------------------------------


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
