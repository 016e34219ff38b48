"""What a benchmark runs on: a coordinator process on a free port of this machine, and the machine in a few words."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx


@contextlib.contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """Start ``uvicorn coordinator.main:app`` with its data and log in ``folder``; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"COORDINATOR_DATA_DIR": str(folder / "coordinator"), "COORDINATOR_DEFAULT_TASK": ""}
    command = [sys.executable, "-m", "uvicorn", "coordinator.main:app", "--port", str(port), "--log-level", "warning"]
    with (folder / "coordinator.log").open("a") as log:
        # A session of its own: Ctrl-C is for the benchmark, which stops the coordinator when the devices are done.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            server = f"http://127.0.0.1:{port}"
            _wait_until_healthy(server, process, folder / "coordinator.log")
            yield server
        finally:
            stop(process)


def _wait_until_healthy(server: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the coordinator did not start:\n{log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server}/healthz").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the coordinator did not answer within a minute:\n{log.read_text()}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, gently first."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def machine() -> str:
    """What these figures were made on, in a few words."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
