"""Results go to a file and come back, whole trials only."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from sparrow.bench.experiment import Experiment, trials
from sparrow.bench.metrics import Accuracy, Point, Shifted
from sparrow.bench.provenance import Provenance
from sparrow.bench.rows import (
    DeviceResult,
    Recorded,
    TrialResult,
    append,
    of_global_model,
    read,
    write_gzip,
)

from .timing import without_timing


def recorded(seed=0, seconds=12.5, found=(), **changes):
    plan = Experiment.model_validate(
        {
            "title": "Tiny",
            "task": "digits",
            "devices": 2,
            "rounds": 4,
            "evaluate_every": 2,
            "seeds": [seed],
            "axes": {"alpha": [0.12345678]},
            "boards": ["a"],
            "data": {"validation": 0.1},
            **changes,
            "methods": [{"label": "FedSPU", "method": "fedspu", "budgets": [0.2, 1.0], "settings": {"clip": 1.0}}],
        }
    )
    [trial] = trials(plan, "tiny", {})
    accuracy = Accuracy(devices=2, mean=0.5, weighted=0.25, std=0.125, bottom_decile=0.375)
    points = tuple(
        Point(number, accuracy, None, accuracy, 0.5, 1, 10, 20, 3, 4, 5 * 10**12, seconds, 0.0, 7.0, 0.5, 9.0)
        for number in (2, 4)
    )
    devices = (
        DeviceResult("device-0", 0.2, False, 10, 0.5, None, 4, 2, 1000),
        DeviceResult("device-1", 1.0, True, 10, None, 0.25, 0, None, 0),
    )
    computed = Provenance("a" * 40, 2, {"torch": "2.13.0"}, "a processor", ("avx2", "fma"), 1)
    result = TrialResult(
        4, "max_rounds", 99, 10**10, "f" * 64, devices, seconds, "a machine", provenance=None if seed else computed
    )
    return Recorded(trial, points, result, found)


def shifted(test_set):
    """As on that test set: one device has a personal model, the other the global one alone."""
    personal, shared, both = (Accuracy(2, mean, mean, 0.0, mean) for mean in (0.75, 0.25, 0.5))
    return Shifted(test_set, both, personal, shared, (0.75, 0.25), (0.25, 0.25))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "results.jsonl"


def test_what_was_written_is_read_back(path):
    assert read(path) == []
    append(path, recorded(0))
    append(path, recorded(1))
    assert read(path) == [recorded(0), recorded(1)]
    assert len(path.read_text().splitlines()) == 2 * (1 + 2 + 1)


def test_what_was_found_on_other_test_sets_is_read_back(path):
    sets = ({"shift": 0.0}, {"shift": 1 / 3}, {"corruption": "contrast", "severity": 3}, {"test_on": "watch"})
    options = {"shifts": [0, 1 / 3], "corruptions": ["contrast"], "severities": [3], "test_on": ["watch"]}
    whole = recorded(found=tuple(map(shifted, sets)), **options)
    assert whole.trial.test_sets == sets
    append(path, whole)
    append(path, recorded(1))
    assert read(path) == [whole, recorded(1)]
    assert len(path.read_text().splitlines()) == (1 + 2 + 4 + 1) + (1 + 2 + 1)
    [first, _] = without_timing(read(path))
    assert [each["devices"] for each in first["shifts"]] == [(0.75, 0.25)] * 4


def test_a_trial_without_other_test_sets_is_written_as_before_there_were_any(path):
    append(path, recorded())
    assert "test_sets" not in path.read_text()
    assert "test_sets" not in recorded().trial.model_dump_json()
    assert "test_sets" in recorded(test_on=["watch"]).trial.model_dump_json()


def test_compressed_rows_are_read_and_appended_by_either_name(path):
    append(path, recorded())
    plain = path.read_bytes()
    compressed = path.with_name(path.name + ".gz")
    write_gzip(compressed, plain)
    path.unlink()
    assert read(path) == read(compressed) == [recorded()]
    append(path, recorded())
    assert not path.exists()
    assert gzip.decompress(compressed.read_bytes()) == plain * 2
    again = path.with_name("again.gz")
    write_gzip(again, plain * 2)
    assert again.read_bytes() == compressed.read_bytes()


@pytest.mark.parametrize("name", ["fedspu-cifar10", "fedspu-early-stopping"])
def test_committed_rows_can_be_read(name):
    found = read(Path(__file__).parents[3] / "benchmarks" / "rows" / f"{name}.jsonl")
    assert found
    assert all(each.shifts == each.trial.test_sets == () for each in found)


def test_the_rows_of_the_global_model_alone_have_its_accuracies_on_every_test_set():
    whole = recorded(found=(shifted({"shift": 1.0}),))
    [found] = of_global_model(whole, whole.trial).shifts
    assert found.accuracy == found.accuracy_global == whole.shifts[0].accuracy_global
    assert found.accuracy_personal is None
    assert found.devices == found.devices_global == (0.25, 0.25)


def test_figures_have_six_digits_and_the_trial_all(path):
    append(path, recorded(seconds=1.23456789))
    [found] = read(path)
    assert found.points[0].seconds == found.result.wall_seconds == 1.23457
    assert found.points[0].training_flops == 5 * 10**12
    assert found.trial == recorded().trial
    assert found.trial.axes == {"alpha": 0.12345678}


def test_rows_from_before_there_were_data_options_are_read(path):
    append(path, recorded())
    lines = path.read_text().splitlines(keepends=True)
    assert '"data": {"validation": 0.1}' in lines[0]
    path.write_text("".join([lines[0].replace(', "data": {"validation": 0.1}', ""), *lines[1:]]))
    [found] = read(path)
    assert found.trial == recorded().trial.model_copy(update={"data": {}})


@pytest.mark.parametrize("cut", [1, 3])
def test_a_trial_without_its_result_is_left_out_and_can_be_run_again(path, cut):
    append(path, recorded(0))
    append(path, recorded(1))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: 4 + cut]))
    assert read(path) == [recorded(0)]
    append(path, recorded(1))
    assert read(path) == [recorded(0), recorded(1)]


def test_a_write_that_was_cut_within_a_line_is_left_out_and_cut_off(path):
    append(path, recorded(0))
    append(path, recorded(1))
    path.write_text(path.read_text()[:-40])
    assert read(path) == [recorded(0)]
    append(path, recorded(1))
    assert read(path) == [recorded(0), recorded(1)]


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "3",
        "[]",
        '{"row": "point"}',
        '{"row": "point", "trial": "unknown"}',
        '{"row": "trial", "trial": "x", "label": "no more"}',
        '{"row": "surprise", "trial": "x"}',
        '{"row": "result", "trial": "x", "devices": [{}]}',
        '{"row": "shift", "trial": "x", "test_set": {}}',
        "",
    ],
)
def test_a_damaged_line_is_named(path, line):
    append(path, recorded())
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(SystemExit, match=r"(?s)results\.jsonl, line 5: "):
        read(path)


def test_without_timing_two_runs_are_alike():
    fast, slow = recorded(seconds=1.0), recorded(seconds=100.0)
    slow = dataclasses.replace(slow, result=dataclasses.replace(slow.result, machine="another"))
    assert fast != slow
    assert without_timing([fast]) == without_timing([slow])
    other = dataclasses.replace(slow, result=dataclasses.replace(slow.result, parameters=100))
    assert without_timing([fast]) != without_timing([other])


def test_rows_without_counts_are_recognised(path):
    old = recorded()
    assert (old.points[-1].counts, old.points[-1].finetune_flops, old.result.idle) == (None, None, None)
    points = tuple(dataclasses.replace(each, counts={"replaced": 0}, finetune_flops=7) for each in old.points)
    devices = tuple(dataclasses.replace(each, inference_flops=9) for each in old.result.devices)
    new = dataclasses.replace(
        old, points=points, result=dataclasses.replace(old.result, devices=devices, idle=("replaced",))
    )
    append(path, new)
    assert read(path) == [new]
    trimmed = [json.loads(line) for line in path.read_text().splitlines()]
    for row in trimmed:
        for name in ("counts", "finetune_flops", "idle"):
            row.pop(name, None)
        for each in row.get("devices", ()) if row["row"] == "result" else ():
            del each["inference_flops"]
    path.write_text("".join(json.dumps(row) + "\n" for row in trimmed))
    assert read(path) == [old], "rows that are committed have none of these"
    assert of_global_model(new, new.trial).points[-1].flops == new.points[-1].training_flops, "no copy is judged"
