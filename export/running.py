"""Run ONNX models and compare their outputs. ONNX Runtime is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.errors import MissingPart

from .errors import ExportError

Array = NDArray[Any]

CHUNK = 256
"""Largest batch, in samples."""


def load(model: bytes | Path, threads: int = 0) -> Any:
    """Return a CPU session of a model.

    threads: 0 for ONNX Runtime's choice. Raises ExportError if it does not load, MissingPart without ONNX Runtime.
    """
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    given = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime's exceptions share no public base class
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot load the model: {error}") from None


def runtime() -> Any:
    """Return the module onnxruntime. Raises MissingPart if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingPart("ONNX Runtime is not installed: pip install 'sparrow-fl[export]'") from None
    return onnxruntime


Raws = Array | Sequence[Array]
"""Samples in one array [N, ...], or a list of arrays if their lengths differ."""


def batches_of(samples: Raws, at_once: int) -> Iterator[Array]:
    """Yield batches [n, ...] of at most ``at_once`` samples; a list of samples gives batches of one."""
    if isinstance(samples, np.ndarray):
        for start in range(0, len(samples), at_once):
            yield samples[start : start + at_once]
    else:
        for place in range(len(samples)):
            yield samples[place][None]


def first_of(samples: Raws, count: int) -> Raws:
    """Return at most the first ``count`` samples."""
    if isinstance(samples, np.ndarray):
        return samples[:count]
    return [samples[place] for place in range(min(count, len(samples)))]


def predict(path: Path, inputs: Raws, at_once: int) -> Array:
    """Return a file's outputs [N, ...], computed in batches of at most ``at_once``.

    Raises ExportError if it does not run.
    """
    return run(load(path), inputs, at_once)


def run(session: Any, inputs: Raws, at_once: int) -> Array:
    """Return a session's outputs as ``predict`` does."""
    name = session.get_inputs()[0].name
    try:
        parts = [session.run(None, {name: batch})[0] for batch in batches_of(inputs, at_once)]
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot run the model on these inputs: {error}") from None
    return np.concatenate(parts)


@dataclass(frozen=True)
class Parity:
    """The difference between two models' outputs on the same inputs."""

    # Number of samples.
    inputs: int
    # Absolute values.
    max_difference: float
    largest_output: float
    # Share of inputs with the same predicted class; None if the outputs are not class scores.
    same_class: float | None


def compare(found: Array, wanted: Array) -> Parity:
    """Return the parity of two arrays of outputs [N, ...].

    The difference is infinite if a value is finite in only one of them.
    """
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - wanted)
    difference[(found == wanted) | (np.isnan(found) & np.isnan(wanted))] = 0
    largest = float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max())
    same = float(np.mean(found.argmax(1) == wanted.argmax(1))) if are_scores(wanted) else None
    return Parity(len(wanted), largest, float(np.nan_to_num(np.abs(wanted)).max()), same)


def are_scores(outputs: Array) -> bool:
    """Return True for class scores: [N, classes], at least two classes."""
    return outputs.ndim == 2 and outputs.shape[1] > 1


def accuracy(outputs: Array, labels: Array | None) -> float | None:
    """Return the accuracy, in [0, 1]; None without labels or class scores."""
    if labels is None or not are_scores(outputs):
        return None
    return float(np.mean(outputs.argmax(1) == labels))
