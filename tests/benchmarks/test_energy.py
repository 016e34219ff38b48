"""Joules of recorded trials on known boards: by hand, and as a page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import energy
from sparrow.bench import rows
from sparrow.bench.experiment import Trial
from sparrow.bench.metrics import Accuracy, Point
from sparrow.bench.rows import DeviceResult, Recorded, TrialResult
from sparrow.devices.simulation import BOARDS


def recorded(label, *, flops, traffic, accuracy, stops=False, rounds=10, boards=()):
    trial = Trial(
        experiment="fedspu-cifar10",
        label=label,
        method="fedspu",
        task="cifar10",
        partition="dirichlet",
        axes={"alpha": 0.5},
        seed=0,
        devices=2,
        new=0,
        boards=boards,
        budgets=(0.5, 1.0),
        settings={"early_stopping": "paper" if stops else "off"},
    )
    judged = Accuracy(devices=2, mean=accuracy, weighted=accuracy, std=0.0, bottom_decile=accuracy)
    point = Point(
        round=rounds,
        accuracy=judged,
        accuracy_global=None,
        accuracy_validation=None,
        train_loss=None,
        stopped=0,
        bytes_up=traffic,
        bytes_down=0,
        evaluation_bytes_up=0,
        evaluation_bytes_down=0,
        training_flops=flops,
        seconds=100.0,
        joules_measured=0.0,
        joules_estimated=400.0,
        seconds_without_joules=0.0,
        wall_seconds=1.0,
    )
    devices = tuple(DeviceResult(f"device-{i}", 1.0, False, 10, accuracy, None, rounds, None, 0) for i in range(2))
    result = TrialResult(rounds, "max_rounds", 1, 1, "", devices, 1.0, "test")
    return Recorded(trial, (point,), result)


def test_a_boards_joules_are_full_load_while_it_computes_and_idle_while_it_transfers():
    board = replace(BOARDS["pi4b"], flops_per_second=1e9, bytes_per_second=1e6)  # 7 s of computing, and 3 of transfer
    point = recorded("a", flops=7_000_000_000, traffic=3_000_000, accuracy=0.5).points[0]
    assert energy.joules_on(board, point) == pytest.approx(7 * board.power.max_watts + 3 * board.power.idle_watts)


def test_the_page_compares_with_and_without_early_stopping_and_says_that_it_estimates(tmp_path, capsys):
    usual = recorded("FedSPU", flops=10**12, traffic=10**6, accuracy=0.6, boards=("pi4b", "pi5"))
    early = recorded("FedSPU+ES", flops=4 * 10**11, traffic=4 * 10**5, accuracy=0.55, stops=True, rounds=4)
    for each in (usual, early):
        rows.append(tmp_path / "fedspu-cifar10.jsonl", each)
    assert energy.main(["--results", str(tmp_path), "--output", str(tmp_path / "energy.md")]) == 0
    page = (tmp_path / "energy.md").read_text()
    assert "| fedspu-cifar10, alpha = 0.5 | FedSPU+ES against FedSPU | 1 | 60.0% | 60.0% | 60.0% | -5.0 |" in page
    assert "| FedSPU, 10 rounds | 0.5: pi4b, 1: pi5 | off | 100 | **0.4**; 20.0; 7 | 60.0 |" in page
    assert "Every figure is **estimated**" in page


def test_without_rows_it_says_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match="run an experiment first"):
        energy.main(["--results", str(tmp_path)])
