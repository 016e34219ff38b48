"""Measure load time, memory and latency of ONNX files.

Each measurement starts ``python -m sparrow.export.measure``, because an existing process has reusable memory and
spinning threads.
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
"""Number of processes that load each file; medians count."""

TURNS = 20
"""Number of times that each file is run in turn."""

RUNS = 20
"""Timed runs per turn."""

IDLE = 3
"""Untimed runs at the start of a turn, which wake threads and fill caches."""


@dataclass(frozen=True)
class LoadCost:
    """Load time, time of the first prediction, and peak memory in bytes in addition to the libraries."""

    load_seconds: float
    first_seconds: float
    peak: int


@dataclass(frozen=True)
class Latency:
    """Seconds per single sample: median and 95th percentile."""

    p50: float
    p95: float


def load_costs(
    paths: Sequence[Path], sample: Array, *, repeats: int = LOADS, done: Callable[[], object] = lambda: None
) -> list[LoadCost]:
    """Return each file's median costs over ``repeats`` alternating single-threaded processes.

    sample: [1, *input_shape]. done: called after each process. Raises ExportError for a file that cannot be run.
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
    """Return the latency of each file.

    threads: None for ONNX Runtime's choice. Raises ExportError for a file that cannot be run.
    """
    # in one process, alternately, so that other load slows all files alike
    return [Latency(**latency) for latency in _in_a_process("latency", sample, threads, paths)]


def _in_a_process(measure: str, sample: Array, threads: int | None, paths: Sequence[Path]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sample.npy"
        np.save(file, sample)
        arguments = [measure, str(file), str(threads or 0), *map(str, paths)]
        command = [sys.executable, "-m", "sparrow.export.measure", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["the process was killed, probably for lack of memory"])[-1]
        raise ExportError(f"the exported file could not be measured: {last}; leave it out with --quick")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# --- in the measuring process


def _run(session: Any, sample: Array) -> float:
    feed = {session.get_inputs()[0].name: sample}
    start = time.perf_counter()
    session.run(None, feed)
    return time.perf_counter() - start


def _load(path: str, threads: int, sample: Array) -> LoadCost:
    # Import ONNX Runtime first, so that its own memory does not count.
    runtime()
    memory.forget_peak()
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


def _main(measure: str, sample: str, threads: str, *paths: str) -> None:
    array = np.load(sample)
    if measure == "load":
        found: Sequence[LoadCost | Latency] = [_load(path, int(threads), array) for path in paths]
    else:
        found = _latencies(paths, int(threads), array)
    sys.stdout.write(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
