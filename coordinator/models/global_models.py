"""Global models, manifests and graphs of federations, and the payloads cut from them.

A payload follows from the assignment and the device's mask, so it is packed on request, to the same bytes after a
restart. The last ones are cached (``payloads``).

A model is written before the transaction that records it (``tables.Model``); files without a record are never served. A
method's own arrays are in a second file.

Element masks, and neuron masks chosen by devices, are stored while a device holds them, so that it receives only
changes or chosen values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from pydantic import ValidationError
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from sparrow.protocol import bundle, checkpoint, values
from sparrow.protocol.elements import ElementMask, from_bits
from sparrow.protocol.manifest import FileName, GraphName, Manifest, Tensors, Values
from sparrow.protocol.masks import Mask, NeuronDraw, NeuronMask, draw_neurons, pack
from sparrow.protocol.messages import Kind
from sparrow.protocol.neurons import Scores, best_neurons, counts_at, mask_digest, mask_from_file, mask_to_file
from sparrow.protocol.secure.consistency import model_digest
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import Published

from ..draws import neurons_of
from ..errors import Damaged, NotFound, Unavailable, Unreadable, explain
from ..methods import GlobalModel, ServerPruning, Situation, load_method
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Model, Round
from .payloads import Packed, Payloads
from .retention import Retention

log = logging.getLogger(__name__)

SHA256 = re.compile("[0-9a-f]{64}")

_MODELS = select(Model).where(Model.federation_id == bindparam("federation_id")).order_by(Model.version)


@dataclass(frozen=True)
class ModelFiles:
    """The files of a global model to write, content by key, and the fields of its record."""

    version: int
    model: GlobalModel
    files: Mapping[str, bytes]
    sha256: str
    state_sha256: str | None
    bytes: int


def settings_of(federation: Federation) -> FederationSettings:
    """Return the federation's stored settings. Raises Unreadable."""
    try:
        return _settings(json.dumps(federation.settings))
    except ValidationError as error:
        raise unreadable(federation, "settings", error) from None


@lru_cache(maxsize=256)
def _settings(text: str) -> FederationSettings:
    return FederationSettings.model_validate_json(text)


def unreadable(federation: Federation, what: str, error: ValidationError) -> Unreadable:
    """Return the error for an invalid part of a federation's record."""
    return Unreadable(
        f"the {what} of federation {federation.name!r} in the records cannot be read: {explain(error)}. Restore a "
        f"backup (sparrow restore), or run the version that wrote them"
    )


class Models:
    """Reads and writes the models of all federations."""

    def __init__(self, store: Store, retention: Retention | None = None) -> None:
        self._store = store
        self._retention = retention or Retention()
        # All by federation id. Number of replacements, and the manifest after them.
        self._manifests: dict[int, tuple[int, Manifest]] = {}
        # Digest of the latest model's file, and the model.
        self._latest: dict[int, tuple[str, GlobalModel]] = {}
        # The last scored model, and its scores.
        self._scores: dict[int, tuple[GlobalModel, Scores]] = {}
        # Digest of the model's file, and its digest in secure rounds.
        self._sent: dict[int, tuple[str, str]] = {}
        self._payloads = Payloads()

    def manifest(self, federation: Federation) -> Manifest:
        """Return the federation's manifest. Raises Unreadable."""
        known = self._manifests.get(federation.id)
        if known is None or known[0] != federation.replacements:
            columns = select(Federation.replacements, Federation.manifest).where(Federation.id == federation.id)
            with self._store.reading() as db:
                number, text = db.execute(columns).one()
            try:
                known = self._manifests[federation.id] = (number, Manifest.model_validate_json(text))
            except ValidationError as error:
                raise unreadable(federation, "manifest", error) from None
        return known[1]

    def add_files(self, federation_id: int, manifest: Manifest, files: Mapping[FileName, bytes]) -> None:
        """Store the given files of a manifest durably."""
        for name, digest in manifest.files.items():
            if name in files:
                self._store.blobs.put(file_key(federation_id, digest), files[name])

    def values(self, federation: Federation, which: Values) -> bytes:
        """Return a file of values, shared in memory. Raises NotFound."""
        digest = self.manifest(federation).files.get(which)
        if digest is None:
            raise NotFound(f"the model of {federation.name} has no {which} values")
        body = self._store.blobs.get(file_key(federation.id, digest))
        return self._payloads.get((federation.id, 0, which), lambda: body).body

    def whole(self, federation: Federation, version: int) -> Tensors:
        """Return all values of a global model by name, including frozen ones."""
        manifest = self.manifest(federation)
        tensors = self.model(federation, version).tensors
        if not manifest.frozen:
            return tensors
        return {**values.unpack(manifest, "frozen", self.values(federation, "frozen")), **tensors}

    def graph(self, federation: Federation, graph: GraphName) -> bytes:
        """Return an ONNX graph of the model. Raises NotFound."""
        digest = self.manifest(federation).graphs.get(graph)
        if digest is None:
            raise NotFound(
                f"the model of {federation.name} was published without the graph {graph}; its devices need PyTorch"
            )
        return self._store.blobs.get(file_key(federation.id, digest))

    def files(self, federation_id: int, version: int, model: GlobalModel) -> ModelFiles:
        """Return the files of a global model for ``write``."""
        files = {}
        state_sha256 = None
        if model.mask is not None or model.own:
            state = {f"own:{name}": array for name, array in model.own.items()}
            if model.mask is not None:
                state["mask"] = np.frombuffer(model.mask.bits, dtype=np.uint8)
                files[mask_key(federation_id, model.mask.digest)] = model.mask.bits
            body = checkpoint.save(state)
            state_sha256 = hashlib.sha256(body).hexdigest()
            files[state_key(federation_id, version, state_sha256)] = body
        body = checkpoint.save(model.tensors, json.dumps({"version": version}))
        sha256 = hashlib.sha256(body).hexdigest()
        files[model_key(federation_id, version, sha256)] = body
        return ModelFiles(version, model, files, sha256, state_sha256, len(body))

    def write(self, federation_id: int, files: ModelFiles, after_each: Callable[[], None] = lambda: None) -> None:
        """Store a global model's files durably. It may take a minute."""
        known = self._store.blobs.keys(f"{federation_id}/masks")
        for key, body in files.files.items():
            if key not in known:
                self._store.blobs.put(key, body)
            after_each()

    def record(self, db: Session, federation_id: int, files: ModelFiles, number: int = 0) -> None:
        """Record a global model with written files, in the transaction that makes it the federation's."""
        row = Model(federation_id=federation_id, version=files.version, bytes=files.bytes, round=number)
        row.sha256 = files.sha256
        row.state_sha256 = files.state_sha256
        db.add(row)

    def digest(self, federation: Federation, version: int) -> str | None:
        """Return this model's SHA-256; None if the method does not send changes."""
        if load_method(federation.method).changes is None:
            return None
        return self.sha256(federation, version)

    def sha256(self, federation: Federation, version: int) -> str:
        """Return the SHA-256 of a model's file. Raises NotFound for an unknown version."""
        if version == federation.model_version:
            return federation.model_sha256
        return self._named(federation, version).sha256

    def file(self, federation: Federation, version: int) -> bytes:
        """Return the stored checkpoint of a global model. Raises NotFound if it is not kept."""
        return self._get(federation, version, model_key(federation.id, version, self.sha256(federation, version)))

    def shared_file(self, federation: Federation, version: int) -> bytes:
        """Return a global model's verified file, shared in memory."""
        body = self.file(federation, version)
        return self._payloads.get((federation.id, version, "file"), lambda: body).body

    def packed(self, federation: Federation, version: int, form: str, pack: Callable[[], bytes]) -> bytes:
        """Return a derived form of a global model, made by ``pack`` once for all callers."""
        return self._payloads.get((federation.id, version, (form, federation.replacements)), pack).body

    def _named(self, federation: Federation, version: int) -> Model:
        """Return the record of a global model. Raises NotFound."""
        with self._store.reading() as db:
            found = db.get(Model, (federation.id, version))
        if found is None:
            raise NotFound(f"{federation.name} has no model {version}; it may have been removed")
        return found

    def _get(self, federation: Federation, version: int, key: str) -> bytes:
        """Return a file of a global model. Raises Unavailable."""
        try:
            return self._store.blobs.get(key, needed=False)
        except FileNotFoundError:
            with self._store.reading() as db:
                if db.get(Model, (federation.id, version)) is None:
                    raise Unavailable("this global model was just replaced by a newer one; retry") from None
            return self._store.blobs.get(key)

    def kept(self, db: Session, federation: Federation) -> dict[int, Model]:
        """Return the global models to keep, oldest first."""
        models = {each.version: each for each in self.recorded(db, federation)}
        stay = self._retention.kept(models.values()) | {federation.model_version}
        return {number: each for number, each in models.items() if number in stay}

    def model(self, federation: Federation, version: int) -> GlobalModel:
        """Return a global model. Raises NotFound if it is not kept."""
        latest = self._latest.get(federation.id)
        digest = self.sha256(federation, version)
        if latest is None or latest[0] != digest:
            model = self._load(federation, version)
            # Only the newest model is cached.
            if version != federation.model_version:
                return model
            latest = self._latest[federation.id] = (digest, model)
        return latest[1]

    def remember(self, federation_id: int, files: ModelFiles) -> None:
        """Cache the federation's new model."""
        self._latest[federation_id] = (files.sha256, files.model)

    def _load(self, federation: Federation, version: int) -> GlobalModel:
        named = self._named(federation, version)
        tensors, _ = checkpoint.load(self._get(federation, version, model_key(federation.id, version, named.sha256)))
        if named.state_sha256 is None:
            return GlobalModel(tensors)
        state, _ = checkpoint.load(
            self._get(federation, version, state_key(federation.id, version, named.state_sha256))
        )
        bits = state.pop("mask", None)
        mask = None if bits is None else from_bits(self.manifest(federation), bits.tobytes())
        return GlobalModel(tensors, mask, {name.removeprefix("own:"): array for name, array in state.items()})

    def drop(self, federation_id: int) -> None:
        """Remove a deleted federation from the caches."""
        self._manifests.pop(federation_id, None)
        self._latest.pop(federation_id, None)
        self._scores.pop(federation_id, None)
        self._sent.pop(federation_id, None)

    def recorded(self, db: Session, federation: Federation) -> list[Model]:
        """Return the records of all global models that are not deleted yet, oldest first."""
        return list(db.scalars(_MODELS, {"federation_id": federation.id}))

    def drop_old(self, db: Session, federation: Federation, in_use: set[int], now: float) -> None:
        """Delete the records of global models that are neither in use nor kept."""
        models = self.recorded(db, federation)
        for each in models:
            if each.pinned_until < now:
                each.pinned_until = 0.0
        stay = in_use | set(self.kept(db, federation))
        for old in models:
            if old.version not in stay:
                db.delete(old)

    @staticmethod
    def needed(db: Session, federation_id: int, keys: Iterable[str]) -> set[str]:
        """Return the keys of all recorded models, and those of ``keys`` that may be recorded soon."""
        # A version newer than all in the records may be in use by another process.
        rows = db.scalars(_MODELS, {"federation_id": federation_id}).all()
        newest = max((row.version for row in rows), default=-1)
        return {key for row in rows for key in keys_of(row)}.union(key for key in keys if _version_in(key) > newest)

    def keep_mask(self, federation: Federation, mask: NeuronMask) -> str:
        """Store a mask chosen by a device; return its digest."""
        manifest = self.manifest(federation)
        digest = mask_digest(manifest, mask)
        key = mask_key(federation.id, digest)
        if key not in self._store.blobs.keys(f"{federation.id}/masks"):
            self._store.blobs.put(key, mask_to_file(manifest, mask))
        return digest

    def _held_mask(self, federation: Federation, device: Device) -> ElementMask | NeuronMask | None:
        """Return the mask that the device reported, if it is stored for this federation."""
        if device.mask is None or not SHA256.fullmatch(device.mask):
            return None
        key = mask_key(federation.id, device.mask)
        try:
            data = self._store.blobs.get(key, needed=False)
        except FileNotFoundError:
            return None
        except Damaged:
            # Like an unknown mask: the device gets the whole model, or chooses again.
            self._store.blobs.delete(key)
            return None
        return mask_from_file(self.manifest(federation), data)

    def mask(
        self, federation: Federation, device: Device, assignment: Assignment
    ) -> tuple[Mask | None, NeuronDraw | None]:
        """Return the mask of an assignment, and its seed form, if any.

        (None, None) means all values, also if the device must choose from the full model.
        """
        if assignment.ratio is None:
            return self.model(federation, assignment.model_version).mask, None
        manifest = self.manifest(federation)
        method = load_method(federation.method)
        settings = settings_of(federation)
        situation = Situation(manifest, settings, assignment.round)
        assert method.active is not None, "assignments of other methods have no ratio"
        choice = method.active.choice(settings)
        pruning = method.active.pruning(settings)
        if choice is not None:
            held = self._held_mask(federation, device)
            kept = isinstance(held, NeuronMask) and choice.keeps(held, assignment.ratio, situation)
            return (held, None) if kept else (None, None)
        if pruning is not None:
            scores = self._scored(federation, assignment.model_version, pruning, situation)
            return best_neurons(scores, counts_at(manifest, assignment.ratio)), None
        if method.active.rule is not None:
            return method.active.rule(manifest, assignment.ratio), None
        draw = NeuronDraw(neurons_of(federation.secret, assignment, device.name), assignment.ratio)
        return draw_neurons(manifest, draw), draw

    def _scored(self, federation: Federation, version: int, pruning: ServerPruning, situation: Situation) -> Scores:
        """Return the neurons' scores, computed once per model."""
        model = self.model(federation, version)
        known = self._scores.get(federation.id)
        if known is None or known[0] is not model:
            known = self._scores[federation.id] = (model, pruning.scores(model, situation))
        return known[1]

    def payload(self, federation: Federation, device: Device, assignment: Assignment) -> Packed:
        """Return the bundle of global values for an assignment."""
        # Unless it is cut for one device's neurons, a payload is the same for all devices with the same mask.
        # In secure rounds devices compare the whole model with that of all others.
        secure = settings_of(federation).secure and assignment.kind == Kind.train.value
        whole = assignment.full or secure
        whose = None if whole or assignment.ratio is None else assignment.id
        version = assignment.model_version
        plan = json.dumps(assignment.plan)
        sends_changes = load_method(federation.method).changes is not None and not secure
        held = self._round_of(federation, device.model) if sends_changes else None
        # An unknown mask counts as none: otherwise a device could fill the cache with payloads.
        known = self._held_mask(federation, device)
        depends = (whose, None if known is None else device.mask, held, plan, federation.replacements)
        key = (federation.id, version, depends)
        return self._payloads.get(key, lambda: self._pack(federation, device, assignment, held, known, whole=whole))

    def _pack(
        self,
        federation: Federation,
        device: Device,
        assignment: Assignment,
        held: int | None,
        known: ElementMask | NeuronMask | None,
        *,
        whole: bool,
    ) -> bytes:
        manifest = self.manifest(federation)
        settings = settings_of(federation)
        plan = assignment.plan or {}
        model = self.model(federation, assignment.model_version)
        mask, draw = self.mask(federation, device, assignment)
        if whole:
            mask = model.mask
            draw = None
        method = load_method(federation.method)
        situation = Situation(manifest, settings, assignment.round, plan)
        if held is not None and method.changes is not None:
            mask = method.changes(model, held, situation)
        return bundle.encode(
            manifest,
            pack(manifest, model.tensors, mask),
            mask,
            draw=draw,
            precision=settings.precision_of("down", Kind(assignment.kind)),
            known=known if isinstance(known, ElementMask) else None,
            parts=method.payload_parts(model, situation) if method.payload_parts else None,
        )

    def sent_digest(self, federation: Federation) -> str:
        """Return the digest of the global model as devices of a secure round decode it."""
        known = self._sent.get(federation.id)
        if known is None or known[0] != federation.model_sha256:
            manifest = self.manifest(federation)
            model = self.model(federation, federation.model_version)
            precision = settings_of(federation).precision_of("down", Kind.train)
            values = pack(manifest, model.tensors, model.mask)
            if precision != "fp32":
                body = bundle.encode(manifest, values, model.mask, precision=precision)
                values = bundle.decode(body, manifest).values
            known = self._sent[federation.id] = (federation.model_sha256, model_digest(values, model.mask))
        return known[1]

    def _round_of(self, federation: Federation, digest: str | None) -> int | None:
        """Return the round that made the model with this digest, or None if it is unknown or undone."""
        # The current model has no record of changes since an undone round.
        if digest is None:
            return None
        of_digest = select(Round.number).where(
            Round.federation_id == federation.id, Round.model_sha256 == digest, Round.undone.is_(False)
        )
        with self._store.reading() as db:
            return db.scalars(of_digest.order_by(Round.number).limit(1)).first()


def why_unusable(federation: Federation, manifest: Manifest) -> str | None:
    """Return the reason why the global model cannot be used without a device, or None."""
    if not load_method(federation.method).usable_global_model:
        return f"{federation.method} has no complete global model; export a device's personal model"
    # The coordinator has the frozen values, but not personal ones.
    if len(manifest.kept) > len(manifest.shared):
        personal = next(spec.name for spec in manifest.kept if spec.policy == "personal")
        return f"{personal} is kept on the devices, so the global model is incomplete; export a personal model"
    return None


def keys_of(model: Model) -> set[str]:
    """Return the keys of a global model's files."""
    keys = {model_key(model.federation_id, model.version, model.sha256)}
    if model.state_sha256 is not None:
        keys.add(state_key(model.federation_id, model.version, model.state_sha256))
    return keys


def model_key(federation_id: int, version: int, sha256: str) -> str:
    """Return the key of a global model's values. sha256: of the file."""
    return f"{federation_id}/models/{version:09d}.{sha256}.safetensors"


def state_key(federation_id: int, version: int, sha256: str) -> str:
    """Return the key of a method's own state of a model."""
    return f"{federation_id}/models/{version:09d}.state.{sha256}.safetensors"


def file_key(federation_id: int, sha256: str) -> str:
    """Return the key of a file in the federation's manifest."""
    return f"{federation_id}/files/{sha256}"


def file_keys(federation: Federation, manifest: Manifest) -> set[str]:
    """Return the keys of all files in a federation's manifest and in its replacement."""
    replacement = federation.replacement
    manifests = [manifest, *([] if replacement is None else [Manifest.model_validate_json(replacement)])]
    return {file_key(federation.id, digest) for each in manifests for digest in each.files.values()}


def record_publication(federation: Federation, published: Published) -> None:
    """Record the publication of a federation's model."""
    federation.publication = published.model_dump_json()
    federation.publisher = published.publication.publisher
    federation.publication_sha256 = published.publication.digest


def carry_out_replacement(federation: Federation) -> bool:
    """Replace the manifest by the waiting version; return whether there was one."""
    if federation.replacement is None:
        return False
    federation.manifest = federation.replacement
    federation.replacement = None
    federation.replacements += 1
    if federation.replacement_publication is not None:
        record_publication(federation, Published.model_validate_json(federation.replacement_publication))
        federation.replacement_publication = None
    log.warning("%s: replaced the graphs of its model", federation.name)
    return True


def _version_in(key: str) -> int:
    return int(key.rpartition("/")[2].partition(".")[0])


def mask_key(federation_id: int, digest: str) -> str:
    """Return the key of a mask that a device may hold."""
    return f"{federation_id}/masks/{digest}"
