"""Samples for comparing, calibrating and evaluating an export: the device's own, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from sparrow.graphs.skeleton import INPUT
from sparrow.protocol.manifest import Manifest
from sparrow.reading import read_file, read_options

from .errors import ExportError, NotThere
from .running import Raws, first_of

__all__ = ["Samples", "read_samples"]

Array = NDArray[Any]

PARITY_INPUTS = 1000
"""Smallest number of inputs for the comparison with the dense model."""

_TYPES = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64", TensorProto.INT32: "int32"}


@dataclass(frozen=True)
class Samples:
    """Prepared or raw inputs, their class labels [N] if known, and inputs for the calibration of int8."""

    inputs: Raws
    labels: Array | None
    calibration: Raws

    def labelled(self, ignored: int | None) -> Samples:
        """Drop samples with the label ``ignored``, unless that drops all."""
        known = None if self.labels is None or ignored is None else self.labels != ignored
        if known is None or known.all() or not known.any():
            return self
        assert self.labels is not None, "known is None without labels"
        return replace(self, inputs=self.inputs[known], labels=self.labels[known])


def read_samples(path: Path, model: ModelProto) -> Samples:
    """Read samples from an npz file, converted to the type of the model's input.

    Arrays: ``inputs`` and ``labels``, or the task npz's ``x_test`` and ``y_test``, with ``x_train`` for calibration.
    Unsigned bytes are scaled to [0, 1]; [N,H,W] becomes [N,1,H,W] if the model has a channel axis. Raises ExportError.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise NotThere(f"there is no {path}; give another --data") from None
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        why = "it holds Python objects" if "pickle" in str(error) else str(error)
        raise ExportError(f"{path} is not an npz file of plain arrays: {why}; write it with numpy.savez") from None
    names = ("inputs", "labels") if "inputs" in arrays else ("x_test", "y_test")
    if names[0] not in arrays:
        raise ExportError(f"{path} has no 'inputs' and no 'x_test'; write numpy.savez(path, inputs=x, labels=y)")
    inputs = _fitting(arrays[names[0]], model, f"{path}: {names[0]}")
    labels = arrays.get(names[1])
    if labels is not None and (labels.shape != (len(inputs),) or labels.dtype.kind not in "iu"):
        raise ExportError(f"{path}: {names[1]} must be {len(inputs)} integers, one per sample")
    own = arrays.get("x_train") if names[0] == "x_test" else None
    return Samples(inputs, labels, inputs if own is None else _fitting(own, model, f"{path}: x_train"))


def read_raw_samples(data: str, manifest: Manifest, class_names: Sequence[str] = ()) -> Samples:
    """Read raw samples, and classes unless the task is a regression, from a table or npz file.

    data: text for ``sparrow join --data``. class_names: names of the device's outputs; by default the manifest's. The
    test part of the file is used if it has one, and the training part for calibration. Raises DataError, ExportError.
    """
    path, options, rest = read_options(data)
    if rest:
        raise ExportError(f"--data: unknown option {rest!r}; give a file and options for reading it")
    targets = manifest.targets
    parts = read_file(path, options, preparation=manifest.preparation, targets=targets)
    chosen = parts.get("test", parts.get("", next(iter(parts.values()))))
    names = list(class_names or (targets.names if targets is not None else ()))
    labels = None
    if chosen.kind == "classes" and chosen.labels is not None:
        number = {name: place for place, name in enumerate(names)}
        unknown = next((str(name) for name in np.unique(chosen.labels) if names and str(name) not in number), None)
        if unknown is not None:
            raise ExportError(f"{path}: unknown class {unknown!r}; the model has {', '.join(filter(None, names))}")
        labels = np.array([number[str(name)] if names else int(name) for name in chosen.labels], np.int64)
    calibration = parts.get("train", chosen)
    return Samples(chosen.inputs, labels, calibration.inputs)


def input_type(model: ModelProto) -> tuple[tuple[int, ...], str]:
    """Return the shape of one sample and the numpy type's name of the model's input."""
    tensor = next(value for value in model.graph.input if value.name == INPUT).type.tensor_type
    return tuple(dim.dim_value for dim in tensor.shape.dim[1:]), _TYPES[tensor.elem_type]


def draw_inputs(model: ModelProto, count: int, seed: int = 0) -> Array:
    """Draw random inputs: standard normal floats, or indices uniform over the rows of their embedding."""
    shape, dtype = input_type(model)
    chance = np.random.default_rng(seed)
    if dtype == "float32":
        return chance.standard_normal((count, *shape), dtype=np.float32)
    sizes = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    rows = [
        sizes[node.input[0]]
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[1] == INPUT and node.input[0] in sizes
    ]
    return chance.integers(0, min(rows, default=1), (count, *shape)).astype(dtype)


def parity_inputs(samples: Samples | None, draw: Callable[[int], Raws]) -> Raws:
    """Return the samples, extended to ``PARITY_INPUTS`` by ``draw(count)``."""
    if samples is None:
        return draw(PARITY_INPUTS)
    given = samples.inputs
    missing = PARITY_INPUTS - len(given)
    if missing <= 0:
        return given
    drawn = draw(missing)
    if isinstance(given, np.ndarray) and isinstance(drawn, np.ndarray):
        return np.concatenate([given, drawn])
    return [*first_of(given, PARITY_INPUTS), *drawn]


def _fitting(inputs: Array, model: ModelProto, name: str) -> Array:
    shape, dtype = input_type(model)
    if inputs.ndim == len(shape) and shape[:1] == (1,):
        inputs = inputs[:, None]
    if inputs.shape[1:] != shape or inputs.ndim == 0 or len(inputs) == 0:
        raise ExportError(f"{name} has shape {inputs.shape}, the model expects (samples, {', '.join(map(str, shape))})")
    if inputs.dtype == np.uint8 and dtype == "float32":
        return (inputs / np.float32(255)).astype(np.float32)
    if inputs.dtype.kind not in "fiu":
        raise ExportError(f"{name} is of {inputs.dtype}, the model expects {dtype}")
    return np.ascontiguousarray(inputs.astype(dtype))
