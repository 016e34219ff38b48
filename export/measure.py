"""Costs of running ONNX files: seconds and memory to load each, seconds for one sample; in processes of their own.

A process that has loaded other things has memory to reuse and threads that spin, so ``load_costs`` and ``latencies``
start ``python -m sparrow.export.measure``, which imports little beside ONNX Runtime and numpy.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.devices import memory

from .errors import ExportError
from .running import load, runtime

Array = NDArray[Any]

LOADS = 5
"""Processes that load each file: the median of their seconds counts, and of their bytes."""

TURNS, RUNS, IDLE = 20, 20, 3
"""Turns of each file, runs of a turn that are timed, runs before them that are not: threads wake, caches fill."""


@dataclass(frozen=True)
class LoadCost:
    """Costs of a file until its first prediction: seconds to load it, seconds of that prediction; ``peak`` bytes of
    memory at most above what the process held with the libraries alone."""

    load_seconds: float
    first_seconds: float
    peak: int


@dataclass(frozen=True)
class Latency:
    """Seconds of one sample alone, median and 95th percentile."""

    p50: float
    p95: float


def load_costs(
    paths: Sequence[Path], sample: Array, *, repeats: int = LOADS, done: Callable[[], object] = lambda: None
) -> list[LoadCost]:
    """Return of each file the median over ``repeats`` processes of one thread, which take turns; ``done`` is called
    after each.

    sample: [1, *input_shape]. Raises ExportError for a file that cannot be run.
    """
    found: list[list[dict[str, Any]]] = [[] for _ in paths]
    for turn in range(repeats):
        for path, costs in list(zip(paths, found, strict=True))[:: -1 if turn % 2 else 1]:
            costs.append(_in_a_process("load", sample, 1, [path])[0])
            done()
    return [
        LoadCost(
            load_seconds=statistics.median(cost["load_seconds"] for cost in costs),
            first_seconds=statistics.median(cost["first_seconds"] for cost in costs),
            peak=int(statistics.median(cost["peak"] for cost in costs)),
        )
        for costs in found
    ]


def latencies(paths: Sequence[Path], sample: Array, *, threads: int | None) -> list[Latency]:
    """Return the latency of each file, in one process in which they take turns: other work then slows all alike.

    threads: None for as many as ONNX Runtime thinks fit. Raises ExportError for a file that cannot be run.
    """
    return [Latency(**latency) for latency in _in_a_process("latency", sample, threads, paths)]


def _in_a_process(what: str, sample: Array, threads: int | None, paths: Sequence[Path]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sample.npy"
        np.save(file, sample)
        command = [sys.executable, "-m", "sparrow.export.measure", what, str(file), str(threads or 0), *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it was killed; is there enough memory?"])[-1]
        raise ExportError(f"the exported file could not be measured: {last}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# --- within that process


def _run(session: Any, sample: Array) -> float:
    feed = {session.get_inputs()[0].name: sample}
    start = time.perf_counter()
    session.run(None, feed)
    return time.perf_counter() - start


def _load(path: str, threads: int, sample: Array) -> LoadCost:
    runtime()  # before memory is counted

    memory.forget_peak()  # else it is that of importing the libraries
    before = memory.resident()
    start = time.perf_counter()
    session = load(Path(path), threads)
    seconds = time.perf_counter() - start
    return LoadCost(seconds, _run(session, sample), max(0, memory.peak_resident() - before))


def _latencies(paths: Sequence[str], threads: int, sample: Array) -> list[Latency]:
    sessions = [load(Path(path), threads) for path in paths]
    seconds: list[list[float]] = [[] for _ in paths]
    for _ in range(TURNS):
        for session, spent in zip(sessions, seconds, strict=True):
            for _ in range(IDLE):
                _run(session, sample)
            spent += [_run(session, sample) for _ in range(RUNS)]
    return [Latency(*(float(value) for value in np.percentile(spent, [50, 95]))) for spent in seconds]


def _main(what: str, sample: str, threads: str, *paths: str) -> None:
    array = np.load(sample)
    if what == "load":
        found: Sequence[LoadCost | Latency] = [_load(path, int(threads), array) for path in paths]
    else:
        found = _latencies(paths, int(threads), array)
    sys.stdout.write(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
