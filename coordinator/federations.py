"""Federations from publication to the last word: creating, describing and steering them."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import rollback
from coordinator.assignments import extend_deadlines, forget_adapted
from coordinator.buffer import check_buffer
from coordinator.candidates import what_is_missing, why_over
from coordinator.errors import BadContent, NameTaken, NoGlobalModel, NotFound, WrongState, explain
from coordinator.judging import judge
from coordinator.methods import CoordinatorMethod, Situation, load_method
from coordinator.models import Models, settings_of
from coordinator.privacy import check_privacy, spent
from coordinator.robust import check_robust
from coordinator.storage.store import Store
from coordinator.storage.tables import Device, Federation
from edge_sdk.protocol import checkpoint
from edge_sdk.protocol.builtin import builtin_tasks, load_builtin
from edge_sdk.protocol.manifest import Manifest, Tensors, initial_values
from edge_sdk.protocol.messages import (
    ChangeFederation,
    CreateFederation,
    Evaluation,
    FederationInfo,
    FederationSettings,
    FederationStatus,
    ModelInfo,
)
from export.metadata import properties

log = logging.getLogger(__name__)


class Federations:
    """Every federation of this coordinator."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float]) -> None:
        self._store = store
        self._models = models
        self._clock = clock

    def create(self, request: CreateFederation) -> FederationInfo:
        """A federation of a built-in task, with initial weights drawn here. Raises BadContent, NameTaken."""
        if request.task not in builtin_tasks():
            raise BadContent(
                f"task: {request.task!r} is not built in; choose one of {', '.join(builtin_tasks())}, or publish a "
                f"model of your own with python -m edge_sdk.publish"
            )
        task = load_builtin(request.task)
        return self._create(request, task.manifest, task.skeleton, None)

    def publish(self, body: bytes) -> FederationInfo:
        """A federation of somebody's own model: a checkpoint as ``CreateFederation`` describes it."""
        request = CreateFederation.model_validate_json(checkpoint.read_note(body))
        tensors, _ = checkpoint.load(body)
        if request.task is not None:
            raise BadContent("task: leave it out where a manifest is published")
        try:
            manifest_json = tensors.pop("sparrow.manifest").tobytes()
            skeleton = tensors.pop("sparrow.skeleton").tobytes()
        except KeyError as missing:
            raise BadContent(f"the checkpoint lacks {missing}; publish with python -m edge_sdk.publish") from None
        manifest = Manifest.model_validate_json(manifest_json)
        manifest.check_tensors(tensors, what="the published weights", only_shared=True)
        return self._create(request, manifest, skeleton, tensors)

    def _create(
        self, request: CreateFederation, manifest: Manifest, skeleton: bytes, published: Tensors | None
    ) -> FederationInfo:
        """published: the tensors that were sent; None for a built-in task, which has nothing that could be hostile."""
        settings = completed(request.settings)
        method = _check_model(settings.method, manifest)
        check_robust(method, settings)
        manifest = method.manifest(manifest, settings)
        check_privacy(method, manifest, settings)
        check_buffer(method, settings)
        if hashlib.sha256(skeleton).hexdigest() != manifest.skeleton_sha256:
            raise BadContent("skeleton_sha256 of the manifest is not that of the skeleton sent; publish both together")
        if published is not None:
            from export.skeleton import check_skeleton  # onnx: 7 MB, which a coordinator of built-in tasks does without

            check_skeleton(skeleton, manifest)
        situation = Situation(manifest, settings)
        model = method.start(initial_values(manifest, settings.seed, published or {}), situation)
        warning = method.warning(model, situation)
        if warning:
            log.warning("%s: %s", request.name, warning)
        with self._store.writing() as db:
            if db.scalar(select(Federation).where(Federation.name == request.name)):
                raise NameTaken(f"a federation called {request.name!r} exists; choose another name")
            federation = Federation(
                uid=uuid.uuid4().hex,
                name=request.name,
                task=manifest.task,
                method=settings.method,
                settings=settings.model_dump(mode="json"),
                manifest=manifest.model_dump_json(),
                status=FederationStatus.waiting.value,
                model_sha256="",
                warning=warning,
                round=0,
                model_version=0,
                created_at=self._clock(),
            )
            db.add(federation)
            db.flush()
            # Blobs first, then the commit: a federation that can be seen has its model on disk.
            self._models.add(federation.id, manifest, skeleton)
            federation.model_sha256 = self._models.save(federation.id, 0, model)
            return self.describe(db, federation)

    def ensure_default(self, task: str, settings: FederationSettings) -> None:
        """Create the federation ``default`` when there is none at all: the first start."""
        with self._store.reading() as db:
            if db.scalar(select(func.count()).select_from(Federation)):
                return
        self.create(CreateFederation(name="default", task=task, settings=settings))

    def change(self, name: str, request: ChangeFederation) -> FederationInfo:
        """Pause, resume, stop, reopen, and change what holds from the next round on."""
        with self._store.writing() as db:
            federation = find(db, name)
            changed = request.model_dump(include={"rounds", "cohort", "deadline_seconds"}, exclude_none=True)
            federation.settings = {**federation.settings, **changed}
            try:
                settings_of(federation)
            except ValidationError as error:
                raise BadContent(explain(error)) from None
            if (request.action == "rollback") != (request.model_version is not None):
                raise BadContent("model_version: give it with the action rollback, and with no other")
            if request.model_version is not None:
                rollback.ask(db, federation, self._models, request.model_version)
            elif request.action is not None:
                _ACTIONS[request.action](federation)
            over = why_over(db, federation) if request.action == "reopen" else None
            if over:
                raise WrongState(
                    f"{name} would end again at once ({over}): give more rounds in the same call, or wait until a "
                    f"device that has not stopped enrols"
                )
            if request.action == "reopen":
                forget_adapted(db, federation)
            if request.action == "resume":
                extend_deadlines(db, federation, self._clock())
            return self.describe(db, federation)

    def models(self, name: str) -> list[ModelInfo]:
        """The global models that are kept, oldest first. Raises NotFound."""
        with self._store.reading() as db:
            return rollback.list_models(db, find(db, name), self._models)

    def list(self) -> list[FederationInfo]:
        """Every federation, by age."""
        with self._store.reading() as db:
            return [self.describe(db, federation) for federation in db.scalars(select(Federation))]

    def get(self, name: str) -> FederationInfo:
        """One federation. Raises NotFound."""
        with self._store.reading() as db:
            return self.describe(db, find(db, name))

    def describe(self, db: Session, federation: Federation) -> FederationInfo:
        """What anybody allowed to look learns of it."""
        manifest = self._models.manifest(federation)
        statuses = db.execute(
            select(Device.status, func.count()).where(Device.federation_id == federation.id).group_by(Device.status)
        )
        counts = {row[0]: row[1] for row in statuses}
        settings = settings_of(federation)
        return FederationInfo(
            uid=federation.uid,
            name=federation.name,
            method=federation.method,
            task=federation.task,
            status=FederationStatus(federation.status),
            reason=federation.reason,
            waiting_for=what_is_missing(db, federation, self._clock()),
            warning=federation.warning,
            round=federation.round,
            rounds=settings.rounds,
            devices=counts.get("active", 0) + counts.get("stopped", 0),
            devices_stopped=counts.get("stopped", 0),
            model_version=federation.model_version,
            rollback_version=federation.rollback_version,
            model_sha256=federation.model_sha256,
            privacy=spent(db, federation.id, federation.round, settings),
            parameters=manifest.trainable_values,
            manifest_digest=manifest.digest,
            global_model_usable=why_unusable(federation, manifest) is None,
            settings=settings,
        )

    def manifest(self, name: str) -> Manifest:
        """The manifest of the federation's model."""
        with self._store.reading() as db:
            return self._models.manifest(find(db, name))

    def skeleton(self, name: str) -> bytes:
        """The ONNX skeleton of the federation's model."""
        with self._store.reading() as db:
            return self._models.skeleton(find(db, name).id)

    def model(self, name: str, version: int | None = None) -> bytes:
        """The newest global model, or one that is kept, as a checkpoint. Raises NoGlobalModel, NotFound."""
        with self._store.reading() as db:
            federation = find(db, name)
        self._check_usable(federation)
        try:
            return self._models.file(federation.id, federation.model_version if version is None else version)
        except FileNotFoundError:
            if version is None:
                raise
            raise NotFound(
                f"model {version} of {name} is not kept; GET /v1/federations/{name}/models lists those that are"
            ) from None

    def model_onnx(self, name: str) -> bytes:
        """The global model as ONNX. Raises NoGlobalModel."""
        from export.skeleton import fill  # onnx, as above

        with self._store.reading() as db:
            federation = find(db, name)
        self._check_usable(federation)
        tensors = self._models.model(federation, federation.model_version).tensors
        manifest = self._models.manifest(federation)
        known = {"federation": federation.name, "task": federation.task, "method": federation.method}
        note = properties(manifest, tensors, round=federation.round, **known)
        return fill(self._models.skeleton(federation.id), manifest, tensors, metadata=note)

    def evaluate(self, name: str, body: bytes) -> Evaluation:
        """The global model on test data (see ``judging``). Raises NoGlobalModel, BadContent."""
        return judge(self.model_onnx(name), self.manifest(name), body)

    def _check_usable(self, federation: Federation) -> None:
        reason = why_unusable(federation, self._models.manifest(federation))
        if reason:
            raise NoGlobalModel(reason)


def completed(settings: FederationSettings) -> FederationSettings:
    """The settings with every one of the method's own, so that devices need not know their defaults.

    Raises BadContent for a method that is not installed, and for settings that are not the method's.
    """
    settings_type = load_method(settings.method).settings_type
    try:
        own = settings_type.model_validate(settings.method_settings)
    except ValidationError as error:
        known = ", ".join(settings_type.model_fields) or "no settings of its own"
        raise BadContent(f"method_settings.{explain(error)}; {settings.method} takes {known}") from None
    return settings.model_copy(update={"method_settings": own.model_dump(mode="json")})


def _check_model(name: str, manifest: Manifest) -> CoordinatorMethod:
    """The method. Raises BadContent for a manifest without the coupling that it needs, and for statistics that are to
    stay on devices which keep nothing between rounds."""
    method = load_method(name)
    if method.needs_coupling and not manifest.coupling:
        raise BadContent(
            f"{name} trains some neurons of each layer, and this manifest does not say which neurons feed which "
            f"weights; publish the model again, for this method"
        )
    stays = [spec for spec in manifest.tensors if spec.policy == "personal" and spec.dtype == "float32" and spec.shape]
    if stays and not method.personal_models:
        raise BadContent(
            f"{stays[0].name}: {name} keeps no model on a device from round to round, so this cannot stay there; "
            f"publish with --running-statistics shared, or register a buffer that never changes with persistent=False"
        )
    return method


def find(db: Session, name: str) -> Federation:
    """The federation of this name. Raises NotFound."""
    federation = db.scalar(select(Federation).where(Federation.name == name))
    if federation is None:
        raise NotFound(f"there is no federation {name!r}; GET /v1/federations lists those that there are")
    return federation


def why_unusable(federation: Federation, manifest: Manifest) -> str | None:
    """Why the global model cannot be used alone, or None where it can."""
    if not load_method(federation.method).usable_global_model:
        return f"{federation.method} has no global model that can be used alone; export a device's personal model"
    if len(manifest.kept) > len(manifest.shared):
        personal = next(spec.name for spec in manifest.kept if spec.policy == "personal")
        return f"{personal} is kept on the devices, so the global model is incomplete; export a personal model"
    return None


def _pause(federation: Federation) -> None:
    _move(federation, {"waiting", "running"}, "paused")


def _resume(federation: Federation) -> None:
    _move(federation, {"paused"}, "running" if federation.round else "waiting")


def _stop(federation: Federation) -> None:
    _move(federation, {"waiting", "running", "paused"}, "stopped")
    federation.reason = "operator"


def _reopen(federation: Federation) -> None:
    _move(federation, {"finished", "stopped"}, "running" if federation.round else "waiting")
    federation.reason = federation.finished_at = None


def _move(federation: Federation, allowed: set[str], status: str) -> None:
    if federation.status not in allowed:
        raise WrongState(
            f"{federation.name} is {federation.status}; this can be done while it is {' or '.join(sorted(allowed))}"
        )
    federation.status = status


_ACTIONS: dict[str, Callable[[Federation], None]] = {
    "pause": _pause,
    "resume": _resume,
    "stop": _stop,
    "reopen": _reopen,
}
