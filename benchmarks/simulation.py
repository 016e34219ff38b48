"""The speed of the fleet, compared with Flower's simulation and a loop without a framework, and a thousand devices.

    python -m benchmarks.simulation speed --data mnist.npz    all in turn; then one of each for memory
    python -m benchmarks.simulation scale --data mnist.npz    100 and 1,000 devices: memory of fleet and coordinator

Each run is a separate command. Ratios are computed within a turn, so that changes of the machine's speed affect all
equally, and the median over turns is reported. Results replace those of their kind in
``benchmarks/rows/simulation.jsonl``, from which a section of ``docs/results/speed.md`` is made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.markdown import markdown_table
from benchmarks.peers.memory import measure
from benchmarks.places import ROWS, write_section
from sparrow.bench.server import machine

PEERS = {
    "sparrow": ["sparrow"],
    "sparrow over HTTP": ["sparrow", "--http"],
    "sparrow with PyTorch": ["sparrow", "--http", "--engine", "torch"],
    "bare": ["bare"],
    "flower": ["flower"],
}
"""Each with its module in ``benchmarks.peers`` and its arguments."""
OURS = tuple(peer for peer in PEERS if peer.startswith("sparrow"))

Row = dict[str, Any]


def speed(data: Path, rounds: int, turns: int, peers: Sequence[str]) -> list[Row]:
    """Run every peer ``turns`` times, alternating, without sampling memory, and once with it."""
    rows = []
    with tqdm(total=(turns + 1) * len(peers), unit="run", disable=None) as bar:
        for turn in range(turns + 1):
            for peer in peers:
                bar.set_description(peer)
                watched = turn == turns
                module, *arguments = PEERS[peer]
                command = [sys.executable, "-m", f"benchmarks.peers.{module}", "--data", str(data), *arguments]
                command += ["--rounds", str(rounds), "--memory" if watched else "--no-memory"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
                row = json.loads(done.stdout.splitlines()[-1])
                kind = "memory" if watched else "speed"
                rows.append({"row": kind, "turn": turn, "machine": machine(), **row, "peer": peer})
                bar.update()
    return rows


def scale(data: Path) -> list[Row]:
    """Run 100 and 1,000 devices, 50 a round, 20 rounds of MNIST; return the peak memory of everything and of the
    coordinator.
    """
    rows = []
    for devices in (100, 1000):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.thousand", "--data", str(data), "--folder", folder]
            measured = measure([*command, "--devices", str(devices)], timeout=3600)
        row = json.loads(measured.stdout.splitlines()[-1])
        peak = {"peak_memory_bytes": measured.peak.bytes, "seconds_whole_command": round(measured.seconds, 1)}
        rows.append({"row": "scale", "machine": machine(), **row, **peak})
    return rows


HEAD = """# Speed of simulation

Made by `python -m benchmarks.simulation speed --data mnist.npz` and `... scale --data mnist.npz` from
`simulation.jsonl`. The task is that of `benchmarks/peers/work.py`: MNIST's small network (21,840 parameters), 100
devices with 600 samples each, 10 devices per round, one local epoch with batches of 50, plain SGD, FedAvg; two
processes with one thread each.

- *bare*: a PyTorch loop without any framework.
- *flower*: Flower 1.32's simulation on Ray.
- *sparrow*: trains with ONNX Runtime; the coordinator is in the same process. *over HTTP*: the coordinator is in a
  separate process. *with PyTorch*: the coordinator is in a separate process, and two processes train.

Only sparrow writes records to disk and evaluates the first model that each device receives. Its last accuracy is that
of ten devices, each on a hundredth of the test images. No framework sends the finished model to its devices.
"""

SCALE = """## A thousand devices

MNIST's small network, FedSPU (every device keeps a personal model), 50 devices per round, 20 rounds, Dirichlet 0.5, and
state on disk. Memory and state are in MB.
"""

COLUMNS = {
    "processor_per_device_round": ("processor, s per device-round", 3),
    "device_rounds_per_second": ("device-rounds/s", 1),
    "seconds_to_first_device": ("to first device, s", 1),
    "seconds_to_first_round": ("to first round, s", 1),
    "seconds_whole_command": ("whole command, s", 1),
}
"""What is measured: its title, and how many digits it has after the point."""


def page(rows: Sequence[Row]) -> str:
    """Return the results as Markdown."""
    parts = [HEAD]
    runs = [row for row in rows if row["row"] == "speed"]
    if runs:
        turns = max(row["turn"] for row in runs) + 1
        parts.append(f"{turns} turns of {runs[0]['rounds']} rounds, medians; {runs[0]['machine']}.\n")
        parts.append(
            markdown_table(
                ["", *(title for title, _ in COLUMNS.values()), "accuracy"],
                [_speeds(runs, peer) for peer in _peers(runs)],
            )
        )
        parts.append(
            "Ratios within a turn: minimum, **median**, maximum. Processor seconds include every process that a "
            "command started, the coordinator and the start-up (for Flower this is a lower bound: a worker that Ray "
            "does not wait for is not counted). Fewer seconds are better, and higher rates are better.\n"
        )
        parts.append(
            markdown_table(
                ["", "against", "processor s", "device-rounds/s", "whole command, start-up included"],
                [
                    [
                        mine,
                        peer,
                        _spread(_ratios(runs, mine, peer, "processor_per_device_round")),
                        _spread(_ratios(runs, mine, peer, "device_rounds_per_second")),
                        _spread([1 / ratio for ratio in _ratios(runs, mine, peer, "seconds_whole_command")]),
                    ]
                    for mine in _peers(runs)
                    for peer in _peers(runs)
                    if mine in OURS and peer not in OURS
                ],
            )
        )
    watched = [row for row in rows if row["row"] == "memory"]
    if watched:
        parts.append(
            "Peak memory of a run's processes, MB. PSS counts a shared page once, RSS once in every process.\n"
        )
        kinds = ("pss", "rss", "uss")
        table = [[row["peer"], *(f"{row['peak_memory_bytes'][kind] / 1e6:.0f}" for kind in kinds)] for row in watched]
        parts.append(markdown_table(["", "PSS", "RSS", "USS"], table))
    scaled = [row for row in rows if row["row"] == "scale"]
    if scaled:
        parts.append(SCALE)
        head = [
            "devices",
            "device-rounds/s",
            "whole command, s",
            "peak PSS of all",
            "peak RSS of the coordinator",
            "state",
        ]
        parts.append(markdown_table(head, [_scaled(row) for row in scaled]))
    return "\n".join(parts)


def _peers(rows: Sequence[Row]) -> list[str]:
    return [peer for peer in PEERS if any(row["peer"] == peer for row in rows)]


def _speeds(rows: Sequence[Row], peer: str) -> list[str]:
    mine = [row for row in rows if row["peer"] == peer]
    return [
        peer,
        *(f"{_median(mine, key):.{digits}f}" for key, (_, digits) in COLUMNS.items()),
        f"{100 * _median(mine, 'accuracy'):.1f} %",
    ]


def _scaled(row: Row) -> list[str]:
    memory = (row["peak_memory_bytes"]["pss"], row["coordinator_peak_rss"], row["state_bytes"])
    rate = row["device_rounds_per_second"]
    seconds = row["seconds_whole_command"]
    return [str(row["devices"]), f"{rate:.1f}", f"{seconds:.0f}", *(f"{each / 1e6:.0f}" for each in memory)]


def _median(rows: Sequence[Row], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def _ratios(rows: Sequence[Row], mine: str, peer: str, key: str) -> list[float]:
    """Return the figure of one of ours divided by the peer's, turn by turn."""
    by = {(row["turn"], row["peer"]): row[key] for row in rows}
    turns = sorted({turn for turn, _ in by})
    return [by[turn, mine] / by[turn, peer] for turn in turns if (turn, mine) in by and (turn, peer) in by]


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}, **{statistics.median(ratios):.2f}**, {max(ratios):.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Run, append the rows, write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation", description="Measure the speed of the fleet."
    )
    parser.add_argument("what", choices=("speed", "scale", "page"))
    parser.add_argument("--data", type=Path, help="mnist.npz")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peer", action="append", choices=PEERS, help="only these; may be repeated")
    options = parser.parse_args(arguments)
    file = ROWS / "simulation.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if options.what != "page":
        if options.data is None:
            parser.error("--data is needed: mnist.npz with x_train, y_train, x_test and y_test")
        made = ("speed", "memory") if options.what == "speed" else ("scale",)
        rows = [row for row in rows if row["row"] not in made]
        rows += (
            speed(options.data, options.rounds, options.turns, options.peer or tuple(PEERS))
            if options.what == "speed"
            else scale(options.data)
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(rows)
    write_section("speed", "simulation", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
