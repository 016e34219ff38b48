"""The command line of a peer and its one line of JSON.

A peer runs in a separate process. The command samples its memory, which takes some processor time; ``--no-memory``
switches that off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.install import ROOT
from benchmarks.peers.memory import measure, process_age


@dataclass
class Clock:
    """The times of events, in ``time.time()``."""

    born: float = field(default_factory=lambda: time.time() - process_age())
    first_device: float = 0.0
    processor: list[float] = field(default_factory=list)
    """Processor seconds of the local training of each device-round."""
    rounds: list[float] = field(default_factory=list)
    """The ends of rounds: each when its new global model was there."""
    stopped: float = 0.0
    """When everything the peer had started was gone."""

    def device_trained(self, at: float, processor: float) -> None:
        """Note that a device ended at ``at`` after ``processor`` seconds of a processor, in any process."""
        self.processor.append(processor)
        self.first_device = min(self.first_device or at, at)

    def round_ended(self) -> None:
        """Note that the new global model exists."""
        self.rounds.append(time.time())


def outcome(peer: str, version: str, clock: Clock, cohort: int, accuracy: float) -> dict[str, Any]:
    """Return one run. ``device_rounds_per_second`` excludes the first round, which includes the start, and is
    comparable only on an idle machine.

    ``processor_seconds_per_device``, of local training only, depends little on other load.
    """
    rounds = len(clock.rounds)
    later = clock.rounds[-1] - clock.rounds[0]
    return {
        "peer": peer,
        "version": version,
        "rounds": rounds,
        "device_rounds": rounds * cohort,
        "seconds_total": round(clock.stopped - clock.born, 3),
        "seconds_to_first_device": round(clock.first_device - clock.born, 3),
        "seconds_to_first_round": round(clock.rounds[0] - clock.born, 3),
        "seconds_of_rounds": round(later, 3),
        "device_rounds_per_second": round((rounds - 1) * cohort / later, 2) if rounds > 1 else None,
        "processor_seconds_per_device": round(statistics.median(clock.processor), 4),
        "accuracy": round(accuracy, 4),
    }


def parser(peer: str) -> argparse.ArgumentParser:
    """Return the options of all peers."""
    result = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{peer}")
    result.add_argument("--data", type=Path, required=True, help="mnist.npz: x_train, y_train, x_test, y_test")
    result.add_argument("--rounds", type=int, default=30)
    result.add_argument("--processes", type=int, default=2, help="each trains one device at a time, on one thread")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    result.add_argument("--timeout", type=float, default=900, help="seconds")
    result.add_argument("--unwatched", action="store_true", help=argparse.SUPPRESS)
    return result


def watch(module: str, options: argparse.Namespace, *more: str, python: Path | None = None) -> int:
    """Run the peer in a separate process under ``python``, then print its line with the outside measurements.

    more: the peer's own arguments.
    """
    command = [
        *(str(python or sys.executable), "-m", module, "--unwatched", "--data", str(options.data.resolve())),
        *("--rounds", str(options.rounds), "--processes", str(options.processes), "--seed", str(options.seed)),
        *more,
    ]
    interval = 0.25 if options.memory else None
    measured = measure(command, cwd=ROOT, interval=interval, timeout=options.timeout)
    line = json.loads(measured.stdout.splitlines()[-1])
    line["seconds_whole_command"] = round(measured.seconds, 3)
    line["processor_per_device_round"] = round(measured.processor / line["device_rounds"], 4)
    line["peak_memory_bytes"] = measured.peak.bytes if options.memory else None
    print(json.dumps(line))
    return 0
