"""Inputs to compare, calibrate and judge an export with: the device's own, or drawn where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from edge_sdk.reading import read_file, read_options
from sparrow.graphs.skeleton import INPUT
from sparrow.protocol.manifest import Manifest

from .errors import ExportError, NotThere
from .running import Raws, first_of

__all__ = ["Samples", "read_samples"]

Array = NDArray[Any]

PARITY_INPUTS = 1000
"""Inputs on which an export is compared with the dense one, at least."""

_TYPES = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64", TensorProto.INT32: "int32"}


@dataclass(frozen=True)
class Samples:
    """inputs [N, *input_shape] or raw samples and, if known, labels [N]; calibration, to measure ranges with."""

    inputs: Raws
    labels: Array | None
    calibration: Raws

    def labelled(self, ignored: int | None) -> Samples:
        """Return those whose label is not ``ignored``; all, if that leaves none."""
        known = None if self.labels is None or ignored is None else self.labels != ignored
        if known is None or known.all() or not known.any():
            return self
        assert self.labels is not None, "they were compared"
        return replace(self, inputs=self.inputs[known], labels=self.labels[known])


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


def read_raw_samples(data: str, manifest: Manifest, class_names: Sequence[str] = ()) -> Samples:
    """Return raw samples of a table or npz file, as the manifest's preparation takes them, and their classes.

    data: the path, and perhaps options, as ``--data`` of ``sparrow join`` has them. class_names: of the outputs on the
    device, by default those of the manifest. The samples are those of the test part, if the file has one; ranges are
    measured on all others. Labels are left out for a regression. Raises DataError, ExportError.
    """
    path, options, rest = read_options(data)
    if rest:
        raise ExportError(f"--data: {rest!r} is not understood; give a file, and how to read it")
    targets = manifest.targets
    parts = read_file(path, options, preparation=manifest.preparation, targets=targets)
    chosen = parts.get("test", parts.get("", next(iter(parts.values()))))
    names = list(class_names or (targets.names if targets is not None else ()))
    labels = None
    if chosen.kind == "classes" and chosen.labels is not None:
        number = {name: place for place, name in enumerate(names)}
        unknown = next((str(name) for name in np.unique(chosen.labels) if names and str(name) not in number), None)
        if unknown is not None:
            raise ExportError(f"{path}: has the class {unknown!r}; the model's are {', '.join(filter(None, names))}")
        labels = np.array([number[str(name)] if names else int(name) for name in chosen.labels], np.int64)
    calibration = parts.get("train", chosen)
    return Samples(chosen.inputs, labels, calibration.inputs)


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


def parity_inputs(samples: Samples | None, draw: Callable[[int], Raws]) -> Raws:
    """Return the samples, and drawn inputs to make them ``PARITY_INPUTS``. draw: gives as many as it is asked for."""
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
