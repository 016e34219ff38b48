"""Messages about federations: creating, changing and describing them, and links to them."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import Field

from ..fields import LONGEST_LINK, Answer, Digest, FederationName, Request
from ..settings import FederationSettings
from ..signatures import Publication
from ..tags import AllowedTags, Where


class CreateFederation(Request):
    """``POST /v1/federations`` for a built-in task; for other models it is the note of a checkpoint.

    The checkpoint (``POST /v1/federations/from-model``) has the initial values by name and, as uint8 vectors,
    ``sparrow.manifest`` (JSON), ``sparrow.skeleton`` and the manifest's other graphs, such as ``sparrow.step``.
    """

    name: FederationName
    task: str | None = Field(
        default=None, max_length=200, description="Built-in task; unset if a manifest is published"
    )
    settings: FederationSettings = FederationSettings()
    publication: Publication | None = Field(
        default=None, description="Terms signed by the author; in a checkpoint the vector sparrow.publication"
    )

    def as_given(self) -> str:
        """Return only explicitly given settings as JSON, because ``method=auto`` may change all others."""
        return self.model_dump_json(exclude_unset=True)


class OfferedMethod(Answer):
    """A method that is installed on this coordinator."""

    name: str
    secure: bool = Field(description="Whether a federation of this method can be secure")


class Choices(Answer):
    """Options for a new federation with a built-in task."""

    tasks: tuple[str, ...]
    methods: tuple[OfferedMethod, ...]


class CompareFederation(Request):
    """``POST /v1/federations/{name}/comparison``: the settings that its publisher would ask for."""

    task: str = Field(max_length=200)
    # Model digest of the manifest, unset for a built-in task.
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
    tags: AllowedTags | None = None
    cohort_where: Where | None = None
    operator: str | None = Field(default=None, max_length=120, description="Who runs the federation")
    purpose: str | None = Field(default=None, max_length=300, description="What its model is for")


class ModelInfo(Answer):
    """A stored global model."""

    version: int
    round: int | None = Field(description="Round that made it; 0: the first model; null: unknown")
    bytes: int
    model_sha256: str | None
    undone: bool = Field(description="Whether an operator has since rolled back to an older model")
    current: bool = Field(description="Whether the next round starts from it")
    accuracy: float | None = Field(
        default=None,
        description="Mean over the devices that evaluated after its round, on validation data if they report them, "
        "else on held-out data; null if none did",
    )
    loss: float | None = Field(default=None, description="Likewise")
    devices: int = Field(default=0, description="Number of these devices; 0: unknown, as in secure rounds")
    best: bool = Field(
        default=False,
        description="Whether its evaluation is the best of all kept ones, except those that fewer than half as many "
        "devices evaluated as another",
    )


class FederationStatus(str, Enum):
    """The states of a federation."""

    waiting = "waiting"
    running = "running"
    paused = "paused"
    finished = "finished"
    stopped = "stopped"


class PrivacySpent(Answer):
    """Privacy cost of the global models so far: (epsilon, delta) for the most frequently drawn device."""

    epsilon: float = Field(
        description="Upper bound for the published models; reports and the coordinator's own view are not covered"
    )
    delta: float
    adjacency: Literal["replacement", "zero_out"] = Field(
        description="Neighbours: a device's updates replaced by any others, or by zeros"
    )
    most_draws: int = Field(description="Rounds of the device drawn most often")


class FederationInfo(Answer):
    """The description of a federation."""

    uid: str = Field(description="Distinguishes federations of the same name on a coordinator that was set up anew")
    name: str
    method: str
    task: str
    status: FederationStatus
    reason: str | None = Field(
        default=None, description="Reason of its end: all_stopped, max_rounds, too_few or operator"
    )
    waiting_for: str | None = Field(default=None, description="Reason why a running federation opens no round")
    warning: str | None = Field(default=None, description="Problem that its method has found")
    notice: str | None = Field(default=None, description="Consequence of its settings that its operator should know")
    round: int = Field(description="Rounds closed so far")
    rounds: int
    devices: int
    devices_stopped: int
    model_version: int
    rollback_version: int | None = Field(default=None, description="Global model to go back to after the open round")
    model_sha256: str
    privacy: PrivacySpent | None = Field(default=None, description="With noise_multiplier")
    parameters: int = Field(description="Trained values of the model")
    frozen_parameters: int = Field(default=0, description="Frozen values of the model")
    frozen_bytes: int = Field(default=0, description="Bytes of frozen values, which a device downloads once")
    published_bytes: int = Field(
        default=0, description="Bytes of the publication: weights, manifest and graphs; 0: built in"
    )
    manifest_digest: str
    publisher: Digest | None = Field(
        default=None, description="Public key of the model's publisher; unset if it is built in or not signed"
    )
    publication: Digest | None = Field(default=None, description="SHA-256 of the signed statement")
    replacing: bool = Field(
        default=False, description="Whether a new version of the model replaces it after the open round"
    )
    input_shape: tuple[int, ...] = Field(default=(), description="Shape of the model's input per sample")
    output_shape: tuple[int, ...] = Field(default=(), description="Shape of the model's output per sample")
    global_model_usable: bool
    device_kinds: tuple[str, ...] = Field(
        default=("sdk",), description="Kinds of devices: sdk, and page for a browser at /join/NAME"
    )
    no_pages_because: str | None = Field(default=None, description="Reason why pages cannot take part")
    smallest_sum: int | None = Field(
        default=None, description="With secure: least number of devices whose updates are summed"
    )
    settings: FederationSettings


class MakeJoinLink(Request):
    """``POST /v1/federations/{name}/join-link``. Both fields are neither stored nor logged."""

    server: str | None = Field(
        default=None, description="The coordinator's address for phones; null: the address of this call"
    )
    token: str | None = Field(default=None, repr=False, description="Enrolment token for the link, if one is needed")


class JoinLink(Answer):
    """A link for joining a federation in a browser. Anyone with the link can join."""

    link: str = Field(
        pattern=rf"^https?://[!-~]{{1,{LONGEST_LINK}}}$",
        repr=False,
        description="An address: /join/NAME, after # token=SECRET if an enrolment token is needed, and "
        "publisher=FINGERPRINT if the model is signed",
    )
    svg: str = Field(repr=False, description="Its QR code, an SVG document")
    hints: tuple[str, ...] = Field(default=(), description="Hints for handing it out")
