"""One run of many devices: ``python -m benchmarks.thousand --devices 1000 --data mnist.npz --folder DIR``.

Prints one line of JSON. Memory is sampled from outside (``benchmarks.simulation scale``); the coordinator's own peak is
the kernel's count of its process.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from edge_sdk.publish import publish
from sparrow.bench.server import coordinator
from sparrow.simulation.fleet import run_fleet
from sparrow.simulation.host import Plan


def run(data: Path, devices: int, folder: Path, *, rounds: int = 20, cohort: int = 50) -> dict[str, float]:
    """Run it; return seconds and bytes."""
    with coordinator(folder) as server:
        publish(
            server,
            "thousand",
            "mnist",
            rounds=rounds,
            cohort=cohort,
            min_devices=devices,
            local_epochs=1,
            batch_size=50,
            early_stopping="off",
            evaluation_interval=0,
            draws="seed",
        )
        plan = Plan(
            "thousand",
            devices=devices,
            data=f"{data},partition=dirichlet,alpha=0.5,minimum=5",
            budgets=(0.2, 0.4, 0.6, 0.8, 1.0),
        )
        state = folder / "devices"
        begin = time.monotonic()
        result = run_fleet(server, plan, state_dir=state)
        seconds = time.monotonic() - begin
        peak = coordinator_peak(folder)
    return {
        "devices": devices,
        "device_rounds": result.device_rounds,
        "seconds": round(seconds, 1),
        "device_rounds_per_second": round(result.device_rounds / seconds, 2),
        "coordinator_peak_rss": peak,
        "state_bytes": sum(file.stat().st_size for file in state.rglob("*") if file.is_file()),
    }


def coordinator_peak(folder: Path) -> int:
    """Return the peak resident memory of the coordinator with its data in ``folder``, bytes (Linux)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"COORDINATOR_DATA_DIR={folder / 'coordinator'}".encode() in (process / "environ").read_bytes()
            if mine and b"uvicorn" in (process / "cmdline").read_bytes():
                found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
                return int(found[1]) * 1024 if found else 0
        except OSError:
            continue
    raise SystemExit("the coordinator's process was not found; this needs Linux's /proc")


def main(arguments: list[str] | None = None) -> int:
    """Print one run as one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thousand")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    print(json.dumps(run(options.data, options.devices, options.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
