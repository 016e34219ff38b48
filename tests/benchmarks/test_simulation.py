"""The speed page: medians of each peer, ratios within a turn."""

from __future__ import annotations

from benchmarks.simulation import page


def run(peer: str, turn: int, rate: float, whole: float, processor: float = 0.05) -> dict:
    return {
        "row": "speed",
        "peer": peer,
        "turn": turn,
        "rounds": 30,
        "machine": "two cores",
        "accuracy": 0.96,
        "processor_per_device_round": processor,
        "device_rounds_per_second": rate,
        "seconds_to_first_device": 3.0,
        "seconds_to_first_round": 4.0,
        "seconds_whole_command": whole,
    }


def test_ratios_are_taken_turn_by_turn_and_seconds_count_the_other_way():
    rows = [run("sparrow", 0, 30.0, 10.0), run("bare", 0, 20.0, 15.0), run("flower", 0, 10.0, 40.0)]
    rows += [run("sparrow", 1, 10.0, 30.0), run("bare", 1, 10.0, 30.0), run("flower", 1, 5.0, 60.0, 0.1)]
    text = page(rows)
    assert "2 turns of 30 rounds, medians; two cores." in text
    assert "| sparrow | 0.050 | 20.0 | 3.0 | 4.0 | 20.0 | 96.0 % |" in text
    assert "| bare | 1.00, **1.00**, 1.00 | 1.00, **1.25**, 1.50 | 1.00, **1.25**, 1.50 |" in text
    assert "| flower | 0.50, **0.75**, 1.00 | 2.00, **2.50**, 3.00 | 2.00, **3.00**, 4.00 |" in text


def test_memory_and_many_devices_have_tables_of_their_own():
    peak = {"pss": 488_000_000, "rss": 1_036_000_000, "uss": 354_000_000}
    memory = {"row": "memory", "peer": "sparrow", "peak_memory_bytes": peak}
    scale = {
        "row": "scale",
        "devices": 1000,
        "device_rounds_per_second": 9.96,
        "seconds_whole_command": 105.4,
        "peak_memory_bytes": peak,
        "coordinator_peak_rss": 140_000_000,
        "state_bytes": 30_000_000,
    }
    text = page([memory, scale])
    assert "| sparrow | 488 | 1036 | 354 |" in text
    assert "| 1000 | 10.0 | 105 | 488 | 140 | 30 |" in text
