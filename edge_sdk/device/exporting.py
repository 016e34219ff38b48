"""Export a device's personal model: the smallest ONNX file with the same predictions as its engine.

The passes take about a second per 40 MB of weights. The comparison ends after ``SAMPLES`` samples or ``SECONDS``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.export.build import dense
from sparrow.export.exporter import Options, Reference, export_model
from sparrow.export.source import Source

from ..engines import Engine
from ..predict import Predictor
from ..tasks import Task, as_arrays
from ..tasks.prepared import fitting

# Limits of the comparison on validation data.
SAMPLES = 1000
SECONDS = 20.0


@dataclass(frozen=True)
class Export:
    """An exported file.

    steps: passes that made it smaller. max_difference: largest difference from ``engine`` on ``samples`` samples.
    """

    path: Path
    bytes: int
    dense_bytes: int
    steps: tuple[str, ...]
    samples: int
    max_difference: float
    latency_ms: float
    engine: str


def export_personal(path: Path, source: Source, engine: Engine, task: Task) -> Export:
    """Write the smallest ONNX file that agrees with ``engine`` on validation data.

    If the task's data were prepared, the file takes raw samples. Raises ExportError if no file agrees.
    """
    engine.load({spec.name: source.tensors[spec.name] for spec in source.manifest.kept})
    reference = reference_of(engine, task)
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
        engine.title,
    )


def reference_of(engine: Engine, task: Task) -> Reference:
    """Return validation inputs, raw if they were prepared, and the engine's outputs."""
    inputs: list[Any] = []
    outputs = []
    begin = time.monotonic()
    prepared = task.prepared
    for batch in task.validation if prepared is None else prepared.validation:
        given, targets = batch
        if prepared is None:
            given, targets = as_arrays(batch)
        else:
            if not isinstance(given, list):
                given = fitting(as_arrays(batch)[0], prepared.preparer)
            batch = prepared.preparer(given), targets
        inputs.append(given)
        outputs.append(engine.scores([batch])[0])
        if sum(map(len, inputs)) >= SAMPLES or time.monotonic() - begin > SECONDS:
            break
    found = np.concatenate(outputs)[:SAMPLES]
    if any(isinstance(each, list) for each in inputs):
        return Reference(engine.title, [one for each in inputs for one in each][:SAMPLES], found)
    return Reference(engine.title, np.concatenate(inputs)[:SAMPLES], found)
