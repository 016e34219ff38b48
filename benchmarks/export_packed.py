"""``python -m benchmarks.export_packed``: costs and savings of packed weights and fewer bits, against dense float32.

For each built-in model, with weights under random masks, dense and packed: bytes of the file, milliseconds per sample
and, in a separate process, milliseconds to load it and the rise of peak memory (Linux only). Then fp32, int8 and the
choice of ``auto``, trained for a few epochs on ``--data``. Without it models have random weights, so the share of
samples with the same class means little. One thread, one sample at a time; files of a density alternate, and the result
is the median.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnxruntime
from onnx import ModelProto, TensorProto
from tqdm import tqdm

from benchmarks.markdown import markdown_table
from sparrow.bench.server import machine
from sparrow.export.packed import pack
from sparrow.export.precision import Choice, choose, to_half
from sparrow.graphs.skeleton import fill
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import Array, Manifest, Tensors, initial_values

TASKS = ("mnist:leaf", "cifar10")
DENSITIES = (0.5, 0.2, 0.1)
WIDE = "8 layers of 2048 x 2048"
EPOCHS = 3
SHARE = 20
"""A device's share of the training data is one in so many."""

_LOAD = """
import sys, time, onnxruntime
def peak():
    # not ru_maxrss: that begins with what the parent held
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.log_severity_level = 3
before, start = peak(), time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(time.perf_counter() - start, peak() - before)
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_packed", description=__doc__.split("\n")[0])
    parser.add_argument("--task", action="append", help=f"a task; may be repeated (default: {', '.join(TASKS)})")
    parser.add_argument("--runs", type=int, default=300, help="runs of each model (default: %(default)s)")
    parser.add_argument("--loads", type=int, default=5, help="loads of each file (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder of mnist.npz and cifar10.npz, for training and evaluation")
    options = parser.parse_args(arguments)
    tasks = options.task or TASKS
    cells = [(task, density) for task in (*tasks, WIDE) for density in DENSITIES]
    rows = [
        row
        for task, density in tqdm(cells, desc="packed", leave=False, disable=None)
        for row in _packed(task, density, options.runs, options.loads)
    ]
    head = [
        "model",
        "density",
        "stored as",
        "KiB",
        "of dense",
        "ms",
        "of dense",
        "load ms",
        "of dense",
        "peak MiB",
        "of dense",
    ]
    print(f"{machine()}, onnxruntime {onnxruntime.__version__}\n\n{markdown_table(head, rows)}")
    for task in tasks:
        choice = _precision(task, options.data, options.runs)
        speedup = choice.trials[0].milliseconds / choice.chosen.milliseconds
        print(f"{task}: {speedup:.2f} times as fast as fp32 with {choice}\n")
    return 0


def _packed(task: str, density: float, runs: int, loads: int) -> list[list[str]]:
    dense, row = wide(density) if task == WIDE else sparse(task, density)
    models = {"dense": dense, "packed": pack(dense), "packed, fp16": pack(to_half(dense))}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.onnx") for number in range(len(models))]
        for path, model in zip(paths, models.values(), strict=True):
            onnx.save(model, path)
        sizes = [path.stat().st_size / 1024 for path in paths]
        sessions = [session(path) for path in paths]
        latency = in_turns([_runner(each, row) for each in sessions], runs if task != WIDE else runs // 10 or 1)
        del sessions
        loaded = [[_load(path) for path in paths] for _ in range(loads)]
    loading, memory = ([statistics.median(turn[i][which] for turn in loaded) for i in range(3)] for which in (0, 1))
    measured = [sizes, latency, loading, memory]
    formats = ("{:.1f}", "{:.3f}", "{:.1f}", "{:.1f}")
    return [
        [task, f"{density:g}", name]
        + [text for each, form in zip(measured, formats, strict=True) for text in _with_ratio(each, number, form)]
        for number, name in enumerate(models)
    ]


def _with_ratio(values: Sequence[float], number: int, form: str) -> tuple[str, str]:
    return form.format(values[number]), f"{values[number] / values[0]:.3f}"


def in_turns(calls: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Return the median milliseconds of each call. Calls alternate, so that other load affects all equally."""
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(times + max(1, times // 10)):
        for call, milliseconds in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            if number >= times // 10:
                milliseconds.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(milliseconds) for milliseconds in taken]


def session(path: Path) -> Any:
    """Load the model for one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _runner(loaded: Any, row: Array) -> Callable[[], object]:
    return lambda: loaded.run(None, {"input": row})


def _load(path: Path) -> tuple[float, float]:
    """Return the milliseconds to load the file in a new process, and the MiB that it adds to the peak memory there."""
    done = subprocess.run([sys.executable, "-c", _LOAD, str(path)], capture_output=True, text=True, check=True)
    seconds, kib = done.stdout.split()
    return float(seconds) * 1e3, int(kib) / 1024


def masked(manifest: Manifest, tensors: Tensors, density: float) -> Tensors:
    """Return ``tensors`` with a random share ``density`` of each maskable weight."""
    result = dict(tensors)
    for number, spec in enumerate(manifest.maskable):
        exists = np.random.default_rng(number).random(spec.shape) < density
        result[spec.name] = np.where(exists, tensors[spec.name], np.float32(0))
    return result


def sparse(task: str, density: float) -> tuple[ModelProto, Array]:
    """Return a built-in model under a random mask, and a sample for it."""
    found = load_builtin(task)
    tensors = masked(found.manifest, initial_values(found.manifest, 0), density)
    row = np.random.default_rng(0).normal(size=(1, *found.manifest.input_shape)).astype(np.float32)
    return onnx.load_from_string(fill(found.skeleton, found.manifest, tensors)), row


def wide(density: float, layers: int = 8, width: int = 2048) -> tuple[ModelProto, Array]:
    """Return a model whose weights, 128 MiB, are most of a process's memory."""
    random = np.random.default_rng(0)
    weights = [
        np.where(random.random((width, width)) < density, random.normal(size=(width, width)), 0).astype(np.float32)
        for _ in range(layers)
    ]
    names = ["input", *(f"x{number}" for number in range(1, layers)), "output"]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)],
        "wide",
        [value("input", TensorProto.FLOAT, ["batch", width])],
        [value("output", TensorProto.FLOAT, ["batch", width])],
        [onnx.numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)],
    )
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    return model, random.normal(size=(1, width)).astype(np.float32)


def _precision(task: str, data: Path | None, runs: int) -> Choice:
    found = load_builtin(task)
    if data is None:
        untrained, _ = sparse(task, 1)
        drawn = np.random.default_rng(0).normal(size=(256, *found.manifest.input_shape)).astype(np.float32)
        return choose(untrained, drawn, drawn, max_fall=1, runs=runs)
    tensors, calibration, inputs, labels = _trained(task, data, found.manifest)
    model = onnx.load_from_string(fill(found.skeleton, found.manifest, tensors))
    return choose(model, calibration, inputs, labels, runs=runs)


def _trained(task: str, data: Path, manifest: Manifest) -> tuple[Tensors, Array, Array, Array]:
    """Return trained weights of one device's share, its training inputs, and its held-out inputs and labels."""
    from itertools import islice

    import torch

    from edge_sdk.tasks import load_task, passes
    from edge_sdk.training.local import as_tensors, get_tensors

    torch.manual_seed(0)
    share = f"{data / task.split(':')[0]}.npz,index=0,of={SHARE}"
    loaded = load_task(task, share, device="benchmark", seed=0, batch_size=32).seeded(0)
    optimiser = torch.optim.SGD(loaded.model.parameters(), lr=0.02, momentum=0.9)
    loaded.model.train()
    for batch in islice(passes(loaded.train, 0), EPOCHS * len(loaded.train)):
        inputs, targets = as_tensors(batch)
        optimiser.zero_grad()
        loaded.loss(loaded.model(inputs), targets).backward()
        optimiser.step()
    seen = np.concatenate([inputs for inputs, _ in loaded.train])
    held = list(loaded.held_out)
    tensors = get_tensors(loaded.model, manifest)
    return tensors, seen, np.concatenate([x for x, _ in held]), np.concatenate([y for _, y in held])


if __name__ == "__main__":
    sys.exit(main())
