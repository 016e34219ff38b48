"""``python -m tests.graph_fuzzing``: what random steps take, against what is predicted of them.

    .venv/bin/python -m tests.graph_fuzzing --graphs 20000 --seed 0

Steps are drawn (``tests.graphs``) and run in processes of their own, so many in each. No process may end by a signal,
and a step that takes more than ``LEAST_SECONDS`` or ``LEAST_BYTES`` may take at most ``MOST`` times what is predicted.
What is beyond is printed with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    from .graphs import Drawn

LEAST_SECONDS, LEAST_BYTES = 0.05, 20e6
MOST = 2.0
IN_A_PROCESS = 50
TRIES = 3
"""Runs of a step that seems to take too long; the fastest counts, as other load on the machine only adds to it."""


@dataclass(frozen=True)
class Row:
    """Time and memory of a step, and the predictions. error: the runtime's, if it does not run the step."""

    seed: int
    operators: tuple[str, ...]
    samples: int
    predicted_seconds: float = 0.0
    seconds: float = 0.0
    predicted_bytes: int = 0
    bytes: int = 0
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """What is beyond the prediction, in words."""
        found = []
        if self.seconds > max(LEAST_SECONDS, MOST * self.predicted_seconds):
            found.append(f"{self.seconds:.3f} s, predicted {self.predicted_seconds:.3f}")
        if self.bytes > max(LEAST_BYTES, MOST * self.predicted_bytes):
            found.append(f"{self.bytes / 1e6:.1f} MB, predicted {self.predicted_bytes / 1e6:.1f}")
        return found


@dataclass(frozen=True)
class Died:
    """A process that a signal ended, and the seed of the step that it ran."""

    seed: int
    signal: int


def run(seed: int, count: int, processes: int = IN_A_PROCESS) -> Iterator[Row | Died]:
    """Draw from ``seed`` on until ``count`` steps were accepted; yield what each took."""
    accepted = 0
    while accepted < count:
        command = ["--child", str(seed), str(min(processes, count - accepted))]
        last = seed
        with subprocess.Popen(
            [sys.executable, "-m", "tests.graph_fuzzing", *command], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                said = json.loads(line)
                last = said["seed"]
                if "operators" in said:
                    accepted += 1
                    yield Row(**{**said, "operators": tuple(said["operators"])})
        code = child.returncode
        if code < 0:
            accepted += 1
            yield Died(last, -code)
        elif code:
            raise RuntimeError(f"the process that draws from seed {last} on ended with exit code {code}")
        seed = last + 1


def _child(seed: int, count: int) -> None:
    from edge_sdk.engines.speed import measured_speed

    from .graphs import draw

    measured_speed()
    accepted = 0
    while accepted < count:
        print(json.dumps({"seed": seed}), flush=True)
        drawn = draw(seed)
        if drawn is not None:
            accepted += 1
            print(json.dumps(asdict(_measured(seed, drawn))), flush=True)
        seed += 1


def _measured(seed: int, drawn: Drawn) -> Row:
    from benchmarks.graph_costs import first_step
    from edge_sdk.engines.onnx import Network, Sessions
    from edge_sdk.engines.speed import measured_speed

    samples = len(drawn.inputs)
    network = Network(drawn.manifest, Sessions(drawn.graphs))
    network.load({"w": np.full(drawn.manifest.tensors[0].shape, 0.5, np.float32)})
    predicted = drawn.needs.seconds(samples, measured_speed()), drawn.needs.bytes(samples)
    try:
        again, seconds, grown = first_step(network, drawn.inputs, drawn.targets)
        for _ in range(TRIES):
            if seconds <= max(LEAST_SECONDS, MOST * predicted[0]):
                break
            seconds = min(seconds, again())
    except Exception as error:  # the runtime's own have many kinds
        return Row(seed, drawn.operators, samples, error=str(error)[:200])
    return Row(seed, drawn.operators, samples, predicted[0], seconds, predicted[1], grown)


def main() -> int:
    """Run, print what is beyond the predictions, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", help="a file that a line of JSON is appended to for each step")
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*options.child)
        return 0
    ran = large = refused = 0
    wrong = list[str]()
    with open(options.rows, "a") if options.rows else open("/dev/null", "w") as rows:
        for row in tqdm(run(options.seed, options.graphs), total=options.graphs, disable=None):
            if isinstance(row, Died):
                wrong.append(f"seed {row.seed}: ended by signal {row.signal}")
                continue
            print(json.dumps(asdict(row)), file=rows, flush=True)
            ran += 1
            refused += bool(row.error)
            large += row.seconds > LEAST_SECONDS or row.bytes > LEAST_BYTES
            wrong += [f"seed {row.seed} ({' '.join(row.operators)}): {fault}" for fault in row.faults]
    print(f"{ran} steps, {refused} of them refused by the runtime, {large} large; {len(wrong)} beyond the prediction")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
