"""Global models, manifests and skeletons of the federations, and the payloads cut from them.

A payload is not stored: which values it holds follows from the assignment (model version, whether whole, active ratio),
so it is packed when asked for, and a restarted coordinator packs the same bytes again. The last few are remembered,
because a device asks twice (size and digest first, then the bytes) and a broken download asks again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Hashable

from sqlalchemy import select

from coordinator.errors import NotFound
from coordinator.storage.store import Store
from coordinator.storage.tables import Assignment, Federation
from edge_sdk.protocol import bundle, checkpoint
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, draw_neurons, pack
from edge_sdk.protocol.messages import FederationSettings

PAYLOAD_CACHE_BYTES = 64 * 1024 * 1024


def settings_of(federation: Federation) -> FederationSettings:
    """The federation's settings, checked when they were stored."""
    return FederationSettings.model_validate(federation.settings)


def job_of(federation: Federation) -> str:
    """The name that draws of this federation go by: its name and seed, so that seeds decide."""
    return f"{federation.name}:{settings_of(federation).seed}"


class Models:
    """Reads and writes the models of every federation."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._manifests: dict[int, Manifest] = {}
        self._latest: dict[int, tuple[int, Tensors]] = {}
        self._payloads: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def manifest(self, federation: Federation) -> Manifest:
        """The federation's manifest."""
        if federation.id not in self._manifests:
            with self._store.reading() as db:
                text = db.scalars(select(Federation.manifest).where(Federation.id == federation.id)).one()
            self._manifests[federation.id] = Manifest.model_validate_json(text)
        return self._manifests[federation.id]

    def add(self, federation_id: int, manifest: Manifest, skeleton: bytes) -> None:
        """Take in a new federation's model: its description, and its ONNX skeleton on disk."""
        self._manifests[federation_id] = manifest
        self._store.blobs.put(f"{federation_id}/skeleton.onnx", skeleton)

    def skeleton(self, federation_id: int) -> bytes:
        """The ONNX skeleton of the forward pass."""
        try:
            return self._store.blobs.get(f"{federation_id}/skeleton.onnx")
        except FileNotFoundError:
            raise NotFound("this federation was published without an ONNX skeleton") from None

    def save(self, federation_id: int, version: int, tensors: Tensors) -> str:
        """Store a global model durably; returns the SHA-256 of its file."""
        body = checkpoint.save(tensors, json.dumps({"version": version}))
        self._store.blobs.put(_model_key(federation_id, version), body)
        self._latest[federation_id] = (version, tensors)
        return hashlib.sha256(body).hexdigest()

    def file(self, federation_id: int, version: int) -> bytes:
        """A global model as stored: a checkpoint."""
        return self._store.blobs.get(_model_key(federation_id, version))

    def tensors(self, federation_id: int, version: int) -> Tensors:
        """A global model: name -> float32."""
        latest = self._latest.get(federation_id)
        if latest is None or latest[0] != version:
            tensors, _ = checkpoint.load(self.file(federation_id, version))
            if latest is not None and latest[0] > version:
                return tensors
            latest = self._latest[federation_id] = (version, tensors)
        return latest[1]

    def forget(self, federation_id: int, in_use: set[int]) -> None:
        """Delete the global models of versions that nothing refers to any more."""
        keep = {_model_key(federation_id, version) for version in in_use}
        for key in self._store.blobs.keys(f"{federation_id}/models"):
            if key not in keep:
                self._store.blobs.delete(key)

    def mask(
        self, federation: Federation, device: str, assignment: Assignment
    ) -> tuple[NeuronMask | None, NeuronDraw | None]:
        """The neurons that an assignment trains, and their seed form; (None, None) for everything."""
        if assignment.ratio is None:
            return None, None
        draw = NeuronDraw(job_of(federation), assignment.round, device, assignment.ratio)
        return draw_neurons(self.manifest(federation), draw), draw

    def payload(self, federation: Federation, device: str, assignment: Assignment) -> bytes:
        """The bundle of global values that an assignment sends down."""
        key: Hashable = (federation.id, assignment.model_version, None if assignment.full else assignment.id)
        with self._lock:
            if key in self._payloads:
                self._payloads.move_to_end(key)
                return self._payloads[key]
        manifest = self.manifest(federation)
        mask, draw = (None, None) if assignment.full else self.mask(federation, device, assignment)
        values = pack(manifest, self.tensors(federation.id, assignment.model_version), mask)
        body = bundle.encode(manifest, values, mask, draw=draw, precision=settings_of(federation).precision)
        with self._lock:
            self._payloads[key] = body
            while len(self._payloads) > 1 and sum(map(len, self._payloads.values())) > PAYLOAD_CACHE_BYTES:
                self._payloads.popitem(last=False)
        return body


def _model_key(federation_id: int, version: int) -> str:
    return f"{federation_id}/models/{version:09d}.safetensors"
