"""A personal model as an ONNX file, written without torch and checked against torch on the device's own data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edge_sdk.predict import Predictor
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.tasks import Task
from edge_sdk.training.local import set_tensors
from sparrow.export.errors import ExportError
from sparrow.export.skeleton import fill

LARGEST_DIFFERENCE = 1e-4
"""Largest absolute difference between ONNX Runtime and PyTorch that float rounding explains."""


class NotTheSame(ExportError):
    """The exported file predicts something else than the model it was made from; it was not written."""


@dataclass(frozen=True)
class Export:
    """An exported file: its size, the largest absolute difference from PyTorch on ``samples`` of the device's data."""

    path: Path
    bytes: int
    samples: int
    max_difference: float
    latency_ms: float


def export_personal(
    path: Path,
    *,
    skeleton: bytes,
    manifest: Manifest,
    tensors: Tensors,
    task: Task,
    metadata: Mapping[str, str],
) -> Export:
    """Fill the skeleton with ``tensors``, compare it with PyTorch on held-out data, and only then put it at ``path``.

    Raises NotTheSame when an output differs by more than ``LARGEST_DIFFERENCE`` relative to the largest output.
    """
    body = fill(skeleton, manifest, tensors, metadata=dict(metadata))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(body)
    try:
        predictor = Predictor(partial, threads=1)
        set_tensors(task.model, tensors)
        difference, samples = _compare(predictor, task)
        latency = predictor.latency()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return Export(path, len(body), samples, difference, latency * 1e3)


def _compare(predictor: Predictor, task: Task) -> tuple[float, int]:
    """Largest absolute difference over the held-out data, and the number of samples."""
    largest, scale, samples = 0.0, 1.0, 0
    training = task.model.training
    task.model.eval()
    try:
        with torch.inference_mode():
            for inputs, _ in task.held_out:
                wanted = task.model(inputs.to(task.compute.device)).cpu().numpy()
                got = predictor(inputs.cpu().numpy())
                largest = max(largest, float(np.abs(wanted - got).max()))
                scale = max(scale, float(np.abs(wanted).max()))
                samples += len(inputs)
    finally:
        task.model.train(training)
    if not largest <= LARGEST_DIFFERENCE * scale:
        raise NotTheSame(
            f"the ONNX file differs from PyTorch by {largest:g} on outputs up to {scale:g}; it was not written. The "
            f"skeleton was made from another model: publish the federation again"
        )
    return largest, samples
