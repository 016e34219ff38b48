"""Flower's deployment engine: a SuperLink, a SuperNode per client, and ``flwr run``, as documented.

Flower is installed in ``.venv-peers`` (``python -m benchmarks.peers.install``). No TLS, as on our side; telemetry, the
search for updates and the installation of an app's dependencies are off. SuperLink and SuperNodes start the apps in
processes of their own, and the SuperLink keeps its state in memory; both are defaults.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparrow.benchmarks.coordinator.contest import Contest, Marks, Row, measure
from sparrow.benchmarks.coordinator.processes import Side, Wire
from sparrow.benchmarks.peers.install import PYTHON
from sparrow.benchmarks.server import free_port

APP = Path(__file__).with_name("flower_app")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_LOG_LEVEL": "ERROR",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: its own commands first in the path, its home in ``folder``."""
    return {**QUIET, "FLWR_HOME": str(folder / "home"), "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}


def check_installed() -> None:
    """Raise SystemExit if Flower is not installed."""
    if not PYTHON.exists():
        raise SystemExit("Flower is not installed: python -m benchmarks.peers.install")


def run(contests: Sequence[Contest], folder: Path) -> list[Row]:
    """Return one measurement per contest: federations of equally many clients, one after another on one SuperLink.

    Peak memory of a later one holds what the SuperLink has kept of those before it: begin with the smallest model.
    """
    check_installed()
    fleet, control, server_io = free_port(), free_port(), free_port()
    shutil.copytree(APP, folder / "plain", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "contest"\n\n[superlink.contest]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
    )
    rows = []
    with Side(folder, environment(folder)) as server, Side(folder, environment(folder)) as clients:
        server.start(
            "superlink",
            [
                *("flower-superlink", "--insecure", "--disable-runtime-dependency-installation"),
                *("--fleet-api-address", f"127.0.0.1:{fleet}", "--control-api-address", f"127.0.0.1:{control}"),
                *("--serverappio-api-address", f"127.0.0.1:{server_io}"),
            ],
        )
        for number in range(contests[0].clients):
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{fleet}"]
            command += ["--clientappio-api-address", f"127.0.0.1:{free_port()}"]
            clients.start(f"client-{number}", [*command, "--node-config", f"partition-id={number}"])
        for contest in contests:
            marks = Marks(folder / f"marks-{contest.model.name}")
            with server.watch() as memory:
                _submit(contest, folder, marks)
                row = measure(contest, server, clients, Wire(fleet), marks, memory)
            rows.append({"engine": "flower", **row})
    return rows


def _submit(contest: Contest, folder: Path, marks: Marks) -> None:
    settings = {
        "marks": str(marks.path),
        "shapes": json.dumps(contest.model.shapes),
        "clients": contest.clients,
        "rounds": contest.all_rounds,
    }
    file = folder / f"{contest.model.name}.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    done = subprocess.run(
        ["flwr", "run", str(folder / "plain"), "contest", "--run-config", str(file)],
        env=os.environ | environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"flwr run ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
