"""``python -m benchmarks.coordinator [--quick]``: run everything; ``--page`` writes the page from recorded rows."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.coordinator import flare, flower, grpc, memory, sparrow
from benchmarks.coordinator.contest import Contest, Row
from benchmarks.coordinator.models import LARGE, SMALL, model_of
from benchmarks.coordinator.page import page
from benchmarks.peers.install import PEERS
from benchmarks.places import ROWS, write_section

ROUNDS = {
    "sparrow": {SMALL: (3, 50), LARGE: (2, 8)},
    "sparrow 0.2": {LARGE: (2, 8)},
    "flower": {SMALL: (1, 1), LARGE: (1, 1)},
    "grpc": {SMALL: (3, 50), LARGE: (2, 8)},
    "flare": {SMALL: (2, 5), LARGE: (2, 5)},
}
"""By engine and model: rounds that are not measured, and those that are. Flower's deployment and FLARE take long for
one."""
ONE_EACH: dict[str, Callable[[Contest, Path], Row]] = {"grpc": grpc.run, "flare": flare.run}
"""Engines that start anew for each contest and need no more than it."""
TURNS = ((4, 10, 20), (10,), (10,))
"""Clients of each turn: the cohort in the middle is repeated."""
QUICK = ((4,),)
UPDATES = (10, 1000)
QUICK_UPDATES = (10, 50)


def measure(turns: Sequence[Sequence[int]], folder: Path, bar: tqdm[Any]) -> list[Row]:
    """Run every engine in turn, with each number of clients."""
    rows: list[Row] = []
    for turn, cohorts in enumerate(turns):
        for clients in cohorts:
            for engine, models in ROUNDS.items():
                bar.set_description(f"{engine}, {clients} clients")
                contests = [Contest(model_of(model), clients, *rounds) for model, rounds in models.items()]
                groups = [contests] if engine == "flower" else [[contest] for contest in contests]
                for group in groups:
                    with tempfile.TemporaryDirectory(dir=folder) as work:
                        made = _run(engine, group, Path(work))
                    made = [{"kind": "rounds", "turn": turn, **row} for row in made]
                    rows += made
                    bar.write("".join(f"{json.dumps(row)}\n" for row in made), end="")
                    bar.update(len(group))
    return rows


def _run(engine: str, contests: Sequence[Contest], folder: Path) -> list[Row]:
    if engine == "flower":
        return flower.run(contests, folder)
    run = ONE_EACH.get(engine) or partial(sparrow.run, engine)
    return [run(contest, folder) for contest in contests]


def main(arguments: list[str] | None = None) -> int:
    """Measure, append the rows, write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coordinator", description="The coordinator and its peers."
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 clients, one turn, 50 updates for memory; writes nothing"
    )
    parser.add_argument("--page", action="store_true", help="only write the page from the recorded rows")
    parser.add_argument("--note", default="", help="a note for readers of the page, such as other load on the machine")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/coordinator"), help="work folder, on a real disk because of fsync"
    )
    options = parser.parse_args(arguments)
    file = ROWS / "coordinator.jsonl"
    if options.page:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        begin = time.monotonic()
        rows = _all(QUICK if options.quick else TURNS, QUICK_UPDATES if options.quick else UPDATES, options.folder)
        rows.append({"kind": "run", "seconds": time.monotonic() - begin, "quick": options.quick, "note": options.note})
        if not options.quick:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(rows)
    if not options.quick:
        write_section("speed", "coordinator", text)
    print(text)
    return 0


def _all(turns: Sequence[Sequence[int]], updates: Sequence[int], folder: Path) -> list[Row]:
    for peer in PEERS.values():
        peer.check()
    folder.mkdir(parents=True, exist_ok=True)
    contests = sum(len(models) for models in ROUNDS.values()) * sum(len(cohorts) for cohorts in turns)
    with tqdm(total=contests, unit="measurement", disable=None) as bar:
        rows = measure(turns, folder, bar)
    with tqdm(total=sum(updates), unit="update", desc="memory", disable=None) as bar:
        for count in updates:
            work = Path(tempfile.mkdtemp(dir=folder))
            rows.append(memory.run(count, work, bar.update))
            bar.write(json.dumps(rows[-1]))
            shutil.rmtree(work)
    return rows + [json.loads(line) for line in _former() if '"kind": "growth"' in line]


def _former() -> list[str]:
    """Return the recorded lines: those of ``growth`` are measured by themselves."""
    file = ROWS / "coordinator.jsonl"
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
