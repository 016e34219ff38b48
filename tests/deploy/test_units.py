"""The systemd units: systemd itself reads them, and what they start is started."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparrow.command_line.exits import Exit
from sparrow.transport import httpx

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ["sparrow-device.service", "sparrow-device.timer", "sparrow-coordinator.service"]
ENVIRONMENTS = {"sparrow-device.service": "device.env", "sparrow-coordinator.service": "coordinator.env"}


@pytest.fixture
def analyze(tmp_path):
    """Runs ``systemd-analyze`` on units whose programs are where the tests' Python is."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for name in UNITS:
        (tmp_path / name).write_text((DEPLOY / name).read_text().replace("/opt/sparrow/", f"{tmp_path}/"))

    def run(*arguments):
        done = subprocess.run(
            ["systemd-analyze", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def unit(name):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(DEPLOY / name)
    return parser


def environment(name, **more):
    """What the unit's example file sets, and ``more``."""
    lines = (DEPLOY / ENVIRONMENTS[name]).read_text().splitlines()
    return {**dict(line.split("=", 1) for line in lines if line and not line.startswith("#")), **more}


def command(name, state, **more):
    """What the unit starts, with systemd's rules for what stands in it, and this Python."""
    settings = environment(name, **more)
    text = (
        unit(name)["Service"]["ExecStart"].replace("%S", str(state)).replace("/opt/sparrow/bin/python", sys.executable)
    )
    words = []
    for word in shlex.split(text):
        if found := re.fullmatch(r"\$(\w+)", word):  # alone: split at spaces, and nothing where it is not set
            words += shlex.split(settings.get(found[1], ""))
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: settings[name[1]], word))
    return words


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_every_line(analyze, name):
    assert analyze("verify", "--man=no", f"./{name}") == (0, "")


@pytest.mark.parametrize(("name", "limit"), [("sparrow-device.service", 30), ("sparrow-coordinator.service", 20)])
def test_a_service_that_is_broken_into_reaches_little(analyze, name, limit):
    status, printed = analyze("security", "--offline=true", f"--threshold={limit}", f"./{name}")
    if "offline" in printed and "unrecognized" in printed:
        pytest.skip("needs systemd 250")
    assert status == 0, printed[-200:]


def test_a_device_that_cannot_train_or_was_started_wrongly_is_not_started_again():
    service = unit("sparrow-device.service")["Service"]
    assert {int(status) for status in service["RestartPreventExitStatus"].split()} == {Exit.USAGE, Exit.CANNOT}
    assert service["SuccessExitStatus"] == str(int(Exit.INTERRUPTED))


def test_the_device_starts_with_the_options_of_its_file(tmp_path):
    more = {"SPARROW_SERVER": "http://127.0.0.1:9", "SPARROW_OPTIONS": "--budget 0.4 --wait 0"}
    words = command("sparrow-device.service", tmp_path, **more)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (Exit.UNREACHABLE, "")
    assert "does not answer" in done.stderr
    # Nothing is stored before the device has enrolled.
    assert not (tmp_path / "sparrow" / "device").exists()


def test_the_coordinator_starts_with_the_settings_of_its_file(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    name = "sparrow-coordinator.service"
    folder = unit(name)["Service"]["Environment"].replace("%S", str(tmp_path)).removeprefix("COORDINATOR_DATA_DIR=")
    kept = {key: text for key, text in os.environ.items() if not key.startswith("COORDINATOR_")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command(name, tmp_path, SPARROW_PORT=port),
            env={**kept, "COORDINATOR_DATA_DIR": folder},
            stdout=log,
            stderr=log,
            cwd=tmp_path,
        )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.05)
        else:
            pytest.fail((tmp_path / "log").read_text())
    finally:
        process.terminate()
        assert process.wait(60) in (0, -15)
    assert (Path(folder) / "coordinator.sqlite3").exists()
