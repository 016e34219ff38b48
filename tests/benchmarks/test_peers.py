"""The peers of the speed table: the bare loop runs, memory is counted right. Flower lives in its own environment."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.peers import COHORT
from benchmarks.peers.memory import TreeMemory, measure, process_age
from benchmarks.peers.work import Net

MB = 1_000_000
HOLD = f"b = bytearray(b'x') * (100 * {MB}); import time; time.sleep(0.8)"


@pytest.mark.integration
def test_the_bare_loop_says_what_it_did(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, samples in (("train", 2000), ("test", 200)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (samples, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, 10, samples, dtype=np.uint8)
    np.savez(tmp_path / "tiny.npz", **arrays)
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers.bare",
        "--data",
        str(tmp_path / "tiny.npz"),
        "--rounds",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["peer"], line["rounds"], line["device_rounds"]) == ("bare", 2, 2 * COHORT)
    assert 0.0 <= line["accuracy"] <= 0.5  # noise has nothing to learn
    assert 0 < line["seconds_to_first_device"] <= line["seconds_to_first_round"] < line["seconds_total"]
    assert line["seconds_total"] < line["seconds_whole_command"]
    assert line["device_rounds_per_second"] > 0
    assert 0 < line["processor_seconds_per_device"] < line["processor_per_device_round"]
    peak = line["peak_memory_bytes"]
    assert 50 * MB < peak["uss"] <= peak["pss"] <= peak["rss"] < 4000 * MB


def test_the_peers_train_the_network_of_the_table():
    assert sum(parameter.numel() for parameter in Net().parameters()) == 21_840


@pytest.mark.parametrize("command", [HOLD, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"])
def test_what_a_child_or_a_grandchild_holds_is_counted_once(command):
    measured = measure([sys.executable, "-c", command], interval=0.05)
    for peak in (measured.peak.pss, measured.peak.uss):
        assert 100 * MB <= peak < 160 * MB
    assert measured.peak.processes == 1 + ("subprocess" in command)
    assert 0.8 <= measured.seconds < 30


def test_a_daemon_that_left_the_tree_is_counted_and_ended():
    leave = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        b = bytearray(b'x') * (100 * {MB})\n"
        "        time.sleep(100)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "time.sleep(0.8)\n"
        "print('done')\n"
    )
    begin = time.monotonic()
    measured = measure([sys.executable, "-c", leave], interval=0.05)
    assert measured.stdout == "done\n"
    assert 100 * MB <= measured.peak.uss < 160 * MB
    assert time.monotonic() - begin < 50


def test_a_command_that_hangs_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        measure([sys.executable, "-c", "import time; time.sleep(100)"], timeout=0.3)


def test_a_command_that_fails_says_why():
    with pytest.raises(SystemExit, match="no such thing"):
        measure([sys.executable, "-c", "raise SystemExit('no such thing')"], interval=None)


def test_a_tree_without_a_marker_is_its_descendants():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        with TreeMemory(os.getpid(), interval=0.05) as memory:
            time.sleep(0.2)
        assert child.pid in memory.processes()
        assert memory.peak.processes >= 2
        assert 0 < process_age() < 24 * 3600
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.pid not in memory.processes()


def test_what_daemons_use_of_the_processor_counts():
    """Of a child, and of a grandchild that is left behind; what this process's other children use does not."""
    work = "import time; [None for _ in iter(lambda: time.process_time() > 0.3, True)]"
    daemon = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work + '; time.sleep(60)'!r}]); {work}"
    subprocess.run([sys.executable, "-c", work], check=True)
    measured = measure([sys.executable, "-c", f"{daemon}; time.sleep(1)"], interval=None)
    assert 0.6 <= measured.processor < 2.0
