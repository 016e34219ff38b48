"""Create federations from a built-in task or a published model, and replace their models' graphs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from sparrow.command_line.nearest import nearest
from sparrow.protocol import checkpoint, values
from sparrow.protocol.auto import chosen
from sparrow.protocol.builtin import BuiltinTask, builtin_tasks, load_builtin
from sparrow.protocol.events import EventKind
from sparrow.protocol.manifest import (
    MAX_GRAPH,
    MAX_MANIFEST,
    FileName,
    Manifest,
    Tensors,
    initial_values,
)
from sparrow.protocol.messages import (
    CompareFederation,
    CreateFederation,
    FederationInfo,
    FederationStatus,
)
from sparrow.protocol.preparation import Targets
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import Publication

from ..draws import new_secret
from ..errors import (
    BadContent,
    DifferentFederation,
    NameTaken,
    NoSuchTask,
    NotFound,
    TooLarge,
    Unavailable,
    callers_data,
)
from ..methods import CoordinatorMethod, PublishedModel, Situation, load_method
from ..models.global_models import Models, carry_out_replacement, record_publication, settings_of
from ..rounds.assignments import open_round
from ..rounds.cleanup import clear_deleted
from ..rounds.intake import fault_of_model
from ..storage import events
from ..storage.store import Store
from ..storage.tables import (
    DeletedFederation,
    Federation,
)
from . import publications
from .checks import check_begin, check_settings, completed, why_predictable, why_unbounded
from .federations import Federations, find

log = logging.getLogger(__name__)

NEVER = 0.0
"""``deleted_at`` of a federation that is being created, or whose creation failed."""

LARGEST_NOTE = 64 * 1024


class Publisher:
    """Creates federations, and replaces their models' graphs."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float], federations: Federations) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._federations = federations

    def create(self, request: CreateFederation) -> FederationInfo:
        """Create a federation of a built-in task, with initial weights drawn here. Raises BadContent, NameTaken."""
        task = _built_in(request.task)
        files: dict[FileName, bytes] = {name: task.graphs[name] for name in task.manifest.graphs}
        return self._create(request, task.manifest, files, None)

    def publish(self, body: bytes, largest: int = 2**31) -> FederationInfo:
        """Create a federation of a custom model: a checkpoint as described by ``CreateFederation``.

        largest: size limit of the model in bytes; a short manifest may declare huge tensors. Raises BadContent,
        NameTaken, TooLarge.
        """
        with callers_data():
            note = checkpoint.read_note(body)
            if len(note) > LARGEST_NOTE:
                raise TooLarge(f"the note has {len(note)} characters; it must have at most {LARGEST_NOTE}")
            request = CreateFederation.model_validate_json(note)
            tensors, _ = checkpoint.load(body)
            request = request.model_copy(update={"publication": _take_publication(tensors) or request.publication})
        if request.task is not None:
            raise BadContent("task: leave it out, since the manifest defines it")
        with callers_data():
            manifest = _take_manifest(tensors)
            if manifest.first_sha256 is not None:
                raise BadContent("first_sha256: leave it out; the coordinator determines the values kept on devices")
            files = {name: _taken(tensors, name) for name in manifest.files}
            size = 4 * manifest.shared_values + values.size(manifest, "frozen") + values.size(manifest, "first")
            if size > largest:
                raise TooLarge(f"the model has {size} bytes, this coordinator accepts up to {largest}")
        return self._create(request, manifest, files, tensors, len(body))

    def replace_model(self, name: str, body: bytes) -> FederationInfo:
        """Replace the model's graphs and manifest, now or after the open round.

        body: a published checkpoint without weights, which do not change. Repeating it has no effect. Raises NotFound,
        BadContent, TooLarge; DifferentFederation if the tensors differ.
        """
        with self._store.reading() as db:
            federation = find(db, name)
            model = self._models.model(federation, federation.model_version)
        with callers_data():
            tensors, _ = checkpoint.load(body)
            published = _take_manifest(tensors)
            publication = _take_publication(tensors)
            publications.check_replaced(federation, publication)
            graphs: dict[FileName, bytes] = {name: _taken(tensors, name) for name in published.graphs}
            if tensors:
                raise BadContent(
                    f"{next(iter(tensors))}: weights cannot be replaced; leave them out, or publish under another name"
                )
            method = _check_model(federation.method, published)
            composed = _composed(method, PublishedModel(published, graphs, {}), settings_of(federation))
            manifest = method.manifest(composed.manifest, settings_of(federation))
            graphs = dict(composed.files)
        has = self._models.manifest(federation)
        manifest = Manifest.model_validate({**manifest.model_dump(), "first_sha256": has.first_sha256})
        difference = _difference(has, manifest, masked=model.mask is not None)
        if difference:
            raise DifferentFederation(
                f"{difference}. Publish a model with other values, inputs or outputs under another name"
            )
        if "step" in has.graphs and "step" not in manifest.graphs:
            raise BadContent(
                "step_sha256: the federation's model has a training step, for devices without PyTorch, and this "
                "version has none; publish a version that compiles"
            )
        signed = None
        with callers_data():
            _check_graphs(graphs, manifest)
            if publication is not None:
                signed = publications.checked(publication, name, published, manifest, settings_of(federation))
        self._models.add_files(federation.id, manifest, graphs)
        with self._store.writing() as db:
            now = find(db, name)
            if now.id != federation.id:
                raise NotFound(f"{name} was deleted and published again meanwhile; retry")
            text = manifest.model_dump_json()
            now.replacement = None if text == now.manifest else text
            now.replacement_publication = None
            if signed is not None and now.replacement is None:
                record_publication(now, signed)
            elif signed is not None:
                now.replacement_publication = signed.model_dump_json()
            if now.published is not None:
                now.published = {**now.published, "model_digest": published.model_digest}
            if open_round(db, now) is None and carry_out_replacement(now):
                events.record(db, now.id, EventKind.model_replaced, self._clock())
        # Again: before the records named the files, a cleanup may have removed them.
        self._models.add_files(federation.id, manifest, graphs)
        return self._federations.get(name)

    def ensure_default(self, task: str, settings: FederationSettings) -> None:
        """Create the federation ``default`` at the first start."""
        with self._store.reading() as db:
            deleted = select(DeletedFederation.id).where(DeletedFederation.deleted_at != NEVER)
            if db.scalar(select(Federation.id).limit(1)) or db.scalar(deleted.limit(1)):
                return
        self.create(CreateFederation(name="default", task=task, settings=settings))

    def compare(self, name: str, wanted: CompareFederation) -> FederationInfo:
        """Return the federation of this name if ``wanted`` has the same method, model and settings as at its
        publication.

        Raises NotFound, DifferentFederation, BadContent.
        """
        with self._store.reading() as db:
            federation = find(db, name)
            model = wanted.model_digest or _built_in(wanted.task).manifest.model_digest
            settings = completed(
                chosen(wanted.settings, self._models.manifest(federation), classes=not wanted.model_digest)
            )
            published = federation.published or {"settings": federation.settings, "model_digest": None}
            asked = _flat(settings.model_dump(mode="json"))
            has = _flat(published["settings"])
            differences = [
                f"{setting}: asked for {_shown(value)}, it has {_shown(has[setting])}"
                for setting, value in asked.items()
                if setting in has and has[setting] != value
            ]
            if wanted.task != federation.task:
                differences.append(f"task: asked for {wanted.task}, it has {federation.task}")
            elif published["model_digest"] not in (None, model):
                differences.append(
                    "model: its layers, shapes, frozen values or values kept on devices differ from those asked for"
                )
            if differences:
                raise DifferentFederation(
                    f"a different federation {name!r} exists: {'; '.join(differences)}. Choose another name, use its "
                    f"settings and model, or delete it first (sparrow federation delete {name})"
                )
            return self._federations.describe(db, federation)

    def _create(
        self,
        request: CreateFederation,
        manifest: Manifest,
        published_files: Mapping[FileName, bytes],
        published: Tensors | None,
        published_bytes: int = 0,
    ) -> FederationInfo:
        """Check and store a federation.

        published: the received tensors; None for a built-in task, which is trusted.
        """
        settings = completed(chosen(request.settings, manifest, classes=published is None))
        published_as = {"settings": settings.model_dump(mode="json"), "model_digest": manifest.model_digest}
        method = _check_model(settings.method, manifest)
        original = manifest
        signed = None
        with callers_data():
            if published is not None:
                manifest.check_tensors(published, what="the published weights", which="published")
            own = PublishedModel(manifest, published_files, published or {})
            composed = _composed(method, own, settings, built_in=published is None)
            manifest = method.manifest(composed.manifest, settings)
            published_files = composed.files
            check_begin(settings)
            check_settings(method, manifest, settings)
            _check_graphs(published_files, manifest, built_in=published is None)
            _check_frozen(published_files.get("frozen"), manifest)
            if published is not None and manifest.first:
                first = values.pack(manifest, "first", composed.tensors)
                manifest = manifest.with_values("first", first)
                published_files = {**published_files, "first": first}
            situation = Situation(manifest, settings)
            model = method.start(initial_values(manifest, settings.seed, composed.tensors), situation)
            if request.publication is not None:
                signed = publications.checked(request.publication, request.name, original, manifest, settings)
        fault = fault_of_model(model, settings)
        if fault is not None:
            raise BadContent(f"{fault}; publish smaller weights, or another precision")
        warning = method.warning(model, situation) or why_predictable(settings)
        for text in (warning, why_unbounded(settings)):
            if text:
                log.warning("%s: %s", request.name, text)
        federation_id = self._reserve_id(request.name)
        # Blobs first, outside any transaction: a visible federation has its model on disk.
        files = self._models.files(federation_id, 0, model)
        try:
            self._models.add_files(federation_id, manifest, published_files)
            self._models.write(federation_id, files)
        except Unavailable:
            # If this fails as well, the next start removes the blobs.
            with contextlib.suppress(Unavailable):
                clear_deleted(self._store, federation_id)
            raise
        manifest_json = manifest.model_dump_json()
        with self._store.writing() as db:
            _check_free(db, request.name)
            db.execute(delete(DeletedFederation).where(DeletedFederation.id == federation_id))
            federation = Federation(
                id=federation_id,
                uid=uuid.uuid4().hex,
                secret=new_secret(request.name, settings),
                name=request.name,
                task=manifest.task,
                method=settings.method,
                settings=settings.model_dump(mode="json"),
                manifest=manifest_json,
                status=FederationStatus.waiting.value,
                model_sha256=files.sha256,
                published_bytes=published_bytes,
                warning=warning,
                round=0,
                model_version=0,
                created_at=self._clock(),
                published=published_as,
                noise_key=secrets.token_bytes(32),
            )
            if signed is not None:
                record_publication(federation, signed)
            db.add(federation)
            db.flush()
            self._models.record(db, federation_id, files)
            events.record(db, federation_id, EventKind.created, federation.created_at)
        self._models.remember(federation_id, files)
        return self._federations.get(request.name)

    def _reserve_id(self, name: str) -> int:
        # Until it is created, the records list it as deleted, so that a killed process leaves no blobs behind.
        with self._store.writing() as db:
            _check_free(db, name)
            federation_id = _next_id(db)
            db.add(DeletedFederation(id=federation_id, name=name, deleted_at=NEVER))
            return federation_id


def _taken(tensors: Tensors, name: str) -> bytes:
    try:
        return tensors.pop(f"sparrow.{name}").tobytes()
    except KeyError as missing:
        raise BadContent(f"the checkpoint lacks {missing}; publish with sparrow publish") from None


def _take_publication(tensors: Tensors) -> Publication | None:
    """Pop the publication from a checkpoint, or return None. Raises BadContent."""
    if "sparrow.publication" not in tensors:
        return None
    return Publication.model_validate_json(_taken(tensors, "publication"))


def _take_manifest(tensors: Tensors) -> Manifest:
    text = _taken(tensors, "manifest")
    if len(text) > MAX_MANIFEST:
        raise TooLarge(f"the manifest has {len(text):,} bytes; it must have at most {MAX_MANIFEST:,}")
    return Manifest.model_validate_json(text)


def _difference(has: Manifest, new: Manifest, *, masked: bool) -> str | None:
    """Return the first difference between the federation's model and a new version, or None.

    masked: whether the model has a mask of single weights.
    """
    for field in ("task", "input_shape", "output_shape"):
        if getattr(has, field) != getattr(new, field):
            return f"{field}: the new version has {getattr(new, field)}, the federation {getattr(has, field)}"
    if has.frozen_sha256 != new.frozen_sha256:
        return "the frozen values differ in the new version"
    old, given = ({spec.name: spec for spec in each.tensors} for each in (has, new))
    for name in {**old, **given}:
        if name not in old or name not in given:
            return f"{name}: only {'the new version' if name in given else 'the federation'} has this tensor"
        for field in ("shape", "dtype", "policy", "trainable"):
            one = getattr(old[name], field)
            other = getattr(given[name], field)
            if one != other:
                return f"{name}: has {field} {other} in the new version, {one} in the federation"
    for field in ("kind", "names", "spare"):
        one, other = (getattr(each.targets or Targets(), field) for each in (has, new))
        if one != other:
            return f"targets: the new version has {field} {other}, the federation {one}"
    if has.tensors_digest != new.tensors_digest:
        return "the tensors agree, but their order, neurons, blocks or further names (tied weights) differ"
    if masked and has.maskable != new.maskable:
        return "the tensors agree, but their layers differ, so the method would prune other tensors"
    return None


def _check_frozen(file: bytes | None, manifest: Manifest) -> None:
    """Raise BadContent unless these are the manifest's frozen values, and finite."""
    if not manifest.frozen:
        return
    if file is None:
        raise BadContent(
            "frozen_sha256: the manifest has frozen tensors but names no file; publish with sparrow publish"
        )
    for name, tensor in values.unpack(manifest, "frozen", file).items():
        if not np.isfinite(tensor).all():
            raise BadContent(f"{name}: a frozen value is not finite; publish a model with finite values")


def _composed(
    method: CoordinatorMethod, published: PublishedModel, settings: FederationSettings, *, built_in: bool = False
) -> PublishedModel:
    """Return the method's version of a published model. Raises BadContent, SkeletonError, GraphError."""
    if method.compose is None:
        return published
    _check_graphs(published.files, published.manifest, built_in=built_in)
    return method.compose(published, settings)


def _check_graphs(graphs: Mapping[FileName, bytes], manifest: Manifest, *, built_in: bool = False) -> None:
    """Raise BadContent or TooLarge unless these are the manifest's graphs, including the skeleton.

    built_in: whether the graphs are trusted. Also raises SkeletonError and GraphError.
    """
    if manifest.skeleton_sha256 is None:
        raise BadContent("skeleton_sha256: the manifest names no skeleton; publish with sparrow publish")
    for graph, digest in manifest.graphs.items():
        if len(graphs[graph]) > MAX_GRAPH:
            raise TooLarge(f"the {graph} has {len(graphs[graph]):,} bytes; it must have at most {MAX_GRAPH:,}")
        if hashlib.sha256(graphs[graph]).hexdigest() != digest:
            raise BadContent(f"{graph}_sha256 of the manifest is not that of the {graph} sent; publish both together")
    if not built_in:
        # Built-in tasks do not need onnx, which takes 7 MB.
        from sparrow.graphs.skeleton import check_skeleton

        check_skeleton(graphs["skeleton"], manifest)
        if manifest.preparation is not None:
            from sparrow.export.preparation import check_preparation

            check_preparation(graphs["preparation"], manifest)
        if "step" in manifest.graphs:
            from sparrow.graphs import Graphs
            from sparrow.graphs.checking import check_graphs

            check_graphs(Graphs(graphs["step"], graphs["evaluation"]), manifest)


def _built_in(name: str | None) -> BuiltinTask:
    if name not in builtin_tasks():
        raise NoSuchTask(
            f"task: {name!r} is not built in{nearest(str(name), builtin_tasks())}; choose one of "
            f"{', '.join(builtin_tasks())}, or publish your own model with sparrow publish"
        )
    return load_builtin(name)


def _check_model(name: str, manifest: Manifest) -> CoordinatorMethod:
    """Return the method.

    Raises BadContent if the manifest lacks the coupling that it needs, or keeps statistics on devices and the method
    does not keep personal models.
    """
    method = load_method(name)
    if method.active is not None and not manifest.coupling:
        raise BadContent(
            f"{name} trains some neurons of each layer, but this manifest has no coupling of neurons and weights; "
            f"publish the model again, for this method"
        )
    stays = [spec for spec in manifest.tensors if spec.policy == "personal" and spec.dtype == "float32" and spec.shape]
    if stays and not method.personal_models:
        raise BadContent(
            f"{stays[0].name}: {name} keeps no personal model on devices, so this tensor cannot stay there; publish "
            f"with --running-statistics shared, or register a constant buffer with persistent=False"
        )
    return method


def _check_free(db: Session, name: str) -> None:
    if db.scalar(select(Federation.id).where(Federation.name == name)) is not None:
        raise NameTaken(
            f"a federation called {name!r} exists; choose another name, or use sparrow publish --exist-ok if it is the "
            f"same"
        )


def _next_id(db: Session) -> int:
    """Return the next federation id."""
    return 1 + max(db.scalar(select(func.max(table.id))) or 0 for table in (Federation, DeletedFederation))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the method's own settings as ``method_settings.NAME``."""
    own = {f"method_settings.{name}": value for name, value in settings["method_settings"].items()}
    return {**{name: value for name, value in settings.items() if name != "method_settings"}, **own}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
