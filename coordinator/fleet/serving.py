"""Models of federations as users and devices download them."""

from __future__ import annotations

import json
import threading

from sparrow.export.metadata import properties
from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import (
    GraphName,
    Manifest,
    Values,
)
from sparrow.protocol.messages import (
    Evaluation,
    ModelInfo,
)
from sparrow.protocol.signatures import Published

from ..errors import (
    NoGlobalModel,
    NotFound,
)
from ..models import judging
from ..models.global_models import Models, why_unusable
from ..rounds import rollback
from ..storage.store import Store
from ..storage.tables import (
    Federation,
)
from . import publications
from .federations import find


class ServedModels:
    """Manifests, graphs and global models by federation name."""

    def __init__(self, store: Store, models: Models) -> None:
        self._store = store
        self._models = models

    def models(self, name: str) -> list[ModelInfo]:
        """Return the kept global models, oldest first. Raises NotFound."""
        with self._store.reading() as db:
            return rollback.list_models(db, find(db, name), self._models)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of the federation's model."""
        with self._store.reading() as db:
            return self._models.manifest(find(db, name))

    def publication(self, name: str) -> Published:
        """Return the signed publication of the federation's model. Raises NotFound."""
        with self._store.reading() as db:
            return publications.read(db, find(db, name))

    def graph(self, name: str, graph: GraphName) -> bytes:
        """Return an ONNX graph of the federation's model. Raises NotFound if it was not published."""
        with self._store.reading() as db:
            return self._models.graph(find(db, name), graph)

    def model(self, name: str, version: int | None = None) -> bytes:
        """Return a kept global model as a checkpoint, the newest by default. Raises NoGlobalModel, NotFound."""
        with self._store.reading() as db:
            federation = find(db, name)
            kept = self._models.kept(db, federation)
        self._check_usable(federation)
        if version is not None and version not in kept:
            raise NotFound(
                f"model {version} of {name} is not kept; GET /v1/federations/{name}/models lists the kept ones"
            )
        number = federation.model_version if version is None else version
        if not self._models.manifest(federation).frozen:
            return self._models.shared_file(federation, number)
        note = json.dumps({"version": number})
        return self._models.packed(
            federation, number, "whole", lambda: checkpoint.save(self._models.whole(federation, number), note)
        )

    def values(self, name: str, which: Values) -> bytes:
        """Return one of the manifest's files of values. Raises NotFound if the model has none."""
        with self._store.reading() as db:
            return self._models.values(find(db, name), which)

    def model_onnx(self, name: str) -> bytes:
        """Return the global model as ONNX. Raises NoGlobalModel."""
        with self._store.reading() as db:
            federation = find(db, name)
        self._check_usable(federation)
        return self._models.packed(federation, federation.model_version, "onnx", lambda: self._fill(federation))

    def evaluate(self, name: str, body: bytes, *, seconds: float, stop: threading.Event) -> Evaluation:
        """Return the evaluation of the global model on test data. Raises NoGlobalModel, BadContent, Unavailable."""
        manifest = self.manifest(name)
        skeleton = self.graph(name, "skeleton")
        return judging.evaluate(self.model_onnx(name), skeleton, manifest, body, seconds=seconds, stop=stop)

    def _fill(self, federation: Federation) -> bytes:
        # Both need onnx, which takes 7 MB.
        from sparrow.export.preparation import compose_bytes
        from sparrow.graphs.skeleton import fill

        tensors = self._models.whole(federation, federation.model_version)
        manifest = self._models.manifest(federation)
        known = {"federation": federation.name, "task": federation.task, "method": federation.method}
        note = properties(manifest, tensors, round=federation.round, **known)
        filled = fill(self._models.graph(federation, "skeleton"), manifest, tensors, metadata=note)
        if manifest.preparation is None or manifest.preparation.own:
            return filled
        return compose_bytes(filled, self._models.graph(federation, "preparation"))

    def _check_usable(self, federation: Federation) -> None:
        reason = why_unusable(federation, self._models.manifest(federation))
        if reason:
            raise NoGlobalModel(reason)
