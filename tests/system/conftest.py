"""Real coordinators and real devices, each a process of its own, for tests that use the front door and kill -9.

A device is started in one of two ways: ``device.command`` runs ``python -m edge_sdk.join`` as a user does;
``device`` forks the same program from a process that has torch loaded already, in 0.1 s instead of 3, and that waits
no longer than a second before it asks an unreachable coordinator again; ``device.fleet`` likewise ``sparrow fleet``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparrow.transport import httpx

from .proxy import Proxy

LOGS: dict[str, Path] = {}
"""Logs of the processes that run now: shown when a test fails."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for name, path in LOGS.items():
            text = path.read_text(errors="replace") if path.exists() else ""
            report.sections.append((f"log of {name}", text[-10_000:]))
    return report


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 90.0, interval: float = 0.005) -> Any:
    """What ``condition`` returns once it is true. Fails the test when it does not become so in time."""
    until = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > until:
            pytest.fail(f"waited {timeout} s in vain: {what}")
        time.sleep(interval)
    return found


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of a coordinator or device that may lie in it."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("COORDINATOR_", "SPARROW_"))}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


class Coordinator:
    """``uvicorn coordinator.main:app`` over one data folder and one port, however often it is killed."""

    def __init__(self, folder: Path, *, data: Path | None = None, **settings: str) -> None:
        self.settings = settings
        self.data = data or folder / "data"
        self.log = folder / "coordinator.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # It lets go of idle connections before the coordinator does, also where this machine stands still for a while.
        self.http = httpx.Client(base_url=self.url, timeout=10, limits=httpx.Limits(keepalive_expiry=2))
        self._process: subprocess.Popen[bytes] | Child | None = None
        self._name = f"coordinator in {folder.name}"
        folder.mkdir(parents=True, exist_ok=True)
        LOGS[self._name] = self.log

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.launch()
        self.wait_until_it_answers()

    def launch(self) -> None:
        """Start it."""
        self._process = self._spawn({"COORDINATOR_DATA_DIR": str(self.data), "COORDINATOR_DEFAULT_TASK": ""})

    def _spawn(self, where: dict[str, str]) -> subprocess.Popen[bytes] | Child:
        command = [sys.executable, "-m", "uvicorn", "coordinator.main:app", "--host", "127.0.0.1"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=self.log.parent,
                env=environment(**where, **self.settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            assert self.runs, "the coordinator ended before it answered"
            try:
                return self.http.get("/healthz").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, "GET /healthz of the coordinator", interval=0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it as an operator does."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()

    def close(self) -> None:
        """End it for good."""
        self.stop()
        self.http.close()
        LOGS.pop(self._name, None)

    def get(self, path: str) -> httpx.Response:
        """Ask it; an error status fails the test."""
        return self.http.get(path).raise_for_status()

    def create(self, name: str, **settings: Any) -> None:
        """Create a federation of the digits."""
        body = {"name": name, "task": "digits", "settings": {"draws": "seed", **settings}}
        self.http.post("/v1/federations", json=body).raise_for_status()

    def info(self, name: str) -> dict[str, Any]:
        return self.get(f"/v1/federations/{name}").json()

    def rounds(self, name: str) -> list[dict[str, Any]]:
        return self.get(f"/v1/federations/{name}/rounds").json()

    def logged(self, pattern: str, *, since: int = 0) -> list[str]:
        """What in the log, from byte ``since`` on, matches the pattern."""
        with self.log.open("rb") as log:
            log.seek(since)
            return re.findall(pattern, log.read().decode(errors="replace"))

    def log_size(self) -> int:
        return self.log.stat().st_size

    def wait_for_log(self, pattern: str, *, since: int = 0, times: int = 1, timeout: float = 90.0) -> None:
        """Wait until the pattern is there so often."""
        what = f"{times} x {pattern!r} in the coordinator's log"
        wait_until(lambda: len(self.logged(pattern, since=since)) >= times, what, timeout, interval=0.002)


class Device:
    """One process of ``edge_sdk.join``, or a fleet's first. ``log`` is what it wrote to stdout and stderr."""

    def __init__(self, name: str, pid: int, log: Path, poll: Callable[[], int | None]) -> None:
        self.name, self.log = name, log
        self._pid, self._poll = pid, poll

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def alive(self) -> bool:
        return self._poll() is None

    def wait(self, timeout: float = 90.0) -> int:
        """Its exit status; minus the signal's number where it was killed."""
        wait_until(lambda: not self.alive(), f"device {self.name} to end", timeout)
        status = self._poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """kill -9; it must have been alive. Processes of its own are waited for: they end with it."""
        assert self.alive(), f"device {self.name} had ended before it was killed"
        family = psutil.Process(self._pid).children(recursive=True)
        self.signal(signal.SIGKILL)
        assert self.wait(10) == -signal.SIGKILL, f"device {self.name} had ended before it was killed"
        assert not psutil.wait_procs(family, timeout=20)[1]

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            os.kill(self._pid, number)


class Forked(Coordinator):
    """``sparrow serve`` in a process forked from one that has loaded it, in 0.1 s instead of 1.5.

    clock_step: seconds by which its machine's clock is wrong from the next start on.
    """

    def __init__(self, nursery: Nursery, folder: Path, *, data: Path | None = None, **settings: str) -> None:
        super().__init__(folder, data=data, **settings)
        self.clock_step = 0.0
        self._nursery = nursery

    def _spawn(self, where: dict[str, str]) -> Child:
        return self._nursery.fork(
            "sparrow.coordinator.commands.serve",
            ["--port", str(self.port)],
            self.log,
            environment={**where, **self.settings},
            clock_step=self.clock_step,
        )


NURSERY = """
import importlib, json, os, sys, time, traceback

for name in sys.argv[1:]:
    importlib.import_module(name)
ended = {}
for line in sys.stdin:
    order = json.loads(line)
    if "poll" in order:
        if order["poll"] not in ended:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            if pid:
                ended[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps(ended.get(order["poll"])), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
        status = 70
        try:
            os.environ.update(order["environment"])
            if order["clock_step"]:
                true_time, step = time.time, order["clock_step"]
                time.time = lambda: true_time() + step
            for name, value in order["constants"].items():
                module, _, attribute = name.rpartition(".")
                setattr(importlib.import_module(module), attribute, value)
            status = importlib.import_module(order["program"]).main(order["arguments"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status or 0)
    print(pid, flush=True)
"""

OF_DEVICES = ("sparrow.simulation.simulate", "edge_sdk.join", "edge_sdk.tasks.digits", "edge_sdk.device.transport")
"""What the nursery of devices has loaded."""

OF_COORDINATORS = tuple(f"sparrow.coordinator.{name}" for name in ("commands.serve", "main", "api.connections"))
"""What that of coordinators has loaded."""


class Child:
    """A process that a nursery has forked; as much of ``subprocess.Popen`` as tests need."""

    def __init__(self, pid: int, poll: Callable[[], int | None]) -> None:
        self.pid, self._poll = pid, poll
        self._ended: int | None = None

    def poll(self) -> int | None:
        if self._ended is None:
            self._ended = self._poll()
        return self._ended

    def wait(self, timeout: float = 90.0) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.002)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """A process with modules loaded, of which others are forked. Any thread may ask it."""

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,  # who interrupts the tests does not mean it
        )

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def fork(
        self,
        program: str,
        arguments: list[str],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        constants: dict[str, Any] | None = None,
        clock_step: float = 0.0,
    ) -> Child:
        """Run a module's ``main``. constants: what is set in modules before; clock_step: how wrong the clock is, s."""
        order = {"program": program, "arguments": arguments, "log": str(log), "environment": environment or {}}
        pid: int = self._ask({**order, "constants": constants or {}, "clock_step": clock_step})
        return Child(pid, lambda: self._ask({"poll": pid}))

    def start(
        self, name: str, arguments: list[str], log: Path, *, program: str = "edge_sdk.join", resumed: int | None = None
    ) -> Device:
        """Start a device or a fleet, which is soon back after a kill: it waits a second at most before it asks again.

        ``resumed``: updates of so many bytes go on where a connection broke, instead of only large ones.
        """
        waits, uploads = "edge_sdk.device.connection", "edge_sdk.device.uploads"
        constants: dict[str, Any] = {f"{waits}.FIRST_WAIT": 0.1, f"{waits}.LONGEST_WAIT": 1.0}
        if resumed is not None:
            constants[f"{uploads}.RESUMED"] = resumed
        child = self.fork(program, arguments, log, constants=constants)
        return Device(name, child.pid, log, child.poll)

    def close(self) -> None:
        with self._process:
            self._process.kill()


class Devices:
    """Starts devices whose state, exports and logs lie in ``folder``, each under its name."""

    def __init__(self, nursery: Callable[[], Nursery], folder: Path) -> None:
        self._nursery = nursery
        self.folder = folder
        self._started: list[Device] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, server: str, federation: str, name: str, *more: str, resumed: int | None = None) -> Device:
        """Fork one."""
        arguments, log = self._arguments(server, federation, name, more), self._log(name)
        return self._known(self._nursery().start(name, arguments, log, resumed=resumed))

    def without_torch(self, server: str, federation: str, name: str, *more: str) -> Device:
        """Run ``python -m edge_sdk.join`` where PyTorch cannot be imported; its output tells where that is tried."""
        hidden = self.folder / "no-torch"
        hidden.mkdir(exist_ok=True)
        missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
        (hidden / "torch.py").write_text(f"print('PyTorch was asked for')\n{missing}\n")
        path = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
        return self.command(server, federation, name, *more, PYTHONPATH=path)

    def command(self, server: str, federation: str, name: str, *more: str, **given: str) -> Device:
        """Run ``python -m edge_sdk.join``; ``given``: of its environment."""
        arguments = self._arguments(server, federation, name, more)
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "edge_sdk.join", *arguments],
                cwd=self.folder,
                env=environment(**given),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self._known(Device(name, process.pid, self._log(name), process.poll))

    def fleet(self, server: str, federation: str, *more: str, resumed: int | None = None) -> Device:
        """Fork a fleet: many devices, hosted by a few processes."""
        where = ("--server", server, "--federation", federation, "--state-dir", str(self.folder / "fleet"))
        arguments = [*where, "--wait", "60", "--quiet", *more]
        nursery, log = self._nursery(), self._log("fleet")
        return self._known(
            nursery.start("fleet", arguments, log, program="sparrow.simulation.simulate", resumed=resumed)
        )

    def onnx(self, name: str) -> Path:
        """Where the device exports its personal model."""
        return self.folder / f"{name}.onnx"

    def close(self) -> None:
        for device in self._started:
            device.signal(signal.SIGKILL)
            device.wait(10)
            LOGS.pop(f"device {device.name} in {self.folder.name}", None)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _known(self, device: Device) -> Device:
        self._started.append(device)
        LOGS[f"device {device.name} in {self.folder.name}"] = device.log
        return device

    def _arguments(self, server: str, federation: str, name: str, more: tuple[str, ...]) -> list[str]:
        return [
            *("--server", server, "--federation", federation, "--device-name", name),
            *("--state-dir", str(self.folder / name), "--export", str(self.onnx(name))),
            *("--threads", "1", "--wait", "30", "--budget", "1", "--policy", "none", *more),
        ]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[[], Nursery]]:
    """The nursery, started when the first device is wanted of it."""
    started: list[Nursery] = []

    def give() -> Nursery:
        if not started:
            started.append(Nursery(*OF_DEVICES))
        return started[0]

    yield give
    for each in started:
        each.close()


@contextmanager
def one_machine(nursery: Callable[[], Nursery], folder: Path, **settings: str) -> Iterator[tuple[Coordinator, Devices]]:
    """A coordinator that answers, and a way to start devices, in an empty folder."""
    with ExitStack() as stack:
        coordinator = Coordinator(folder / "coordinator", **settings)
        stack.callback(coordinator.close)
        devices = Devices(nursery, folder / "devices")
        stack.callback(devices.close)
        coordinator.start()
        yield coordinator, devices


Machine = Callable[[], tuple[Coordinator, Devices]]


@pytest.fixture(scope="module")
def machine(nursery: Callable[[], Nursery], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Makes coordinators with folders of their own that live as long as the module."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(one_machine(nursery, tmp_path_factory.mktemp("machine")))


@pytest.fixture
def coordinator_and_devices(nursery: Callable[[], Nursery], tmp_path: Path) -> Iterator[tuple[Coordinator, Devices]]:
    """A coordinator of one's own, and a way to start devices."""
    with one_machine(nursery, tmp_path) as both:
        yield both


@pytest.fixture
def coordinator(coordinator_and_devices: tuple[Coordinator, Devices]) -> Coordinator:
    return coordinator_and_devices[0]


@pytest.fixture
def device(coordinator_and_devices: tuple[Coordinator, Devices]) -> Devices:
    return coordinator_and_devices[1]


@pytest.fixture
def proxy(coordinator: Coordinator) -> Iterator[Callable[[], Proxy]]:
    """Makes proxies in front of the coordinator."""
    with ExitStack() as stack:

        def make() -> Proxy:
            made = Proxy(coordinator.port)
            stack.callback(made.close)
            return made

        yield make
