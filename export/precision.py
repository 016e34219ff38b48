"""Fewer bits for weights (float16) or for weights and activations (int8), and the choice between them by measurement.

float16 halves the file; computing is float32 as before, since the cast folds when the file is loaded. int8 quarters the
file and may be faster or slower than float32: that depends on the network and on the processor, so ``choose`` measures
both where it runs, and keeps float32 where int8 is not faster or loses accuracy.
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

from sparrow.graphs.graph import fresh_name, set_nodes_in_place
from sparrow.protocol.manifest import Array

from .errors import ExportError
from .fusing import fuse
from .running import accuracy, batches_of, compare, load, run, runtime

MIN_VALUES = 256
"""Smaller tensors stay float32: biases and norms, whose precision counts most and whose size least."""

MOST_CALIBRATION = 512
"""Samples from which ranges are measured, at most, evenly over those given: more hardly move the extremes."""

MAX_FALL = 0.01
"""By how much accuracy may fall with int8, as a share of all samples."""

MIN_SPEEDUP = 1.05
"""What int8 must gain to be chosen: less is within what a measurement may be off."""

LINEAR = ("Gemm", "MatMul")
"""What reads each weight once a sample and so waits for memory: here int8 pays first."""

OPERATORS = ("Add", "AveragePool", "Clip", "Concat", "Conv", "Flatten", *LINEAR, "MaxPool", "Pad", "Relu", "Reshape")
"""All that is quantised: what has weights, and what may stand between in int8. Normalisation stays float32."""

BATCH = 64


def to_half(model: ModelProto) -> ModelProto:
    """Return the model with its float32 weights stored as float16; inputs, outputs and computing stay float32.

    Stay as they are: tensors of fewer than ``MIN_VALUES``, with values beyond float16 (65,504), and those that a caller
    may replace since they are inputs as well. The model given is not changed.
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
    """Return the model in int8: QuantizeLinear and DequantizeLinear around ``operators``, weights per channel, static
    ranges.

    inputs: [N, *input_shape], as the device sees them; the least and largest value that an activation takes become its
    range. Inputs and outputs keep their types. Weights take 7 of the 8 bits:
    processors without dot products of bytes (x86 before VNNI) would overflow with 8. The same input gives the same
    bytes. The model given is not changed. Raises ExportError if nothing can be quantised, MissingPart without ONNX
    Runtime.
    """
    runtime()
    from onnxruntime import quantization

    if any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.node):
        raise ExportError("the model is quantised already; give the float32 one")
    chosen = np.unique(np.linspace(0, len(inputs) - 1, MOST_CALIBRATION).astype(int))
    with tempfile.TemporaryDirectory(prefix="sparrow-") as folder, _quiet():
        path, out = Path(folder, "fp32.onnx"), Path(folder, "int8.onnx")
        # By path: given a model, the tool would move its weights to a file that it deletes.
        onnx.save(_typed(fuse(model)), path)
        try:
            quantization.quantize_static(
                path,
                out,
                _Reader(model.graph.input[0].name, inputs[chosen]),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=sorted(operators),
                per_channel=True,
                reduce_range=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                # These sum up in more bits anyway: rounding what they give costs time and accuracy.
                extra_options={"OpTypesToExcludeOutputQuantization": list(LINEAR)},
            )
        except Exception as error:  # the tool raises whatever it meets
            raise ExportError(f"ONNX Runtime cannot quantise this model: {error}; leave it in fp32 or fp16") from error
        result = onnx.load(out)
    if not any(tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1 for tensor in result.graph.initializer):
        raise ExportError("no convolution or fully connected layer has weights to quantise; leave the model in fp32")
    return _restored(result, model)


@dataclass(frozen=True)
class Trial:
    """One precision as measured: milliseconds of one sample (p50, one thread), bytes of the model, and what it loses.

    accuracy: share of right answers, where labels were given. agreement: share of samples whose best class is fp32's,
    where outputs are class scores. difference: largest absolute difference from fp32. refused: why it was not taken,
    empty where it could be.
    """

    name: str
    milliseconds: float
    bytes: int
    accuracy: float | None
    agreement: float | None
    difference: float
    refused: str = ""

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.milliseconds:.3f} ms (p50)", f"{self.bytes / 1024:.1f} KiB"]
        parts += [] if self.accuracy is None else [f"accuracy {self.accuracy:.2%}"]
        parts += [] if self.agreement is None else [f"same class as fp32 {self.agreement:.2%}"]
        return ", ".join([*parts, f"refused: {self.refused}" if self.refused else ""]).rstrip(", ")


@dataclass(frozen=True)
class Choice:
    """The model to use, the trial that it is, and all trials, fp32 first, on so many samples."""

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
    """Return the model in fp32 or int8, whichever is faster on this machine without losing more than ``max_fall``.

    calibration, inputs: [N, *input_shape], as ``quantise`` takes them; labels: [N] classes of ``inputs``. Two ways to
    int8 are tried: everything, and fully connected layers alone. Each runs on one thread, one sample at a time, in
    turns, ``runs`` times, and the medians count. What int8 loses is accuracy where there are labels, else agreement
    with fp32's classes; where outputs are no class scores, its largest difference as a share of fp32's largest output.
    It is refused where that is more than ``max_fall``, or where it is not ``MIN_SPEEDUP`` times faster; what ONNX
    Runtime cannot quantise stays fp32, too.
    """
    models = {"fp32": model}
    failed: dict[str, str] = {}
    for name, operators in (("int8", OPERATORS), ("int8 in fully connected layers", LINEAR)):
        try:
            models[name] = quantise(model, calibration, operators=operators)
        except ExportError as error:
            failed[name] = str(error)
    sessions = [load(each.SerializeToString(), threads=1) for each in models.values()]
    seconds = _medians(sessions, inputs[:1], runs, clock)
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


def _trial(name: str, seconds: float, size: int, output: Array, plain: Array, labels: Array | None) -> Trial:
    parity = compare(output, plain)
    return Trial(name, seconds * 1e3, size, accuracy(output, labels), parity.same_class, parity.max_difference)


def _reason(trial: Trial, plain: Trial, output: Array, max_fall: float) -> str:
    """Return why int8 is not taken; empty where it can be."""
    if trial.accuracy is not None and plain.accuracy is not None:
        lost, what = (
            plain.accuracy - trial.accuracy,
            f"accuracy falls from {plain.accuracy:.2%} to {trial.accuracy:.2%}",
        )
    elif trial.agreement is not None:
        lost, what = 1 - trial.agreement, f"{1 - trial.agreement:.2%} of the samples get another class"
    else:
        lost = trial.difference / max(float(np.abs(output).max()), 1e-30)
        what = f"outputs differ by {lost:.2%} of the largest"
    if not lost <= max_fall + 1e-12:
        return f"{what}, more than {max_fall:.2%}"
    if not plain.milliseconds >= MIN_SPEEDUP * trial.milliseconds:
        return f"not {MIN_SPEEDUP:g} times faster than fp32: {plain.milliseconds / trial.milliseconds:.2f}"
    return ""


def _medians(sessions: Sequence[Any], row: Array, runs: int, clock: Callable[[], float]) -> list[float]:
    """Return the seconds of each session: in turns, so that what slows the machine for a while slows all."""
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
    """Calibration data as onnxruntime.quantization asks for them."""

    def __init__(self, name: str, rows: Array) -> None:
        self._feeds = iter([{name: batch} for batch in batches_of(rows, BATCH)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def _typed(model: ModelProto) -> ModelProto:
    """Return the same model, with the types of all values: ONNX's own inference knows none behind a group norm."""
    asked, result = deepcopy(model), deepcopy(model)
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
    """Return the model without the tool's notes, and with the model's own."""
    used = {node.domain for node in result.graph.node} | {""}
    kept = [opset for opset in result.opset_import if opset.domain in used or opset.domain == "ai.onnx"]
    del result.opset_import[:], result.metadata_props[:], result.graph.value_info[:]
    result.opset_import.extend(kept)
    result.metadata_props.extend(model.metadata_props)
    result.graph.name = model.graph.name
    result.producer_name, result.producer_version = model.producer_name, model.producer_version
    return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tool's advice to people, which it gives through the root logger, from the log."""

    def refuse(_: Any) -> bool:
        return False

    handler = logging.NullHandler()  # without any, the first message would set up logging for the whole process
    logging.root.addFilter(refuse)
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeFilter(refuse)
        logging.root.removeHandler(handler)
