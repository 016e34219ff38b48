"""Flower's deployment engine: a SuperLink, a SuperNode per client, and ``flwr run``, as documented.

Flower's newest release is installed in ``.venv-flower`` (``python -m benchmarks.peers.install``). No TLS, as on our
side; telemetry, the search for updates and the installation of an app's dependencies are off. The rest are defaults: a
SuperLink serves everybody by HTTP on one port and keeps its state in memory, and SuperLink and SuperNodes start the
apps in separate processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.coordinator.contest import Contest, Marks, Row, measure
from benchmarks.coordinator.processes import Side, Wire, parse
from benchmarks.peers.install import PEERS
from sparrow.bench.server import free_port

PEER = PEERS["flower"]
APP = Path(__file__).with_name("flower_app")
START_SECONDS = 60.0
SUBMIT_SECONDS = 120.0
LOOK_SECONDS = 0.5
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_LOG_LEVEL": "ERROR",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}


class ClientsWire(Wire):
    """Bytes of the clients' connections only, because the SuperLink's port also serves its ServerApp.

    They are read at the clients' ends, and regularly within ``watch``, because HTTP connections are short.
    """

    def __init__(self, port: int, clients: Side) -> None:
        super().__init__(port)
        self._tree = clients.watch()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Look regularly within the ``with`` block."""
        self._ended.clear()
        thread = threading.Thread(target=self._look, daemon=True, name="clients-wire")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.bytes()

    def bytes(self) -> tuple[int, int]:
        """Return (down, up) so far, as Wire does."""
        with self._lock:
            command = ["ss", "-tinHOp", "state", "connected", "dport", "=", f":{self._port}"]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            mine = {str(pid) for pid in self._tree.processes()}
            theirs = [line for line in lines if mine & set(re.findall(r"pid=(\d+)", line))]
            # By the client's own address, which the server sees as its peer's: what the client has sent goes up.
            swapped = [" ".join([*(fields := line.split())[:3], fields[4], fields[3], *fields[5:]]) for line in theirs]
            self._seen |= {peer: (received, sent) for peer, (sent, received) in parse("\n".join(swapped)).items()}
            return sum(down for down, _ in self._seen.values()), sum(up for _, up in self._seen.values())


def environment(folder: Path, python: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: its own commands first in the path, its home in ``folder``."""
    return {**QUIET, "FLWR_HOME": str(folder / "home"), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


def run(contests: Sequence[Contest], folder: Path) -> list[Row]:
    """Return one measurement per contest:

    federations with the same number of clients, in sequence on one SuperLink. Its peak memory includes data of earlier
    contests, so begin with the smallest model.
    """
    PEER.check()
    port = free_port()
    shutil.copytree(APP, folder / "plain", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "contest"\n\n[superlink.contest]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    rows = []
    mine = environment(folder, PEER.python)
    with Side(folder, mine) as server, Side(folder, mine) as clients:
        command = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
        server.start("superlink", [*command, "--host", "127.0.0.1", "--port", str(port)])
        _wait_until_open(port, server)
        for number in range(contests[0].clients):
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            command += ["--host", "127.0.0.1", "--port", str(free_port())]
            clients.start(f"client-{number}", [*command, "--node-config", f"partition-id={number}"])
        wire = ClientsWire(port, clients)
        for contest in contests:
            marks = Marks(folder / f"marks-{contest.model.name}")
            try:
                with server.watch() as memory, wire.watch():
                    _submit(contest, folder, marks)
                    row = measure(contest, server, clients, wire, marks, memory)
            except SystemExit as failed:
                logs = [folder / "superlink.log", folder / "client-0.log"]
                said = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs]
                raise SystemExit("\n".join([str(failed), *said])) from None
            rows.append({"engine": "flower", "version": PEER.version("flwr"), **row})
    return rows


def _wait_until_open(port: int, server: Side) -> None:
    """Return when the SuperLink's port is open: ``flwr run`` does not wait for it."""
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        server.check()
        if time.monotonic() > end:
            raise SystemExit(f"the SuperLink did not open its port within {START_SECONDS:g} s")
        time.sleep(0.1)


def _submit(contest: Contest, folder: Path, marks: Marks) -> None:
    settings = {
        "marks": str(marks.path),
        "shapes": json.dumps(contest.model.shapes),
        "clients": contest.clients,
        "rounds": contest.all_rounds,
    }
    file = folder / f"{contest.model.name}.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    command = ["flwr", "run", str(folder / "plain"), "contest", "--run-config", str(file)]
    PEER.call(command, environment(folder, PEER.python), SUBMIT_SECONDS)
