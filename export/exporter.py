"""Export a personal model to a checked ONNX file, for ``sparrow export`` and ``sparrow join --export``.

    source -> dense model -> passes (``build``) -> preparation in front -> parity with the reference -> file

Passes and calibration use prepared inputs. The file takes raw samples, and parity is checked on them, one at a time and
in batches. The reference is the dense model, or the engine of a device.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto

from sparrow.command_line.table import percent
from sparrow.graphs.bounds import samples_at_once

from .build import ACCURACY_LIMIT, Built, Mode, Precision, build
from .errors import ExportError, NotTheSame
from .forms import load_form
from .older import older
from .ort_format import write_ort
from .preparation import Preparer, compose, draw_raw
from .report import Figures, Report, measure
from .running import CHUNK, Parity, Raws, accuracy, batches_of, compare, first_of, predict
from .samples import Array, Samples, draw_inputs, parity_inputs
from .source import Source

__all__ = ["Options", "Reference", "export_model"]

LARGEST_DIFFERENCE = 1e-4
"""Largest difference of outputs attributed to float rounding, per unit of the largest output."""

ALONE = 7
"""Number of samples that are also run one at a time."""


@dataclass(frozen=True)
class Options:
    """Options of an export.

    mode: None for the smallest file with the same predictions. budget: budget of a dynamic model. accuracy_limit:
    largest accepted fall of accuracy of a rounded export. ort_format: also write an .ort file. measured: measure load
    time, memory and latency. with_preparation: include the preparation, so that the file takes raw samples.
    """

    mode: Mode | None = None
    precision: Precision = "fp32"
    budget: float | None = None
    accuracy_limit: float = ACCURACY_LIMIT
    ort_format: bool = False
    measured: bool = False
    with_preparation: bool = True


@dataclass(frozen=True)
class Reference:
    """Expected outputs of an export, from the model ``name``. inputs: raw samples if there is a preparation."""

    name: str
    inputs: Raws
    outputs: Array


def export_model(
    source: Source,
    plain: ModelProto,
    output: Path,
    options: Options,
    *,
    samples: Samples | None = None,
    reference: Reference | None = None,
    doing: Callable[[str], object] = lambda step: None,
) -> Report:
    """Write the export of ``source`` to ``output`` if its predictions equal the reference's.

    plain: the ``dense`` model of ``source``. samples: samples for calibration and accuracy; raw if there is a
    preparation. reference: model to compare with; by default the dense model, on samples and random inputs. doing:
    called with the name of each step. A failed export leaves ``output`` unchanged. Raises ExportError; NotTheSame if
    predictions differ.
    """
    front = _Front.of(source, options)
    if output.is_dir():
        raise ExportError(f"{output} is a folder; give the name of a file")
    if samples is not None and source.manifest.targets is not None:
        samples = samples.labelled(source.manifest.targets.ignored)
    output.parent.mkdir(parents=True, exist_ok=True)
    # on the output's file system, so that the file can be moved into place atomically
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as folder:
        export = Path(folder) / "export.onnx"
        dense = Path(folder) / "dense.onnx"
        # Written like the export, so that the two sizes are comparable.
        unchanged = build(source, plain, "dense", "fp32", None, dynamic=lambda: plain)
        dense.write_bytes(front.written(unchanged.model))
        at_once = front.at_once(samples_at_once(plain, CHUNK))
        if reference is None:
            inputs = front.parity_inputs(plain, samples)
            # With the operators of the skeleton, so that the comparison covers their translation.
            original = Path(folder) / "original.onnx"
            original.write_bytes(front.before(plain).SerializeToString(deterministic=True))
            reference = Reference("the dense model", inputs, predict(original, inputs, at_once))
        elif not front.composes:
            reference = replace(reference, inputs=front.prepared(reference.inputs))
        if not front.composes and samples is not None:
            samples = front.prepared_samples(samples)
        built, parity, notes = _smallest(
            source, plain, export, options, samples, reference, at_once, doing, front, dense.stat().st_size
        )
        mine, theirs = (_figures(path, samples, at_once) for path in (export, dense))
        _check_accuracy(built, mine, theirs, options.accuracy_limit)
        if options.measured:
            (sample,) = batches_of(first_of(reference.inputs, 1), 1)
            costs = measure(export, dense, sample, lambda: doing("measuring"))
            mine, theirs = replace(mine, costs=costs[0]), replace(theirs, costs=costs[1])
        report = Report(
            path=str(output),
            mode=built.mode,
            precision=built.precision,
            steps=built.steps,
            properties={entry.key: entry.value for entry in built.model.metadata_props},
            parity=parity,
            samples=0 if samples is None or samples.labels is None else len(samples.labels),
            export=mine,
            dense=theirs,
            notes=(*notes, *built.notes),
            ort=write_ort(export, output.with_suffix(".ort")) if options.ort_format else None,
        )
        os.replace(export, output)
    return report


@dataclass(frozen=True)
class _Front:
    """The preparation in front of a model. preparer: None without one. composes: whether the file includes it."""

    source: Source
    preparer: Preparer | None
    composes: bool

    @classmethod
    def of(cls, source: Source, options: Options) -> _Front:
        preparer = None if source.preparation is None else Preparer(source.preparation)
        return cls(source, preparer, preparer is not None and options.with_preparation)

    def before(self, model: ModelProto) -> ModelProto:
        """Return the model for the file; without the preparation, its metadata must not describe raw samples."""
        if self.preparer is None:
            return model
        if self.composes:
            return compose(model, self.preparer.graph)
        bare = deepcopy(model)
        kept = [entry for entry in model.metadata_props if entry.key != "preparation"]
        del bare.metadata_props[:]
        bare.metadata_props.extend(kept)
        return bare

    def written(self, model: ModelProto) -> bytes:
        """Return the content of the file for a built model."""
        content: bytes = older(self.before(model)).SerializeToString(deterministic=True)
        return content

    def prepared(self, raw: Raws) -> Array:
        return np.asarray(raw) if self.preparer is None else self.preparer(raw)

    def at_once(self, most: int) -> int:
        """Return the batch size for the file. most: the batch size of the model."""
        return min(most, self.preparer.at_once) if self.composes and self.preparer is not None else most

    def prepared_samples(self, samples: Samples) -> Samples:
        calibration = self.prepared(samples.calibration)
        return Samples(self.prepared(samples.inputs), samples.labels, calibration)

    def parity_inputs(self, plain: ModelProto, samples: Samples | None) -> Raws:
        description = self.source.manifest.preparation
        if not self.composes or description is None:
            plain_samples = None if samples is None else self.prepared_samples(samples)
            return parity_inputs(plain_samples, partial(draw_inputs, plain))
        return parity_inputs(samples, partial(draw_raw, description))


def _smallest(
    source: Source,
    plain: ModelProto,
    path: Path,
    options: Options,
    samples: Samples | None,
    reference: Reference,
    at_once: int,
    doing: Callable[[str], object],
    front: _Front,
    dense_bytes: int,
) -> tuple[Built, Parity, tuple[str, ...]]:
    """Write the requested mode, or the smallest one with the same predictions. Return notes on modes that failed."""
    modes: tuple[Mode, ...] = (options.mode or "packed",)
    if options.mode is None and options.precision == "fp32":
        modes = ("packed", "dense")
    notes: list[str] = []
    calibration = front.prepared_samples(samples) if front.composes and samples is not None else samples
    for mode in modes:
        try:
            built = build(
                source,
                plain,
                mode,
                options.precision,
                calibration,
                dynamic=lambda: load_form(source)(source, options.budget),
                accuracy_limit=options.accuracy_limit,
                doing=doing,
            )
            content = front.written(built.model)
            if mode != modes[-1] and len(content) >= dense_bytes:
                # the dense model is as small
                continue
            path.write_bytes(content)
            doing("comparing")
            return built, _check_parity(path, built, reference, at_once), tuple(notes)
        except ExportError as error:
            if mode == modes[-1]:
                raise
            notes.append(f"{mode}: {error}")
    raise AssertionError("the last mode returns or raises")


def _check_parity(path: Path, built: Built, reference: Reference, at_once: int) -> Parity:
    # Only exact exports are checked: rounded and dynamic models may differ.
    alone = predict(path, first_of(reference.inputs, ALONE), 1)
    parity = compare(predict(path, reference.inputs, at_once), reference.outputs)
    single = compare(alone, reference.outputs[:ALONE])
    parity = replace(parity, max_difference=max(parity.max_difference, single.max_difference))
    exact = built.precision == "fp32" and built.mode != "dynamic"
    if not exact or parity.max_difference <= LARGEST_DIFFERENCE * max(1.0, parity.largest_output):
        return parity
    advice = (
        "The skeleton is of another model: publish the federation again"
        if built.mode == "dense"
        else "Export with --mode dense, and report this"
    )
    raise NotTheSame(
        f"the ONNX file differs from {reference.name} by {parity.max_difference:g} on outputs up to "
        f"{parity.largest_output:g}; it was not written. {advice}"
    )


def _figures(path: Path, samples: Samples | None, at_once: int) -> Figures:
    measured = None
    if samples is not None and samples.labels is not None:
        measured = accuracy(predict(path, samples.inputs, at_once), samples.labels)
    return Figures(path.stat().st_size, measured)


def _check_accuracy(built: Built, mine: Figures, theirs: Figures, limit: float) -> None:
    if built.precision == "fp32" or mine.accuracy is None or theirs.accuracy is None:
        return
    if theirs.accuracy - mine.accuracy > limit:
        raise ExportError(
            f"--precision {built.precision} lowers the accuracy on --data from {percent(theirs.accuracy, 2)} to "
            f"{percent(mine.accuracy, 2)}, more than --accuracy-limit {limit:g}; it was not written: use fp32"
        )
