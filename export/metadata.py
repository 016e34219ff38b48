"""The metadata of an exported file, as properties of the ONNX model."""

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
"""Fields of a preparation that an exported file has."""


def properties(manifest: Manifest, tensors: Tensors, **known: object) -> dict[str, str]:
    """Return name -> text of what is ``known`` (method, round, ...; None is left out) and what follows from the model.

    task: the manifest's. classes: scores per sample, where the output is a vector. density: share of the weights of
    linear layers and convolutions that are not zero. digest: SHA-256 of the personal model as a checkpoint.
    class_names: JSON list of the outputs' names, "" for an unused spare one. preparation, targets: JSON objects that
    describe a raw sample (``dtype``, ``shape``, ``axes``, ``columns``) and the meaning of the outputs.
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
    """Return the share, in [0, 1], of the maskable weights that are not zero; 1 where the model has none."""
    weights = [tensors[spec.name] for spec in manifest.maskable if spec.name in tensors]
    size = sum(weight.size for weight in weights)
    return sum(int(np.count_nonzero(weight)) for weight in weights) / size if size else 1.0
