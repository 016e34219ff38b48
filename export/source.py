"""Read the model to export, from a device's state folder or a checkpoint with manifest and skeleton."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparrow.protocol import checkpoint, personal, values
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.manifest import Manifest, Tensors

from .errors import ExportError, NotThere
from .metadata import properties
from .preparation import check_preparation, complete

__all__ = ["Source", "read_source"]


@dataclass(frozen=True)
class Source:
    """A personal model and its context.

    tensors: all tensors of ``manifest.whole``. own: the method's other arrays. membership: None for a checkpoint.
    preparation: the complete graph from raw samples to inputs, if any. class_names: names of all outputs on this
    device, including spare outputs; empty if equal to the manifest's.
    """

    manifest: Manifest
    skeleton: bytes
    tensors: Tensors
    own: Tensors = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    membership: personal.Membership | None = None
    preparation: bytes | None = None
    class_names: tuple[str, ...] = ()

    @property
    def method(self) -> str | None:
        """Return the federated method, None if unknown."""
        return self.membership.federation.method if self.membership else None

    @property
    def memory(self) -> Mapping[str, Any]:
        """Return the method's non-array state."""
        found = self.progress.get("memory", {})
        return found if isinstance(found, dict) else {}

    def properties(self) -> dict[str, str]:
        """Return the metadata of the exported file."""
        names = json.dumps(self.class_names, ensure_ascii=False) if self.class_names else None
        if self.membership is None:
            return properties(self.manifest, self.tensors, class_names=names)
        return properties(
            self.manifest,
            self.tensors,
            class_names=names,
            task=self.membership.federation.task,
            federation=self.membership.federation.name,
            method=self.method,
            device=self.membership.device,
            round=self.progress.get("last_round"),
        )


def read_source(path: Path, manifest: Path | None = None, skeleton: Path | None = None) -> Source:
    """Read a state folder, or a safetensors file from a state folder or from ``GET .../model``.

    manifest, skeleton: paths; by default the files in the same folder; a built-in task's skeleton is found by its
    digest. Raises ExportError.
    """
    model = path
    # prefer the best personal model, if it was kept
    if path.is_dir():
        model = path / personal.BEST if (path / personal.BEST).exists() else path / personal.MODEL
    if path.is_dir() and not model.exists():
        raise NotThere(f"{path} has no {personal.MODEL}; give the state folder of a device that has trained")
    body = _bytes(model)
    try:
        note = checkpoint.read_note(body)
        saved = personal.read(body) if personal.is_personal(note) else None
        tensors = saved.stored if saved else checkpoint.load(body)[0]
    except ProtocolError as error:
        raise ExportError(f"{model} cannot be read: {error}") from None
    found = _manifest(manifest or model.with_name(personal.MANIFEST))
    if saved is not None:
        if not saved.model:
            raise ExportError(f"{model} has no personal model yet; export it after the device's first round")
        if saved.reference is not None:
            raise ExportError(
                f"{model} is a simulated device's difference from a shared model; export a device that joined with "
                f"sparrow join"
            )
        if saved.manifest != found.values_digest:
            raise ExportError(f"{model} was trained with another manifest; give its federation's with --manifest")
    frozen = model.with_name(personal.values_file("frozen"))
    own = model.with_name(personal.OWN)
    try:
        if found.frozen and frozen.exists():
            tensors = {**values.unpack(found, "frozen", _bytes(frozen)), **tensors}
        found.check_tensors(tensors, what=f"the tensors in {model}", which="whole")
    except ProtocolError as error:
        raise ExportError(str(error)) from None
    return Source(
        manifest=found,
        skeleton=_skeleton(skeleton, model.with_name(personal.graph_file("skeleton")), found),
        tensors=tensors,
        own=saved.own if saved else {},
        progress=_progress(model, saved) if saved else {},
        membership=_membership(model.with_name(personal.MEMBERSHIP)) if saved else None,
        preparation=_preparation(model, found),
        class_names=personal.read_class_names(_bytes(own)) if own.exists() else (),
    )


def _preparation(model: Path, manifest: Manifest) -> bytes | None:
    if manifest.preparation is None:
        return None
    path = model.with_name(personal.graph_file("preparation"))
    if not path.exists():
        raise NotThere(
            f"{path} is missing; download /v1/federations/NAME/preparation.onnx from the coordinator, or export "
            "--without-preparation"
        )
    graph = _bytes(path)
    check_preparation(graph, manifest)
    if not manifest.preparation.own:
        return graph
    own = personal.read_own(_bytes(model.with_name(personal.OWN)), str(manifest.preparation_sha256))
    if own is None:
        raise NotThere(
            f"{model.with_name(personal.OWN)} has no statistics of this device; run sparrow join again, or export "
            "--without-preparation"
        )
    return complete(graph, own)


def _progress(model: Path, saved: personal.Saved) -> Mapping[str, Any]:
    # The progress file can be later than the model.
    if model.name == personal.BEST:
        return saved.progress
    path = model.with_name(personal.PROGRESS)
    try:
        later = personal.read_progress(_bytes(path), saved.save) if path.exists() else None
    except ProtocolError as error:
        raise ExportError(f"{path} is damaged ({error}); remove it") from None
    return saved.progress if later is None else later


def _membership(path: Path) -> personal.Membership | None:
    if not path.exists():
        return None
    try:
        return personal.Membership.model_validate_json(_bytes(path))
    except ValidationError as error:
        raise ExportError(f"{path} is damaged ({error.error_count()} faults); run sparrow join again") from None


def _manifest(path: Path) -> Manifest:
    if not path.exists():
        raise NotThere(f"{path} is missing; give the manifest of the model's federation with --manifest")
    try:
        return Manifest.model_validate_json(_bytes(path))
    except ValidationError as error:
        raise ExportError(f"{path} is not a manifest ({error.error_count()} faults); give another --manifest") from None


def _skeleton(given: Path | None, beside: Path, manifest: Manifest) -> bytes:
    if given is not None or beside.exists():
        return _bytes(given or beside)
    for name in builtin_tasks():
        builtin = load_builtin(name)
        if manifest.skeleton_sha256 is not None and builtin.manifest.skeleton_sha256 == manifest.skeleton_sha256:
            return builtin.skeleton
    raise NotThere(
        f"{beside} is missing; download /v1/federations/NAME/skeleton.onnx from the coordinator, give it with "
        f"--skeleton"
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NotThere(f"{path} is missing") from None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None
