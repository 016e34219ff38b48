"""Inputs to compare, calibrate and judge an export with: the device's own, or drawn where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from sparrow.export.errors import ExportError, NotThere
from sparrow.export.skeleton import INPUT

__all__ = ["Samples", "read_samples"]

Array = NDArray[Any]

PARITY_INPUTS = 1000
"""Inputs on which an export is compared with the dense one, at least."""

_TYPES = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64", TensorProto.INT32: "int32"}


@dataclass(frozen=True)
class Samples:
    """inputs [N, *input_shape] and, where known, labels [N]; calibration [M, *input_shape], to measure ranges with."""

    inputs: Array
    labels: Array | None
    calibration: Array


def read_samples(path: Path, model: ModelProto) -> Samples:
    """Return the arrays of an npz file, of the type that the model's input has.

    ``inputs`` and ``labels``; or, as the task ``npz`` has them, ``x_test`` and ``y_test``, with ``x_train`` for the
    calibration. Unsigned bytes are scaled to [0, 1], [N,H,W] becomes [N,1,H,W] where the model wants channels. Raises
    ExportError.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise NotThere(f"there is no {path}; give another --data") from None
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        why = "it holds Python objects" if "pickle" in str(error) else str(error)
        raise ExportError(f"{path} is not a file of plain arrays that numpy.savez wrote: {why}") from None
    names = ("inputs", "labels") if "inputs" in arrays else ("x_test", "y_test")
    if names[0] not in arrays:
        raise ExportError(f"{path} has no 'inputs' and no 'x_test'; write numpy.savez(path, inputs=x, labels=y)")
    inputs = _fitting(arrays[names[0]], model, f"{path}: {names[0]}")
    labels = arrays.get(names[1])
    if labels is not None and (labels.shape != (len(inputs),) or labels.dtype.kind not in "iu"):
        raise ExportError(f"{path}: {names[1]} must be {len(inputs)} whole numbers, one a sample")
    own = arrays.get("x_train") if names[0] == "x_test" else None
    return Samples(inputs, labels, inputs if own is None else _fitting(own, model, f"{path}: x_train"))


def input_type(model: ModelProto) -> tuple[tuple[int, ...], str]:
    """Return the shape of one sample and name of the numpy type of what the model takes."""
    tensor = next(value for value in model.graph.input if value.name == INPUT).type.tensor_type
    return tuple(dim.dim_value for dim in tensor.shape.dim[1:]), _TYPES[tensor.elem_type]


def draw_inputs(model: ModelProto, count: int, seed: int = 0) -> Array:
    """Draw random inputs: normal; indices are uniform over the rows of the table that they index."""
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


def parity_inputs(model: ModelProto, samples: Samples | None) -> Array:
    """Return the samples, and drawn inputs to make them ``PARITY_INPUTS``."""
    if samples is None:
        return draw_inputs(model, PARITY_INPUTS)
    missing = PARITY_INPUTS - len(samples.inputs)
    return np.concatenate([samples.inputs, draw_inputs(model, missing)]) if missing > 0 else samples.inputs


def _fitting(inputs: Array, model: ModelProto, what: str) -> Array:
    shape, dtype = input_type(model)
    if inputs.ndim == len(shape) and shape[:1] == (1,):
        inputs = inputs[:, None]
    if inputs.shape[1:] != shape or inputs.ndim == 0 or len(inputs) == 0:
        raise ExportError(f"{what} has shape {inputs.shape}, the model wants (samples, {', '.join(map(str, shape))})")
    if inputs.dtype == np.uint8 and dtype == "float32":
        return (inputs / np.float32(255)).astype(np.float32)
    if inputs.dtype.kind not in "fiu":
        raise ExportError(f"{what} is of {inputs.dtype}, the model wants {dtype}")
    return np.ascontiguousarray(inputs.astype(dtype))
