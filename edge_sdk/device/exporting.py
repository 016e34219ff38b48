"""Export of a device's personal model: the smallest ONNX file that predicts what PyTorch predicts on the device's data.

The passes take about a second for each 40 MB of weights on a server's core, and need no samples. The comparison takes
most of the time: it ends after ``SAMPLES`` samples of validation data, or when PyTorch has taken ``SECONDS`` for them.
ONNX Runtime takes no longer for the same samples, so that an export takes about a minute at most.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edge_sdk.predict import Predictor
from edge_sdk.publishing.modes import evaluating
from edge_sdk.tasks import Task
from edge_sdk.training.local import set_tensors
from sparrow.export.build import dense
from sparrow.export.exporter import Options, Reference, export_model
from sparrow.export.source import Source

SAMPLES = 1000
SECONDS = 20.0
"""Validation data on which the file is compared with PyTorch: this many samples, or those of this many seconds."""


@dataclass(frozen=True)
class Export:
    """An exported file: its size and that of the dense model, the passes that made it smaller, and the largest absolute
    difference from PyTorch on ``samples`` of the device's data."""

    path: Path
    bytes: int
    dense_bytes: int
    steps: tuple[str, ...]
    samples: int
    max_difference: float
    latency_ms: float


def export_personal(path: Path, source: Source, task: Task) -> Export:
    """Write the smallest ONNX file that predicts the same as PyTorch does, on the task's validation data, to ``path``.

    Raises ExportError; NotTheSame among them, where even the dense model predicts something else.
    """
    set_tensors(task.model, source.tensors)
    reference = reference_of(task)
    report = export_model(source, dense(source), path, Options(), reference=reference)
    latency = Predictor(path, threads=1).latency()
    return Export(
        path,
        report.export.bytes,
        report.dense.bytes,
        report.steps,
        len(reference.inputs),
        report.parity.max_difference,
        latency * 1e3,
    )


def reference_of(task: Task) -> Reference:
    """Return inputs of the validation data, and PyTorch's outputs for them."""
    inputs, outputs = [], []
    begin = time.monotonic()
    with torch.random.fork_rng(devices=[]), evaluating(task.model), torch.inference_mode():
        for batch, _ in task.validation:
            inputs.append(batch.cpu().numpy())
            outputs.append(task.model(batch.to(task.compute.device)).cpu().numpy())
            if sum(map(len, inputs)) >= SAMPLES or time.monotonic() - begin > SECONDS:
                break
    return Reference("PyTorch", np.concatenate(inputs)[:SAMPLES], np.concatenate(outputs)[:SAMPLES])
