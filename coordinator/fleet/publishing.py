"""New federations and new versions of their models: of a built-in task, or as somebody publishes them."""

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
from ..storage.store import Store
from ..storage.tables import (
    DeletedFederation,
    Federation,
)
from . import publications
from .checks import check_settings, completed, why_predictable, why_unbounded
from .federations import Federations, find

log = logging.getLogger(__name__)

NEVER = 0.0
"""When a federation was deleted that is being created, or whose creation failed."""

LARGEST_NOTE = 64 * 1024


class Publisher:
    """Makes federations, and gives them new versions of their models."""

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
        """Create a federation of a user's own model: a checkpoint as ``CreateFederation`` describes it.

        largest: of the model, in bytes: a manifest of a few lines may describe values without end. Raises BadContent,
        NameTaken, TooLarge.
        """
        with callers_data():
            note = checkpoint.read_note(body)
            if len(note) > LARGEST_NOTE:
                raise TooLarge(f"the note has {len(note)} characters, nothing valid is longer than {LARGEST_NOTE}")
            request = CreateFederation.model_validate_json(note)
            tensors, _ = checkpoint.load(body)
            request = request.model_copy(update={"publication": _take_publication(tensors) or request.publication})
        if request.task is not None:
            raise BadContent("task: leave it out where a manifest is published")
        with callers_data():
            manifest = _take_manifest(tensors)
            if manifest.first_sha256 is not None:
                raise BadContent("first_sha256: leave it out; the coordinator says what stays on devices")
            files = {name: _taken(tensors, name) for name in manifest.files}
            size = 4 * manifest.shared_values + values.size(manifest, "frozen") + values.size(manifest, "first")
            if size > largest:
                raise TooLarge(f"the model has {size} bytes, this coordinator takes up to {largest}")
        return self._create(request, manifest, files, tensors, len(body))

    def replace_model(self, name: str, body: bytes) -> FederationInfo:
        """Give the model new graphs, and a manifest that names them: now, or when the open round has closed.

        body: a checkpoint as a publication, without weights: those stay. The same again changes nothing. Raises
        NotFound, BadContent, TooLarge, and DifferentFederation where the model's values are not the federation's.
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
                raise BadContent(f"{next(iter(tensors))}: weights are not replaced; leave them out, or publish anew")
            method = _check_model(federation.method, published)
            composed = _composed(method, PublishedModel(published, graphs, {}), settings_of(federation))
            manifest, graphs = method.manifest(composed.manifest, settings_of(federation)), dict(composed.files)
        has = self._models.manifest(federation)
        manifest = Manifest.model_validate({**manifest.model_dump(), "first_sha256": has.first_sha256})
        difference = _difference(has, manifest, masked=model.mask is not None)
        if difference:
            raise DifferentFederation(
                f"{difference}. A model of other values, inputs or outputs needs a federation of its own: publish it "
                f"under another name"
            )
        if "step" in has.graphs and "step" not in manifest.graphs:
            raise BadContent(
                "step_sha256: the federation's model has a training step, with which devices train without PyTorch, "
                "and this version has none; publish one that compiles"
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
                raise NotFound(f"{name} was deleted meanwhile, and published anew; try again")
            text = manifest.model_dump_json()
            now.replacement = None if text == now.manifest else text
            now.replacement_publication = None
            if signed is not None and now.replacement is None:
                record_publication(now, signed)
            elif signed is not None:
                now.replacement_publication = signed.model_dump_json()
            if now.published is not None:
                now.published = {**now.published, "model_digest": published.model_digest}
            if open_round(db, now) is None:
                carry_out_replacement(now)
        # Again, because a cleanup may have taken them for unneeded before the records named them.
        self._models.add_files(federation.id, manifest, graphs)
        return self._federations.get(name)

    def ensure_default(self, task: str, settings: FederationSettings) -> None:
        """Create the federation ``default`` when there never was any: the first start."""
        with self._store.reading() as db:
            deleted = select(DeletedFederation.id).where(DeletedFederation.deleted_at != NEVER)
            if db.scalar(select(Federation.id).limit(1)) or db.scalar(deleted.limit(1)):
                return
        self.create(CreateFederation(name="default", task=task, settings=settings))

    def compare(self, name: str, wanted: CompareFederation) -> FederationInfo:
        """Return the federation of this name if ``wanted`` would make the same one: method, model and settings.

        Those at its publication count: later changes of an operator are no difference, nor are the initial weights.
        Raises NotFound, DifferentFederation, BadContent."""
        with self._store.reading() as db:
            federation = find(db, name)
            model = wanted.model_digest or _built_in(wanted.task).manifest.model_digest
            settings = completed(
                chosen(wanted.settings, self._models.manifest(federation), classes=not wanted.model_digest)
            )
            published = federation.published or {"settings": federation.settings, "model_digest": None}
            asked, has = _flat(settings.model_dump(mode="json")), _flat(published["settings"])
            differences = [
                f"{setting}: asked for {_shown(value)}, it has {_shown(has[setting])}"
                for setting, value in asked.items()
                if setting in has and has[setting] != value
            ]
            if wanted.task != federation.task:
                differences.append(f"task: asked for {wanted.task}, it has {federation.task}")
            elif published["model_digest"] not in (None, model):
                differences.append(
                    "model: its layers, their shapes, its frozen values, or what of it stays on devices are others "
                    "than those asked for"
                )
            if differences:
                raise DifferentFederation(
                    f"a federation {name!r} exists and is another: {'; '.join(differences)}. Choose another name, ask "
                    f"for what it has, or delete it first (sparrow federation delete {name})"
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

        published: the tensors that were sent, in so many bytes with all that came with them; None for a built-in task,
        which has nothing that could be hostile."""
        settings = completed(chosen(request.settings, manifest, classes=published is None))
        published_as = {"settings": settings.model_dump(mode="json"), "model_digest": manifest.model_digest}
        method = _check_model(settings.method, manifest)
        original, signed = manifest, None
        with callers_data():
            if published is not None:
                manifest.check_tensors(published, what="the published weights", which="published")
            own = PublishedModel(manifest, published_files, published or {})
            composed = _composed(method, own, settings, built_in=published is None)
            manifest, published_files = method.manifest(composed.manifest, settings), composed.files
            check_settings(method, manifest, settings)
            _check_graphs(published_files, manifest, built_in=published is None)
            _check_frozen(published_files.get("frozen"), manifest)
            if published is not None and manifest.first:
                first = values.pack(manifest, "first", composed.tensors)
                manifest, published_files = manifest.with_values("first", first), {**published_files, "first": first}
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
        # Blobs first, outside of any transaction: a federation that can be seen has its model on disk.
        files = self._models.files(federation_id, 0, model)
        try:
            self._models.add_files(federation_id, manifest, published_files)
            self._models.write(federation_id, files)
        except Unavailable:
            with contextlib.suppress(Unavailable):  # then the next start removes what was written
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
        self._models.remember(federation_id, files)
        return self._federations.get(request.name)

    def _reserve_id(self, name: str) -> int:
        """Return the id of a federation that is about to be created, under which its blobs may be written.

        Until it is, the records have it as deleted before it began: killed, it leaves nothing. Raises NameTaken."""
        with self._store.writing() as db:
            _check_free(db, name)
            federation_id = _next_id(db)
            db.add(DeletedFederation(id=federation_id, name=name, deleted_at=NEVER))
            return federation_id


def _taken(tensors: Tensors, name: str) -> bytes:
    """Take the bytes of ``sparrow.NAME`` out of a checkpoint. Raises BadContent where it has none."""
    try:
        return tensors.pop(f"sparrow.{name}").tobytes()
    except KeyError as missing:
        raise BadContent(f"the checkpoint lacks {missing}; publish with sparrow publish") from None


def _take_publication(tensors: Tensors) -> Publication | None:
    """Take the publication out of a checkpoint; None if it has none. Raises BadContent."""
    if "sparrow.publication" not in tensors:
        return None
    return Publication.model_validate_json(_taken(tensors, "publication"))


def _take_manifest(tensors: Tensors) -> Manifest:
    """Take the manifest out of a checkpoint. Raises BadContent, TooLarge."""
    text = _taken(tensors, "manifest")
    if len(text) > MAX_MANIFEST:
        raise TooLarge(f"the manifest has {len(text):,} bytes, at most {MAX_MANIFEST:,} are accepted")
    return Manifest.model_validate_json(text)


def _difference(has: Manifest, new: Manifest, *, masked: bool) -> str | None:
    """Return the first of what a federation keeps of a model that a new version has otherwise; None for nothing.

    masked: whether the model has a mask of single weights."""
    for field in ("task", "input_shape", "output_shape"):
        if getattr(has, field) != getattr(new, field):
            return f"{field}: the new version has {getattr(new, field)}, the federation {getattr(has, field)}"
    if has.frozen_sha256 != new.frozen_sha256:
        return "what nobody trains of the model has other values in the new version"
    old, given = ({spec.name: spec for spec in each.tensors} for each in (has, new))
    for name in {**old, **given}:
        if name not in old or name not in given:
            return f"{name}: only {'the new version' if name in given else 'the federation'} has this tensor"
        for field in ("shape", "dtype", "policy", "trainable"):
            one, other = getattr(old[name], field), getattr(given[name], field)
            if one != other:
                return f"{name}: has {field} {other} in the new version, {one} in the federation"
    for field in ("kind", "names", "spare"):
        one, other = (getattr(each.targets or Targets(), field) for each in (has, new))
        if one != other:
            return f"targets: the new version has {field} {other}, the federation {one}"
    if has.tensors_digest != new.tensors_digest:
        return "the tensors agree, but not their order, neurons, blocks or other names (tied weights)"
    if masked and has.maskable != new.maskable:
        return "the tensors agree, but the method prunes others of them, for they are used in other layers"
    return None


def _check_frozen(file: bytes | None, manifest: Manifest) -> None:
    """Raise BadContent unless this is the file of frozen values that the manifest names, all of them finite."""
    if not manifest.frozen:
        return
    if file is None:
        raise BadContent(
            "frozen_sha256: the manifest has frozen tensors, and names no file; publish with sparrow publish"
        )
    for name, tensor in values.unpack(manifest, "frozen", file).items():
        if not np.isfinite(tensor).all():
            raise BadContent(f"{name}: a frozen value is not finite; publish a sound model")


def _composed(
    method: CoordinatorMethod, published: PublishedModel, settings: FederationSettings, *, built_in: bool = False
) -> PublishedModel:
    """Return the federation's model. Raises BadContent, SkeletonError and GraphError for a published one that is none,
    or cannot be taken."""
    if method.compose is None:
        return published
    _check_graphs(published.files, published.manifest, built_in=built_in)
    return method.compose(published, settings)


def _check_graphs(graphs: Mapping[FileName, bytes], manifest: Manifest, *, built_in: bool = False) -> None:
    """Raise BadContent unless these are the graphs that the manifest names, the skeleton among them; TooLarge.

    built_in: whether the graphs are our own, and need not be read; else SkeletonError for a skeleton that is not the
    model's, and GraphError for a training step or an evaluation that devices would refuse.
    """
    if manifest.skeleton_sha256 is None:
        raise BadContent("skeleton_sha256: the manifest names no skeleton; publish with sparrow publish")
    for graph, digest in manifest.graphs.items():
        if len(graphs[graph]) > MAX_GRAPH:
            raise TooLarge(f"the {graph} has {len(graphs[graph]):,} bytes, at most {MAX_GRAPH:,} are accepted")
        if hashlib.sha256(graphs[graph]).hexdigest() != digest:
            raise BadContent(f"{graph}_sha256 of the manifest is not that of the {graph} sent; publish both together")
    if not built_in:
        from sparrow.graphs.skeleton import check_skeleton  # onnx: 7 MB, which built-in tasks do without

        check_skeleton(graphs["skeleton"], manifest)
        if manifest.preparation is not None:
            from sparrow.export.preparation import check_preparation  # onnx, as above

            check_preparation(graphs["preparation"], manifest)
        if "step" in manifest.graphs:
            from sparrow.graphs import Graphs
            from sparrow.graphs.checking import check_graphs  # the devices' own check; onnx, as above

            check_graphs(Graphs(graphs["step"], graphs["evaluation"]), manifest)


def _built_in(name: str | None) -> BuiltinTask:
    """Return the built-in task of this name. Raises NoSuchTask."""
    if name not in builtin_tasks():
        raise NoSuchTask(
            f"task: {name!r} is not built in{nearest(str(name), builtin_tasks())}; choose one of "
            f"{', '.join(builtin_tasks())}, or publish a model of your own with sparrow publish"
        )
    return load_builtin(name)


def _check_model(name: str, manifest: Manifest) -> CoordinatorMethod:
    """Return the method.

    Raises BadContent for a manifest without the coupling that it needs, and for statistics that are to stay on devices
    which keep nothing between rounds."""
    method = load_method(name)
    if method.active is not None and not manifest.coupling:
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


def _check_free(db: Session, name: str) -> None:
    if db.scalar(select(Federation.id).where(Federation.name == name)) is not None:
        raise NameTaken(
            f"a federation called {name!r} exists; choose another name (sparrow publish --exist-ok uses the one that "
            f"there is, where it is the same)"
        )


def _next_id(db: Session) -> int:
    """Return the id of the next federation; no id is used twice, since a deleted one may have left blobs."""
    return 1 + max(db.scalar(select(func.max(table.id))) or 0 for table in (Federation, DeletedFederation))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, the method's own ones among the others."""
    own = {f"method_settings.{name}": value for name, value in settings["method_settings"].items()}
    return {**{name: value for name, value in settings.items() if name != "method_settings"}, **own}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
