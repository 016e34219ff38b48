"""The contest with Flower's servers: marks, what the kernel's tools say, and rows -> ratios -> page."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.coordinator.contest import Marks
from benchmarks.coordinator.page import ASKED, growth, page, ratios
from benchmarks.coordinator.processes import Side, parse, processor_seconds

SPARROW, FLOWER = {"seconds_per_round": 0.1}, {"seconds_per_round": 6.0, "server_seconds_per_update": 0.16}


def row(engine: str, model: str = "small", clients: int = 4, turn: int = 0, **figures) -> dict:
    usual = {
        "kind": "rounds",
        "parameters": 21_840,
        "rounds": 1 if engine == "flower" else 50,
        "seconds_per_round": 1.0,
        "updates_per_second": 4.0,
        "server_seconds_per_update": 0.016,
        "client_seconds_per_round": 0.5,
        "bytes_down_per_update": 91_000.0,
        "bytes_up_per_update": 88_000.0,
        "server_memory": {"pss": 100_000_000},
        "machine": "two cores",
    }
    return {**usual, "engine": engine, "model": model, "clients": clients, "turn": turn, **figures}


def memory(updates: int, peak: int) -> dict:
    return {"kind": "memory", "parameters": 2_282_649, "updates": updates, "server_peak_rss": peak, "seconds": 9.0}


def asked(what: str, theirs: str, ours: str = "sparrow"):
    return next(each for each in ASKED if (each.what, each.theirs, each.ours) == (what, theirs, ours))


def crowd(enrolled, seconds, peak):
    return {
        "kind": "growth",
        "parameters": 21840,
        "enrolled": enrolled,
        "cohort": 200,
        "rounds": 50,
        "processes": 1,
        "records": "SQLite",
        "server_seconds_per_update": seconds,
        "server_seconds_per_enrolment": 0.004,
        "updates_per_second": 150.0,
        "server_peak_rss": peak,
    }


def test_ratios_are_taken_within_a_turn_and_a_contest():
    rows = [row("sparrow", turn=0, server_seconds_per_update=0.01), row("flower", server_seconds_per_update=0.2)]
    rows += [row("sparrow", turn=1, server_seconds_per_update=0.04), row("flower", turn=1, **FLOWER)]
    rows += [row("sparrow", clients=10), row("flower", clients=20), row("sparrow", turn=2)]  # nothing to compare with
    found = ratios(rows, asked("server CPU per update", "flower"))
    assert found == {("small", 4): [pytest.approx(0.05), pytest.approx(0.25)]}


def test_a_line_for_one_model_leaves_the_other_out():
    rows = [row(engine, model) for engine in ("sparrow", "grpc") for model in ("small", "large")]
    assert set(ratios(rows, asked("server CPU per update", "grpc"))) == {("large", 4)}


def test_what_their_clock_could_not_measure_is_no_success():
    rows = [row("sparrow"), row("flower", client_seconds_per_round=0.0)]
    assert ratios(rows, asked("client CPU per round", "flower")) == {("small", 4): [float("inf")]}


def test_the_page_lists_the_bars_that_are_met():
    rows = [row("sparrow", **SPARROW), row("flower", **FLOWER)]
    rows += [row("sparrow", turn=1, **SPARROW), row("flower", turn=1, **{**FLOWER, "seconds_per_round": 5.0})]
    rows += [row("sparrow", "large"), row("flower", "large"), memory(10, 200_000_000), memory(1000, 210_000_000)]
    text = page([*rows, {"kind": "run", "seconds": 600.0, "quick": False, "note": "a busy machine"}])
    assert "two cores; 10 minutes. **a busy machine**" in text
    assert "2 turns with 4 clients" in text
    assert "| 21,840 | 4 | Flower, deployment engine | 5.5 | 4 | 160 | 0.5 | 100 | 91 | 88 |" in text
    assert "| small, 4 clients | 50.0 times, **54.5 times**, 60.0 times | at least 100 times | no |" in text
    assert "| large, 4 clients | **1.0 times** | at least 25 times | no |" in text
    assert "| server CPU per update | small, 4 clients | 0.1, **0.1**, 0.1 | at most 0.06 | no |" in text
    assert "with 1,000 updates is 5.0 % higher than with 10. The limit is 10 %: met" in text
    quicker = page([row("sparrow", server_seconds_per_update=0.004), row("flower", **FLOWER)])
    assert "| server CPU per update | small, 4 clients | **0.025** | at most 0.06 | yes |" in quicker


def test_the_page_says_what_a_million_devices_would_take():
    crowds = [crowd(100, 0.002, 100_000_000), crowd(10_000, 0.0025, 120_000_000)]
    text = page([row("sparrow"), row("flower"), *crowds])
    assert "| 10,000 | 200 | 50 | SQLite | 1 | 2.50 | 150 | 4.00 | 120 |" in text
    assert "costs 1.25 times as much as with 100. The limit is 1.3: met" in text
    assert "1.8 hours of one core" in text, "a million times 2.5 and 4 ms"


def test_memory_grows_from_the_fewest_updates_to_the_most():
    assert growth([memory(1000, 330), memory(10, 300), memory(100, 900)]) == pytest.approx(0.1)


def test_bytes_of_each_connection():
    text = (
        "ESTAB 0 0 127.0.0.1:9092 127.0.0.1:40000 cubic rtt:0.1 bytes_sent:500 bytes_acked:500 bytes_received:70 x\n"
        "ESTAB 0 0 [::1]:9092 [::1]:40002 cubic rtt:0.1 bytes_received:30 x\n"
    )
    assert parse(text) == {"127.0.0.1:40000": (500, 70), "[::1]:40002": (0, 30)}


def test_processor_seconds_hold_those_of_children_that_ended(tmp_path):
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    spawn = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {spin!r}]); print(1, flush=True)"
    with Side(tmp_path, {}) as side:
        process = side.start("parent", [sys.executable, "-c", f"{spawn}; time.sleep(60)"])
        Marks(tmp_path / "parent.log").wait(1, side.check, 30)
        assert 0.25 <= side.processor_seconds() < 10, "0.3, in ticks of 0.01"
        assert processor_seconds([process.pid]) == pytest.approx(side.processor_seconds(), abs=0.1)
    assert process.poll() is not None


def test_marks_of_a_side_that_died_say_why(tmp_path):
    with Side(tmp_path, {}) as side:
        side.start("server", [sys.executable, "-c", "raise SystemExit('no port')"]).wait()
        with pytest.raises(SystemExit, match="server ended with 1:\nno port"):
            Marks(tmp_path / "marks").wait(1, side.check, 30)


def test_a_mark_that_is_being_written_is_waited_for(tmp_path):
    (tmp_path / "marks").write_text("1.5 4\n2.5 4\n3")
    assert Marks(tmp_path / "marks").wait(2, lambda: None, 1) == [1.5, 2.5]
    with pytest.raises(SystemExit, match="2 of 3 rounds in 0 s"):
        Marks(tmp_path / "marks").wait(3, lambda: None, 0)


def test_a_process_that_is_gone_has_used_nothing():
    assert processor_seconds([2**22 + os.getpid()]) == 0
