"""Somebody who does what a page says: its commands, in order, each in the environment that the ones before it left.

What a person starts in a terminal of its own is left running: coordinators until the end, devices until the next
command that is waited for has ended.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from sparrow.transport import httpx

INSTALLS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\S*python3? -m venv |\S*pip (?:un)?install |sudo apt install |uv venv )")
"""What makes an environment, or puts a package into it."""
SERVER = re.compile(r"(?:[A-Z_]+=\S* )*(?:\S*sparrow serve|uvicorn coordinator\.main:app)\b")
DEVICE = re.compile(r"\S*sparrow join |\S*python -m edge_sdk\.join |\S*python docs/client\.py ")
PORT = re.compile(r" --port (\d+)")
ADDRESSES = re.compile(r"(?:SERVER|COORDINATOR|192\.168\.1\.5|127\.0\.0\.1|\$ADDRESS):(?:8000|8443)\b")
"""How pages write the address of a coordinator."""
PATIENCE = 400
"""Seconds that one command may take; installing takes the longest."""


class Reader:
    """Somebody who does what is printed, in one folder after another.

    path: folders of programs that come before the system's.
    """

    def __init__(self, home: Path, path: str = "") -> None:
        self.home, self.folder, self.port = home, home, 0
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve().parent
        kept = {key: text for key, text in os.environ.items() if key.startswith("PIP_") or "proxy" in key.lower()}
        path = f"{path or base}:/usr/bin:/bin"
        quick = {"PIP_RETRIES": "0", "PIP_NO_COMPILE": "1", "OMP_NUM_THREADS": "1"}
        self.environment = {**kept, **quick, "HOME": str(home), "PATH": path}
        self.servers: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.devices: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.started = 0

    def follow(self, steps: Iterable[tuple[str, str]], folder: Path, *, installs: bool, **more: str) -> str:
        """Take ``steps`` in ``folder``: ("run", a command) or ("save as FILE", its text); return what was printed."""
        self.folder, self.environment = folder, {**self.environment, "XDG_STATE_HOME": str(folder / "state"), **more}
        self.choose_port()
        try:
            for what, text in steps:
                if what != "run":
                    (folder / what.removeprefix("save as ")).write_text(self.here(text))
                elif installs or not INSTALLS.match(text):
                    self.do(self.here(text))
            self.wait_for_devices()
            assert self.servers
            for command, process, log in self.servers:
                assert process.poll() is None, f"{command} has ended:\n{log.read_text()}"
        finally:
            self.stop()
        return "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))

    def choose_port(self) -> None:
        """Take a port that is free, for the coordinator of what follows."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment["SPARROW_SERVER"] = f"http://127.0.0.1:{self.port}"

    def here(self, text: str) -> str:
        """With the server replaced by this machine, and its port by one that is free."""
        text = ADDRESSES.sub(f"127.0.0.1:{self.port}", text)
        return SERVER.sub(lambda found: f"{found[0]} --port {self.port}", PORT.sub("", text))

    def do(self, line: str) -> None:
        """Run one line, as printed."""
        command = re.sub(r"\s*&\s*(#.*)?$", "", re.sub(r"\s{2,}# .*$", "", line))
        print(f"$ {command}", flush=True)
        begun = time.monotonic()
        apart = bool(SERVER.match(command) or DEVICE.match(command)) or bool(re.search(r"&\s*(#.*)?$", line))
        process, log = self._start(command)
        if SERVER.match(command):
            self.servers.append((command, process, log))
            self._wait_for_server(command, process, log)
        elif apart:
            self.devices.append((command, process, log))
        else:
            self._end(command, process, log)
            self.wait_for_devices()
        print(f"  {time.monotonic() - begun:.1f} s", flush=True)

    def _start(self, command: str) -> tuple[subprocess.Popen[bytes], Path]:
        self.started += 1
        log, left = (self.folder / f"{self.started:02}.{kind}" for kind in ("log", "environment"))
        # The environment is handed on, as in one terminal: that of a virtual environment, say.
        script = f"{command}\nstatus=$?\nenv -0 >{left}\nexit $status\n"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, log

    def _end(self, command: str, process: subprocess.Popen[bytes], log: Path) -> None:
        """Wait for a command that ends, well."""
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        assert status == 0, f"{command}: ended with {status}:\n{log.read_text()[-5000:]}"
        left = log.with_suffix(".environment").read_bytes()
        self.environment = dict(each.split("=", 1) for each in left.decode().split("\0") if each)
        self.environment.pop("_", None)

    def _wait_for_server(self, command: str, process: subprocess.Popen[bytes], log: Path) -> None:
        until, scheme = time.monotonic() + 60, "https" if "--ssl-certfile" in command else "http"
        while time.monotonic() < until:
            assert process.poll() is None, f"{command}: ended\n{log.read_text()}"
            try:
                if httpx.get(f"{scheme}://127.0.0.1:{self.port}/healthz", verify=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        pytest.fail(f"{command}: does not answer\n{log.read_text()}")

    def wait_for_devices(self) -> None:
        """Wait until every device has ended, well."""
        while self.devices:
            self._end(*self.devices.pop(0))

    def stop(self) -> None:
        """End what is left running."""
        for _, process, _ in (*self.servers, *self.devices):
            if process.poll() is None:
                os.killpg(process.pid, 15)
                process.wait(20)
        self.servers, self.devices = [], []
