"""The training step for pages, made from the published one in a separate process (``sparrow.limited``)."""

from __future__ import annotations

import numpy as np

from ..protocol import checkpoint
from ..protocol.manifest import Manifest
from ..protocol.masks import FULL_RATIO, NeuronDraw, draw_neurons


def request_of(step: bytes, manifest: Manifest, ratio: float) -> bytes:
    """Return the request for a step with masks of this active ratio, in (0, 1]."""
    parts = {"step": step, "manifest": manifest.text.encode()}
    return checkpoint.save({name: np.frombuffer(part, np.uint8) for name, part in parts.items()}, repr(ratio))


def answer(request: bytes) -> bytes:
    """Return the optimised step for masks of the requested ratio; its errors have one value for each active neuron."""
    # Imported here, because the coordinator, which makes the request, does not load onnx.
    from .steps import step_of_neurons

    parts, ratio = checkpoint.load(request)
    manifest = Manifest.model_validate_json(parts["manifest"].tobytes())
    some = float(ratio) < FULL_RATIO and bool(manifest.groups)
    mask = draw_neurons(manifest, NeuronDraw("any", float(ratio))) if some else None
    return step_of_neurons(parts["step"].tobytes(), manifest, mask)
