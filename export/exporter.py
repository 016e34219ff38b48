"""The one path from a personal model to a checked ONNX file, for ``sparrow export`` and for ``join --export``.

    source -> dense model -> passes (``build``) -> preparation in front -> parity with the reference -> file in place

Passes, calibration and the choice between forms see prepared inputs. The file takes raw samples, and parity is judged
on them, one at a time and in batches. The smallest file that predicts the same is written: with neurons removed and
zeros packed, or the dense one if that predicts something else or cannot be made. The reference is the dense model, or
on a device its engine.
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

from sparrow.graphs.bounds import samples_at_once

from .build import ACCURACY_LIMIT, Built, Mode, Precision, build
from .errors import ExportError, NotTheSame
from .forms import load_form
from .ort_format import write_ort
from .preparation import Preparer, compose, draw_raw
from .report import Figures, Report, measure
from .running import CHUNK, Parity, Raws, accuracy, batches_of, compare, first_of, predict
from .samples import Array, Samples, draw_inputs, parity_inputs
from .source import Source

__all__ = ["Options", "Reference", "export_model"]

LARGEST_DIFFERENCE = 1e-4
"""Largest difference between outputs of the same model that float rounding explains, per unit of the largest output."""


ALONE = 7
"""Samples of the reference that are also run one at a time."""


@dataclass(frozen=True)
class Options:
    """Wishes for an export.

    mode: None takes the smallest that predicts the same. budget: of a dynamic model. accuracy_limit: largest fall of
    accuracy of a rounded export. ort_format: an .ort file, too. measured: load time, memory and latency, too.
    with_preparation: put the federation's preparation in front, so that the file takes raw samples.
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
    """Outputs that an export must give: of ``name`` for ``inputs`` [N, ...], raw samples if the model has a
    preparation."""

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
    doing: Callable[[str], object] = lambda what: None,
) -> Report:
    """Write the export of ``source`` to ``output``, once it is found to predict the same as the reference.

    plain: the ``dense`` model of ``source``. samples: the device's own, for rounding and accuracy; they, and the inputs
    of the reference, are raw if the source has a preparation. reference: the dense model by default, on samples and
    drawn inputs. doing: called with each step. What was at ``output`` stays if this fails. Raises ExportError,
    NotTheSame among them.
    """
    front = _Front.of(source, options)
    if output.is_dir():
        raise ExportError(f"{output} is a folder; give the name of a file in it")
    if samples is not None and source.manifest.targets is not None:
        samples = samples.labelled(source.manifest.targets.ignored)
    output.parent.mkdir(parents=True, exist_ok=True)
    # beside the output, so that it can be moved into place in one step
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as folder:
        export, dense = Path(folder) / "export.onnx", Path(folder) / "dense.onnx"
        dense.write_bytes(front.before(plain).SerializeToString(deterministic=True))
        at_once = front.at_once(samples_at_once(plain, CHUNK))
        if reference is None:
            inputs = front.parity_inputs(plain, samples)
            reference = Reference("the dense model", inputs, predict(dense, inputs, at_once))
        elif not front.composes:
            reference = replace(reference, inputs=front.prepared(reference.inputs))
        if not front.composes and samples is not None:
            samples = front.prepared_samples(samples)
        built, parity, notes = _smallest(source, plain, export, options, samples, reference, at_once, doing, front)
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
    """The preparation in front of a model. preparer: None without one. composes: whether it comes into the file."""

    source: Source
    preparer: Preparer | None
    composes: bool

    @classmethod
    def of(cls, source: Source, options: Options) -> _Front:
        """Return the front of a source's exports."""
        preparer = None if source.preparation is None else Preparer(source.preparation)
        return cls(source, preparer, preparer is not None and options.with_preparation)

    def before(self, model: ModelProto) -> ModelProto:
        """Return the model as it is written; one without its preparation says nothing of raw samples."""
        if self.preparer is None:
            return model
        if self.composes:
            return compose(model, self.preparer.graph)
        bare = deepcopy(model)
        kept = [entry for entry in model.metadata_props if entry.key != "preparation"]
        del bare.metadata_props[:]
        bare.metadata_props.extend(kept)
        return bare

    def prepared(self, raw: Raws) -> Array:
        """Return the inputs of raw samples."""
        return np.asarray(raw) if self.preparer is None else self.preparer(raw)

    def at_once(self, most: int) -> int:
        """Return how many samples of the written file are run at a time, of ``most`` of the model's."""
        return min(most, self.preparer.at_once) if self.composes and self.preparer is not None else most

    def prepared_samples(self, samples: Samples) -> Samples:
        """Return the samples as the passes take them."""
        calibration = self.prepared(samples.calibration)
        return Samples(self.prepared(samples.inputs), samples.labels, calibration)

    def parity_inputs(self, plain: ModelProto, samples: Samples | None) -> Raws:
        """Return inputs of the written file to compare by: the samples, and drawn ones."""
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
) -> tuple[Built, Parity, tuple[str, ...]]:
    """Write the mode asked for to ``path``, or else the first one that predicts the same, and return why not others."""
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
            if not built.steps and mode != modes[-1]:
                continue  # nothing was gained: the dense model is as small
            path.write_bytes(front.before(built.model).SerializeToString(deterministic=True))
            doing("comparing")
            return built, _check_parity(path, built, reference, at_once), tuple(notes)
        except ExportError as error:
            if mode == modes[-1]:
                raise
            notes.append(f"{mode}: {error}")
    raise AssertionError("the last mode returns or raises")


def _check_parity(path: Path, built: Built, reference: Reference, at_once: int) -> Parity:
    """Return how the file differs from the reference. Raises NotTheSame where it should not, but does.

    Rounded weights differ, and so do dynamic models, which are other predictors.
    """
    alone = predict(path, first_of(reference.inputs, ALONE), 1)
    parity = compare(predict(path, reference.inputs, at_once), reference.outputs)
    single = compare(alone, reference.outputs[:ALONE])
    parity = replace(parity, max_difference=max(parity.max_difference, single.max_difference))
    exact = built.precision == "fp32" and built.mode != "dynamic"
    if not exact or parity.max_difference <= LARGEST_DIFFERENCE * max(1.0, parity.largest_output):
        return parity
    advice = (
        "The skeleton was made from another model: publish the federation again"
        if built.mode == "dense"
        else "Report this, and export with --mode dense meanwhile"
    )
    raise NotTheSame(
        f"the ONNX file differs from {reference.name} by {parity.max_difference:g} on outputs up to "
        f"{parity.largest_output:g}; it was not written. {advice}"
    )


def _figures(path: Path, samples: Samples | None, at_once: int) -> Figures:
    right = None
    if samples is not None and samples.labels is not None:
        right = accuracy(predict(path, samples.inputs, at_once), samples.labels)
    return Figures(path.stat().st_size, right)


def _check_accuracy(built: Built, mine: Figures, theirs: Figures, limit: float) -> None:
    if built.precision == "fp32" or mine.accuracy is None or theirs.accuracy is None:
        return
    if theirs.accuracy - mine.accuracy > limit:
        raise ExportError(
            f"--precision {built.precision} lowers the accuracy on --data from {theirs.accuracy:.2%} to "
            f"{mine.accuracy:.2%}, more than --accuracy-limit {limit:g}; nothing was written: leave it at fp32"
        )
