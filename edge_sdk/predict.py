"""Run an exported personal model with ONNX Runtime: no torch, no onnx.

    sparrow predict model.onnx --input week.csv --top 3
    sparrow predict model.onnx --input samples.npy --watch

``Predictor`` is one loaded model; ``Watched`` is the newest of a file that is replaced now and then, as a device's
export is after more training.

Exit codes: docs/cli.md.
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

CHUNK = 256
"""Samples per run of the model: enough to keep a board's cores busy, few enough for its memory."""

PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""Where a model can run -> ONNX Runtime's execution providers, the later ones for operators that an earlier has not."""

ENERGY_SECONDS = 0.5
"""How long predictions are repeated to count their joules: sensors tick too slowly for one."""

WATCH_SECONDS = 1.0
"""How often a model file is looked at."""

NAMED = 5
"""How many samples a message names."""

_DTYPES = {
    "tensor(float)": "float32",
    **{f"tensor({kind})": kind for kind in ("int64", "int32", "int16", "int8", "uint8", "uint16")},
}


class PredictError(SdkError):
    """The model or the input cannot be used; the text says what to do."""


class NoSuchFile(PredictError):
    """There is no such model or input."""

    exit_code = Exit.NOT_FOUND


@dataclass(frozen=True)
class Timing:
    """The cost of one sample alone: seconds, median and 95th percentile; joules, None where nobody knows.

    energy: how the joules were come by (``measured, rapl``), or why there are none.
    """

    p50: float
    p95: float
    joules: float | None = None
    energy: str = ""


class Predictor:
    """A model ready to run.

    ``input_shape`` and ``output_shape`` are those of one sample (None where an axis is free), ``dtype`` is the input's;
    ``properties`` is what the file says of itself: method, round, density, classes, .... A model with its preparation
    in front takes raw samples. ``class_names`` are those of the outputs, empty if the file has none; a name is "" for
    an output that no class of the device has. ``target`` is the name of the number that a regression predicts, else
    None.
    """

    def __init__(
        self, path: str | Path, threads: int | None = None, *, provider: str = "cpu", chunk: int = CHUNK
    ) -> None:
        """Load the ``.onnx`` or ``.ort`` file ``path``.

        threads: of the processor; None leaves their number to ONNX Runtime. provider: one of ``PROVIDERS``. chunk:
        samples per run. Raises PredictError; MissingPart without ONNX Runtime.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingPart("ONNX Runtime is not installed: pip install 'sparrow-fl[predict]'") from error
        if not Path(path).is_file():
            raise NoSuchFile(f"there is no model file {path}; export one with sparrow export")
        if chunk < 1:
            raise PredictError(f"{chunk} samples per run; at least 1 is needed")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only: its warnings are about its own optimiser
        if threads is not None:
            if threads < 1:
                raise PredictError(f"{threads} threads; at least 1 is needed")
            options.intra_op_num_threads = threads
        providers = _providers(provider, onnxruntime.get_available_providers())
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise PredictError(f"{path} is not a model that ONNX Runtime can load: {error}") from error
        # Where a library of the accelerator's is missing, ONNX Runtime goes on without it.
        if providers[0] not in self._session.get_providers():
            raise PredictError(
                f"{provider} is there but could not be started; see that this onnxruntime-gpu finds its CUDA, cuDNN "
                f"and TensorRT libraries, or choose cpu"
            )
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1 or inputs[0].type not in _DTYPES or not inputs[0].shape:
            raise PredictError(f"{path} does not take and give one batch of samples; export it with sparrow export")
        self._input, self._output = inputs[0].name, outputs[0].name
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
            raise PredictError(f"{path}: its metadata are damaged ({error}); export the model again") from None

    def named(self, output: int) -> str:
        """Return the name of a class, or its number if it has none."""
        if output < len(self.class_names):
            return self.class_names[output] or f"spare output {output}"
        return f"class {output}"

    def __call__(self, inputs: Array) -> Array:
        """Return outputs [N, *output_shape] of the samples ``inputs`` [N, *input_shape] of type ``dtype``, N >= 1.

        Raises PredictError when shape or type differ, or a value is not finite. NaN is a missing value if the model's
        preparation puts the mean in its place.
        """
        self._check(inputs)
        chunks = [self._run(inputs[start : start + self._chunk]) for start in range(0, len(inputs), self._chunk)]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def warm_up(self, runs: int = 10) -> None:
        """Run on zeros, so that the first sample is not slower than those after it."""
        for _ in range(runs):
            self._run(self._zeros())

    def latency(self, sample: Array | None = None, repeats: int = 100) -> float:
        """Median seconds (p50) of one sample alone; see ``measure``."""
        return self.measure(sample, repeats).p50

    def measure(self, sample: Array | None = None, repeats: int = 100, meter: EnergyMeter | None = None) -> Timing:
        """Measure the cost of one sample alone over ``repeats`` runs, after a tenth as many to warm up.

        sample: [1, *input_shape]; zeros where none is given, since a dense model takes the same time for any input.
        meter: to count joules with, which takes another ``ENERGY_SECONDS``. Raises
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
        runs, end = 0, time.monotonic() + ENERGY_SECONDS
        with meter.phase("predict") as phase:
            while runs == 0 or time.monotonic() < end:
                self._run(sample[:1])
                runs += 1
        energy = phase.energy
        if energy.joules is None or not energy.coverage:
            return Timing(p50, p95, None, str(energy.reason or "no sensor covered the predictions"))
        each = energy.joules / energy.coverage / runs  # joules are of the covered time alone
        return Timing(p50, p95, each, f"{energy.quality}, {energy.source}")

    def _zeros(self) -> Array:
        return np.zeros((1, *(length or 1 for length in self.input_shape)), dtype=self.dtype)

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
            alone = inputs.ndim == len(wanted) and all(
                length in ("any", found) for length, found in zip(wanted, inputs.shape, strict=True)
            )
            hint = " (add the batch axis with inputs[None])" if alone else ""
            raise PredictError(
                f"the input has shape {inputs.shape}, the model wants (samples, {', '.join(map(str, wanted))}){hint}"
            )
        if inputs.dtype != self.dtype:
            raise PredictError(
                f"the input is of {inputs.dtype}, the model wants {self.dtype}; "
                f"{'give raw samples' if 'preparation' in self.properties else 'scale it as in training'}, and convert "
                f"them with inputs.astype('{self.dtype}')"
            )
        if len(inputs) == 0:
            raise PredictError("the input holds no sample; give at least one")
        # A preparation that standardises puts the mean in the place of NaN.
        bad = np.isinf(inputs) if self._fills else ~np.isfinite(inputs)
        if bad.any():  # the model would answer a class all the same
            unusable = np.flatnonzero(bad.reshape(len(inputs), -1).any(axis=1))
            names = ", ".join(map(str, unusable[:NAMED])) + (", ..." if len(unusable) > NAMED else "")
            raise PredictError(
                f"the input has values that are no finite numbers in {len(unusable)} of {len(inputs)} samples "
                f"({names}, counted from 0); replace the values or leave these samples out"
            )


class Watched:
    """The newest model of a file that is replaced now and then; predicts as ``Predictor`` does.

    A file that has changed is loaded whole and run once before it takes over, in one step: a prediction that is under
    way ends with the model it began with. One that cannot be loaded, or takes or gives other shapes, is told to
    ``report`` and left; the model before it stays. ``on_swap`` is told the new predictor. Looks at the file every
    ``seconds`` in a thread of its own, between ``start`` and ``close`` (or as a context manager), or when ``refresh``
    is called.
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
        """Load what is there now. Raises PredictError."""
        self._path, self._seconds = Path(path), seconds
        self._load = partial(Predictor, path, threads, provider=provider, chunk=chunk)
        self._report, self._on_swap = report, on_swap
        self._seen = self._signature()  # before loading: what is replaced meanwhile is seen as new
        self._current = self._load()
        self._refreshing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> Predictor:
        """The model that predicts now."""
        return self._current

    def __call__(self, inputs: Array) -> Array:
        """Return outputs of the newest model; see ``Predictor``."""
        return self._current(inputs)

    def refresh(self) -> bool:
        """Look at the file once; True where another model took over. Never raises for a file that cannot be used."""
        with self._refreshing:
            signature = self._signature()
            if signature is None or signature == self._seen:  # one that is gone may be about to be replaced
                return False
            self._seen = signature
            try:
                newer = self._load()
                self._check(newer)
                newer.warm_up(1)
            except PredictError as error:
                self._report(f"the newer {self._path} is not used, the model before it is: {error}")
                return False
            self._current = newer
        self._on_swap(newer)
        return True

    def start(self) -> None:
        """Watch from now on."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="model-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no more; predictions go on with the model that is there."""
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
        was, now = self._current, newer
        if (was.input_shape, was.output_shape, was.dtype) != (now.input_shape, now.output_shape, now.dtype):
            raise PredictError(
                f"it takes {now.input_shape} of {now.dtype} and gives {now.output_shape}, not {was.input_shape} of "
                f"{was.dtype} and {was.output_shape}; start anew for another task"
            )


def _providers(name: str, offered: list[str]) -> list[str]:
    """Return the execution providers for ``name``, of those that this ONNX Runtime offers."""
    if name not in PROVIDERS:
        raise PredictError(f"there is no provider {name!r}; choose one of {', '.join(PROVIDERS)}")
    first, *rest = PROVIDERS[name]
    if first not in offered:
        usable = [known for known, (wanted, *_) in PROVIDERS.items() if wanted in offered]
        raise PredictError(
            f"this ONNX Runtime has no {name}, it offers {', '.join(usable)}; choose one of them, or "
            f"pip install onnxruntime-gpu in place of onnxruntime"
        )
    return [first, *(provider for provider in rest if provider in offered)]


def _lengths(shape: list[int | str | None]) -> tuple[int | None, ...]:
    return tuple(length if isinstance(length, int) else None for length in shape)


def top_classes(scores: Array, count: int) -> NDArray[np.intp]:
    """Return the ``count`` classes of highest score, best first: [N, classes] -> [N, count]; ties go to the lower
    class.
    """
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def read_inputs(data: str, predictor: Predictor) -> Array | Sequence[Array]:
    """Return raw samples from a file or folder, as the model takes them; one by one if they are decoded from files.

    data: the path, and perhaps options as ``--data`` of ``sparrow join`` has them. Raises PredictError, DataError.
    """
    from sparrow.protocol.preparation import Preparation, Targets

    from .reading import Decoded, read_file, read_options

    path, options, rest = read_options(data)
    if rest:
        raise WrongUsage(f"--input: {rest!r} is not understood; give a file, and how to read it, such as missing=mean")
    if options.missing == "drop":
        raise WrongUsage("--input: missing=drop would number samples anew; give missing=mean, or mend the file")
    if not Path(path).exists():
        raise NoSuchFile(f"there is no input file {path}")
    described = predictor.properties.get("preparation")
    if described is None and Path(path).suffix.lower() not in (".npy", ".npz"):
        raise PredictError(
            f"{path}: the model says nothing of columns, for it was exported without a preparation; give prepared "
            "samples as an .npy file"
        )
    try:
        preparation = None if described is None else Preparation.model_validate_json(described)
        targets = Targets.model_validate_json(predictor.properties.get("targets", "{}"))
    except ValueError as error:
        raise PredictError(f"the model's description of its samples is damaged ({error}); export it again") from None
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
    """The result of the command for one model file; times are in seconds."""

    predictor: Predictor
    outputs: Array
    seconds: float
    alone: Timing | None = None
    files: list[str] = field(default_factory=list)
    """Of each sample, if each is a file."""


def _show(found: _Predicted, top: int) -> str:
    """For a person."""
    lines, outputs, count = [], found.outputs, len(found.outputs)
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
        lines.append(f"outputs of shape {outputs.shape}: no class scores; save them with --output")
    lines.append(f"{count} samples in {found.seconds * 1e3:.2f} ms, {found.seconds * 1e3 / count:.3f} ms each")
    if (alone := found.alone) is not None:
        joules = "unknown" if alone.joules is None else f"{alone.joules * 1e3:.3g} mJ"
        lines.append(
            f"one alone: {alone.p50 * 1e3:.3f} ms (p50), {alone.p95 * 1e3:.3f} ms (p95), "
            f"energy {joules} ({alone.energy})"
        )
    return "\n".join(lines)


def _called(found: _Predicted, number: int) -> str:
    return found.files[number] if found.files else f"sample {number}"


def _as_json(found: _Predicted, top: int) -> str:
    """For a program: the classes of each sample, best first, or the numbers of a regression; None for neither."""
    outputs, predictor = found.outputs, found.predictor
    classes, numbers = None, None
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
    from sparrow.devices import EnergyMeter  # the standard library alone, and of no use to who only predicts

    with EnergyMeter() as meter:
        return predictor.measure(sample, meter=meter)


def _options(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="ONNX file of a personal model, or .ort")
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="raw samples: a table, npz, npy, picture or sound, or a folder of these, and options",
    )
    add_skip_unreadable(parser)
    parser.add_argument("--output", type=Path, help="write the raw outputs to this .npy file")
    parser.add_argument("--top", type=int, default=1, help="classes to show per sample (default 1)")
    parser.add_argument("--threads", type=int, help="threads to use (default: ONNX Runtime decides)")
    parser.add_argument("--provider", choices=PROVIDERS, default="cpu", help="where to run it (default cpu)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"samples per run (default {CHUNK})")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"stay, and predict again with each newer model file; looks every so often (default {WATCH_SECONDS:g})",
    )
    add_json(parser, ", with --watch a line for each model")


def _run(options: argparse.Namespace) -> None:
    if options.top < 1:
        raise WrongUsage(f"--top {options.top}: show at least 1 class")
    if options.watch is not None and not options.watch > 0:
        raise WrongUsage(f"--watch {options.watch}: give seconds above 0")
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
            print(f"a newer {options.model}: {_describe(watched.current)}", file=sys.stderr)
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
    return ", ".join(known) or "it says nothing of itself"


def _write(path: Path, outputs: Array) -> None:
    try:
        with path.open("wb") as file:  # numpy.save on a path would append ".npy" to other names
            np.save(file, outputs, allow_pickle=False)
    except OSError as error:
        raise PredictError(f"{path} cannot be written: {error.strerror}") from error


COMMAND = Command("sparrow predict", "Run an exported model.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
