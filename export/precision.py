"""Reduced precision: float16 weights, or int8 weights and activations.

float16 halves the file; ONNX Runtime folds the cast on load and computes in float32. int8 quarters the file, but its
speed depends on the network and the processor, so ``choose`` measures both.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import ModelProto, TensorProto, ValueInfoProto

from sparrow.command_line.table import percent
from sparrow.graphs.graph import fresh_name, set_nodes_in_place
from sparrow.protocol.manifest import Array

from .errors import ExportError
from .fusing import fuse
from .running import accuracy, are_scores, batches_of, compare, load, run, runtime

MIN_VALUES = 256
"""Smaller tensors (biases, norms) stay float32, because they need the precision and little space."""

MOST_CALIBRATION = 512
"""Largest number of calibration samples, spread evenly; more hardly change the extremes."""

MAX_FALL = 0.01
"""Largest accepted loss of accuracy in int8, as a share of all samples."""

MIN_SPEEDUP = 1.05
"""Smallest speedup for which int8 is chosen; less is within measurement error."""

LINEAR = ("Gemm", "MatMul")
"""Operators that read each weight once per sample and are limited by memory, so that int8 helps them most."""

OPERATORS = ("Add", "AveragePool", "Clip", "Concat", "Conv", "Flatten", *LINEAR, "MaxPool", "Pad", "Relu", "Reshape")
"""Quantised operators: those with weights, and those that pass int8 through. Normalisation stays float32."""

BATCH = 64


def to_half(model: ModelProto) -> ModelProto:
    """Return a copy that stores its float32 weights as float16; inputs, outputs and arithmetic stay float32.

    Unchanged: tensors of fewer than ``MIN_VALUES`` values, with values beyond float16's range, or that are also inputs.
    """
    result = deepcopy(model)
    graph = result.graph
    inputs = {value.name for value in graph.input}
    casts = []
    for tensor in graph.initializer:
        if tensor.name in inputs or tensor.data_type != TensorProto.FLOAT:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        if values.size < MIN_VALUES or not np.abs(values).max() <= np.finfo(np.float16).max:
            continue
        name = fresh_name(graph, f"{tensor.name}.half")
        casts.append(onnx.helper.make_node("Cast", [name], [tensor.name], to=TensorProto.FLOAT))
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float16), name))
    set_nodes_in_place(graph, [*casts, *graph.node])
    return result


def quantise(model: ModelProto, inputs: Array, *, operators: Sequence[str] = OPERATORS) -> ModelProto:
    """Return a copy in int8: QDQ format around ``operators``, per-channel weights, static activation ranges.

    inputs: [N, *input_shape], calibration samples as the device sees them. Inputs and outputs keep their types.
    Deterministic. Raises ExportError if nothing can be quantised, MissingPart without ONNX Runtime.
    """
    runtime()
    from onnxruntime import quantization

    if any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.node):
        raise ExportError("the model is quantised already; give the float32 one")
    chosen = np.unique(np.linspace(0, len(inputs) - 1, MOST_CALIBRATION).astype(int))
    with tempfile.TemporaryDirectory(prefix="sparrow-") as folder, _quiet():
        path = Path(folder, "fp32.onnx")
        out = Path(folder, "int8.onnx")
        # Pass a path: given a model, the tool would move its weights to a file that it deletes.
        onnx.save(_typed(fuse(model)), path)
        try:
            quantization.quantize_static(
                path,
                out,
                _Reader(model.graph.input[0].name, inputs[chosen]),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=sorted(operators),
                per_channel=True,
                # Weights take 7 bits: 8 would overflow on x86 before VNNI.
                reduce_range=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                # These accumulate in more bits: rounding their outputs costs time and accuracy.
                extra_options={"OpTypesToExcludeOutputQuantization": list(LINEAR)},
            )
        # the tool's exceptions share no base class
        except Exception as error:
            raise ExportError(f"ONNX Runtime cannot quantise this model: {error}; leave it in fp32 or fp16") from error
        result = onnx.load(out)
    if not any(tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1 for tensor in result.graph.initializer):
        raise ExportError("no convolution or fully connected layer has weights to quantise; leave the model in fp32")
    return _restored(result, model)


@dataclass(frozen=True)
class Trial:
    """The measurements of one precision."""

    name: str
    # Milliseconds of one sample on one thread, median.
    milliseconds: float
    # Bytes of the model.
    bytes: int
    # If there are labels.
    accuracy: float | None
    # Share of samples with the same class as fp32, if outputs are class scores.
    agreement: float | None
    # Largest absolute difference from fp32.
    difference: float
    # The reason, "" if acceptable.
    refused: str = ""

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.milliseconds:.3f} ms (p50)", f"{self.bytes / 1024:.1f} KiB"]
        parts += [] if self.accuracy is None else [f"accuracy {percent(self.accuracy, 2)}"]
        parts += [] if self.agreement is None else [f"same class as fp32 {percent(self.agreement, 2)}"]
        return ", ".join([*parts, f"refused: {self.refused}" if self.refused else ""]).rstrip(", ")


@dataclass(frozen=True)
class Choice:
    """The chosen model, its trial, all trials (fp32 first) and the number of samples."""

    model: ModelProto = field(repr=False, compare=False)
    chosen: Trial
    trials: tuple[Trial, ...]
    samples: int

    @property
    def precision(self) -> str:
        """Return ``fp32`` or ``int8``."""
        return self.chosen.name.split()[0]

    def __str__(self) -> str:
        lines = [f"{self.precision}, measured on {self.samples} samples", *map(str, self.trials)]
        return "\n  ".join(lines)


def choose(
    model: ModelProto,
    calibration: Array,
    inputs: Array,
    labels: Array | None = None,
    *,
    max_fall: float = MAX_FALL,
    runs: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Return the model in fp32 or int8, whichever is faster on this machine.

    calibration, inputs: [N, *input_shape]; labels: [N] classes of ``inputs``. Two variants of int8 are tried: all
    layers, and only fully connected ones. Variants run alternately, one sample at a time on one thread, ``runs`` times;
    medians count. int8 is rejected if it is not ``MIN_SPEEDUP`` times faster, or loses more than ``max_fall``: of
    accuracy if there are labels, else of agreement with fp32's classes, or, if outputs are not class scores, of the
    largest output. Raises ExportError for labels if outputs are not class scores.
    """
    if labels is not None:
        _check_scores(model, inputs[:1])
    models = {"fp32": model}
    failed: dict[str, str] = {}
    for name, operators in (("int8", OPERATORS), ("int8 in fully connected layers", LINEAR)):
        try:
            models[name] = quantise(model, calibration, operators=operators)
        except ExportError as error:
            failed[name] = str(error)
    sessions = [load(each.SerializeToString(), threads=1) for each in models.values()]
    seconds = _medians_of_turns(sessions, inputs[:1], runs, clock)
    outputs = [run(session, inputs, BATCH) for session in sessions]
    trials: list[Trial] = []
    for name, taken, output in zip(models, seconds, outputs, strict=True):
        trial = _trial(name, taken, models[name].ByteSize(), output, outputs[0], labels)
        reason = _reason(trial, trials[0], outputs[0], max_fall) if trials else ""
        trials.append(Trial(**{**vars(trial), "refused": reason}))
    accepted = [trial for trial in trials if not trial.refused]
    chosen = min(accepted, key=lambda trial: trial.milliseconds)
    nan = float("nan")
    unmade = tuple(Trial(name, nan, 0, None, None, nan, reason) for name, reason in failed.items())
    return Choice(models[chosen.name], chosen, (*trials, *unmade), len(inputs))


def _check_scores(model: ModelProto, sample: Array) -> None:
    output = run(load(model.SerializeToString(), threads=1), sample, 1)
    if not are_scores(output):
        raise ExportError(
            f"labels need class scores, the model's outputs have the shape {output.shape[1:]}; leave the labels out of "
            f"--data"
        )


def _trial(name: str, seconds: float, size: int, output: Array, plain: Array, labels: Array | None) -> Trial:
    parity = compare(output, plain)
    return Trial(name, seconds * 1e3, size, accuracy(output, labels), parity.same_class, parity.max_difference)


def _reason(trial: Trial, plain: Trial, output: Array, max_fall: float) -> str:
    if trial.accuracy is not None and plain.accuracy is not None:
        lost = plain.accuracy - trial.accuracy
        loss = f"accuracy falls from {percent(plain.accuracy, 2)} to {percent(trial.accuracy, 2)}"
    elif trial.agreement is not None:
        lost = 1 - trial.agreement
        loss = f"{percent(lost, 2)} of the samples change class"
    else:
        lost = trial.difference / max(float(np.abs(output).max()), 1e-30)
        loss = f"outputs differ by {percent(lost, 2)} of the largest"
    if not lost <= max_fall + 1e-12:
        return f"{loss}, more than {percent(max_fall, 2)}"
    if not plain.milliseconds >= MIN_SPEEDUP * trial.milliseconds:
        return f"not {MIN_SPEEDUP:g} times faster than fp32: {plain.milliseconds / trial.milliseconds:.2f}"
    return ""


def _medians_of_turns(sessions: Sequence[Any], row: Array, runs: int, clock: Callable[[], float]) -> list[float]:
    # Sessions take turns, so that other load on the machine slows all of them alike.
    seconds: list[list[float]] = [[] for _ in sessions]
    for session in sessions:
        for _ in range(max(1, runs // 10)):
            run(session, row, 1)
    for _ in range(runs):
        for session, taken in zip(sessions, seconds, strict=True):
            start = clock()
            run(session, row, 1)
            taken.append(clock() - start)
    return [statistics.median(taken) for taken in seconds]


class _Reader:
    # The interface of onnxruntime.quantization.

    def __init__(self, name: str, rows: Array) -> None:
        self._feeds = iter([{name: batch} for batch in batches_of(rows, BATCH)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def _typed(model: ModelProto) -> ModelProto:
    """Return a copy with the types of all values, inferred by ONNX Runtime; ONNX cannot infer types after a group
    norm.
    """
    asked = deepcopy(model)
    result = deepcopy(model)
    del asked.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    asked.graph.output.extend(ValueInfoProto(name=name) for name in names)
    known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    for value in load(asked.SerializeToString()).get_outputs():
        if value.type == "tensor(float)" and value.name not in known:
            info = onnx.helper.make_tensor_value_info(value.name, TensorProto.FLOAT, value.shape)
            result.graph.value_info.append(info)
    return result


def _restored(result: ModelProto, model: ModelProto) -> ModelProto:
    # The tool writes metadata of its own.
    used = {node.domain for node in result.graph.node} | {""}
    kept = [opset for opset in result.opset_import if opset.domain in used or opset.domain == "ai.onnx"]
    del result.opset_import[:], result.metadata_props[:], result.graph.value_info[:]
    result.opset_import.extend(kept)
    result.metadata_props.extend(model.metadata_props)
    result.graph.name = model.graph.name
    result.producer_name = model.producer_name
    result.producer_version = model.producer_version
    return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: suppress the quantisation tool's advice, which it logs through the root logger."""

    def refuse(_: Any) -> bool:
        return False

    # Without a handler, the first message would configure logging for the whole process.
    handler = logging.NullHandler()
    logging.root.addFilter(refuse)
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeFilter(refuse)
        logging.root.removeHandler(handler)
