"""A coordinator process for benchmarks, and a description of the machine."""

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

from edge_sdk.tasks.compute import PROCESSOR, USUAL, Compute

from ..transport import connect, httpx


@contextlib.contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """Context manager: start a coordinator with its data and log in ``folder``; yield its address."""
    with started(folder) as (server, _):
        yield server


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[str, int]]:
    """Like ``coordinator``, but yield its address and process id."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "coordinator.log").open("a") as log:
        # In a session of its own, it does not receive Ctrl-C: the benchmark stops it after the devices.
        process = subprocess.Popen(
            command(port), stdout=log, stderr=log, env=os.environ | environment(folder), start_new_session=True
        )
        try:
            server = f"http://127.0.0.1:{port}"
            wait_until_healthy(server, process, folder / "coordinator.log")
            yield server, process.pid
        finally:
            stop(process)


def command(port: int) -> list[str]:
    """Return the command that starts a coordinator on this port."""
    return [sys.executable, "-m", "uvicorn", "coordinator.main:app", "--port", str(port), "--log-level", "warning"]


def environment(folder: Path) -> dict[str, str]:
    """Return the settings of a coordinator with its data in ``folder`` and no federation."""
    return {"COORDINATOR_DATA_DIR": str(folder / "coordinator"), "COORDINATOR_DEFAULT_TASK": ""}


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_healthy(server: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the coordinator answers. Raises SystemExit with its log."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the coordinator did not start:\n{log.read_text()}")
        with contextlib.suppress(httpx.TransportError), connect(server) as client:
            if client.get("/healthz").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the coordinator did not answer within a minute:\n{log.read_text()}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, first with SIGTERM."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def machine(compute: Compute = USUAL) -> str:
    """Return a short description of this machine, with its GPU if ``compute`` uses it."""
    described = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if compute.device == PROCESSOR:
        return described
    import torch

    return f"{described}, {torch.cuda.get_device_name(compute.device)}"
