"""One device's conversation with its coordinator: enrol, ask, download, train, upload, and go on after any death.

``Session.step`` does one thing and returns; ``join`` calls it in a loop, a fleet for many devices in turn. Between
steps everything that matters is on disk (``state``), so a step can be killed anywhere:

    before the state is saved   the assignment is still open: it is given again and done again, from the same model and
                                with the same random numbers, so to the same update
    after it                    the outbox holds the update: it is sent again, byte for byte, and counts once
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import ValidationError

from sparrow.command_line.table import printable
from sparrow.devices import EnergyMeter
from sparrow.devices.memory import available
from sparrow.graphs import Graphs
from sparrow.protocol import bundle, personal
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import BundleError, ManifestError, ProtocolError
from sparrow.protocol.evidence import Pool, choice
from sparrow.protocol.failures import Failure
from sparrow.protocol.fields import MOST_COUNT, MOST_FLOPS, bounded
from sparrow.protocol.flops import forward_flops, nonzero_flops
from sparrow.protocol.manifest import Array, GraphName, Manifest, Tensors
from sparrow.protocol.masks import Mask, NeuronMask, merge_in_place, pack, same_mask
from sparrow.protocol.messages import (
    JUDGING,
    Assignment,
    ChangeDevice,
    Conditions,
    DeviceProfile,
    Enrol,
    Evaluation,
    FederationInfo,
    Kind,
    Moved,
    PauseReason,
    Payload,
    Phase,
    Receipt,
    Telemetry,
    UpdateReport,
    UploadCost,
)
from sparrow.protocol.neurons import mask_digest, mask_from_file, mask_to_file
from sparrow.protocol.parts import expected
from sparrow.protocol.quantization import Quantised
from sparrow.protocol.secure.messages import Statement
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.skew import LabelSketch

from ..budget.prediction import held
from ..budget.preparation import Prepared
from ..budget.search import Choice
from ..engines import Engine, EngineChoice, evaluate_held_out
from ..engines.training import VALUES, TrainingDiverged, UnsoundModel, count_steps
from ..errors import (
    BadArgument,
    Damaged,
    FederationDeleted,
    FederationOver,
    ModelReplaced,
    NameTaken,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    Refused,
    RoundOver,
    SdkError,
    TokenExpired,
    failure_of,
)
from ..methods import DeviceState, Evaluated, Job, Trained, Update, load_method
from ..methods.early_stopping import gives_way
from ..methods.merging import GLOBAL_SHARES, is_whole, mixed, whole_model
from ..tasks import Task, count_examples
from ..tasks.compute import PROCESSOR
from ..tasks.intake import take_in
from ..tasks.metrics import METRICS
from .candidates import SHARE, SHARES, Candidates, Ending
from .connection import Traffic
from .demands import Demands
from .diagnosis import diagnose
from .heartbeat import Heartbeat
from .label_prior import LabelPrior, asks_for_labels
from .local_noise import WITHHELD, LocalNoise, check_history, count_update, withhold
from .opening import (
    Prepare,
    as_taken,
    check_digest,
    choose_engine,
    fetch_graphs,
    open_onnx,
    open_torch,
)
from .rounding import round_update
from .state import Best, Identity, NewData, Pending, StateFolder, Totals
from .telemetry import Telemetry as Meter
from .trainable import CannotTrain
from .transport import Transport
from .trust import Trust
from .validation import digest_of
from .values import load_values
from .watchdog import LOOK_SECONDS, Paused, Watchdog, WatchedWork

if TYPE_CHECKING:
    from .secure import SecureRound

log = logging.getLogger(__name__)

JSON_TYPE = "application/json"
PATIENCE_WHEN_LEAVING = 3.0
RESERVE_SECONDS = 5.0
"""Of a round's deadline, what is kept for judging and sending after the last step, at least."""
MASK = "mask.bits"
"""The file of the mask that this device holds: of elements, as last received, or of the neurons that it has chosen."""
FAILURES = 3
"""Rounds in a row that fail, of a device that has trained in none, after which it gives up."""
TRAINING = (Kind.train, Kind.personalise, Kind.prepare)
"""The kinds of work that train in a round."""
FIRST_REST, LONGEST_REST = 5.0, 900.0
"""Seconds of rest after a fault of the coordinator; each in a row doubles it."""
FINAL = (NotAuthenticated, NotAllowed, NameTaken, FederationOver, FederationDeleted)
"""Refusals that concern the device itself. After any other it tries again: it may come of a coordinator's fault."""


Answer = TypeVar("Answer")


class Outcome(Enum):
    """The outcome of a step."""

    worked = "worked"
    idle = "idle"
    over = "over"


@dataclass(frozen=True)
class Step:
    """Outcome of one step. ``assignment`` is what was worked on; ``pause_seconds`` how long an idle device rests, as it
    is asked to or after a fault; ``paused`` why its policy keeps it idle; ``failed`` why nothing came of the work."""

    outcome: Outcome
    assignment: Assignment | None = None
    pause_seconds: float = 0.0
    paused: PauseReason | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Known:
    """The facts of a federation that a device needs before it can enrol; a fleet asks for them once.

    preparation: the graph; None if the model takes samples as they are. trust: the rules of the fleet.
    """

    info: FederationInfo
    manifest: Manifest
    trust: Trust
    preparation: bytes | None = None

    @classmethod
    def of(cls, transport: Transport, federation: str) -> Known:
        """Ask for them."""
        info = transport.federation(federation)
        manifest = transport.manifest(federation)
        trust = Trust(federation, Demands())
        trust.admit(info, manifest, lambda: transport.publication(federation))
        graph = None
        if manifest.preparation is not None:
            graph = transport.graph(federation, "preparation")
            check_digest(manifest, "preparation", graph)
        return cls(info, manifest, trust, graph)

    def prepared(self, task: Task) -> Task:
        """Return a hosted device's task, its data checked and its samples prepared."""
        if task.prepared is not None:
            return task
        if self.preparation is None:
            return take_in(as_taken(task, self.manifest), self.manifest)
        task = take_in(task, self.manifest)
        from ..tasks.prepared import prepared_hosted

        return prepared_hosted(task, self.manifest, self.preparation)


def load_mask(folder: StateFolder, manifest: Manifest) -> ElementMask | NeuronMask | None:
    """Return the mask that a device holds. A file that cannot be read counts as none: it is sent, or chosen, again."""
    data = folder.cached(MASK) or b""
    try:
        return mask_from_file(manifest, data[32:]) if data[:32] == hashlib.sha256(data[32:]).digest() else None
    except ProtocolError:
        return None


@dataclass(frozen=True)
class SessionOptions:
    """The way a session works.

    budget: of a device that does not choose its own. engine: what trains (``choose_engine``); ONNX Runtime needs only
    the task's data; or an engine itself, which devices may use one after another. prepare: given task, manifest,
    federation and what makes the engine's rehearsals before the device enrols; returns the task as it is to be
    computed, or raises if that cannot be. telemetry: made from the transport's counters. profile: the device's
    description of itself, this machine's by default. progress: called with (assignment, steps done, steps in all, loss)
    while the device trains. watchdog: holds the device to its policy, between assignments and between batches.
    local_noise: added to each update before it is sent. memory_limit: bytes that the process may hold; None: what there
    is. known: the facts of a federation that would be asked for otherwise. announce: whether a device that is enrolled
    reports that it is there. hosted: whether it is one of many that a process hosts in turn: such a device may be
    silent, and sends no heartbeats.
    """

    budget: float = 1.0
    engine: EngineChoice | Engine = "auto"
    prepare: Prepare | None = None
    telemetry: Callable[[Traffic], Meter] = lambda traffic: Meter(EnergyMeter(), traffic)
    profile: DeviceProfile | None = None
    progress: Callable[[Assignment, int, int, float], None] = lambda assignment, done, total, loss: None
    watchdog: Watchdog | None = None
    demands: Demands = field(default_factory=Demands)
    local_noise: LocalNoise | None = None
    memory_limit: int | None = None
    known: Known | None = None
    announce: bool = True
    hosted: bool = False


USUAL = SessionOptions()


class Session:
    """One device in one federation.

    make_task: gives the task once the federation's settings and its manifest are known. Raises the errors that
    ``errors`` lists; the state folder stays usable.
    """

    def __init__(
        self,
        transport: Transport,
        folder: StateFolder,
        *,
        federation: str,
        name: str,
        make_task: Callable[[FederationInfo, Manifest], Task],
        options: SessionOptions = USUAL,
    ) -> None:
        known, local_noise, engine, prepare = options.known, options.local_noise, options.engine, options.prepare
        budget = options.budget
        self._make_task = make_task
        self._memory_limit = options.memory_limit
        self._transport = transport
        self._demands = options.demands
        self._local_noise = local_noise
        self._hosted = options.hosted
        self._watchdog = options.watchdog
        self._away: PauseReason | None = None  # what the coordinator was told last
        self._uploading = 0.0  # seconds that the last upload took
        self._folder = folder
        self._federation = federation
        self._profile = options.profile
        self._report_progress = options.progress
        self.failed_rounds = 0  # in a row, since this process began
        self.last_failure: str | None = None
        # The same, as the coordinator learns it.
        self.reported_failure: Failure | None = None
        self._faults = 0  # of the coordinator, in a row
        self._next: Assignment | None = None  # what came with the answer to the last update
        self._working_on: Assignment | None = None  # stays when a step is interrupted: leave() hands it back
        self._telemetry = options.telemetry(transport.traffic)
        self._enrolment_token = transport.token
        before = folder.known_identity()
        if before is not None and before.token is not None:
            transport.token = before.token
            if before.previous is not None:
                self._settle_token(before)
        try:
            self.info = known.info if known else transport.federation(federation)
        except TokenExpired:
            transport.token = self._enrolment_token
            self.info = transport.federation(federation)
        self._identity = folder.identity(federation, self.info.uid, name)
        self._trust = known.trust if known else Trust(federation, self._demands, folder)
        self.manifest = known.manifest if known else self._load_manifest(self.info)
        self._method = load_method(self.info.method)
        if local_noise is not None:
            local_noise.check(self._method, self.manifest, self.info.settings)
        self.differences: list[tuple[str, str]] = []
        task = self._load_task()
        self.frozen, self._first = Tensors(), Tensors()
        if known is None:
            share = not self._demands.own_frozen
            self.frozen = load_values("frozen", self.manifest, federation, transport, folder.path, share=share)
            self._first = load_values("first", self.manifest, federation, transport, folder.path)
        # Built-in steps are known by their digests.
        self._step_checked = self._trust.built_in
        self._own_graphs = False  # the engine trains with them, and is this session's alone
        self._prepared: Prepared
        self.engine: Engine
        if not isinstance(engine, str):
            self._prepared, self.engine = Prepared(task, budget), engine
        elif choose_engine(engine, task, self.manifest, self.info.method) == "onnx":
            self._own_graphs = True
            self._prepared, self.engine = self._open_onnx(task, prepare, budget)
        else:
            values = {**self.frozen, **self._first}
            self._prepared, self.engine = open_torch(task, self.manifest, self.info, values, prepare, budget)
        self.task = self._prepared.task
        log.info("%s trains with %s", name, self.engine.title)
        self._prior = LabelPrior.of(self.task, self.manifest, self.info.settings)
        if self._prior is not None:
            self._prior.check(self.engine, self.task.train)
        if known is None:
            self._note_membership()
        self.personal, self.progress = folder.load(self.manifest)
        check_history(local_noise, self.progress, folder.path)
        self._personal_is: Best | None = None  # what the personal model in memory is; another best one is on disk alone
        self._moved_before = self.progress.everything
        self._as_new = {} if self.personal is not None else self._never_sent()
        self._mask = load_mask(folder, self.manifest)
        if self._identity.token is None:
            self._enrol()
        elif options.announce:
            transport.token = self._identity.token
            change = ChangeDevice(
                budget=self.budget,
                limited_by=self._prepared.limited_by,
                num_examples=count_examples(self.task.train) or None,
                data_warnings=self._data_warnings(),
                conditions=Conditions(),
                holds_model=self.personal is not None,
            )
            self._or_enrol_again(lambda: self._tell(change))

    @property
    def name(self) -> str:
        """The name of this device in its federation."""
        return self._identity.name

    @property
    def working_on(self) -> Assignment | None:
        """The work that is under way, or that an interrupt has left open."""
        return self._working_on

    @property
    def identity(self) -> Identity:
        """Return the identity under which the coordinator knows this device."""
        return self._identity

    @property
    def transport(self) -> Transport:
        """Return the transport that this session calls the coordinator with."""
        return self._transport

    @property
    def trust(self) -> Trust:
        """The rules by which this device accepts its federation."""
        return self._trust

    @property
    def folder(self) -> StateFolder:
        """Return the folder in which this device keeps its state."""
        return self._folder

    @property
    def mask(self) -> ElementMask | NeuronMask | None:
        """Return the mask that this device keeps between rounds, if its method has one."""
        return self._mask

    @property
    def budget(self) -> float:
        """The share of each layer's neurons that this device trains now."""
        return self._prepared.budget

    @property
    def choice(self) -> Choice | None:
        """The reasons for the budget; None where the user gave it."""
        return self._prepared.choice

    @property
    def moved(self) -> Moved:
        """Bytes of all HTTP bodies of this device so far: training, evaluation, and what is around them."""
        traffic = self._transport.traffic
        return self._moved_before.plus(traffic.down, traffic.up, traffic.frozen)

    # --- identity ------------------------------------------------------------------------------------------------

    def _load_manifest(self, info: FederationInfo) -> Manifest:
        """Return the federation's manifest, downloaded once: anew if the one that is there is another.

        Raises BadPublication for one that this device does not accept; then everything stays as it was.
        """
        cached = self._folder.cached(personal.MANIFEST)
        manifest = None
        with suppress(ValidationError):  # damaged on the disk
            manifest = Manifest.model_validate_json(cached) if cached else None
        before = manifest
        if manifest is None or manifest.digest != info.manifest_digest:
            manifest = self._transport.manifest(self._federation)
        self._trust.admit(info, manifest, lambda: self._transport.publication(self._federation))
        if manifest is not before:
            if before is not None and _only_prepares_otherwise(before, manifest):
                log.warning("the federation prepares its samples in another way; this device's model starts again")
                self._folder.forget_model()
            self._folder.cache(personal.MANIFEST, manifest.model_dump_json().encode(), durable=False)
        return manifest

    def _load_task(self) -> Task:
        """Return this device's task, its data prepared as the federation's model takes them."""
        task = self._make_task(self.info, self.manifest)
        if task.prepared is None and not self._hosted:
            task = self._prepare(task)
        if self._method.check_data is not None:
            self._method.check_data(task, self.info.settings)
        if not task.metrics:  # as of a device that brings its data alone
            task = replace(task, metrics=tuple(name for name in self.manifest.metrics if name in METRICS))
        return task

    def _prepare(self, task: Task) -> Task:
        """Run the federation's preparation over a device's raw samples, and keep what they add to it."""
        description = self.manifest.preparation
        statistics: Mapping[str, Array] = {}
        if description is None:
            if task.preparation is not None:
                raise BadArgument(
                    f"the task has a preparation, but the federation {self.info.name} was published without one: leave "
                    "preparation out and give prepared samples, or publish the model again (replace=True)"
                )
            task = take_in(as_taken(task, self.manifest), self.manifest)
        else:
            task = take_in(task, self.manifest)
            # Here, because ONNX Runtime is imported with it.
            from ..tasks.prepared import compute_own, differences, load_preparer, prepared, raw_statistics

            digest = str(self.manifest.preparation_sha256)
            if description.own:
                kept = personal.read_own(self._folder.cached(personal.OWN), digest)
                statistics = compute_own(task.train, description) if kept is None else kept
            if description.mean:
                self.differences = differences(raw_statistics(task.train, description), description)
            preparer = load_preparer(self.manifest, self._graph("preparation"), statistics)
            task = prepared(task, preparer, memory_limit=self._memory_limit)
        if statistics or task.class_names:
            own = personal.write_own(statistics, self.manifest.preparation_sha256, task.class_names)
            self._folder.cache(personal.OWN, own)
        return task

    def skeleton(self) -> bytes:
        """Return the ONNX skeleton of the federation's model, downloaded once. Raises GraphError."""
        return self._graph("skeleton")

    @cached_property
    def graphs(self) -> Graphs | None:
        """The training step and the evaluation of the federation's model, downloaded once and checked; None where it
        was published without. Raises GraphError for graphs that are not the manifest's, or must not be run."""
        found = fetch_graphs(self.manifest, self._graph, self.frozen, self._first)
        if found is None:
            return None
        graphs, self._needs = found
        return graphs

    def _open_onnx(self, task: Task, prepare: Prepare | None, budget: float) -> tuple[Prepared, Engine]:
        assert self.graphs is not None, "the manifest names them"
        free = available() if self._memory_limit is None else self._memory_limit - held(PROCESSOR)
        return open_onnx(
            *(task, self.manifest, self.info, self.graphs, prepare, budget),
            needs=self._needs,
            free=free,
            trial=not self._trust.built_in,
        )

    def _take_new_version(self) -> None:
        """Go on with a new version of the federation's model, of the same values and of other graphs.

        Raises ModelReplaced where PyTorch trains, with code of the version before, and for one
        device of a fleet, whose engine is not its own.
        """
        manifest = self._load_manifest(self._transport.federation(self._federation))
        if manifest.tensors_digest != self.manifest.tensors_digest:
            raise ManifestError("the federation's model has other values than this device's; join under another name")
        if not self._own_graphs:
            raise ModelReplaced(
                f"the model of federation {self.info.name} has a new version, and this device trains the one before: "
                f"start it again, with the new code where PyTorch trains (--engine onnx needs none)"
            )
        log.warning("the federation's model has a new version; this device goes on with it")
        before, self.manifest = self.manifest, manifest
        prepares_alike = before.preparation_sha256 == manifest.preparation_sha256
        self.__dict__.pop("graphs", None)
        try:
            task = self.task if prepares_alike else replace(self._load_task(), compute=self.task.compute)
            _, engine = self._open_onnx(task, None, self.budget)
        except SdkError:
            self.manifest = before  # so that it is tried again
            raise
        if prepares_alike:
            engine.load(self.engine.read())
        self.engine, self.task = engine, task
        self._step_checked = False
        if not prepares_alike:
            self.personal, self.progress = self._folder.load(manifest)
            self._personal_is, self._as_new = None, self._never_sent()
        with suppress(SdkError):  # so that the personal model can be exported later, as in ``join``
            self.skeleton()

    def _graph(self, name: GraphName) -> bytes:
        """Return a graph that has the digest in the manifest, downloaded once. Raises GraphError."""
        file, wanted = personal.graph_file(name), self.manifest.graphs.get(name)
        graph = self._folder.cached(file)
        if graph is None or hashlib.sha256(graph).hexdigest() != wanted:
            graph = self._transport.graph(self._federation, name)
            check_digest(self.manifest, name, graph)
            self._folder.cache(file, graph, durable=False)
        return graph

    def _note_membership(self) -> None:
        membership = personal.Membership(device=self._identity.name, budget=self.budget, federation=self.info)
        self._folder.cache(personal.MEMBERSHIP, membership.model_dump_json(indent=1).encode())

    def _enrol(self) -> None:
        request = Enrol(
            name=self._identity.name,
            enrolment_key=self._identity.enrolment_key,
            identity_key=self._public_identity(),
            budget=self.budget,
            limited_by=self._prepared.limited_by,
            num_examples=count_examples(self.task.train) or None,
            hosted=self._hosted,
            profile=(self._profile or own_profile(self._telemetry.describe())).model_copy(
                update={"data_warnings": self._data_warnings()}
            ),
        )
        enrolled = self._transport.enrol(self._federation, request)
        self._identity = self._identity.model_copy(update={"device_id": enrolled.device_id, "token": enrolled.token})
        self._folder.save_identity(self._identity)
        if enrolled.notice:
            log.warning("%s", printable(enrolled.notice))
        self._transport.token = enrolled.token

    def _data_warnings(self) -> tuple[str, ...]:
        """Return the operator's warnings about data unlike the publisher's; none in a secure federation, or with local
        noise."""
        if self.info.settings.secure or self._local_noise is not None:
            return ()
        return tuple(there for _, there in self.differences)

    def _public_identity(self) -> str | None:
        """Return the key by which others know this device in secure rounds. Raises CannotTrain without a library, and
        where the device sends updates under masks alone, and the federation has none."""
        if not self.info.settings.secure:
            if self._demands.secure is not None:
                raise CannotTrain(
                    f"{self._federation} is no secure federation, and this device sends updates under masks alone "
                    f"(require_secure); ask its operator for one with secure=true"
                )
            return None
        if find_spec("cryptography") is None:
            raise CannotTrain("a secure federation needs cryptography: pip install 'sparrow-fl[secure]'")
        from sparrow.protocol.secure.pads import public_identity

        return public_identity(bytes.fromhex(self._identity.identity_key)).hex()

    @property
    def identity_key(self) -> str | None:
        """The public key by which others know this device in secure rounds; None in a federation without any."""
        return self._public_identity() if self.info.settings.secure else None

    @cached_property
    def _secure(self) -> SecureRound:
        from .secure import SecureRound  # cryptography, an extra

        identity = bytes.fromhex(self._identity.identity_key)
        return SecureRound(self._folder, self._identity.name, identity, self._demands.secure, self._trust)

    def _or_enrol_again(self, call: Callable[[], Answer]) -> Answer:
        """Return the answer of ``call``; a device whose token has expired enrols again first.

        Raises Refused where an enrolment token is needed and was not given.
        """
        try:
            return call()
        except TokenExpired:
            self._transport.token = self._enrolment_token
            self._enrol()
            return call()

    def _renew_token(self) -> None:
        """Take a new token. It is kept before it is used, so that there is a good one on disk at any time; and the old
        one until it was used: a coordinator that goes on from a backup knows only that."""
        before = self._identity
        if before.device_id is not None:
            token = self._transport.new_token(before.device_id, before.enrolment_key)
            self._identity = self._identity.model_copy(update={"token": token, "previous": before.token})
            self._folder.save_identity(self._identity)
            self._identity = self._settle_token(self._identity)

    def _settle_token(self, identity: Identity) -> Identity:
        """Use a new token for the first time, or go on with the old one where it is refused."""
        assert identity.device_id is not None, "there is no token without"
        token = self._transport.token = identity.token
        try:
            self._transport.change_device(identity.device_id, ChangeDevice())
        except NotAuthenticated:
            token = self._transport.token = identity.previous
        settled = identity.model_copy(update={"token": token, "previous": None})
        self._folder.save_identity(settled)
        return settled

    def _tell(self, change: ChangeDevice) -> None:
        if self._identity.device_id is not None:
            self._transport.change_device(self._identity.device_id, change)

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self, wait_seconds: float = 0.0) -> Step:
        """Send what is waiting to be sent, or ask for work and do it, or find that there is none.

        No fault of the coordinator ends a device: where it gives work that cannot be used, or refuses for a reason that
        is not in ``FINAL``, the work is handed back and the device rests.
        """
        try:
            step = self._step(wait_seconds)
        except FINAL:
            raise
        except (Refused, Damaged, BundleError) as fault:
            return self._rest(fault)
        if step.outcome is Outcome.worked and step.failed is None:
            self._faults = 0
        return step

    def _rest(self, fault: SdkError) -> Step:
        """Hand back what is open, and rest for longer after each fault in a row."""
        seconds = min(FIRST_REST * 2.0 ** min(self._faults, 30), LONGEST_REST)
        self._faults += 1
        self.last_failure = str(fault)
        self.reported_failure = failure_of(fault)
        log.warning("%s; this device tries again in %.0f s", fault, seconds)
        assignment, self._working_on = self._working_on, None
        if assignment is not None:
            try:
                self._give_up(assignment, self.reported_failure)
            except FINAL:
                raise
            except Refused as refusal:
                log.info("the work could not be handed back: %s", refusal.detail)
        return Step(Outcome.idle, assignment, pause_seconds=seconds, failed=str(fault))

    def _step(self, wait_seconds: float) -> Step:
        if (reason := self._watchdog.look() if self._watchdog else None) is not None:
            self._stay_away(reason)
            self._next = None  # which was taken back with that
            return Step(Outcome.idle, pause_seconds=LOOK_SECONDS, paused=reason)
        self._away = None  # asking for work says that it is back
        if self.progress.pending is not None:
            with self._heard(self.progress.pending.assignment_id, self.info.settings):
                self._send(self.progress.pending)
        assignment, self._next, pause = self._next, None, 0.0
        if assignment is None:
            try:
                assignment, pause = self._or_enrol_again(lambda: self._ask(wait_seconds))
            except FederationOver:
                self._judge_best_again()
                return Step(Outcome.over)
        if self._transport.renewal_due:
            self._renew_token()
        if assignment is None:
            return Step(Outcome.idle, pause_seconds=pause)
        self._working_on = assignment
        failed, to_blame = None, True
        try:
            if assignment.manifest_digest not in (None, self.manifest.digest):
                self._take_new_version()
            self._trust.check(assignment.settings)
            with self._heard(assignment.assignment_id, assignment.settings):
                self._judge_best_again()
                self._work(assignment, self._watched_work(assignment))
        except BundleError:  # of the payload
            raise
        except ModelReplaced as error:
            self._give_up(assignment, failure_of(error))
            raise
        except (TrainingDiverged, ProtocolError) as error:
            failed, to_blame = str(error), not isinstance(error, UnsoundModel)
            if isinstance(error, TrainingDiverged):
                failed = diagnose(error, assignment.settings, self.task.train)
            log.warning("round %s: %s", assignment.round, failed)
            self.reported_failure = failure_of(error)
            self._give_up(assignment, self.reported_failure)
            if assignment.kind in TRAINING:
                self._save_progress(failures=self.progress.failures + 1, failure=failed)
        except Paused as pause_:
            log.warning("round %s is handed back: the pause would last beyond its deadline", assignment.round)
            self._give_up(assignment, pause_.reason)
            self._away = pause_.reason
            self._reassess(assignment)
        except RoundOver as error:
            # The round closed while this device was downloading; there is other work, or will be.
            log.info("round %s: %s", assignment.round, error.detail)
            self._tell(ChangeDevice(conditions=Conditions()))  # it may have been thought away
        self._working_on = None  # not in a finally: after an interrupt or error ``leave`` must know what to hand back
        if assignment.kind not in JUDGING:
            self.failed_rounds = (self.failed_rounds + to_blame) if failed else 0
            self.last_failure = failed or self.last_failure
        return Step(Outcome.worked, assignment, failed=failed)

    def _ask(self, wait_seconds: float) -> tuple[Assignment | None, float]:
        """Ask for work, and say what the last upload cost, which need not be said again."""
        cost = self.progress.upload_cost
        found = self._transport.assignment(self._federation, wait_seconds, cost, *self._holding())
        if cost is not None:
            self.progress = self.progress.model_copy(update={"upload_cost": None})
        return found

    def _holding(self) -> tuple[str | None, str | None]:
        """Return the digests of the mask and of the global model that this device holds."""
        return mask_digest(self.manifest, self._mask) if self._mask else None, self.progress.model

    def _heard(self, assignment_id: str, settings: FederationSettings) -> AbstractContextManager[None]:
        """Have the coordinator hear of this device while it works, transfers included."""
        return nullcontext() if self._hosted else Heartbeat(self._transport, assignment_id, settings.silence_seconds)

    def _reassess(self, assignment: Assignment) -> None:
        """Choose the budget again for the next rounds."""
        controller, hot = self._prepared.controller, self._watchdog is not None and self._watchdog.hot
        if controller is None or assignment.kind is not Kind.train:
            return
        if self._watchdog is not None:
            self._watchdog.hot = False
        before = controller.budget
        if controller.reassess(assignment.settings.deadline_seconds, hot=hot):
            log.info("from budget %g: %s", before, controller.choice)
            self._note_membership()
            self._tell(ChangeDevice(budget=controller.budget, limited_by=controller.choice.limited_by))

    def _stay_away(self, reason: PauseReason) -> None:
        """Say once that the policy keeps this device from work, and why, in a word."""
        if reason is not self._away:
            self._tell(ChangeDevice(conditions=Conditions(available=False, reason=reason)))
            self._away = reason

    def _watched_work(self, assignment: Assignment) -> WatchedWork | None:
        """Return the watched piece of work. No deadline holds for work after the end of the federation."""
        if self._watchdog is None:
            return None
        waits = assignment.kind is not Kind.adapt
        return WatchedWork(
            self._watchdog,
            self._watchdog.clock() + assignment.deadline_seconds if waits else None,
            reserve=max(RESERVE_SECONDS, 2 * self._uploading),
            on_pause=self._telemetry.pause,
        )

    def _give_up(self, assignment: Assignment, reason: PauseReason | Failure) -> None:
        if self.personal is None:  # a part of its own begins as it was, not with what a failed round has left
            self.engine.load(self._as_new)
        self._hand_back(assignment.assignment_id, reason)

    def _never_sent(self) -> Tensors:
        """Return the tensors of the task's model that no payload holds: a device's own part, local
        running statistics."""
        shared = {spec.name for spec in self.manifest.shared}
        return {name: tensor for name, tensor in self.engine.read().items() if name not in shared}

    def leave(self, reason: Failure) -> None:
        """Return open work and mark the device as away, so that the round need not wait for the deadline."""
        self._transport.patience_seconds = PATIENCE_WHEN_LEAVING
        reason = reason if self._local_noise is None else WITHHELD
        try:
            if self._working_on is not None:
                self._hand_back(self._working_on.assignment_id, reason)
            self._tell(ChangeDevice(conditions=Conditions(available=False, reason=reason)))
        except SdkError as error:
            log.warning("could not say goodbye: %s", error)

    def _hand_back(self, assignment_id: str, reason: PauseReason | Failure) -> None:
        if self._local_noise is not None and not isinstance(reason, PauseReason):
            reason = WITHHELD
        try:
            self._transport.hand_back(assignment_id, reason)
        except RoundOver:
            pass  # then nobody waits for it any more
        except NotFound:
            pass  # it was withdrawn: a preparation that took too long

    def _work(self, assignment: Assignment, watched: WatchedWork | None) -> None:
        def after_step(done: int, total: int, loss: float) -> None:
            self._report_progress(assignment, done, total, loss)
            self._telemetry.sample()
            if watched is not None:
                watched.after_step(done, total)

        with self._telemetry.phase("download") as download:
            received = None
            if assignment.payload is not None:
                received = self._receive(assignment, assignment.payload)
                self._keep_mask(_elements(received.mask))
        job = Job(
            assignment=assignment,
            manifest=self.manifest,
            task=self.task,
            engine=self.engine,
            state=DeviceState(
                self.personal,
                self.progress.memory,
                self._folder.own,
                self.progress.model,
                self._mask if isinstance(self._mask, NeuronMask) else None,
            ),
            received=received,
            progress=after_step,
            federation=self.info.name,
            device=self._identity.name,
            budget=self.budget,
        )
        match assignment.kind:
            case Kind.train:
                self._train(job, self._method.train, download.cost)
            case Kind.prepare:
                self._train(job, self._method.prepare, download.cost)
            case Kind.personalise:
                self._personalise(self._adjusted(job), download.cost)
            case Kind.evaluate:
                self._evaluate(self._adjusted(job), download.cost)
            case Kind.compare:
                self._compare(self._adjusted(job), download.cost)
            case Kind.adapt:
                self._adapt(self._adjusted(job), download.cost)
            case Kind.keys | Kind.shares | Kind.agree | Kind.unmask:
                self._keep_and_send(assignment, self._secure.answer(assignment), job.state)
            case other:
                log.warning("%s on this device has no work of kind %s", self.info.method, other.value)
                self._hand_back(assignment.assignment_id, Failure("unknown-work"))

    def _adjusted(self, job: Job) -> Job:
        """Return the work with this device's class frequencies in what was received, where the federation wants it."""
        return job if self._prior is None else self._prior.received(job)

    def _receive(self, assignment: Assignment, payload: Payload) -> bundle.Bundle:
        """Return the decoded payload. Raises Damaged where it is not what this model's can be."""
        parts = expected(self._method.payload_parts, self.manifest, assignment.plan)
        largest = bundle.largest_payload(self.manifest, parts)
        if payload.bytes > largest:
            raise Damaged(
                f"a payload of {payload.bytes:,} bytes is announced, of this model it has at most {largest:,}",
                failure=Failure("bad-payload/size"),
            )
        body = self._transport.payload(assignment.assignment_id, payload)
        try:
            return bundle.decode(body, self.manifest, _elements(self._mask), parts=parts)
        except BundleError as error:
            raise Damaged(f"the payload cannot be used: {error}", failure=error.failure) from error

    def _keep_mask(self, mask: ElementMask | NeuronMask | None) -> None:
        if mask is not None and not same_mask(mask, self._mask):
            data = mask_to_file(self.manifest, mask)
            self._folder.cache(MASK, hashlib.sha256(data).digest() + data)
            self._mask = mask

    def _train(self, job: Job, work: Callable[[Job], Trained], download: Phase) -> None:
        self._check_training(job)
        self._check_step(job)
        adjusted = self._adjusted(job)
        first = self._judge_first(adjusted)
        with self._telemetry.phase("train") as train:
            trained = work(adjusted)
            best = self._find_best(job, trained)
            train.flops = trained.flops
        if self._local_noise is not None:
            trained = withhold(trained)
        trained = self._within_joules(job, trained, download, train.cost)
        assert trained.update is not None, "such a round ends with values to send"
        update = trained.update if self._prior is None else self._prior.sent(job, trained.update)
        if self._local_noise is not None:
            update = self._local_noise.hide(job, update)
        statement: Statement | None = None
        if job.assignment.settings.secure and job.assignment.kind is Kind.train:
            with self._telemetry.phase("evaluate") as measured:
                metrics = self._metrics(adjusted, trained, best) if job.assignment.settings.masks_metrics else None
            first["evaluation"] = self.progress.evaluation.plus(measured.cost)
            hidden = self._secure.mask(job, update, metrics)
            update, statement = replace(update, values=hidden.values, extras=hidden.extras), hidden.statement
            trained = replace(trained, counts={**trained.counts, "clipped_values": hidden.clipped})
        trained = replace(trained, counts={**trained.counts, **self._carried(job, update)})
        report = _report(
            *(trained, job, download, train.cost, statement),
            tells=self._tells(job.assignment),
            labels=None if job.assignment.settings.secure else self._labels(job),
        )
        body, feedback = self._pack(job, update, report)
        self._keep_round(job, trained, body, {**first, "best": best}, download, train.cost, feedback)

    def _check_training(self, job: Job) -> None:
        """Raise ProtocolError for a round that this device does not train in: it would reveal more than was agreed."""
        assignment = job.assignment
        secure = assignment.settings.secure
        if self._demands.secure is not None and not (secure and assignment.kind is Kind.train):
            raise ProtocolError(
                "the coordinator asks for an update without masks, and this device sends none (require_secure)",
                failure=Failure("bad-work/unmasked"),
            )
        if secure and not (self._method.sums and assignment.kind is Kind.train):
            raise ProtocolError(
                f"{assignment.settings.method} on this device has no secure work of kind {assignment.kind.value}; its "
                f"updates are more than sums, and nothing is sent",
                failure=Failure("secure-refused/parts"),
            )
        if secure:
            self._secure.check_round(job)
        self._trust.check_steps(count_steps(assignment.settings, self.task.train))
        if assignment.round == 1 and self._begins_as_published(job):
            self._trust.check_first_weights(whole_model(self.manifest, job.received))

    def _check_step(self, job: Job) -> None:
        """Compare the gradients of a published step with its loss, before this device first trains with it.

        Raises ImplausibleStep.
        """
        if self._step_checked or not self._own_graphs:
            return
        from ..engines.engine import OnnxEngine  # here, because PyTorch's engine does without ONNX Runtime

        engine = self.engine
        assert isinstance(engine, OnnxEngine), "it trains with the published graphs"
        before = {name: np.array(tensor) for name, tensor in engine.read().items()}
        try:
            if job.received is not None and not self.manifest.outputs and is_whole(self.manifest, job.received):
                engine.load({**before, **whole_model(self.manifest, job.received)})
            # Nobody else knows the samples, and so the directions that follow from them.
            found = engine.check_plausible(self.task.train, int(self._data[:15], 16))
        finally:
            engine.load(before)
        if not found.judged:
            log.warning(
                "the gradients of the training step could not be compared with its loss; it is used all the same"
            )
        self._step_checked = True

    def _begins_as_published(self, job: Job) -> bool:
        """Return whether a payload of the first round must be the model as it was published, in its own values."""
        received = job.received
        settings = job.assignment.settings
        exact = settings.precision_of("down", job.assignment.kind) == "fp32"
        # With a buffer, a device may be given the model of a later round.
        plain = received is not None and received.mask is None and settings.buffer is None
        return exact and plain and self.manifest.outputs is None

    def _labels(self, job: Job) -> LabelSketch | None:
        """Return what a round asks of this device's labels, in clear or under masks; None where it asks nothing."""
        if self._local_noise is not None or self._prior is None or not asks_for_labels(job):
            return None
        return self._prior.sketch

    def _tells(self, assignment: Assignment) -> bool:
        """Return whether losses and accuracies may go up in clear."""
        settings = assignment.settings
        if self._local_noise is not None:
            return False
        if not settings.secure:
            return True
        return self._demands.plain_metrics and not settings.masks_metrics

    def _personalise(self, job: Job, download: Phase) -> None:
        first = self._judge_first(job)
        with self._telemetry.phase("train") as train:
            trained = self._method.personalise(job)
            best = self._find_best(job, trained)
            train.flops = trained.flops
        trained = self._within_joules(job, trained, download, train.cost)
        body = _report(trained, job, download, train.cost, tells=self._tells(job.assignment)).encode()
        self._keep_round(job, trained, body, {**first, "best": best}, download, train.cost)

    def _within_joules(self, job: Job, trained: Trained, download: Phase, train: Phase) -> Trained:
        """Return the outcome of a round, as this device's last one where its joules are spent."""
        limit = job.assignment.settings.joules_per_device
        spent = self.progress.training.plus(download).plus(train)
        if limit is None or job.assignment.kind is Kind.prepare or spent.joules < limit:
            return trained
        return replace(trained, stopped=True)

    def _keep_round(
        self,
        job: Job,
        trained: Trained,
        body: bytes,
        judged: Mapping[str, object],
        download: Phase,
        train: Phase,
        feedback: Tensors | None = None,
    ) -> None:
        controller = self._prepared.controller if job.assignment.kind is Kind.train else None
        if controller is not None:
            # Before the update is sent: it may close the round, and the next one is to be made for the new budget.
            controller.after_training(download, train)
            self._reassess(job.assignment)
        number = job.assignment.round
        upload = self._keep_and_send(
            job.assignment,
            body,
            trained.state,
            feedback,
            rounds=self.progress.rounds + (job.assignment.kind is not Kind.prepare),
            last_round=number,
            steps=self.progress.steps + trained.steps,
            # Before it is sent: what comes after a crash must know of it.
            updates=count_update(self.progress.updates, self._local_noise, trained.update),
            stopped_round=number if trained.stopped else None,
            **judged,
            training=self.progress.training.plus(download).plus(train),
        )
        if self._watchdog is not None:
            spent = [download, train, upload]
            joules = [phase.joules for phase in spent if phase.joules is not None]
            self._watchdog.count(sum(phase.seconds - phase.paused_seconds for phase in spent), sum(joules))
        if controller is not None:
            controller.after_upload(upload)

    def _metrics(self, job: Job, trained: Trained, best: Best | None) -> dict[str, float | None]:
        """Return what is told of a round under masks: the loss of its training and, where the round is evaluated, loss
        and accuracy on held-out data of the model received and of the personal model after it."""
        if self._local_noise is not None:
            return {}
        found: dict[str, float | None] = {"train_loss": trained.train_loss}
        if (labels := self._labels(job)) is not None:
            found |= labels.told()
        settings, number = job.assignment.settings, job.assignment.round
        interval = settings.evaluation_interval
        if number != settings.rounds and not (interval and number % interval == 0):
            return found
        changed = best is not None and best.round == number
        models = {"personal": trained.state.personal if changed or self.best is None else self.best}
        if job.received is not None and is_whole(self.manifest, job.received) and self.info.global_model_usable:
            models["global"] = whole_model(self.manifest, job.received)
        for name, tensors in models.items():
            if tensors is not None:
                judged = self.evaluate({**self.engine.read(), **tensors})
                found |= {f"loss_{name}": judged.loss, f"accuracy_{name}": judged.accuracy}
        if number == settings.rounds and settings.personal_model == "fleet" and self._method.mixes_global:
            candidates = Candidates.of(self._method, replace(job, state=trained.state))
            evidence = candidates.evidence(self.engine, self.task.validation)
            found |= {} if evidence is None else evidence.told()
        return found

    def _inference_flops(self, tensors: Tensors) -> int:
        """Return the FLOPs of one sample through a model; 0 with local noise: which weights are zero is its data's."""
        return nonzero_flops(self.manifest, tensors) if self._local_noise is None else 0

    def _carried(self, job: Job, update: Update) -> dict[str, int]:
        """Return how many values of an update bring along what rounding took from earlier ones; nothing unrounded."""
        owed = self._folder.feedback
        settings = job.assignment.settings
        if settings.precision_of("up", job.assignment.kind) != "int8" or settings.secure:
            return {}
        return {"carried_values": int(np.count_nonzero(pack(self.manifest, owed, update.mask))) if owed else 0}

    def _pack(self, job: Job, update: Update, report: str) -> tuple[bytes, Tensors | None]:
        """Return the update as a bundle, and what rounding takes from it; None where nothing is rounded."""
        assignment = job.assignment
        precision = assignment.settings.precision_of("up", assignment.kind)
        values: Array | Quantised = update.values
        feedback = None
        if precision == "int8" and not assignment.settings.secure:
            values, feedback = round_update(job, update, self._folder.feedback)
        try:
            body = bundle.encode(
                self.manifest,
                values,
                update.mask,
                draw=update.draw,
                precision=precision,
                report=report,
                known=None if job.received is None else _elements(job.received.mask),
                parts=update.parts,
                extras=update.extras,
            )
        except BundleError as error:  # a value is not finite
            raise TrainingDiverged(str(error).partition(": training diverged")[0], failure=VALUES) from error
        return body, feedback

    def _evaluate(self, job: Job, download: Phase) -> None:
        with self._telemetry.phase("evaluate") as measured:
            ending = self._mix_with_global(job)
            best = self.best
            evaluated = self._method.evaluate(replace(job, state=replace(job.state, personal=best)))
            answers = self.engine.read() if best is None else best
            shared = self._validate_global(job, evaluated)
            others = {**evaluated.others, **ending.others}
            found = (evaluated.personal, evaluated.global_model, evaluated.validation, shared, *ending.others.values())
            judged = [each.num_examples for each in found if each]
            exists = _elements(job.received.mask) if job.received else None
            trained = evaluated.flops + ending.flops
            measured.flops = forward_flops(self.manifest, exists) * sum(judged) + trained
        tells = self._tells(job.assignment)
        receipt = Receipt(
            personal=evaluated.personal if tells else None,
            global_model=evaluated.global_model if tells else None,
            validation=evaluated.validation if tells else None,
            others=others if tells else {},
            finetune_flops=min(trained, MOST_FLOPS),
            inference_flops=self._inference_flops(answers),
            taken=ending.taken if tells else None,
            usual=ending.usual if tells else None,
            state_bytes=_bytes_of(job.state),
            telemetry=Telemetry(download=download, train=measured.cost),
        )
        self._keep_and_send(
            job.assignment,
            receipt.model_dump_json(exclude_defaults=True).encode(),
            job.state,
            validation_global=shared or self.progress.validation_global,
            evaluation=self.progress.evaluation.plus(download).plus(measured.cost),
        )

    def _compare(self, job: Job, download: Phase) -> None:
        """Tell what this device may gain by another model than the finished one."""
        with self._telemetry.phase("evaluate") as measured:
            candidates = Candidates.of(self._method, job)
            evidence = candidates.evidence(self.engine, self.task.validation)
            measured.flops = candidates.flops + self._judging(len(candidates.models))
        receipt = Receipt(
            evidence=evidence if self._tells(job.assignment) else None,
            finetune_flops=min(candidates.flops, MOST_FLOPS),
            telemetry=Telemetry(download=download, train=measured.cost),
        )
        self._keep_and_send(
            job.assignment,
            receipt.model_dump_json(exclude_defaults=True).encode(),
            job.state,
            evaluation=self.progress.evaluation.plus(download).plus(measured.cost),
        )

    def _judging(self, models: int) -> int:
        """Return the FLOPs of judging so many models on validation data."""
        return models * forward_flops(self.manifest) * count_examples(self.task.validation)

    def _adapt(self, job: Job, download: Phase) -> None:
        first = self._judge_first(job)
        with self._telemetry.phase("adapt") as measured:
            state = self._method.adapt(job)
        assert state.personal is not None, "adapting ends with a personal model"
        held_out, validation = self._judge(state.personal)
        best = self._best_of(job, validation) if self._keeps_best else None
        receipt = Receipt(
            personal=held_out if self._tells(job.assignment) else None,
            inference_flops=self._inference_flops(state.personal),
            state_bytes=_bytes_of(state),
            telemetry=Telemetry(download=download, train=measured.cost),
        )
        self._keep_and_send(
            job.assignment,
            receipt.model_dump_json(exclude_defaults=True).encode(),
            state,
            adapted=True,
            best=best,
            **first,
            training=self.progress.training.plus(download).plus(measured.cost),
        )

    def _keep_and_send(
        self,
        assignment: Assignment,
        body: bytes,
        state: DeviceState,
        feedback: Tensors | None = None,
        **changed: object,
    ) -> Phase:
        """Keep the new state and the update together, then send it; returns what sending cost."""
        self._keep_mask(state.neurons)  # first: without the rest it is chosen again, from the same model
        pending = self._folder.put_outbox(assignment.assignment_id, assignment.kind, body)
        if feedback is not None:
            self._folder.put_owed(pending)
        changed |= {"memory": dict(state.memory), "model": state.model, "pending": pending, "everything": self.moved}
        if state.personal is self.personal and state.own is self._folder.own and feedback is None:
            self._save_progress(**changed)
        else:
            before, self.personal = self.progress.best, state.personal
            self.progress = self.progress.model_copy(update=changed)
            best = changed.get("best") not in (None, before)
            self._personal_is = self.progress.best if best else None
            self._folder.save(self.manifest, self.personal, self.progress, state.own, feedback, best=best)
        return self._send(pending, body)

    def _send(self, pending: Pending, body: bytes | None = None) -> Phase:
        if body is None:
            body = self._folder.outbox(pending)
        media_type = bundle.MEDIA_TYPE if pending.kind in (Kind.train, Kind.prepare) else JSON_TYPE
        with self._telemetry.phase("upload") as upload:
            try:
                # A host opens the session anew for whatever comes next.
                self._next = self._transport.update(
                    *(pending.assignment_id, body, media_type, self.progress.upload_cost),
                    *((None, None) if self._hosted else self._holding()),
                    goes_on=not self._hosted,
                )
            except RoundOver as error:
                # Too late, or answered already: the local step stays.
                log.info("the update was not needed any more: %s", error.detail)
                self._owe_as_before(pending)
                self._say_what_stays(pending)
            except (NotAuthenticated, NotAllowed):
                raise
            except Refused as refusal:
                # It would be refused again. The local step stays, and the round need not wait for this device.
                log.warning("the update was refused: %s", refusal.detail)
                self._owe_as_before(pending)
                self._save_progress(pending=None)
                self._hand_back(pending.assignment_id, Failure("update-refused"))
                self._say_what_stays(pending)
                return Phase()
        self._uploading = upload.cost.seconds
        account = "evaluation" if pending.kind in JUDGING else "training"
        totals: Totals = getattr(self.progress, account)
        cost = UploadCost(assignment_id=pending.assignment_id, upload=upload.cost, everything=self.moved)
        self._save_progress(pending=None, upload_cost=cost, **{account: totals.plus(upload.cost)})
        self._folder.forget_owed()
        return upload.cost

    def _owe_as_before(self, pending: Pending) -> None:
        """Take back what rounding took from an update that does not count: what is owed is of those that do."""
        owed = self._folder.owed_before(pending)
        if owed is not None:
            self._folder.save(self.manifest, self.personal, self.progress, feedback=owed)

    def _say_what_stays(self, pending: Pending) -> None:
        """Without an update the coordinator cannot know that this device holds a model, and would send it all again."""
        holds = pending.kind in (Kind.train, Kind.personalise) and self.personal is not None
        # Whoever comes too late may have been thought away.
        self._tell(ChangeDevice(holds_model=True if holds else None, conditions=Conditions()))

    def _save_progress(self, **changed: object) -> None:
        self.progress = self.progress.model_copy(update={**changed, "everything": self.moved})
        self._folder.save_progress(self.progress)

    # --- looking at models ---------------------------------------------------------------------------------------

    @property
    def best(self) -> Tensors | None:
        """The personal model to use: the best of all rounds on validation data where the federation asks for it and the
        method can tell, or else the last one. None where there is none yet."""
        best = self.progress.best
        if best is None:
            return self.personal
        if self._personal_is == best:
            return self.personal
        found = self._folder.best(self.manifest)
        if found is None:
            log.warning("%s has lost best.safetensors; the last round's model is used", self._folder.path)
            self.progress = self.progress.model_copy(update={"best": None})
            return self.personal
        return found

    def _judge_first(self, job: Job) -> dict[str, Any]:
        """Return the changes to progress that say how good the model is as first received, before any local training:
        where a part of it has come, of the narrow network that this is; and where nothing has, of the model that the
        device has. Nothing where that is known."""
        if self.progress.rounds or self.progress.accuracy_before is not None:
            return {}
        tensors = self.engine.read() if self.personal is None else dict(self.personal)
        if job.received is None or self.manifest.outputs:
            pass  # nothing of a model has come
        elif is_whole(self.manifest, job.received):
            tensors |= whole_model(self.manifest, job.received)
        else:
            # Zeroed anew, for what was in the shared tensors is none of this federation's.
            tensors |= {spec.name: np.zeros(spec.shape, np.float32) for spec in self.manifest.shared}
            merge_in_place(self.manifest, tensors, job.received.values, job.received.mask)
        try:
            held_out, validation = self._judge(tensors)
        except TrainingDiverged:
            raise UnsoundModel(
                "the model received gives no finite loss on this device's held-out data, before any training",
                "see whether the data are scaled as the task expects; if they are, the operator can go back to an "
                "older model, and bound what one device moves (update_clip)",
            ) from None
        return {"accuracy_before": held_out.accuracy, "validation_before": validation}

    @property
    def _keeps_best(self) -> bool:
        return self._method.picks_best and self.info.settings.keeps_best

    def _find_best(self, job: Job, trained: Trained) -> Best | None:
        """Return the best personal model after a round: the round's own unless its validation data speak against it."""
        state, before = trained.state, self.progress.best
        if state.personal is None or not self._keeps_best:
            return before
        found = trained.personal_validation or self._validate(state.personal)
        newest = self._best_of(job, found)
        return before if before and gives_way(found, newest.lowest_loss) else newest

    def _best_of(self, job: Job, found: Evaluation, global_share: float = 0.0) -> Best:
        before = self.progress.best
        return Best(
            round=job.assignment.round,
            validation=found,
            lowest_loss=min(found.loss, before.lowest_loss) if before else found.loss,
            global_share=global_share,
            manifest=self.manifest.digest,
            data=self._data,
        )

    @cached_property
    def _data(self) -> str:
        return digest_of(self.task.validation)

    def _judge_best_again(self) -> None:
        """Judge the best personal model again if the federation's model was replaced since, or the validation data.

        On new data the last round's model takes its place, if it is better there.
        """
        best = self.progress.best
        if best is None or (best.manifest, best.data) == (self.manifest.digest, self._data):
            return
        tensors = self.best
        if tensors is None:
            return
        found, changed = self._validate_sound(tensors), dict[str, object]()
        choice = None if found is None else self._judged_now(best, best.round, found)
        if best.data != self._data:
            new = NewData(round=best.round, before=best.validation, after=found)
            changed = {"new_data": new, "accuracy_before": None, "validation_before": None, "validation_global": None}
            last = None if self.personal is None or self.personal is tensors else self._validate_sound(self.personal)
            if last is not None and (found is None or last.loss < found.loss):
                assert self.personal is not None, "it was judged"
                choice = self._judged_now(Best(round=0, validation=last, lowest_loss=0), self.progress.last_round, last)
                self.progress = self.progress.model_copy(update={"best": choice})
                self._folder.save_best(self.manifest, self.personal, self.progress)
                self._personal_is = choice
        if self._personal_is == best and choice is not None:
            self._personal_is = choice
        self._save_progress(best=choice, **changed)

    def _judged_now(self, best: Best, number: int, found: Evaluation) -> Best:
        """Return the best model, of round ``number``, as it is judged now."""
        now = {"validation": found, "lowest_loss": found.loss, "manifest": self.manifest.digest, "data": self._data}
        return best.model_copy(update={"round": number, **now})

    def _validate_sound(self, tensors: Tensors) -> Evaluation | None:
        """Return a model on validation data; None if its loss is not finite."""
        try:
            return self._validate(tensors)
        except TrainingDiverged:
            return None

    def _mix_with_global(self, job: Job) -> Ending:
        """Keep a mixture of the personal model and the finished global one as the best model, where validation data
        speak for it: what a small budget has never trained is then the others'. With ``finetune_epochs`` one of them
        is also trained once more, within the budget."""
        if not job.assignment.plan.get("finished") or not self._method.mixes_global:
            return Ending()
        if job.received is None or self.personal is None or self.progress.best is None:
            return Ending()
        if job.assignment.settings.personal_model == "fleet":
            return self._take_by_evidence(job)
        received = whole_model(self.manifest, job.received)
        for share in GLOBAL_SHARES:
            self._keep_if_better(job, mixed(self.personal, received, share), share)
        if self._method.finish is None or not job.assignment.settings.finetune_epochs:
            return Ending()
        try:
            tensors, flops = self._method.finish(job, mixed(self.personal, received, SHARE))
        except TrainingDiverged as error:
            log.warning("training once more at the end failed: %s", error)
            return Ending()
        self._keep_if_better(job, tensors, SHARE)
        return Ending(flops)

    def _take_by_evidence(self, job: Job) -> Ending:
        """Keep as the best model the candidate that this device's and all devices' validation data speak for, and judge
        all of them on held-out data, which decides nothing."""
        candidates, pool = Candidates.of(self._method, job), Pool.from_plan(job.assignment.plan)
        evidence = candidates.evidence(self.engine, self.task.validation)
        name = choice(pool, evidence, candidates.models)
        ending = Ending(
            candidates.flops,
            candidates.judged(self.engine, self.task.held_out),
            name,
            choice(pool, None, candidates.models),
        )
        tensors = candidates.models[name]
        found = self._validate_sound(tensors)
        if found is None:
            log.warning("the loss of the model to take at the end (%s) is not finite; the best round's stays", name)
            return replace(ending, taken=None)
        best = self._best_of(job, found, SHARES.get(name, 0.0)).model_copy(update={"taken": name})
        self.progress = self.progress.model_copy(update={"best": best})
        self._folder.save_best(self.manifest, tensors, self.progress)
        return ending

    def _keep_if_better(self, job: Job, tensors: Tensors, share: float) -> None:
        """Keep a model as the best one, where validation data speak for it. share: of the global model in it."""
        try:
            found = self._validate(tensors)
        except TrainingDiverged:  # a model of which nothing can be said is not the best
            return
        if self.progress.best is None or found.loss < self.progress.best.validation.loss:
            self.progress = self.progress.model_copy(update={"best": self._best_of(job, found, share)})
            self._folder.save_best(self.manifest, tensors, self.progress)

    def _validate_global(self, job: Job, evaluated: Evaluated) -> Evaluation | None:
        """Return the global model on validation data, where it was just judged beside a personal one."""
        if evaluated.personal is None or evaluated.global_model is None or not self.info.global_model_usable:
            return None
        if self.task.test is None:
            return evaluated.global_model
        return self._validate(self.engine.read() | whole_model(self.manifest, job.received))

    def _judge(self, tensors: Tensors) -> tuple[Evaluation, Evaluation]:
        """Return a model on held-out and on validation data."""
        self.engine.load(tensors)
        return evaluate_held_out(self.engine, self.task.validation, self.task.test)

    def _validate(self, tensors: Tensors) -> Evaluation:
        self.engine.load(tensors)
        return self.engine.evaluate(self.task.validation)

    def evaluate(self, tensors: Tensors) -> Evaluation:
        """Return loss and accuracy of a model on this device's held-out data."""
        self.engine.load(tensors)
        return self.engine.evaluate(self.task.held_out, metrics=True)


def _only_prepares_otherwise(before: Manifest, manifest: Manifest) -> bool:
    """Return whether a manifest is of the same tensors, behind another preparation."""
    return before.tensors_digest == manifest.tensors_digest and before.preparation_sha256 != manifest.preparation_sha256


def _elements(mask: Mask | None) -> ElementMask | None:
    return mask if isinstance(mask, ElementMask) else None


def _report(
    trained: Trained,
    job: Job,
    download: Phase,
    train: Phase,
    statement: Statement | None = None,
    *,
    tells: bool,
    labels: LabelSketch | None = None,
) -> str:
    """Return the report of a round's training, as JSON. tells: whether it holds losses."""
    report = UpdateReport(
        num_examples=trained.num_examples,
        status="stopped" if trained.stopped else "active",
        steps=trained.steps,
        training_flops=min(trained.flops, MOST_FLOPS),
        train_loss=bounded(trained.train_loss) if tells else None,
        validation_loss=trained.validation.loss if tells and trained.validation else None,
        stop_loss=bounded(trained.stop_loss) if tells and trained.stop_loss is not None else None,
        counts={name: min(count, MOST_COUNT) for name, count in trained.counts.items()},
        received=dict(job.received.sizes) if job.received else {},
        secure=statement,
        labels=labels,
        telemetry=Telemetry(download=download, train=train),
    )
    return report.model_dump_json(exclude_defaults=True)


def _bytes_of(state: DeviceState) -> int:
    """Return the bytes of models that the device keeps between rounds."""
    return sum(tensor.nbytes for tensor in (*(state.personal or {}).values(), *state.own.values()))


def own_profile(energy: str) -> DeviceProfile:
    """Return the profile that this device sends when it enrols."""
    try:
        sdk_version = version("sparrow-fl")
    except PackageNotFoundError:
        sdk_version = "unknown"
    return DeviceProfile(
        board=platform.machine(),
        system=f"{platform.system()} {platform.release()}"[:200],
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        sensors=(energy[:300],),
        sdk_version=sdk_version,
    )
