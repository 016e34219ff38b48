"""README.md followed from its first to its last line in an empty environment, as printed.

Its commands run in order in a copy of the repository, with a home folder of their own, each in the environment that the
ones before it left. What a person starts in a terminal of its own is left running: coordinators until the end, devices
until the next command that is waited for has ended. Python blocks are saved as the file that the text before names.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = ("make demo", "make test")
INSTALLS = re.compile(r"python3 -m venv |pip install ")
SERVER = re.compile(r"(?:[A-Z_]+=\S* )*(?:sparrow serve|uvicorn coordinator\.main:app)\b")
DEVICE = re.compile(r"sparrow join |python -m edge_sdk\.join ")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE = 400
"""Seconds that one command may take; installing takes the longest."""


def steps() -> list[tuple[str, str]]:
    """What the README has one do, in order: ("run", a command) or ("save as FILE", its text)."""
    text, found, before = (ROOT / "README.md").read_text(), [], 0
    for block in BLOCK.finditer(text):
        if block[1] == "python":
            (name,) = re.findall(r"Save this as `([^`]+)`", text[before : block.start()])
            found.append((f"save as {name}", block[2]))
        else:
            lines = block[2].replace("\\\n", " ").splitlines()
            found += [("run", line) for line in lines if line and not line.startswith(SKIPPED)]
        before = block.end()
    return found


class Reader:
    """Somebody who does what is printed, in one folder after another."""

    def __init__(self, home: Path) -> None:
        self.home, self.folder, self.port = home, home, 0
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve().parent
        kept = {key: text for key, text in os.environ.items() if key.startswith("PIP_") or "proxy" in key.lower()}
        path = f"{base}:/usr/bin:/bin"
        quick = {"PIP_RETRIES": "0", "PIP_NO_COMPILE": "1", "OMP_NUM_THREADS": "1"}
        self.environment = {**kept, **quick, "HOME": str(home), "PATH": path}
        self.servers: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.devices: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.started = 0

    def follow(self, folder: Path, *, installs: bool, **more: str) -> str:
        """Do all of it in ``folder``, and return what was printed."""
        self.folder, self.environment = folder, {**self.environment, "XDG_STATE_HOME": str(folder / "state"), **more}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment["SPARROW_SERVER"] = f"http://127.0.0.1:{self.port}"
        try:
            for what, text in steps():
                if what != "run":
                    (folder / what.removeprefix("save as ")).write_text(self._here(text))
                elif installs or not INSTALLS.match(text):
                    self.do(self._here(text))
            self._wait_for_devices()
            assert self.servers
            for command, process, log in self.servers:
                assert process.poll() is None, f"{command} has ended:\n{log.read_text()}"
        finally:
            self._stop()
        return "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))

    def _here(self, text: str) -> str:
        """With the server replaced by this machine, and its port by one that is free."""
        text = text.replace("SERVER:8000", f"127.0.0.1:{self.port}").replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        return SERVER.sub(lambda found: f"{found[0]} --port {self.port}", text)

    def do(self, line: str) -> None:
        """Run one line, as printed."""
        command = re.sub(r"\s*&\s*(#.*)?$", "", line)
        print(f"$ {command}", flush=True)
        begun = time.monotonic()
        apart = bool(SERVER.match(command) or DEVICE.match(command)) or command != line
        process, log = self._start(command)
        if SERVER.match(command):
            self.servers.append((command, process, log))
            self._wait_for_server(command, process, log)
        elif apart:
            self.devices.append((command, process, log))
        else:
            self._end(command, process, log)
            self._wait_for_devices()
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
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert process.poll() is None, f"{command}: ended\n{log.read_text()}"
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/healthz").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        pytest.fail(f"{command}: does not answer\n{log.read_text()}")

    def _wait_for_devices(self) -> None:
        while self.devices:
            self._end(*self.devices.pop(0))

    def _stop(self) -> None:
        for _, process, _ in (*self.servers, *self.devices):
            if process.poll() is None:
                os.killpg(process.pid, 15)
                process.wait(20)
        self.servers, self.devices = [], []


def test_there_is_something_to_follow():
    commands = [text for what, text in steps() if what == "run"]
    assert any(SERVER.match(command) for command in commands)
    assert sum(bool(DEVICE.match(command)) for command in commands) >= 2
    assert any(command.startswith("pip install ") for command in commands)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_works_as_printed_in_an_empty_environment_without_and_with_tokens(tmp_path):
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
    home, first, second = tmp_path / "home", tmp_path / "first", tmp_path / "second"
    home.mkdir()
    shutil.copytree(ROOT, first, ignore=unwanted)
    reader = Reader(home)
    printed = reader.follow(first, installs=True)
    assert "devices join with: sparrow join --server http" in printed
    assert re.search(r"^sample 2: class \d", printed, re.MULTILINE)
    assert re.search(r"^bob: 10 rounds, ", printed, re.MULTILINE)
    second.mkdir()
    reader.folder = second
    reader.do("pip install 'sparrow-fl[completion]'")  # what commands advise, of which a message names the extra
    reader.do("sparrow completion bash")
    admin, enrolment = "an-admin-token-0123", "an-enrolment-token"
    printed = reader.follow(
        second,
        installs=False,
        COORDINATOR_ADMIN_TOKEN=admin,
        COORDINATOR_ENROLMENT_TOKEN=enrolment,
        SPARROW_ADMIN_TOKEN=admin,
        SPARROW_ENROLMENT_TOKEN=enrolment,
    )
    assert "with SPARROW_ENROLMENT_TOKEN set" in printed
    assert re.search(r"^sample 2: class \d", printed, re.MULTILINE)
