"""``make demo``: one coordinator and five device processes, from nothing to five personal ONNX files.

The demo runs the product's own programs, ``uvicorn coordinator.main:app`` and ``python -m edge_sdk.join``, over HTTP on
this machine. Devices have budgets 0.2 to 1.0 and a Dirichlet(0.3) share of scikit-learn's digits. Afterwards three
models are compared on each device's own held-out data: one trained only on that device, from the same initial weights
and for as many local steps; the federation's global model; the device's personal model. All train with ONNX Runtime, so
PyTorch is not needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import plots
from edge_sdk.device.state import Progress, StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.engines import Engine, evaluate_held_out
from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.engines.training import derive_seed
from edge_sdk.methods.early_stopping import gives_way
from edge_sdk.predict import Predictor
from edge_sdk.tasks import Task, load_task
from sparrow.bench.server import coordinator, machine, stop
from sparrow.graphs import Graphs
from sparrow.protocol import checkpoint
from sparrow.protocol.builtin import BuiltinTask, load_builtin
from sparrow.protocol.manifest import Tensors, initial_values
from sparrow.protocol.messages import CreateFederation, FederationInfo, RoundRecord
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import connect

TASK = "digits"
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
ALPHA = 0.3
ROUNDS = 30
WATTS = "2.3:6.4"
"""The power of a Raspberry Pi 4B, idle and busy. It is used, and labelled, only on machines without a sensor."""
LIMIT_SECONDS = 600
AGAIN = "make demo KEEP=1"


@dataclass(frozen=True)
class DeviceRow:
    """One line of the table. Accuracies are shares of right answers on the device's held-out samples."""

    device: str
    budget: float
    rounds: int
    stopped_round: int | None
    samples: int
    held_out: int
    local_steps: int
    accuracy_local_only: float
    accuracy_global: float
    accuracy_personal: float
    bytes_up: int
    bytes_down: int
    whole_model_bytes: int
    everything_bytes: int
    seconds: float
    joules_measured: float
    joules_estimated: float
    onnx_bytes: int
    onnx_latency_ms: float

    @property
    def traffic_share(self) -> float:
        """Return the bytes both ways as a share of sending the whole float32 model both ways in each of its rounds."""
        return (self.bytes_up + self.bytes_down) / (2 * self.rounds * self.whole_model_bytes)


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[str]:
    """Start a coordinator in an emptied ``folder``, and its logs there; yield its address."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with coordinator(folder) as server:
        yield server


def run(folder: Path, server: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Run the federation at the coordinator ``server``, with its devices in ``folder``, and return the report."""
    begin = time.monotonic()
    asked = FederationSettings(
        rounds=ROUNDS,
        cohort=len(BUDGETS),
        min_devices=len(BUDGETS),
        local_epochs=2,
        learning_rate=0.05,
        evaluation_interval=2,
        global_evaluation_interval=2,
        seed=seed,
        draws="seed",
        **settings,
    )
    request = CreateFederation(name="demo", task=TASK, settings=asked)
    # The same as publish() for a built-in task, without PyTorch.
    with connect(server) as client:
        Transport(client).create_federation(request.as_given().encode(), "application/json")
    with devices(folder, server, seed) as processes:
        info, records = watch(server, processes, folder)
    with connect(server) as client:
        model, _ = checkpoint.load(client.get("/v1/federations/demo/model").raise_for_status().content)
    wall = time.monotonic() - begin
    task = load_builtin(TASK)
    sessions = Sessions(Graphs(task.graphs["step"], task.graphs["evaluation"]))
    rows = [
        judge(folder, name(index), budget, task, sessions, info.settings, model, seed)
        for index, budget in enumerate(
            tqdm(BUDGETS, desc="training locally, to compare", unit="device", leave=False, disable=None)
        )
    ]
    return {
        "seed": seed,
        "wall_seconds": round(wall, 1),
        "rounds": info.round,
        "reason": info.reason,
        "settings": info.settings.model_dump(mode="json"),
        "parameters": info.parameters,
        "machine": machine(),
        "devices": [asdict(row) | {"traffic_share": row.traffic_share} for row in rows],
        "accuracy_by_round": [
            {"round": each.round, "personal": each.accuracy_personal, "global": each.accuracy_global}
            for each in records
            if each.evaluated_devices
        ],
    }


def name(index: int) -> str:
    """Return the name of the device at ``index``."""
    return f"device-{index}"


@contextlib.contextmanager
def devices(folder: Path, server: str, seed: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run five device processes, each with its own folder."""
    processes = []
    try:
        for index, budget in enumerate(BUDGETS):
            home = folder / name(index)
            home.mkdir()
            options = {
                "--server": server,
                "--federation": "demo",
                "--device-name": name(index),
                "--budget": str(budget),
                "--state-dir": str(home / "state"),
                "--data": f"index={index},of={len(BUDGETS)},alpha={ALPHA},seed={seed}",
                "--watts": WATTS,
                "--export": str(home / "model.onnx"),
                "--wait": "60",
                "--threads": "1",
                "--engine": "onnx",
                # five devices share this machine, and each would wait for the others
                "--policy": "none",
            }
            words = [word for option in options.items() for word in option]
            command = [sys.executable, "-m", "edge_sdk.join", "--quiet", *words]
            with (home / "log").open("w") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            stop(process)


def watch(
    server: str, processes: list[subprocess.Popen[bytes]], folder: Path
) -> tuple[FederationInfo, list[RoundRecord]]:
    """Show a live line until every device has left; return the federation's last state and its records."""
    url = "/v1/federations/demo"
    end = time.monotonic() + LIMIT_SECONDS
    with (
        tqdm(total=ROUNDS, unit="round", desc="starting", dynamic_ncols=True, disable=None) as bar,
        connect(server) as client,
    ):
        while True:
            running = [process for process in processes if process.poll() is None]
            info = FederationInfo.model_validate_json(client.get(url).raise_for_status().content)
            records = [RoundRecord.model_validate(row) for row in client.get(f"{url}/rounds").json()]
            bar.n = info.round
            bar.set_description(f"{info.devices - info.devices_stopped} training, {info.devices_stopped} stopped")
            known = [each.accuracy_personal for each in records if each.accuracy_personal is not None]
            sent = sum(each.bytes_up + each.bytes_down for each in records)
            bar.set_postfix_str(f"personal {100 * known[-1]:.1f} %, {sent / 1e6:.1f} MB" if known else "")
            if not running:
                break
            if time.monotonic() > end:
                raise SystemExit(f"the demo took longer than {LIMIT_SECONDS} s; see the logs in {folder}")
            time.sleep(0.3)
    for index, process in enumerate(processes):
        if process.returncode != 0:
            log = folder / name(index) / "log"
            raise SystemExit(f"{name(index)} ended with {process.returncode}:\n{log.read_text()}")
    return info, records


def judge(
    folder: Path,
    device: str,
    budget: float,
    builtin: BuiltinTask,
    sessions: Sessions,
    settings: FederationSettings,
    model: Tensors,
    seed: int,
) -> DeviceRow:
    """Compare the three models on the device's own held-out data."""
    home = folder / device
    index = int(device.rsplit("-", 1)[1])
    data = f"index={index},of={len(BUDGETS)},alpha={ALPHA},seed={seed}"
    task = load_task(TASK, data, device=device, seed=seed, batch_size=settings.batch_size)
    state = StateFolder(home / "state")
    _, progress = state.load(builtin.manifest)
    personal = state.best(builtin.manifest)
    state.close()
    assert personal is not None
    engine = OnnxEngine(Network(builtin.manifest, sessions), classification=True)
    accuracy = {
        "local_only": local_only(engine, task, settings, progress, device),
        "global": _accuracy(engine, task, model),
        "personal": _accuracy(engine, task, personal),
    }
    onnx = home / "model.onnx"
    return DeviceRow(
        device=device,
        budget=budget,
        rounds=progress.rounds,
        stopped_round=progress.stopped_round,
        samples=_samples(task.train),
        held_out=_samples(task.held_out),
        local_steps=progress.steps,
        accuracy_local_only=accuracy["local_only"],
        accuracy_global=accuracy["global"],
        accuracy_personal=accuracy["personal"],
        bytes_up=progress.training.bytes_up,
        bytes_down=progress.training.bytes_down,
        whole_model_bytes=4 * builtin.manifest.shared_values,
        everything_bytes=progress.everything.bytes_down + progress.everything.bytes_up,
        seconds=progress.training.seconds,
        joules_measured=progress.training.joules_measured,
        joules_estimated=progress.training.joules_estimated,
        onnx_bytes=onnx.stat().st_size,
        onnx_latency_ms=Predictor(onnx, threads=1).latency() * 1e3,
    )


def local_only(engine: Engine, task: Task, settings: FederationSettings, progress: Progress, device: str) -> float:
    """Return the accuracy of a model trained only on this device: same initial weights, rate, batch and number of local
    steps. The best round's model is chosen as a device does.
    """
    engine.load(initial_values(engine.manifest, settings.seed))
    lowest = math.inf
    accuracy = 0.0
    for number in range(progress.rounds):
        engine.train(
            task.train,
            settings.model_copy(update={"local_steps": progress.steps // progress.rounds}),
            learning_rate=settings.learning_rate,
            seed=derive_seed("local-only", settings.seed, device, number),
        )
        held_out, validation = evaluate_held_out(engine, task.validation, task.test)
        lowest = min(lowest, validation.loss)
        if not gives_way(validation, lowest):
            assert held_out.accuracy is not None
            accuracy = held_out.accuracy
    return accuracy


def _accuracy(engine: Engine, task: Task, tensors: Tensors) -> float:
    engine.load(tensors)
    accuracy = engine.evaluate(task.held_out).accuracy
    assert accuracy is not None
    return accuracy


def _samples(batches: Any) -> int:
    return sum(len(targets) for _, targets in batches)


def table(report: dict[str, Any]) -> str:
    """Return the report as one table for a terminal."""
    head = (
        f"{'device':9} {'budget':>6} {'rounds':>6} {'stopped':>7} {'local':>7} {'global':>7} {'personal':>8} "
        f"{'up':>8} {'down':>8} {'of whole':>8} {'in all':>8} {'joules':>15} {'ONNX':>8} {'latency':>8}"
    )
    lines = [head, "-" * len(head)]
    for row in report["devices"]:
        joules = (
            f"{row['joules_measured']:.0f} J measured"
            if row["joules_measured"]
            else f"{row['joules_estimated']:.0f} J estimated"
        )
        lines.append(
            f"{row['device']:9} {row['budget']:6.1f} {row['rounds']:6d} {row['stopped_round'] or '-':>7} "
            f"{row['accuracy_local_only']:7.1%} {row['accuracy_global']:7.1%} {row['accuracy_personal']:8.1%} "
            f"{row['bytes_up'] / 1e3:5.0f} kB {row['bytes_down'] / 1e3:5.0f} kB {row['traffic_share']:8.0%} "
            f"{row['everything_bytes'] / 1e3:5.0f} kB "
            f"{joules:>15} {row['onnx_bytes'] / 1e3:5.1f} kB {row['onnx_latency_ms']:5.3f} ms"
        )
    rows = report["devices"]
    gain = sum(row["accuracy_personal"] - row["accuracy_local_only"] for row in rows) / len(rows)
    lines += [
        "-" * len(head),
        f"personal minus local-only: {100 * gain:+.1f} points on average; {report['rounds']} rounds in "
        f"{report['wall_seconds']:.0f} s; ended because: {report['reason']}",
        "local: trained alone for as many steps, the best of its rounds. up, down: bytes of training; of whole: "
        "against the whole model both ways in each round.",
        "in all: bytes of everything, both ways. For the curve each device downloads and judges the global model every "
        "second round, which by default it does once, at the end.",
    ]
    if any(row["joules_estimated"] for row in rows):
        idle, busy = WATTS.split(":")
        lines.append(
            f"joules estimated: no sensor here, so a board of {idle} W idle and {busy} W busy is assumed (a Raspberry "
            f"Pi 4B), and each of the five devices is charged the whole board."
        )
    return "\n".join(lines)


def show(report: dict[str, Any], folder: Path) -> None:
    """Print the table, and write the report and its plot into ``folder``."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plots.accuracy_by_round(report, folder / "accuracy.png")
    print(table(report))
    print(
        f"\n{folder}/report.json      these results\n"
        f"{folder}/accuracy.png     accuracy by round\n"
        f"{folder}/<device>/model.onnx   try: sparrow predict {folder}/{name(0)}/model.onnx "
        f"--input x.npy"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and print its result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description="One federation, five devices.")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="work folder; it is emptied first")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data, masks and batches")
    parser.add_argument("--keep", action="store_true", help="keep the page open afterwards, until Ctrl-C")
    options = parser.parse_args(arguments)
    with fresh(options.folder) as server:
        stays = "" if options.keep else f", while it runs; {AGAIN} keeps it open"
        print(f"see it live at {server}/{stays}", flush=True)
        show(run(options.folder, server, options.seed), options.folder)
        if options.keep:
            print(f"\nthe page stays open at {server}/ until Ctrl-C", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
