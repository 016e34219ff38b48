"""Run ONNX files to compare what they predict. ONNX Runtime is imported where it is used, and says so where missing."""

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
"""Most samples run at a time."""


def load(model: bytes | Path, threads: int = 0) -> Any:
    """Return a session of a model on the processor. threads: 0 for as many as ONNX Runtime thinks fit.

    Raises ExportError for a model that cannot be loaded, MissingPart without ONNX Runtime.
    """
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    given = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        raise ExportError(f"ONNX Runtime cannot load the model: {error}") from None


def runtime() -> Any:
    """Return the module onnxruntime. Raises MissingPart where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingPart("ONNX Runtime is not installed: pip install 'sparrow-fl[export]'") from None
    return onnxruntime


Raws = Array | Sequence[Array]
"""Samples in one array [N, ...], or one by one, because their lengths differ."""


def batches_of(samples: Raws, at_once: int) -> Iterator[Array]:
    """Yield batches [n, ...] of at most ``at_once`` samples; of samples one by one, each alone."""
    if isinstance(samples, np.ndarray):
        for start in range(0, len(samples), at_once):
            yield samples[start : start + at_once]
    else:
        for place in range(len(samples)):
            yield samples[place][None]


def first_of(samples: Raws, count: int) -> Raws:
    """Return the first samples, at most ``count``."""
    if isinstance(samples, np.ndarray):
        return samples[:count]
    return [samples[place] for place in range(min(count, len(samples)))]


def predict(path: Path, inputs: Raws, at_once: int) -> Array:
    """Return the outputs [N, ...] of the file for its inputs, at most ``at_once`` of which are run at a time.

    Raises ExportError for a file that cannot be run."""
    return run(load(path), inputs, at_once)


def run(session: Any, inputs: Raws, at_once: int) -> Array:
    """Return the outputs of a session as ``predict`` does."""
    name = session.get_inputs()[0].name
    try:
        parts = [session.run(None, {name: batch})[0] for batch in batches_of(inputs, at_once)]
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        raise ExportError(f"ONNX Runtime cannot run the model on these inputs: {error}") from None
    return np.concatenate(parts)


@dataclass(frozen=True)
class Parity:
    """The difference of two exports over ``inputs`` inputs.

    max_difference: largest absolute difference of an output. largest_output: largest absolute output, for scale.
    same_class: share of inputs for which both have the same highest score; None where outputs are no scores.
    """

    inputs: int
    max_difference: float
    largest_output: float
    same_class: float | None


def compare(found: Array, wanted: Array) -> Parity:
    """Return the parity of two arrays of outputs [N, ...]; a value that is not finite in one alone differs
    infinitely."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - wanted)
    difference[(found == wanted) | (np.isnan(found) & np.isnan(wanted))] = 0
    largest = float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max())
    same = float(np.mean(found.argmax(1) == wanted.argmax(1))) if _scores(wanted) else None
    return Parity(len(wanted), largest, float(np.nan_to_num(np.abs(wanted)).max()), same)


def _scores(outputs: Array) -> bool:
    return outputs.ndim == 2 and outputs.shape[1] > 1


def accuracy(outputs: Array, labels: Array | None) -> float | None:
    """Return the share of samples whose highest score is their label's; None without labels, or where outputs are no
    scores."""
    if labels is None or not _scores(outputs):
        return None
    return float(np.mean(outputs.argmax(1) == labels))
