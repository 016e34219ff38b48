"""``make test-arm64``: the device's side on aarch64, under user-mode QEMU, against a coordinator on this machine.

In a Debian arm64 root (``root.py``) without PyTorch it runs the tests of ``devices/`` and of the wire's format; then a
device in there and one on this machine, which trains with PyTorch, are a federation of two. The one inside must
complete rounds of FedSPU, export its personal model, and predict with the file what the host predicts with it.
Everything made lies below ``.arm64``: the first run takes minutes for the root and the wheels, later ones use them.
Exit status: 0; 1 with what failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from root import CannotEmulate, Root, check_host, register_emulator

from edge_sdk.predict import Predictor
from sparrow.transport import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = REPOSITORY / ".arm64"
TESTS = ("tests/devices", "tests/sparrow/protocol/test_bundle.py")
ROUNDS = 3
EMULATED, NATIVE = "arm64", "host"
LIMIT_SECONDS = 3600
"""Of each step. A quiet machine needs a tenth."""

LARGEST_DIFFERENCE = 1e-4
"""Of class scores around 10: what different orders of summation explain."""


class Failed(Exception):
    """What make test-arm64 is there to find."""


def main() -> int:
    """Make what is missing, run everything, print what came out."""
    try:
        check_host()
        register_emulator()
        root = Root(WORK / "root")
        _timed("root", root.make, "Debian arm64 root")
        _timed("wheels", lambda: root.install(Path(__file__).with_name("requirements.txt")), "wheels for aarch64")
        root.install_project(REPOSITORY)
        print(_describe(root), flush=True)
        passed = _run_tests(root)
        _run_federation(root)
        print(f"{passed} device tests passed on aarch64; a device there trained, exported and predicted")
    except (CannotEmulate, Failed) as error:
        print(f"make test-arm64: {error}", file=sys.stderr)
        return 1
    return 0


def _timed(name: str, step: Callable[[], bool], what: str) -> None:
    start = time.monotonic()
    made = step()
    print(f"{name}: {what}, {f'made in {time.monotonic() - start:.0f} s' if made else 'as made before'}", flush=True)


def _inside(root: Root, arguments: Sequence[str]) -> str:
    """What a command prints inside. Raises Failed with it where its status is not 0."""
    # One thread each: this machine may have two cores, and the device on it wants one.
    command = root.command(arguments, {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"inside the root, {' '.join(arguments)} had not ended after {LIMIT_SECONDS} s") from None
    if done.returncode != 0:
        raise Failed(f"inside the root, {' '.join(arguments)} ended with status {done.returncode}:\n{_last(done)}")
    return done.stdout


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join((done.stdout + done.stderr).splitlines()[-40:])


def _describe(root: Root) -> str:
    code = (
        "import importlib.util, platform, numpy, onnxruntime; "
        "print(platform.machine(), 'Python', platform.python_version(), 'ONNX Runtime', onnxruntime.__version__, "
        "'numpy', numpy.__version__, 'with' if importlib.util.find_spec('torch') else 'without', 'PyTorch')"
    )
    printed = _inside(root, ["python3", "-c", code]).strip()
    if not printed.endswith("without PyTorch"):
        raise Failed(f"the device inside is to do without PyTorch: {printed}")
    return "inside: " + printed


def _run_tests(root: Root) -> int:
    """Run the device tests inside; returns how many passed."""
    start = time.monotonic()
    # Emulated code takes ten times as long as a test's limit, and hypothesis, allow for.
    patience = ["--override-ini", "timeout=900", "--hypothesis-profile", "ci"]
    tests = ["python3", "-m", "pytest", *TESTS, "-p", "no:cacheprovider", *patience]
    printed = _inside(root, tests)
    last = printed.strip().splitlines()[-1]
    found = re.search(r"(\d+) passed", last)
    if found is None:
        raise Failed(f"no device test passed:\n{printed}")
    print(f"tests ({', '.join(TESTS)}): {last.strip('= ')}; {time.monotonic() - start:.0f} s in all", flush=True)
    return int(found.group(1))


def _run_federation(root: Root) -> None:
    """Two devices, one of them inside, through a federation of FedSPU; then the exported file, in both places."""
    state = root.path / "sparrow" / "device"
    shutil.rmtree(WORK / "federation", ignore_errors=True)
    with _coordinator(WORK / "federation") as http, (WORK / "federation" / "host.log").open("wb") as log:
        url = str(http.base_url).rstrip("/")
        start = time.monotonic()
        native = subprocess.Popen(
            [sys.executable, *_join(url, NATIVE, 1, str(WORK / "federation" / NATIVE))],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            printed = _inside(root, ["python3", *_join(url, EMULATED, 0, "device")])
            native.wait(LIMIT_SECONDS)
        except (Failed, subprocess.TimeoutExpired) as failure:
            raise Failed(f"{failure}\nThe device on this machine wrote {log.name}.") from None
        finally:
            if native.poll() is None:
                native.kill()
                native.wait()
        print(printed.rstrip())
        records = http.get("/v1/federations/default/rounds").raise_for_status().json()
        done = [number for number in range(1, len(records) + 1) if _took_part(http, number)]
        if not done:
            raise Failed(f"the device inside completed none of {len(records)} rounds: {json.dumps(records)}")
        print(
            f"federation: {len(done)} of {len(records)} rounds of FedSPU completed by {EMULATED} at budget 0.4 with "
            f"the coordinator on this machine, {time.monotonic() - start:.0f} s",
            flush=True,
        )
    _predict_in_both(root, state)


def _join(url: str, name: str, index: int, folder: str) -> list[str]:
    federation = ["--server", url, "--device-name", name, "--data", f"index={index},of=2", "--budget", "0.4", "--quiet"]
    federation += ["--wait", "300"]
    federation += ["--engine", "onnx" if name == EMULATED else "torch"]  # the two engines in one federation
    return ["-m", "edge_sdk.join", *federation, "--state-dir", folder, "--export", f"{folder}/model.onnx"]


def _took_part(http: httpx.Client, number: int) -> bool:
    reports: list[dict[str, Any]] = http.get(f"/v1/federations/default/rounds/{number}/reports").json()
    return any(report["device"] == EMULATED and report["kind"] == "train" for report in reports)


def _predict_in_both(root: Root, state: Path) -> None:
    samples = np.random.default_rng(0).random((64, 1, 8, 8), dtype=np.float32)
    np.save(state / "samples.npy", samples)
    command = ["-m", "edge_sdk.predict", "device/model.onnx", "--input", "device/samples.npy"]
    printed = _inside(root, ["python3", *command, "--output", "device/scores.npy", "--threads", "1"])
    inside = np.load(state / "scores.npy")
    here = Predictor(state / "model.onnx", threads=1)(samples)
    difference = float(np.abs(inside - here).max())
    if not difference <= LARGEST_DIFFERENCE * max(1.0, float(np.abs(here).max())):
        raise Failed(f"the exported file predicts something else inside: scores differ by {difference:g}")
    timing = printed.strip().splitlines()[-1].partition(", energy")[0]
    print(f"export: {timing}, inside; scores differ from the host's by at most {difference:.1e}")


@contextmanager
def _coordinator(folder: Path) -> Iterator[httpx.Client]:
    """A coordinator on this machine, with the federation that is there by default; yields a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True)
    settings = {"rounds": ROUNDS, "local_epochs": 1, "deadline_seconds": LIMIT_SECONDS, "early_stopping": "off"}
    environment = _environment(
        COORDINATOR_DATA_DIR=str(folder / "coordinator"), COORDINATOR_DEFAULT_SETTINGS=json.dumps(settings)
    )
    command = [sys.executable, "-m", "uvicorn", "coordinator.main:app", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "coordinator.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            _wait_for(http, process, log)
            yield http
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise Failed(f"the coordinator did not start:\n{log.read_text(errors='replace')[-2000:]}")


def _environment(**more: str) -> dict[str, str]:
    """This process's, without settings of a coordinator or device that may lie in it."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("COORDINATOR_", "SPARROW_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


if __name__ == "__main__":
    sys.exit(main())
