"""``python -m benchmarks.secure``: the cost of secure aggregation, compared with plain rounds and with Flower's.

Federations of 20 devices and ``mnist:leaf`` (2.3 million parameters), two local steps on random data, so that training
does not hide the costs. The coordinator runs in a separate process, all devices in this one. Rounds of Flower's SecAgg+
alternate with them, with as many values and the neighbours and threshold of our rule (``peers.secagg``: in memory,
without training). Processor seconds are those of all devices or of the server, a device- round; bytes are those of
bodies, up, of all calls. ``python -m benchmarks.peers.install peers`` installs Flower. Rows are in
``benchmarks/rows/secure.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import markdown_table
from benchmarks.peers.install import PEERS, PYTHON, ROOT
from benchmarks.peers.memory import measure as measure_command
from benchmarks.places import ROWS, write_section
from edge_sdk.tasks import Task
from sparrow.bench import server
from sparrow.protocol.secure.groups import Sharing, choose_sharing
from sparrow.simulation.simulate import SimulationOptions, simulate

DEVICES = 20
ROUNDS = 3
TURNS = 3
COLLUDERS = 1
DROPOUTS = 0.3
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "rounds": ROUNDS,
    "cohort": DEVICES,
    "local_steps": 2,
    "learning_rate": 0.01,
    "early_stopping": "off",
    "evaluation_interval": 0,
    "draws": "seed",
}
COMMAND = [str(PYTHON), "-m", "benchmarks.peers.secagg"]
TICKS = os.sysconf("SC_CLK_TCK")


def _task(number: int) -> Task:
    from edge_sdk.tasks.models import mnist_leaf

    chance = np.random.default_rng(number)
    batches = [(chance.random((8, 1, 28, 28), np.float32), np.arange(8) % 10) for _ in range(2)]
    return Task("leaf", mnist_leaf(), _loss, batches, batches[:1])


def _loss(outputs: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(outputs, targets)


def _cpu_seconds(process: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(secure: bool) -> dict[str, Any]:
    """Return the cost of a federation per device-round."""
    with tempfile.TemporaryDirectory() as folder, server.started(Path(folder)) as (address, process):
        before = _cpu_seconds(process)
        begin = time.process_time()
        wall = time.perf_counter()
        result = simulate(
            address,
            _task,
            devices=DEVICES,
            options=SimulationOptions(engine="onnx", in_memory=True, adapt=False),
            quiet=True,
            secure=secure,
            **SETTINGS,
        )
        devices = time.process_time() - begin
        seconds = time.perf_counter() - wall
        coordinator = _cpu_seconds(process) - before
    assert result.ended is not None
    rounds = DEVICES * ROUNDS
    return {
        "run": "secure" if secure else "plain",
        "device_cpu_seconds": devices / rounds,
        "server_cpu_seconds": coordinator / rounds,
        "cpu_seconds": (devices + coordinator) / rounds,
        "wall_seconds": seconds / rounds,
        "bytes_up": result.ended.bytes_up / rounds,
        "machine": server.machine(),
    }


class Flower:
    """Flower's rounds: in one process, which plays them when it is asked to, and on its engine."""

    def __init__(self, shapes: Sequence[Sequence[int]], sharing: Sharing) -> None:
        PEERS["peers"].check()
        # Flower counts the share that a device keeps itself.
        self._numbers = [json.dumps(shapes), str(DEVICES), str(sharing.neighbours + 1), str(sharing.threshold)]
        self._process = subprocess.Popen(
            [*COMMAND, "memory", *self._numbers, "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def in_memory(self, secure: bool) -> dict[str, Any]:
        """Return the cost of one round per device."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("secure\n" if secure else "plain\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return {
            "run": f"Flower in memory, {'SecAgg+' if secure else 'plain'}",
            "device_cpu_seconds": found["devices"] / DEVICES,
            "server_cpu_seconds": found["server"] / DEVICES,
            "cpu_seconds": (found["devices"] + found["server"]) / DEVICES,
            "bytes_up": found["bytes_up"],
            "version": PEERS["peers"].version("flwr"),
        }

    def on_its_engine(self, secure: bool) -> dict[str, Any]:
        """Return the cost of a device-round over all processes: the difference between several rounds and one."""

        def processor(rounds: int) -> float:
            command = [*COMMAND, "secure" if secure else "plain", *self._numbers, str(rounds)]
            return measure_command(command, cwd=ROOT, interval=None, timeout=300).processor

        seconds = (processor(1 + ROUNDS) - processor(1)) / ROUNDS / DEVICES
        return {"run": f"Flower's engine, {'SecAgg+' if secure else 'plain'}", "cpu_seconds": seconds}

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Measure, and write rows and page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secure", description="Measure secure aggregation.")
    parser.add_argument("--turns", type=int, default=TURNS, help="measurements of each kind of round")
    turns = parser.parse_args().turns
    sharing = choose_sharing(DEVICES, COLLUDERS, DROPOUTS)
    assert sharing is not None
    shapes = [list(each.shape) for each in _task(0).model.state_dict().values()]
    flower = Flower(shapes, sharing)
    rows = []
    # Warm up: the first run compiles and loads libraries.
    measure(secure=False)
    with (ROWS / "secure.jsonl").open("w") as file:
        for _ in range(turns):
            for play in (measure, flower.in_memory, flower.on_its_engine):
                for secure in (False, True):
                    rows.append(play(secure))
                    file.write(json.dumps(rows[-1]) + "\n")
                    print(rows[-1], flush=True)
    flower.close()
    write_section("security", "secure", page(rows, sharing, turns))


def page(rows: Sequence[Mapping[str, Any]], sharing: Sharing, turns: int) -> str:
    """Return the page of results."""

    def middle(run: str, name: str) -> float | None:
        found = [row[name] for row in rows if row["run"] == run and name in row]
        return float(statistics.median(found)) if found else None

    def milliseconds(run: str, name: str) -> str:
        found = middle(run, name)
        return "" if found is None else f"{1e3 * found:.0f}"

    def more(name: str, without: str, masked: str) -> float:
        return (middle(masked, name) or 0.0) - (middle(without, name) or 0.0)

    parts = ("device_cpu_seconds", "server_cpu_seconds", "cpu_seconds")
    table = [
        [
            run,
            *(milliseconds(run, name) for name in parts),
            f"{found / 1e6:.2f}" if (found := middle(run, "bytes_up")) else "",
        ]
        for run in dict.fromkeys(row["run"] for row in rows)
    ]
    ours = more("cpu_seconds", "plain", "secure")
    memory = more("cpu_seconds", "Flower in memory, plain", "Flower in memory, SecAgg+")
    engine = more("cpu_seconds", "Flower's engine, plain", "Flower's engine, SecAgg+")
    times = (middle("secure", "server_cpu_seconds") or 0) / (middle("plain", "server_cpu_seconds") or 1)
    share = (middle("secure", "bytes_up") or 0) / (middle("plain", "bytes_up") or 1)
    version = next(row["version"] for row in rows if "version" in row)
    return f"""# The cost of secure aggregation

`python -m benchmarks.secure` produced these results; the rows are in `secure.jsonl`. {DEVICES} devices train mnist:leaf
(2.3 million parameters) for two local steps, in {turns} turns of {ROUNDS} rounds. They alternate with rounds of Flower
{version}'s SecAgg+ with the same number of values. The table shows medians, on {rows[0]["machine"]}. In both frameworks
each secret is shared among {sharing.neighbours} neighbours, and {sharing.threshold} shares restore it, which tolerates
{COLLUDERS} colluder and {DROPOUTS:.0%} dropouts. Processor time is per device-round, over all phases, including
signatures and unmasking. Sparrow's includes training, HTTP and a database. Flower's devices do not train; its client
and server run in memory, in one process, or on its simulation engine.

{markdown_table(["rounds", "devices, CPU ms", "server, CPU ms", "together, CPU ms", "up, MB"], table)}

With masks a device needs {1e3 * more("device_cpu_seconds", "plain", "secure"):.0f} ms more per round, the server needs
{times:.2f} times as long per update, and an update has {share:.0%} of the bytes of an update in fp32. Coordinator and
device together need {1e3 * ours:.0f} ms per device-round for the masks: {ours / memory:.0%} of Flower's cost in
memory, and {ours / engine:.0%} of its cost on the simulation engine.
"""


if __name__ == "__main__":
    main()
