"""Messages about federations: creating, changing and describing them, and links to them."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import Field

from ..fields import LONGEST_LINK, Answer, Digest, FederationName, Request
from ..settings import FederationSettings
from ..signatures import Publication


class CreateFederation(Request):
    """``POST /v1/federations`` for a built-in task; for a model of one's own it is the note of a checkpoint.

    That (``POST /v1/federations/from-model``) holds the initial values by name and, as uint8 vectors,
    ``sparrow.manifest`` (JSON), ``sparrow.skeleton`` and the other graphs that the manifest names, such as
    ``sparrow.step``.
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
    """``POST /v1/federations/{name}/comparison``: what its publisher would ask for. model_digest: the manifest's, left
    out for a built-in task."""

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
