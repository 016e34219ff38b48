"""Run an exported personal model with ONNX Runtime: no torch, no onnx.

    sparrow predict model.onnx --input week.csv --top 3
    sparrow predict model.onnx --input samples.npy --watch

``Watched`` reloads a model file when it is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.exits import Exit
from sparrow.command_line.options import add_json, add_skip_unreadable, with_skipped
from sparrow.protocol.errors import MissingPart, SdkError

if TYPE_CHECKING:
    from sparrow.devices import EnergyMeter

__all__ = ["NoSuchFile", "PredictError", "Predictor", "Timing", "Watched", "top_classes"]

Array = NDArray[Any]

# Samples per run: enough to keep a board's cores busy, few enough for its memory.
CHUNK = 256

# Option -> ONNX Runtime's execution providers; later ones run operators that earlier ones lack.
PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}

# Duration of repeated predictions when measuring energy: sensors update too slowly for a single one.
ENERGY_SECONDS = 0.5

WATCH_SECONDS = 1.0

# Samples named in an error message.
NAMED = 5

_DTYPES = {
    "tensor(float)": "float32",
    **{f"tensor({kind})": kind for kind in ("int64", "int32", "int16", "int8", "uint8", "uint16")},
}


class PredictError(SdkError):
    """The model or the input cannot be used."""


class NoSuchFile(PredictError):
    """There is no such model or input."""

    exit_code = Exit.NOT_FOUND


@dataclass(frozen=True)
class Timing:
    """The cost of predicting a single sample: median and 95th percentile in seconds, and joules if known.

    energy: quality and source of the joules (``measured, rapl``), or why they are unknown.
    """

    p50: float
    p95: float
    joules: float | None = None
    energy: str = ""


class Predictor:
    """A loaded model.

    input_shape, output_shape: shapes for one sample; None for a free axis. dtype: type of the input. properties: the
    file's metadata, such as method, round and density; with ``preparation``, the model takes raw samples. class_names:
    names of the outputs, "" for a spare output; empty if unknown. target: column that a regression predicts, else None.
    """

    def __init__(
        self, path: str | Path, threads: int | None = None, *, provider: str = "cpu", chunk: int = CHUNK
    ) -> None:
        """Load the ``.onnx`` or ``.ort`` file ``path``.

        threads: None: ONNX Runtime's choice. provider: one of ``PROVIDERS``. chunk: samples per run.
        Raises PredictError; MissingPart without ONNX Runtime.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingPart("ONNX Runtime is not installed: pip install 'sparrow-fl[predict]'") from error
        if not Path(path).is_file():
            raise NoSuchFile(f"there is no model file {path}; export one with sparrow export")
        if chunk < 1:
            raise PredictError(f"{chunk} samples per run; give at least 1")
        options = onnxruntime.SessionOptions()
        # Only errors: the warnings concern ONNX Runtime's own optimiser.
        options.log_severity_level = 3
        if threads is not None:
            if threads < 1:
                raise PredictError(f"{threads} threads; give at least 1")
            options.intra_op_num_threads = threads
        providers = _providers(provider, onnxruntime.get_available_providers())
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        # ONNX Runtime's exceptions share no public base class.
        except Exception as error:
            raise PredictError(f"{path} is not a model that ONNX Runtime can load: {error}") from error
        # If a library of the accelerator is missing, ONNX Runtime falls back to the CPU.
        if providers[0] not in self._session.get_providers():
            raise PredictError(
                f"{provider} could not be started; make the CUDA, cuDNN and TensorRT libraries available to "
                f"onnxruntime-gpu, or choose cpu"
            )
        inputs = self._session.get_inputs()
        outputs = self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1 or inputs[0].type not in _DTYPES or not inputs[0].shape:
            raise PredictError(f"{path} must have one input and one output; export it with sparrow export")
        self._input = inputs[0].name
        self._output = outputs[0].name
        self._chunk = chunk
        self.input_shape = _lengths(inputs[0].shape[1:])
        self.output_shape = _lengths(outputs[0].shape[1:])
        self.dtype = np.dtype(_DTYPES[inputs[0].type])
        self.properties: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        try:
            self.class_names = tuple(map(str, json.loads(self.properties.get("class_names", "[]"))))
            targets = json.loads(self.properties.get("targets", "{}"))
            regression = targets.get("kind") == "numbers"
            self.target: str | None = str(targets.get("column", "output")) if regression else None
            self._fills = bool(json.loads(self.properties.get("preparation", "{}")).get("missing"))
        except (ValueError, TypeError, AttributeError) as error:
            raise PredictError(f"{path}: damaged metadata ({error}); export the model again") from None

    def named(self, output: int) -> str:
        """Return the name of an output's class, or its number if it has no name."""
        if output < len(self.class_names):
            return self.class_names[output] or f"spare output {output}"
        return f"class {output}"

    def __call__(self, inputs: Array) -> Array:
        """Predict: [N, *input_shape] of type ``dtype`` -> [N, *output_shape], N >= 1.

        Raises PredictError for another shape or type, and for values that are not finite, except NaN if the model's
        preparation replaces missing values.
        """
        self._check(inputs)
        chunks = [self._run(inputs[start : start + self._chunk]) for start in range(0, len(inputs), self._chunk)]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def warm_up(self, runs: int = 10) -> None:
        """Run on zeros, so that the first sample is not slower than later ones."""
        for _ in range(runs):
            self._run(self._zeros())

    def latency(self, sample: Array | None = None, repeats: int = 100) -> float:
        """Return the median seconds of a single sample; see ``measure``."""
        return self.measure(sample, repeats).p50

    def measure(self, sample: Array | None = None, repeats: int = 100, meter: EnergyMeter | None = None) -> Timing:
        """Measure the cost of a single sample over ``repeats`` runs.

        sample: [1, *input_shape]; default: zeros. meter: also measure joules, for another ``ENERGY_SECONDS``. Raises
        PredictError for a sample that does not fit.
        """
        sample = self._zeros() if sample is None else sample
        self._check(sample)
        for _ in range(max(1, repeats // 10)):
            self._run(sample[:1])
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._run(sample[:1])
            seconds.append(time.perf_counter() - start)
        p50, p95 = (float(value) for value in np.percentile(seconds, [50, 95]))
        if meter is None:
            return Timing(p50, p95)
        runs = 0
        end = time.monotonic() + ENERGY_SECONDS
        with meter.phase("predict") as phase:
            while runs == 0 or time.monotonic() < end:
                self._run(sample[:1])
                runs += 1
        energy = phase.energy
        if energy.joules is None or not energy.coverage:
            return Timing(p50, p95, None, str(energy.reason or "no sensor covered the predictions"))
        # The meter counts joules only in the covered share of the time.
        each = energy.joules / energy.coverage / runs
        return Timing(p50, p95, each, f"{energy.quality}, {energy.source}")

    def _zeros(self) -> Array:
        return np.zeros((1, *(length or 1 for length in self.input_shape)), dtype=self.dtype)

    def _run(self, inputs: Array) -> Array:
        try:
            (output,) = self._session.run([self._output], {self._input: inputs})
        except Exception as error:
            raise PredictError(f"the model failed on this input: {error}") from error
        return np.asarray(output)

    def _check(self, inputs: Array) -> None:
        wanted = tuple(length or "any" for length in self.input_shape)
        fits = inputs.ndim == len(wanted) + 1 and all(
            length in (None, found) for length, found in zip(self.input_shape, inputs.shape[1:], strict=True)
        )
        if not fits:
            single = inputs.ndim == len(wanted) and all(
                length in ("any", found) for length, found in zip(wanted, inputs.shape, strict=True)
            )
            hint = " (add the batch axis with inputs[None])" if single else ""
            raise PredictError(
                f"the input has shape {inputs.shape}, the model expects (samples, {', '.join(map(str, wanted))}){hint}"
            )
        if inputs.dtype != self.dtype:
            raise PredictError(
                f"the input has type {inputs.dtype}, the model expects {self.dtype}; "
                f"{'give raw samples' if 'preparation' in self.properties else 'scale it as in training'}, and convert "
                f"them with inputs.astype('{self.dtype}')"
            )
        if len(inputs) == 0:
            raise PredictError("the input has no samples; give at least one")
        # The preparation replaces NaN by the mean. Other bad values would silently give a class.
        bad = np.isinf(inputs) if self._fills else ~np.isfinite(inputs)
        if bad.any():
            unusable = np.flatnonzero(bad.reshape(len(inputs), -1).any(axis=1))
            names = ", ".join(map(str, unusable[:NAMED])) + (", ..." if len(unusable) > NAMED else "")
            raise PredictError(
                f"the input has values that are not finite in {len(unusable)} of {len(inputs)} samples "
                f"({names}, counted from 0); replace the values or leave these samples out"
            )


class Watched:
    """A predictor that reloads its model file when the file is replaced.

    A new file is loaded and run once, then replaces the model atomically. A file that cannot be loaded, or has other
    shapes, is passed to ``report`` and ignored. Between ``start`` and ``close`` (or as a context manager), a thread
    checks the file every ``seconds``.
    """

    def __init__(
        self,
        path: str | Path,
        threads: int | None = None,
        *,
        provider: str = "cpu",
        chunk: int = CHUNK,
        seconds: float = WATCH_SECONDS,
        report: Callable[[str], object] = lambda trouble: None,
        on_swap: Callable[[Predictor], object] = lambda predictor: None,
    ) -> None:
        """Load the current file. Raises PredictError if it is missing or unusable."""
        self._path = Path(path)
        self._seconds = seconds
        self._load = partial(Predictor, path, threads, provider=provider, chunk=chunk)
        self._report = report
        self._on_swap = on_swap
        # Before loading, so that a replacement in the meantime counts as new.
        self._seen = self._signature()
        self._current = self._load()
        self._refreshing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> Predictor:
        """The current model."""
        return self._current

    def __call__(self, inputs: Array) -> Array:
        """Predict with the current model; see ``Predictor``."""
        return self._current(inputs)

    def refresh(self) -> bool:
        """Check the file once; return True if a new model was loaded. Does not raise for an unusable file."""
        with self._refreshing:
            signature = self._signature()
            # A missing file may be about to be replaced.
            if signature is None or signature == self._seen:
                return False
            self._seen = signature
            try:
                newer = self._load()
                self._check(newer)
                newer.warm_up(1)
            except PredictError as error:
                self._report(f"the new {self._path} cannot be used, the old model stays: {error}")
                return False
            self._current = newer
        self._on_swap(newer)
        return True

    def start(self) -> None:
        """Start watching the file."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="model-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; the current model still predicts."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Watched:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            self.refresh()

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _check(self, newer: Predictor) -> None:
        was = self._current
        now = newer
        if (was.input_shape, was.output_shape, was.dtype) != (now.input_shape, now.output_shape, now.dtype):
            raise PredictError(
                f"its input is {now.dtype} {now.input_shape} and its output {now.output_shape}, instead of {was.dtype} "
                f"{was.input_shape} and {was.output_shape}; start sparrow predict again for another task"
            )


def _providers(name: str, offered: list[str]) -> list[str]:
    if name not in PROVIDERS:
        raise PredictError(f"unknown provider {name!r}; choose one of {', '.join(PROVIDERS)}")
    first, *rest = PROVIDERS[name]
    if first not in offered:
        usable = [known for known, (wanted, *_) in PROVIDERS.items() if wanted in offered]
        raise PredictError(
            f"this ONNX Runtime does not support {name}; choose one of {', '.join(usable)}, or install onnxruntime-gpu "
            f"instead of onnxruntime"
        )
    return [first, *(provider for provider in rest if provider in offered)]


def _lengths(shape: list[int | str | None]) -> tuple[int | None, ...]:
    return tuple(length if isinstance(length, int) else None for length in shape)


def top_classes(scores: Array, count: int) -> NDArray[np.intp]:
    """Return the classes of highest score, best first: [N, classes] -> [N, count]; ties: lower class first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def read_inputs(data: str, predictor: Predictor) -> Array | Sequence[Array]:
    """Return samples for the model from a file or folder; pictures and sounds are decoded one by one.

    data: path and options, as in ``sparrow join --data``. Raises PredictError if they do not fit the model, DataError
    if they are unreadable.
    """
    from sparrow.protocol.preparation import Preparation, Targets
    from sparrow.reading import Decoded, read_file, read_options

    path, options, rest = read_options(data)
    if rest:
        raise WrongUsage(f"--input: unknown option {rest!r}; give a file and options such as missing=mean")
    if options.missing == "drop":
        raise WrongUsage("--input: missing=drop would renumber the samples; give missing=mean, or repair the file")
    if not Path(path).exists():
        raise NoSuchFile(f"there is no input file {path}")
    described = predictor.properties.get("preparation")
    if described is None and Path(path).suffix.lower() not in (".npy", ".npz"):
        raise PredictError(
            f"{path}: the model was exported without a preparation and cannot read tables, pictures or sounds; give "
            "prepared samples as an .npy file"
        )
    try:
        preparation = None if described is None else Preparation.model_validate_json(described)
        targets = Targets.model_validate_json(predictor.properties.get("targets", "{}"))
    except ValueError as error:
        raise PredictError(f"the model's description of samples is damaged ({error}); export the model again") from None
    shape = None if described is not None else tuple(length or 1 for length in predictor.input_shape)
    parts = read_file(path, options, preparation=preparation, targets=targets, shape=shape, labelled=False)
    raw = parts.get("", parts.get("test", next(iter(parts.values()))))
    for text in raw.said:
        print(f"{path}: {text}", file=sys.stderr)
    if isinstance(raw.inputs, Decoded):
        return raw.inputs
    return raw.inputs.astype(predictor.dtype, copy=False)


@dataclass(frozen=True)
class _Predicted:
    predictor: Predictor
    outputs: Array
    seconds: float
    alone: Timing | None = None
    files: list[str] = field(default_factory=list)


def _show(found: _Predicted, top: int) -> str:
    lines = []
    outputs = found.outputs
    count = len(outputs)
    predictor = found.predictor
    if predictor.target is not None:
        for number, values in enumerate(outputs.reshape(count, -1)):
            lines.append(
                f"{_called(found, number)}: {predictor.target} {', '.join(f'{value:.6g}' for value in values)}"
            )
    elif outputs.ndim == 2:
        for number, classes in enumerate(top_classes(outputs, top)):
            named = ", ".join(f"{predictor.named(index)} (score {outputs[number, index]:.3f})" for index in classes)
            lines.append(f"{_called(found, number)}: {named}")
    else:
        lines.append(f"outputs of shape {outputs.shape} are not class scores; save them with --output")
    lines.append(f"{count} samples in {found.seconds * 1e3:.2f} ms, {found.seconds * 1e3 / count:.3f} ms each")
    if (alone := found.alone) is not None:
        joules = "unknown" if alone.joules is None else f"{alone.joules * 1e3:.3g} mJ"
        lines.append(
            f"single sample: {alone.p50 * 1e3:.3f} ms (p50), {alone.p95 * 1e3:.3f} ms (p95), "
            f"energy {joules} ({alone.energy})"
        )
    return "\n".join(lines)


def _called(found: _Predicted, number: int) -> str:
    return found.files[number] if found.files else f"sample {number}"


def _as_json(found: _Predicted, top: int) -> str:
    outputs = found.outputs
    predictor = found.predictor
    classes = None
    numbers = None
    if predictor.target is not None:
        numbers = outputs.reshape(len(outputs), -1).tolist()
    elif outputs.ndim == 2:
        classes = [
            [
                {"class": int(index), "name": predictor.named(index), "score": float(outputs[number, index])}
                for index in best
            ]
            for number, best in enumerate(top_classes(outputs, top))
        ]
    alone = None if found.alone is None else vars(found.alone)
    return json.dumps(
        {
            "properties": predictor.properties,
            "samples": len(outputs),
            "files": found.files or None,
            "output_shape": list(outputs.shape[1:]),
            "classes": classes,
            "numbers": numbers,
            "seconds": found.seconds,
            "alone": alone,
        }
    )


def _first(inputs: Array | Sequence[Array]) -> Array:
    return inputs[:1] if isinstance(inputs, np.ndarray) else inputs[0][None]


def _measured(predictor: Predictor, sample: Array) -> Timing:
    from sparrow.devices import EnergyMeter

    with EnergyMeter() as meter:
        return predictor.measure(sample, meter=meter)


def _options(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="ONNX file of a personal model, or .ort")
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="raw samples: a table, npz, npy, picture or sound, or a folder of these, with options",
    )
    add_skip_unreadable(parser)
    parser.add_argument("--output", type=Path, help="write the raw outputs to this .npy file")
    parser.add_argument("--top", type=int, default=1, help="classes to show per sample (default: 1)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: ONNX Runtime's choice)")
    parser.add_argument("--provider", choices=PROVIDERS, default="cpu", help="device to run on (default: cpu)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"samples per run (default: {CHUNK})")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"predict again after each change of the model file, checked every SECONDS (default: {WATCH_SECONDS:g})",
    )
    add_json(parser, ", with --watch one line per model")


def _run(options: argparse.Namespace) -> None:
    if options.top < 1:
        raise WrongUsage(f"--top {options.top}: give at least 1")
    if options.watch is not None and not options.watch > 0:
        raise WrongUsage(f"--watch {options.watch}: use seconds above 0")
    watched = Watched(
        options.model,
        options.threads,
        provider=options.provider,
        chunk=options.chunk,
        report=lambda trouble: print(f"warning: {trouble}", file=sys.stderr, flush=True),
    )
    inputs = read_inputs(with_skipped(options.input, options) or "", watched.current)
    show = _as_json if options.json else _show
    found = _predict(watched.current, inputs, options.output)
    print(show(replace(found, alone=_measured(watched.current, _first(inputs))), options.top), flush=True)
    while options.watch is not None:
        time.sleep(options.watch)
        if watched.refresh():
            print(f"new {options.model}: {_describe(watched.current)}", file=sys.stderr)
            print(show(_predict(watched.current, inputs, options.output), options.top), flush=True)


def _predict(predictor: Predictor, inputs: Array | Sequence[Array], output: Path | None) -> _Predicted:
    seconds = 0.0
    parts = []
    for batch in [inputs] if isinstance(inputs, np.ndarray) else (one[None] for one in inputs):
        start = time.perf_counter()
        parts.append(predictor(batch))
        seconds += time.perf_counter() - start
    outputs = np.concatenate(parts)
    if output is not None:
        _write(output, outputs)
    return _Predicted(predictor, outputs, seconds, files=[str(place) for place in getattr(inputs, "places", ())])


def _describe(predictor: Predictor) -> str:
    known = [f"{name} {predictor.properties[name]}" for name in ("method", "round") if name in predictor.properties]
    return ", ".join(known) or "no description"


def _write(path: Path, outputs: Array) -> None:
    try:
        # Given a path, numpy.save would append ".npy" to other names.
        with path.open("wb") as file:
            np.save(file, outputs, allow_pickle=False)
    except OSError as error:
        raise PredictError(f"{path} cannot be written: {error.strerror}") from error


COMMAND = Command("sparrow predict", "Run an exported model.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
