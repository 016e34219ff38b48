"""From what is to be exported to the ONNX model asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import onnx
import onnx.checker
import onnx.helper
from onnx import ModelProto

from sparrow.export.errors import ExportError
from sparrow.export.samples import Samples
from sparrow.export.skeleton import MAX_MODEL, fill
from sparrow.export.source import Source

Mode = Literal["compact", "packed", "dynamic"]
Precision = Literal["fp32", "fp16", "int8", "auto"]

ACCURACY_LIMIT = 0.01
"""Largest fall of accuracy, as a share of samples, at which a rounded export is still written."""


@dataclass(frozen=True)
class Built:
    """A model and what it took to get there: the steps in order, and the precision, which ``auto`` leaves open, with
    what was measured to choose it as ``notes``."""

    model: ModelProto
    steps: tuple[str, ...]
    precision: Precision
    notes: tuple[str, ...] = ()


def dense(source: Source) -> ModelProto:
    """The personal model as trained, in fp32: what every export is compared with. Raises ExportError."""
    filled = fill(source.skeleton, source.manifest, source.tensors, metadata=source.properties())
    return onnx.load_from_string(filled)


def build(
    source: Source,
    plain: ModelProto,
    mode: Mode,
    precision: Precision,
    samples: Samples | None,
    *,
    budget: float | None = None,
    accuracy_limit: float = ACCURACY_LIMIT,
    doing: Callable[[str], object] = lambda what: None,
) -> Built:
    """The model asked for, from the ``dense`` one, ``plain``; with properties, checked by onnx.

    Neurons without influence go, weights take the ``precision``, zeros are packed; each only where it helps, and the
    last only in the mode ``packed``. budget: of a dynamic model, the device's own by default. accuracy_limit: largest
    fall of accuracy, as a share of samples, that ``auto`` accepts. doing: told each step.
    Raises ExportError, with what to do.
    """
    steps: list[str] = []
    notes: tuple[str, ...] = ()
    if mode == "dynamic":
        if precision != "fp32":
            raise ExportError(
                f"--precision {precision} with --mode dynamic: rounding would flip choices; leave --precision out"
            )
        doing("joining the models")
        model = _dynamic(source, budget)
        steps.append("dynamic")
    else:
        from sparrow.export.alignment import align
        from sparrow.export.compact import compact
        from sparrow.export.passes import installed_passes

        doing("removing neurons")
        model = installed_passes(align(compact(plain)))
        if model.ByteSize() < plain.ByteSize():
            steps.append("compact")
        doing(f"precision {precision}")
        model, precision, notes = _rounded(model, precision, samples, accuracy_limit)
        steps += [] if precision == "fp32" else [precision]
    if mode != "compact":
        from sparrow.export.packed import pack

        doing("packing")
        packed = pack(model)
        if packed.ByteSize() < model.ByteSize():
            model = packed
            steps.append("packed")
    return Built(_finished(model, source, mode, precision), tuple(steps), precision, notes)


def _rounded(
    model: ModelProto, precision: Precision, samples: Samples | None, accuracy_limit: float
) -> tuple[ModelProto, Precision, tuple[str, ...]]:
    """The model with its weights rounded, the precision that it has then, and why."""
    if precision == "fp32":
        return model, precision, ()
    from sparrow.export.precision import choose, quantise, to_half

    if precision == "fp16":
        return to_half(model), precision, ()
    if samples is None:
        raise ExportError(f"--precision {precision} is measured on the device's own inputs; give them with --data")
    if precision == "int8":
        return quantise(model, list(samples.calibration)), precision, ()
    calibration, inputs = list(samples.calibration), list(samples.inputs)
    choice = choose(model, calibration, inputs, samples.labels, max_fall=accuracy_limit)
    return choice.model, "fp32" if choice.precision == "fp32" else "int8", tuple(map(str, choice.trials))


def _dynamic(source: Source, budget: float | None) -> ModelProto:
    member = source.membership
    if member is None:
        raise ExportError(
            "--mode dynamic needs a device's whole state folder, with the federation.json that joining writes; "
            "join once more, or leave --mode out"
        )
    settings = member.federation.settings.method_settings
    if source.method == "pfedgate":
        from sparrow.export.gated import gated_model

        # A device whose budget was too small for rounds has adapted with a gate of the smallest one.
        share = budget or max(member.budget, float(settings["smallest_budget"]))
        return gated_model(source.skeleton, source.manifest, source.own, settings, share, personal=source.tensors)
    if source.method == "dmpfl":
        from sparrow.export.adaptive import adaptive_model

        return adaptive_model(
            source.skeleton, source.manifest, source.own, source.memory, settings, personal=source.tensors
        )
    raise ExportError(
        f"--mode dynamic is for pfedgate and dmpfl, whose devices choose sample by sample; {source.method} has one "
        f"model, leave --mode out"
    )


def _finished(model: ModelProto, source: Source, mode: str, precision: str) -> ModelProto:
    """The model with what it says of itself: what its maker wrote, and what follows from the source."""
    written = {entry.key: entry.value for entry in model.metadata_props}
    says = {**written, **source.properties(), "mode": mode, "precision": precision}
    model.producer_name = "sparrow"
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, dict(sorted(says.items())))
    if model.ByteSize() > MAX_MODEL:
        raise ExportError(f"the model would take {model.ByteSize()} bytes, one ONNX file holds at most {MAX_MODEL}")
    onnx.checker.check_model(model)
    return model
