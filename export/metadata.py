"""Metadata of an exported file, stored as ONNX model properties."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import Manifest, Tensors

SAID = {
    "reader",
    "dtype",
    "shape",
    "free",
    "axes",
    "rate",
    "step",
    "columns",
    "channel",
    "channels",
    "steps",
    "missing",
}
"""Fields of a preparation that are part of the metadata."""


def properties(manifest: Manifest, tensors: Tensors, **known: object) -> dict[str, str]:
    """Return the metadata derived from the model, and the ``known`` metadata (method, round, ...) that are not None.

    classes: number of class scores. density: share of nonzero maskable weights. digest: SHA-256 of the personal model's
    checkpoint. class_names: JSON list, "" for an unused spare output. preparation, targets: JSON objects that describe
    raw samples and outputs.
    """
    kept = {spec.name: tensors[spec.name] for spec in manifest.whole if spec.name in tensors}
    found = {
        "task": manifest.task,
        "density": f"{density(manifest, kept):.6g}",
        "digest": hashlib.sha256(checkpoint.save(kept)).hexdigest(),
        "manifest": manifest.digest,
    }
    targets = manifest.targets
    if len(manifest.output_shape) == 1 and (targets is None or targets.kind == "classes"):
        found["classes"] = str(manifest.output_shape[0])
    if targets is not None and targets.names:
        found["class_names"] = _json([*targets.names, *[""] * targets.spare])
    if targets is not None:
        found["targets"] = _json(targets.model_dump(mode="json", include={"kind", "column"}, exclude_none=True))
    if manifest.preparation is not None:
        described = manifest.preparation.model_dump(mode="json", include=SAID, exclude_none=True)
        found["preparation"] = _json(described)
    return {**found, **{name: str(value) for name, value in known.items() if value is not None}}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def density(manifest: Manifest, tensors: Tensors) -> float:
    """Return the share, in [0, 1], of nonzero maskable weights; 1 if the model has none."""
    weights = [tensors[spec.name] for spec in manifest.maskable if spec.name in tensors]
    size = sum(weight.size for weight in weights)
    return sum(int(np.count_nonzero(weight)) for weight in weights) / size if size else 1.0
