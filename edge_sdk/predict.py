"""Run an exported personal model with ONNX Runtime: no torch, and nothing else of this package.

    python -m edge_sdk.predict model.onnx --input samples.npy --top 3

Exit status: 0 done; 1 the model or the input cannot be used, with the reason on stderr; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CHUNK = 256
"""Samples per run of the model: enough to keep a board's cores busy, few enough for its memory."""

_DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32"}


class PredictError(ValueError):
    """The model or the input cannot be used; the text says what to do."""


class Predictor:
    """A model ready to run on the CPU.

    ``input_shape`` and ``output_shape`` are those of one sample (None where an axis is free), ``dtype`` is the input's.
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        """Load the ONNX file ``path``; ``threads`` None leaves their number to ONNX Runtime. Raises PredictError."""
        try:
            import onnxruntime
        except ImportError as error:
            raise PredictError("ONNX Runtime is not installed; pip install sparrow-fl[predict]") from error
        if not Path(path).is_file():
            raise PredictError(f"there is no model file {path}; export one with python -m export")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only: its warnings are about its own optimiser
        if threads is not None:
            if threads < 1:
                raise PredictError(f"{threads} threads; at least 1 is needed")
            options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise PredictError(f"{path} is not a model that ONNX Runtime can load: {error}") from error
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1 or inputs[0].type not in _DTYPES or not inputs[0].shape:
            raise PredictError(f"{path} does not take and give one batch of samples; export it with python -m export")
        self._input, self._output = inputs[0].name, outputs[0].name
        self.input_shape = _lengths(inputs[0].shape[1:])
        self.output_shape = _lengths(outputs[0].shape[1:])
        self.dtype = np.dtype(_DTYPES[inputs[0].type])

    def __call__(self, inputs: Array) -> Array:
        """Outputs [N, *output_shape] of the samples ``inputs`` [N, *input_shape] of type ``dtype``, N >= 1.

        Raises PredictError when shape or type differ.
        """
        self._check(inputs)
        chunks = [self._run(inputs[start : start + CHUNK]) for start in range(0, len(inputs), CHUNK)]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def latency(self, sample: Array | None = None, repeats: int = 100) -> float:
        """Median seconds (p50) of one sample alone over ``repeats`` runs, after a tenth as many to warm up.

        sample: [1, *input_shape]; zeros where none is given, since a dense model takes the same time for any input.
        """
        if sample is None:
            sample = np.zeros((1, *(length or 1 for length in self.input_shape)), dtype=self.dtype)
        self._check(sample)
        for _ in range(max(1, repeats // 10)):
            self._run(sample[:1])
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._run(sample[:1])
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _run(self, inputs: Array) -> Array:
        try:
            (output,) = self._session.run([self._output], {self._input: inputs})
        except Exception as error:  # see __init__
            raise PredictError(f"the model failed on this input: {error}") from error
        return np.asarray(output)

    def _check(self, inputs: Array) -> None:
        wanted = tuple(length or "any" for length in self.input_shape)
        fits = inputs.ndim == len(wanted) + 1 and all(
            length in (None, found) for length, found in zip(self.input_shape, inputs.shape[1:], strict=True)
        )
        if not fits:
            hint = " (add the batch axis with inputs[None])" if inputs.ndim == len(wanted) else ""
            raise PredictError(
                f"the input has shape {inputs.shape}, the model wants (samples, {', '.join(map(str, wanted))}){hint}"
            )
        if inputs.dtype != self.dtype:
            raise PredictError(
                f"the input is of {inputs.dtype}, the model wants {self.dtype}; scale it as in training, "
                f"then convert it with inputs.astype('{self.dtype}')"
            )
        if len(inputs) == 0:
            raise PredictError("the input holds no sample; give at least one")


def _lengths(shape: list[int | str | None]) -> tuple[int | None, ...]:
    return tuple(length if isinstance(length, int) else None for length in shape)


def top_classes(scores: Array, count: int) -> NDArray[np.intp]:
    """The ``count`` classes of highest score, best first: [N, classes] -> [N, count]; ties go to the lower class."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _read(path: Path) -> Array:
    try:
        loaded = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise PredictError(f"there is no input file {path}") from None
    except (OSError, ValueError, EOFError) as error:
        raise PredictError(f"{path} is not an array that numpy.save wrote: {error}") from error
    if not isinstance(loaded, np.ndarray):
        raise PredictError(f"{path} holds several arrays; save the samples alone with numpy.save")
    return loaded


def _report(outputs: Array, top: int, seconds: float, latency: float) -> None:
    if outputs.ndim == 2:
        for number, classes in enumerate(top_classes(outputs, top)):
            named = ", ".join(f"class {index} (score {outputs[number, index]:.3f})" for index in classes)
            print(f"sample {number}: {named}")
    else:
        print(f"outputs of shape {outputs.shape}: no class scores; save them with --output")
    print(
        f"{len(outputs)} samples in {seconds * 1e3:.2f} ms, {seconds * 1e3 / len(outputs):.3f} ms each; "
        f"one alone: {latency * 1e3:.3f} ms (p50)"
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m edge_sdk.predict", description="Run an exported model.")
    parser.add_argument("model", type=Path, help="ONNX file of a personal model")
    parser.add_argument("--input", type=Path, required=True, help="samples as numpy.save writes them, batch axis first")
    parser.add_argument("--output", type=Path, help="write the raw outputs to this .npy file")
    parser.add_argument("--top", type=int, default=1, help="classes to show per sample (default 1)")
    parser.add_argument("--threads", type=int, help="threads to use (default: ONNX Runtime decides)")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top {options.top}: show at least 1 class")
    try:
        predictor = Predictor(options.model, options.threads)
        inputs = _read(options.input)
        start = time.perf_counter()
        outputs = predictor(inputs)
        seconds = time.perf_counter() - start
        if options.output is not None:
            _write(options.output, outputs)
        _report(outputs, options.top, seconds, predictor.latency(inputs[:1]))
    except PredictError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _write(path: Path, outputs: Array) -> None:
    try:
        with path.open("wb") as file:  # numpy.save on a path would append ".npy" to other names
            np.save(file, outputs, allow_pickle=False)
    except OSError as error:
        raise PredictError(f"{path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
