"""A fleet on a Ray cluster trains the model that it trains without one, and goes on after Ctrl-C.

The cluster is a Ray of two workers on this machine, and the command a process of its own: Ray warns of much.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from edge_sdk.errors import SdkError
from sparrow.command_line.exits import Exit
from sparrow.simulation import cluster, simulate
from sparrow.simulation.fleet import Access, run_fleet
from sparrow.simulation.host import Plan

from .conftest import Coordinator, Machine, environment, wait_until

DEVICES = 6
SETTINGS = {"method": "fedspu", "rounds": 3, "cohort": 3, "min_devices": DEVICES, "seed": 7}
BUDGETS = (0.4, 1.0)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command; its state lies in ``tmp_path``, and Ray's files in a folder with the short name it needs."""
    ray_folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    started: list[subprocess.Popen[str]] = []

    def go(server: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sparrow.simulation.simulate", "--ray", "local", "--workers", "2"]
        command += ["--server", server, "--federation", "digits", "--devices", str(DEVICES), "--budgets", "0.4,1"]
        process = subprocess.Popen(
            [*command, "--state-dir", str(tmp_path / "state"), "--wait", "30", *more],
            env=environment(RAY_TMPDIR=ray_folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, which a Ctrl-C reaches as a whole
            text=True,
        )
        started.append(process)
        return process

    yield go
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
    left = [each for each in psutil.process_iter(["cmdline"]) if ray_folder in " ".join(each.info["cmdline"] or ())]
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(ray_folder)
    assert not [each for each in left if each.is_running()], "Ray's processes end with the command"


def finish(process: subprocess.Popen[str], status: int) -> str:
    """What the command wrote, once it has ended with this status."""
    output, _ = process.communicate(timeout=120)
    print(output)  # shown when the test fails
    assert process.returncode == status, output
    return output


@pytest.mark.timeout(300)
def test_two_workers_equal_one_process_and_resume_after_ctrl_c(machine: Machine, start: Start, tmp_path: Path) -> None:
    (spread, _), (alone, _) = machine(), machine()
    for coordinator in (spread, alone):
        coordinator.create("digits", **{**SETTINGS, "rounds": 12})
    process = start(spread.url)
    wait_until(lambda: spread.info("digits")["round"] >= 2, "two rounds", timeout=60, interval=0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert "interrupted" in finish(process, 130)
    assert spread.info("digits")["status"] == "running"
    output = finish(start(spread.url), 0)
    assert "6 devices, " in output
    assert "the federation is finished" in output
    run_fleet(alone.url, Plan("digits", DEVICES, budgets=BUDGETS), processes=1, in_memory=True, quiet=True)
    assert spread.info("digits")["model_sha256"] == alone.info("digits")["model_sha256"]
    slices = {path.name: {each.name for each in path.glob("device-*")} for path in (tmp_path / "state").iterdir()}
    assert slices == {
        "slice-0-of-2": {"device-0", "device-2", "device-4"},
        "slice-1-of-2": {"device-1", "device-3", "device-5"},
    }


def test_a_slice_that_fails_ends_the_others(coordinator: Coordinator, start: Start) -> None:
    coordinator.create("digits", **SETTINGS)
    output = finish(start(coordinator.url, "--data", "index={index},of=4"), 1)  # which has no index 4 and 5
    assert "sparrow fleet: slice " in output
    assert "Traceback" not in output


def test_devices_dealt_to_another_number_of_slices_are_not_enrolled_again(tmp_path):
    (tmp_path / "slice-0-of-2").mkdir()
    options = {"in_memory": False, "access": Access(patience_seconds=0.0)}
    part = cluster._Slice("http://127.0.0.1:9", Plan("digits", DEVICES), 0, 3, tmp_path, options)
    with pytest.raises(SdkError, match="give --workers 2 to continue"):
        part.run()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--app", "coordinator.main:app", "--ray", "local"], "--ray needs a coordinator's --server"),
        (["--server", "http://127.0.0.1:9", "--ray", "local", "--processes", "2"], "--workers instead of --processes"),
        (["--server", "http://127.0.0.1:9", "--workers", "2"], "give --ray"),
    ],
)
def test_options_that_do_not_go_together(options, what, capsys):
    assert simulate.main(["--devices", "2", *options]) == Exit.USAGE
    assert what in capsys.readouterr().err


def test_without_ray_it_says_what_to_install(coordinator, monkeypatch, capsys):
    coordinator.create("digits", **SETTINGS)
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    options = ["--server", coordinator.url, "--federation", "digits", "--devices", "2", "--ray", "local"]
    assert simulate.main(options) == Exit.CANNOT
    assert "pip install 'sparrow-fl[scale]'" in capsys.readouterr().err
