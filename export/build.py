"""The sequence of passes from a personal model to an export."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnx.checker
import onnx.helper
from onnx import ModelProto

from sparrow.graphs.skeleton import MAX_MODEL, fill

from .errors import ExportError
from .samples import Samples
from .source import Source

__all__ = ["dense"]

Mode = Literal["dense", "compact", "packed", "dynamic"]
Precision = Literal["fp32", "fp16", "int8", "auto"]

ACCURACY_LIMIT = 0.01
"""Largest accepted fall of accuracy of a rounded export, as a share of samples."""


@dataclass(frozen=True)
class Built:
    """An exported model, the applied passes, its precision (never ``auto``) and the measurements behind this choice."""

    model: ModelProto
    mode: Mode
    steps: tuple[str, ...]
    precision: Precision
    notes: tuple[str, ...] = ()


def dense(source: Source) -> ModelProto:
    """Return the personal model as trained, in fp32. Raises ExportError if it cannot be built."""
    filled = fill(source.skeleton, source.manifest, source.tensors, metadata=source.properties())
    return onnx.load_from_string(filled)


def build(
    source: Source,
    plain: ModelProto,
    mode: Mode,
    precision: Precision,
    samples: Samples | None,
    *,
    dynamic: Callable[[], ModelProto],
    accuracy_limit: float = ACCURACY_LIMIT,
    doing: Callable[[str], object] = lambda step: None,
) -> Built:
    """Return an export of ``source`` with metadata, checked by onnx.

    plain: the model of ``dense``. dynamic: makes the model of the mode ``dynamic``. accuracy_limit: largest loss of
    accuracy that ``auto`` accepts, as a share of samples. doing: called with the name of each step. Raises ExportError.
    """
    steps: list[str] = []
    notes: tuple[str, ...] = ()
    model = plain
    if mode == "dynamic":
        if precision != "fp32":
            raise ExportError(
                f"--precision {precision} with --mode dynamic: rounding would change choices; leave --precision out"
            )
        doing("joining the models")
        model = dynamic()
        steps.append("dynamic")
    else:
        if mode != "dense":
            from .alignment import align
            from .compact import compact
            from .merging import merge
            from .passes import installed_passes

            doing("merging adapters")
            merged = merge(plain)
            if merged is not plain:
                steps.append("merged")
            doing("removing neurons")
            model = installed_passes(align(compact(merged)))
            if model.ByteSize() < merged.ByteSize():
                steps.append("compact")
        doing(f"precision {precision}")
        model, precision, notes = _rounded(model, precision, samples, accuracy_limit)
        steps += [] if precision == "fp32" else [precision]
    if mode in ("packed", "dynamic"):
        from .packed import pack

        doing("packing")
        packed = pack(model)
        if packed.ByteSize() < model.ByteSize():
            model = packed
            steps.append("packed")
    return Built(_finished(model, source, mode, precision), mode, tuple(steps), precision, notes)


def _rounded(
    model: ModelProto, precision: Precision, samples: Samples | None, accuracy_limit: float
) -> tuple[ModelProto, Precision, tuple[str, ...]]:
    if precision == "fp32":
        return model, precision, ()
    from .precision import choose, quantise, to_half

    if precision == "fp16":
        return to_half(model), precision, ()
    if samples is None:
        raise ExportError(f"--precision {precision} needs samples of the device; give them with --data")
    if precision == "int8":
        return quantise(model, np.asarray(samples.calibration)), precision, ()
    calibration = np.asarray(samples.calibration)
    inputs = np.asarray(samples.inputs)
    choice = choose(model, calibration, inputs, samples.labels, max_fall=accuracy_limit)
    return choice.model, "fp32" if choice.precision == "fp32" else "int8", tuple(map(str, choice.trials))


def _finished(model: ModelProto, source: Source, mode: str, precision: str) -> ModelProto:
    """Return a copy with the model's metadata, updated by the source's."""
    model = deepcopy(model)
    written = {entry.key: entry.value for entry in model.metadata_props}
    metadata = {**written, **source.properties(), "mode": mode, "precision": precision}
    model.producer_name = "sparrow"
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, dict(sorted(metadata.items())))
    if model.ByteSize() > MAX_MODEL:
        raise ExportError(f"the model has {model.ByteSize()} bytes, but an ONNX file has at most {MAX_MODEL}")
    onnx.checker.check_model(model)
    return model
