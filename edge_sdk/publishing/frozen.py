"""File of a model's frozen values, and the choice of its precision."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from sparrow.protocol import values
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, Tensors

from . import FrozenPrecision
from .modes import evaluating

HARMLESS = 0.01
"""Largest relative L2 change of the model's output that half precision may cause under ``auto``."""


def freeze(
    model: nn.Module, manifest: Manifest, precision: FrozenPrecision, samples: Sequence[Tensor]
) -> tuple[Manifest, bytes]:
    """Return the manifest with the digest of the frozen values' file, and the file; empty without frozen values.

    samples: batches of validation inputs, used by ``auto``. Raises ManifestError, naming the tensor, for values that
    are not finite in the precision.
    """
    if not manifest.frozen:
        return manifest, b""
    state = model.state_dict()
    tensors: Tensors = {spec.name: np.array(state[spec.name].detach().cpu().numpy()) for spec in manifest.frozen}

    def packed(kind: Literal["float32", "float16"]) -> tuple[Manifest, bytes]:
        stored = Manifest.model_validate({**manifest.model_dump(), "frozen_precision": kind})
        file = values.pack(stored, "frozen", tensors)
        return stored.with_values("frozen", file), file

    if precision != "auto":
        return packed(precision)
    try:
        halved, file = packed("float16")
    # Values beyond the range of float16.
    except ManifestError:
        return packed("float32")
    return (halved, file) if _distance(model, halved, file, samples) <= HARMLESS else packed("float32")


def _distance(model: nn.Module, manifest: Manifest, file: bytes, samples: Sequence[Tensor]) -> float:
    """Return the relative L2 distance between the model's output and its output with the values of ``file``."""
    rounded = copy.deepcopy(model)
    state = rounded.state_dict()
    with evaluating(model), evaluating(rounded), torch.no_grad():
        for name, each in values.unpack(manifest, "frozen", file).items():
            state[name].copy_(torch.tensor(each))
        right, found = (torch.cat([net(inputs) for inputs in samples]).double() for net in (model, rounded))
    return float((found - right).norm() / right.norm().clamp_min(1e-30))
