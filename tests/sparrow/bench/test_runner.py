"""An experiment from its file to its rows: complete, repeatable, interrupted without loss, tuned on equal terms."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main as in_a_clone
from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.tasks.dealing import read_dealing
from sparrow.bench import rows
from sparrow.bench.__main__ import main
from sparrow.bench.experiment import FOLDER, BadExperiment, load_experiment, trials, tuning_trials
from sparrow.bench.runner import Where, run_trial
from sparrow.command_line.exits import Exit

from .timing import without_timing

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

TINY = """
title = "Tiny"
task = "digits"
devices = 4
new = 1
rounds = 3
evaluate_every = 2
seeds = [0]

[settings]
cohort = 3
local_steps = 4

[axes]
alpha = [0.5]

[[methods]]
label = "FedSPU"
method = "fedspu"
budgets = [0.5, 1.0]

[[methods]]
label = "FedAvg"
method = "fedavg"
"""
TUNED = """
[[methods]]
label = "FedSPU+ES"
method = "fedspu"
tuned_as = "FedSPU"
settings = { early_stopping = "paper" }

[tune]
grid = { learning_rate = [0.0001, 0.1] }
extensions = 0
"""
LABELS = ["FedSPU", "FedAvg"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("experiment") / "tiny.toml"
    path.write_text(TINY)
    return path


def command(what, file, folder, *more):
    return [what, str(file), "--data", "", "--folder", str(folder), *more]


@pytest.fixture(scope="module")
def undisturbed(file, tmp_path_factory):
    """The folder of an experiment that was run to its end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(command("run", file, folder, "--processes", "1")) == 0
    return folder


def results(folder):
    return rows.read(folder / "results.jsonl")


# --- what is run -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_the_rows_of_every_trial_and_a_report(undisturbed):
    found = results(undisturbed)
    assert [each.trial.label for each in found] == LABELS
    for each in found:
        assert (each.result.rounds, each.result.reason) == (3, "max_rounds")
        assert [point.round for point in each.points] == [2, 3], "the end is judged"
        assert [device.device for device in each.result.devices] == [f"device-{index}" for index in range(5)]
        assert [device.new for device in each.result.devices] == [False] * 4 + [True]
        assert sum(device.rounds for device in each.result.devices) == 3 * 3
        assert all(device.accuracy is not None for device in each.result.devices)
        assert {device.inference_flops for device in each.result.devices} == {each.result.inference_flops}
        assert (each.result.idle, each.points[-1].finetune_flops) == ((), 0)
        assert each.points[-1].accuracy.devices == 4, "new devices are no part of the federation's accuracy"
        assert 0 < each.points[0].bytes_up < each.points[1].bytes_up
    assert [device.budget for device in found[0].result.devices] == [0.5, 0.5, 1.0, 1.0, 0.5]
    assert found[0].points[-1].bytes_up < found[1].points[-1].bytes_up, "half of its devices send half"
    assert "FedAvg" in (undisturbed / f"{found[0].trial.experiment}.md").read_text()
    assert not list((undisturbed / "trials").iterdir()), "the trials' own folders are gone"


def test_a_report_is_made_of_what_has_been_run(undisturbed, file, tmp_path, capsys):
    arguments = [
        "report",
        str(file),
        "--results",
        str(undisturbed / "results.jsonl"),
        "--output",
        str(tmp_path / "report"),
    ]
    assert main(arguments) == 0
    written = capsys.readouterr().out.splitlines()
    assert written
    assert sorted(written) == sorted(str(path) for path in (tmp_path / "report").iterdir())


def test_trials_that_are_there_are_kept(undisturbed, file):
    before = (undisturbed / "results.jsonl").read_bytes()
    assert main(command("run", file, undisturbed, "--processes", "1", "--resume")) == 0
    assert (undisturbed / "results.jsonl").read_bytes() == before


def test_an_interrupted_run_goes_on_to_the_rows_of_one_that_was_not(undisturbed, file, tmp_path):
    """Ctrl-C in the second trial: the first is kept, the second goes on from where its coordinator and devices were."""
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparrow", "bench", *command("run", file, tmp_path / "work", "--processes", "2")],
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + 60
        while not any("round 1 closed" in path.read_text() for path in second_trial(tmp_path / "work")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, "the second trial has not come to its first round"
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert "interrupted" in (tmp_path / "log").read_text()
    assert [each.trial.label for each in results(tmp_path / "work")] == LABELS[:1]
    assert list((tmp_path / "work" / "trials").iterdir()), "what the interrupted one has done is there"

    assert main(command("run", file, tmp_path / "work", "--processes", "1", "--resume")) == 0
    assert without_timing(results(tmp_path / "work")) == without_timing(results(undisturbed))


def second_trial(folder):
    return (folder / "trials").glob("*/coordinator.log") if (folder / "results.jsonl").exists() else []


def test_a_trial_with_other_settings_is_run_again_and_replaces_the_first(undisturbed, file, tmp_path):
    (tmp_path / "results.jsonl").write_bytes((undisturbed / "results.jsonl").read_bytes())
    changed = tmp_path / "tiny.toml"
    changed.write_text(TINY.replace("local_steps = 4", "local_steps = 1"))
    again = command("run", changed, tmp_path, "--processes", "1", "--resume", "--only", "FedAvg", "--seed", "0")
    assert main(again) == 0
    found = results(tmp_path)
    assert [each.trial.label for each in found] == [*LABELS, "FedAvg"]
    assert [each.trial.settings["local_steps"] for each in rows.latest(found).values()] == [4, 1]


# --- tuning ----------------------------------------------------------------------------------------------------------


def test_tuning_tries_the_same_for_every_method_and_keeps_the_best_on_validation_data(tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY + TUNED)
    assert main(command("tune", file, tmp_path / "work", "--processes", "1")) == 0
    tried = rows.read(tmp_path / "work" / "tuning.jsonl")
    rates = {label: [t.trial.settings["learning_rate"] for t in tried if t.trial.label == label] for label in LABELS}
    assert rates == {label: [0.0001, 0.1] for label in LABELS}, "as many trials for each; FedSPU+ES is FedSPU's"
    assert len(tried) == 4
    record = json.loads((tmp_path / "work" / "tuned.json").read_text())
    for label in LABELS:
        scores = {
            each.trial.settings["learning_rate"]: each.points[-1].accuracy_validation.mean
            for each in tried
            if each.trial.label == label
        }
        noted = {
            json.loads(point)["learning_rate"]: score for point, score in record["validation_accuracy"][label].items()
        }
        assert noted == pytest.approx(scores, rel=1e-5)
        best = max(scores, key=scores.__getitem__)
        assert record["tuned"][label] == {"learning_rate": best}
        assert f"{label}: {{'learning_rate': {best}}}" in capsys.readouterr().out or label != LABELS[0]

    before = (tmp_path / "work" / "tuning.jsonl").read_bytes()
    for only in ((), ("--only", LABELS[1])):  # of the others, what was chosen stays
        assert main(command("tune", file, tmp_path / "work", "--processes", "1", "--resume", *only)) == 0
        assert (tmp_path / "work" / "tuning.jsonl").read_bytes() == before
        assert json.loads((tmp_path / "work" / "tuned.json").read_text())["tuned"] == record["tuned"]


def test_what_was_tuned_is_what_is_run(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY + TUNED)
    plan = load_experiment(str(file))
    chosen = {"FedSPU": {"learning_rate": 0.1}, "FedAvg": {"learning_rate": 0.0001}}
    rates = {trial.label: trial.settings["learning_rate"] for trial in trials(plan, "tiny", chosen)}
    assert rates == {"FedSPU": 0.1, "FedAvg": 0.0001, "FedSPU+ES": 0.1}
    assert {trial.settings["evaluation_interval"] for _, _, trial in tuning_trials(plan, "tiny")} == {0}
    assert not {trial.seed for _, _, trial in tuning_trials(plan, "tiny")} & set(plan.seeds), "never on the runs' seeds"


def test_a_method_may_have_a_grid_of_its_own_and_settings_of_its_table_are_merged(tmp_path):
    file = tmp_path / "tiny.toml"
    grid = '"method_settings.proximal_weight" = [0.1, 1.0]'
    fedprox = f'[[methods]]\nlabel = "FedProx"\nmethod = "fedprox"\ngrid = {{ {grid} }}\n'
    own = "settings = { method_settings = { epsilon = 2 } }\n"
    file.write_text(TINY.replace("[axes]", "method_settings.delta = 1\n[axes]") + fedprox + own + TUNED)
    plan = load_experiment(str(file))
    tried = [
        (trial.settings["learning_rate"], trial.settings["method_settings"])
        for label, _, trial in tuning_trials(plan, "tiny")
        if label == "FedProx"
    ]
    assert tried == [
        (rate, {"delta": 1, "epsilon": 2, "proximal_weight": weight}) for rate in (0.0001, 0.1) for weight in (0.1, 1)
    ]
    assert [label for label, _, _ in tuning_trials(plan, "tiny")].count("FedAvg") == 2, "the others are as they were"
    chosen = {"FedProx": {"learning_rate": 0.1, "method_settings.proximal_weight": 1.0}}
    settings = {trial.label: trial.settings for trial in trials(plan, "tiny", chosen)}
    assert settings["FedProx"]["method_settings"] == {"delta": 1, "proximal_weight": 1.0, "epsilon": 2}
    assert settings["FedAvg"]["method_settings"] == {"delta": 1}


def test_options_of_the_data_are_part_of_every_trial_and_its_data_text(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text('data = { test = "published", validation = 0.1 }\n' + TINY + TUNED)
    plan = load_experiment(str(file))
    everything = [*trials(plan, "tiny", {}), *(trial for _, _, trial in tuning_trials(plan, "tiny"))]
    assert {json.dumps(trial.data) for trial in everything} == {'{"test": "published", "validation": 0.1}'}
    wanted = "partition=dirichlet,alpha=0.5,test=published,validation=0.1,seed=0"
    assert {trial.data_text for trial in trials(plan, "tiny", {})} == {wanted}
    dealing = read_dealing(everything[0].data_text, task="mnist", seed=1)
    assert (dealing.test, dealing.validation, dealing.options) == ("published", 0.1, (("alpha", 0.5),))


def test_each_domain_is_left_out_in_turn_and_all_are_tested_on_it(tmp_path):
    file = tmp_path / "tiny.toml"
    left = TINY.replace("dirichlet", "person").replace("alpha = [0.5]", 'leave_out = ["photo", "sketch"]')
    file.write_text(left)
    plan = load_experiment(str(file))
    assert plan.tests_on_published
    found = [read_dealing(trial.data_text, task="pacs", seed=1) for trial in trials(plan, "tiny", {})]
    assert [(each.leave_out, each.test) for each in found] == [("photo", "published")] * 2 + [
        ("sketch", "published")
    ] * 2
    file.write_text('data = { test = "own" }\n' + left)
    assert not load_experiment(str(file)).tests_on_published
    file.write_text('data = { leave_out = "sketch" }\n' + TINY)
    assert load_experiment(str(file)).tests_on_published


def test_fleets_of_different_sizes(tmp_path):
    """Few devices hold large shards, and all of them are awaited and judged."""
    file = tmp_path / "tiny.toml"
    sizes = TINY.replace("alpha = [0.5]", "devices = [2, 5]").replace("[settings]", 'partition = "shards"\n[settings]')
    file.write_text(sizes.replace("rounds = 3", "rounds = 1").replace("cohort = 3", "cohort = 2"))
    assert main(command("run", file, tmp_path / "work", "--processes", "1", "--only", "FedAvg")) == 0
    found = results(tmp_path / "work")
    assert [len(each.result.devices) for each in found] == [3, 6]
    few, many = (np.mean([device.test_examples for device in each.result.devices]) for each in found)
    assert few == pytest.approx(2 * many, rel=0.05)
    assert "devices = 5" in (tmp_path / "work" / "tiny.md").read_text()


# --- other test sets -------------------------------------------------------------------------------------------------


def test_other_test_sets_are_part_of_every_trial_but_not_of_tuning(tmp_path):
    file = tmp_path / "tiny.toml"
    wanted = 'shifts = [0, 0.25]\ncorruptions = ["contrast"]\ntest_on = ["watch"]\n'
    file.write_text(wanted + TINY + TUNED)
    plan = load_experiment(str(file))
    found = next(trials(plan, "tiny", {}))
    contrasts = [{"corruption": "contrast", "severity": severity} for severity in range(1, 6)]
    assert [*found.test_sets] == [{"shift": 0}, {"shift": 0.25}, *contrasts, {"test_on": "watch"}]
    texts = [found.tested_on(each) for each in found.test_sets]
    assert texts[1] == "partition=dirichlet,alpha=0.5,shift=0.25,seed=0"
    assert texts[2] == "partition=dirichlet,alpha=0.5,corruption=contrast,severity=1,seed=0"
    assert not any(trial.test_sets for _, _, trial in tuning_trials(plan, "tiny"))


def test_last_models_are_judged_on_other_test_sets_without_training(tmp_path):
    """Without shift they are what the federation's last evaluation found, fine-tuned copies included."""
    file = tmp_path / "tiny.toml"
    head = TINY[: TINY.index("[[methods]]")].replace("rounds = 3", "rounds = 4").replace("local_steps = 4", "")
    tuned, once = "settings = { finetune_epochs = 1 }", "settings = { method_settings = { iterations = 1 } }"
    methods = {
        "FedSPU": ("fedspu", ""),
        "FedDST+FT": ("feddst", tuned),
        "FedDST+FT+": ("feddst", f'{tuned}\njudged_as = "adaptive"'),
        "FedPer+FT": ("fedper", tuned),
        "Per-FedAvg": ("perfedavg", ""),
        "DM-PFL": ("dmpfl", once),
        "DM-PFL+": ("dmpfl", f'{once}\njudged_as = "adaptive"'),
        "Local": ("local", ""),
    }
    runs = [
        f'[[methods]]\nlabel = "{label}"\nmethod = "{method}"\n{more}\n' for label, (method, more) in methods.items()
    ]
    file.write_text("shifts = [0, 1]\n" + head + "".join(runs))
    assert main(command("run", file, tmp_path / "work", "--processes", "2")) == 0
    found = {each.trial.label: each for each in results(tmp_path / "work")}
    assert set(found) == set(methods)
    for label, each in found.items():
        still, moved = each.shifts
        trained = each.result.devices[:4]
        assert (still.test_set, moved.test_set) == ({"shift": 0}, {"shift": 1})
        assert still.devices == tuple(device.accuracy for device in trained), label
        assert still.devices_global == tuple(device.accuracy_global for device in trained), label
        assert (still.accuracy, still.accuracy_global) == (each.points[-1].accuracy, each.points[-1].accuracy_global)
        assert moved.devices != still.devices
        assert still.accuracy.devices >= 3, "one may never have been drawn"
    assert in_a_clone(["report", str(file), "--folder", str(tmp_path / "work")]) == 0
    assert "| FedDST+FT, global model |" in (tmp_path / "work" / "tiny.md").read_text()
    personal, adaptive = found["DM-PFL"], found["DM-PFL+"]
    assert personal.result.wall_seconds == adaptive.result.wall_seconds, "trained once"
    assert personal.shifts[1].devices_global == adaptive.shifts[1].devices_global
    assert personal.shifts[1].devices != adaptive.shifts[1].devices


def test_test_sets_that_cannot_be_had_are_told_before_anything_is_trained(tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    file.write_text('corruptions = ["contrast"]\n' + TINY)
    assert main(command("run", file, tmp_path / "work", "--processes", "1")) == Exit.USAGE
    assert "corruption=contrast" in capsys.readouterr().err
    assert not (tmp_path / "work" / "results.jsonl").exists()
    assert not list((tmp_path / "work").glob("trials/*/coordinator*")), "nor has a coordinator been started"


# --- what cannot be run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("devices = 4", "devices = "), "Invalid value"),
        (("devices = 4", "devices = 0"), "greater than or equal to 1"),
        (("devices = 4", "device = 4"), "device\n"),
        (("cohort = 3", "cohrt = 3"), "cohrt"),
        (("cohort = 3", "momentum = 2.0"), "momentum"),
        (("new = 1", 'boards = ["pi3"]'), "unknown board 'pi3'; choose from pi4b"),
        (('label = "FedAvg"', 'label = "FedSPU"'), "two methods have the same label"),
        (('method = "fedavg"', 'method = "fedavg"\nbudget = 1'), "budget"),
        (('method = "fedavg"', 'method = "fedavg"\ntuned_as = "FedProx"'), "tuned_as is 'FedProx'"),
        (('method = "fedavg"', 'method = "fedavg"\ngrid = { clip = [1.0] }'), "FedAvg: has a grid but is not tuned"),
        (("new = 1", "data = { of = 3, alpha = 1 }"), "data: alpha, of is set elsewhere in the experiment"),
        (("new = 1", "upload_caps = [100, 0]"), "greater than 0"),
        (("alpha = [0.5]", "devices = [0.5]"), "axes: devices is [0.5]; give whole numbers from 1"),
        (("new = 1", "shifts = [0, 2]"), "less than or equal to 1"),
        (("new = 1", "shifts = [0, 0.0]"), "shifts: a test set is named twice"),
        (("new = 1", "severities = [1]"), "severities need corruptions"),
        (("new = 1", 'corruptions = ["contrast"]\nseverities = [6]'), "less than or equal to 5"),
        (("new = 1", 'corruptions = ["contarst"]'), "unknown corruption 'contarst'"),
        (("new = 1", 'corruptions = ["fog"]'), "corruption=fog exists only for"),
        (
            ("new = 1", 'shifts = [0, 1]\ndata = { test = "published" }'),
            "shifts draw from the devices' own test samples",
        ),
        (("new = 1", "shifts = [0, 1]\ndata = { shift = 0.5 }"), "data: shift is changed by the test sets"),
    ],
)
def test_a_file_that_describes_no_experiment_is_refused_with_what_is_wrong(tmp_path, change, said, capsys):
    file = tmp_path / "wrong.toml"
    assert change[0] in TINY
    file.write_text(TINY.replace(*change))
    assert main(command("run", file, tmp_path / "work")) == Exit.USAGE
    line = capsys.readouterr().err
    assert line.startswith(f"sparrow bench: {file}: ")
    assert " ".join(said.split()) in line
    assert not (tmp_path / "work").exists()


def test_a_setting_is_given_or_tuned(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY + "settings = { learning_rate = 0.3 }\n" + TUNED)
    experiment = load_experiment(str(file))
    assert "FedAvg" not in [run.label for run in experiment.tuned], "its rate is fixed, whatever the common grid"
    file.write_text(file.read_text().replace('tuned_as = "FedSPU"', 'tuned_as = "FedAvg"'))
    with pytest.raises(BadExperiment, match=r"tuned_as\b.*'FedAvg'.*FedSPU"):
        load_experiment(str(file))
    own = 'settings = { method_settings.a = 1 }\ngrid = { "method_settings.a" = [1, 2] }\n'
    file.write_text(TINY + own + TUNED)
    with pytest.raises(BadExperiment, match=r"FedAvg: method_settings\.a\b"):
        load_experiment(str(file))


@pytest.mark.parametrize("name", ["nothing", "nothing.toml"])
def test_an_unknown_experiment_is_told_with_those_there_are(name, capsys):
    assert main(["run", name, "--data", "x"]) == Exit.NOT_FOUND
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"there is no experiment '{name}'; there are .*fedspu-cifar10.*, or give a .toml file$", line)
    assert main(["report", "fedspu-cifar11"]) == Exit.NOT_FOUND
    assert "did you mean fedspu-cifar10?" in capsys.readouterr().err


def test_what_is_not_there_is_told(file, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"\btiny\b.*\[tune\]"):
        main(command("tune", file, tmp_path))
    assert main(["report", str(file), "--folder", str(tmp_path)]) == Exit.NOT_FOUND
    assert "sparrow bench run tiny" in capsys.readouterr().err


def test_data_that_cannot_be_used_end_the_run_with_a_word(tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.replace("alpha = [0.5]", "alhpa = [0.5]"))
    assert main(command("run", file, tmp_path / "work", "--processes", "1")) == Exit.USAGE
    assert "sparrow bench: " in capsys.readouterr().err


def test_a_copy_is_fine_tuned_once_for_all_test_sets(tmp_path, monkeypatch):
    trained = []
    train = OnnxEngine.train
    monkeypatch.setattr(OnnxEngine, "train", lambda *what, **how: (trained.append(1), train(*what, **how))[1])
    head = TINY[: TINY.index("[[methods]]")].replace("rounds = 3", "rounds = 2").replace("new = 1\n", "")
    tuned = '[[methods]]\nlabel = "FedAvg+FT"\nmethod = "fedavg"\nsettings = { finetune_epochs = 1 }\n'
    counts, last = [], []
    for degrees in ("[1]", "[0, 0.5, 1]"):
        file = tmp_path / "tiny.toml"
        file.write_text(f"shifts = {degrees}\n{head}{tuned}")
        before = len(trained)
        assert main(command("run", file, tmp_path / f"work-{len(counts)}", "--processes", "1")) == 0
        counts.append(len(trained) - before)
        (found,) = results(tmp_path / f"work-{len(last)}")
        last.append(found.shifts[-1])
    assert counts[0] == counts[1] > 0
    assert last[0] == last[1], "the same on the same test set, whatever others there are"


def test_what_trains_can_be_asked_for(file, tmp_path, capsys):
    own = "--engine torch --accelerator cpu"
    what = command("run", file, tmp_path / "work", "--processes", "1", "--only", "FedAvg", *own.split())
    assert main(what) == 0
    (found,) = rows.read(tmp_path / "work" / "results.jsonl")
    assert (found.result.engine, found.trial.engine) == ("torch", "torch")
    assert own in (tmp_path / "work" / "tiny.md").read_text(), "the page's command says so"
    capsys.readouterr()
    assert main(command("run", file, tmp_path / "other", "--engine", "onnx", "--accelerator", "cuda")) == Exit.USAGE
    assert "--accelerator cuda" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_accelerator_that_is_not_there_is_refused_before_anything_is_trained(file, tmp_path, capsys):
    assert main(command("run", file, tmp_path / "work", "--accelerator", "cuda")) == Exit.USAGE
    assert "--accelerator cuda, but this PyTorch" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_every_experiment_of_the_repository_can_be_read():

    for path in sorted(FOLDER.glob("*.toml")):
        assert list(trials(load_experiment(path.stem), path.stem, {}))


def test_a_training_that_two_labels_share_is_run_once(tmp_path, capsys):
    """FedAvg is FedAvg+FT less the judging of fine-tuned copies: the same rows as when it is run by itself."""
    tuned = '[[methods]]\nlabel = "FedAvg+FT"\nmethod = "fedavg"\nsettings = { finetune_epochs = 1 }\n'
    plain = '[[methods]]\nlabel = "FedAvg"\nmethod = "fedavg"\n'
    head = TINY[: TINY.index("[[methods]]")].replace("rounds = 3", "rounds = 2").replace("new = 1\n", "")
    found = {}
    for name, methods in (("shared", tuned + plain), ("alone", plain)):
        file = tmp_path / "one.toml"
        file.write_text(head + methods)
        assert main(command("run", file, tmp_path / name, "--processes", "1")) == 0
        found[name] = {each.trial.label: each for each in rows.read(tmp_path / name / "results.jsonl")}
        said, of = capsys.readouterr().err, methods.count("[[methods]]")
        lines = [line for line in said.splitlines() if line.startswith("one: trial ")]
        assert [line.partition(",")[0] for line in lines] == [f"one: trial {n} of {of}" for n in range(1, of + 1)]
        assert "\r" not in said, "without a terminal there is no bar"
    shared, alone = found["shared"]["FedAvg"], found["alone"]["FedAvg"]
    assert shared.trial == alone.trial
    assert [point.accuracy for point in shared.points] == [point.accuracy for point in alone.points]
    assert shared.result.model_sha256 == alone.result.model_sha256
    assert [each.accuracy for each in shared.result.devices] == [each.accuracy for each in alone.result.devices]
    judged = found["shared"]["FedAvg+FT"].points[-1]
    assert judged.accuracy != shared.points[-1].accuracy, "fine-tuned copies do differ"
    assert judged.accuracy_global == shared.points[-1].accuracy


def test_settings_of_fine_tuning_are_tuned_on_one_training(tmp_path):
    """Copies are thrown away: each point of the grid has the rows that a training of its own would have."""
    head = TINY[: TINY.index("[[methods]]")].replace("rounds = 3", "rounds = 2").replace("new = 1\n", "")
    method = '[[methods]]\nlabel = "FedAvg+FT"\nmethod = "fedavg"\n'
    grid = "[tune]\nextensions = 0\ngrid = { finetune_epochs = [1, 3], finetune_learning_rate = [0.01, 0.1] }\n"
    file = tmp_path / "tuned.toml"
    file.write_text(head + method + grid)
    assert main(command("tune", file, tmp_path / "work", "--processes", "1")) == 0
    tried = rows.read(tmp_path / "work" / "tuning.jsonl")
    assert len({each.points[-1].accuracy_validation.mean for each in tried}) > 2
    assert len({each.result.model_sha256 for each in tried}) == 1
    for each in (tried[0], tried[-1]):
        (alone,) = run_trial([each.trial], Where("", tmp_path / "alone", 1))
        found, expected = each.points[-1], alone.points[-1]
        assert found.accuracy_validation.mean == pytest.approx(expected.accuracy_validation.mean, rel=1e-5)
        assert found.accuracy.mean == pytest.approx(expected.accuracy.mean, rel=1e-5)
        assert found.finetune_flops == expected.finetune_flops > 0


def test_a_last_local_stage_leaves_the_rows_without_it_as_they_are(tmp_path):
    """FedPer's are not taken from FedPer+FT's: those have no global model, and judge copies of the personal ones."""
    tuned = '[[methods]]\nlabel = "FedPer+FT"\nmethod = "fedper"\nsettings = { finetune_epochs = 1 }\n'
    file = tmp_path / "one.toml"
    head = TINY[: TINY.index("[[methods]]")].replace("rounds = 3", "rounds = 2").replace("new = 1\n", "")
    file.write_text(head + tuned + '[[methods]]\nlabel = "FedPer"\nmethod = "fedper"\n')
    assert main(command("run", file, tmp_path / "work", "--processes", "1")) == 0
    found = {each.trial.label: each for each in rows.read(tmp_path / "work" / "results.jsonl")}
    assert found["FedPer"].result.model_sha256 == found["FedPer+FT"].result.model_sha256, "the same training"
    assert found["FedPer"].points[-1].accuracy is not None
    assert found["FedPer"].points[-1].accuracy != found["FedPer+FT"].points[-1].accuracy


def test_labels_that_judge_one_training_come_together(tmp_path):
    """Who names one of them has the rows of both, and nothing is trained for the other."""
    head = TINY[: TINY.index("[[methods]]")].replace("rounds = 3", "rounds = 4").replace("local_steps = 4", "")
    method = 'method = "dmpfl"\nsettings = { method_settings = { iterations = 1 } }\n'
    plain, adaptive = f'[[methods]]\nlabel = "DM-PFL"\n{method}', f'[[methods]]\nlabel = "DM-PFL+"\n{method}'
    file = tmp_path / "both.toml"
    file.write_text(head + plain + adaptive + 'judged_as = "adaptive"\n')
    assert main(command("run", file, tmp_path / "work", "--processes", "1", "--only", "DM-PFL+")) == 0
    found = {each.trial.label: each for each in results(tmp_path / "work")}
    assert set(found) == {"DM-PFL", "DM-PFL+"}
    for each in found.values():
        new = each.result.devices[-1]
        assert new.new, "it catches up instead of adapting, and is judged too"
        assert new.test_examples > 0
        assert new.accuracy > 0.5
        assert new.accuracy_global > 0.5
    assert found["DM-PFL"].result.wall_seconds == found["DM-PFL+"].result.wall_seconds, "trained once"
    before = (tmp_path / "work" / "results.jsonl").read_bytes()
    assert main(command("run", file, tmp_path / "work", "--processes", "1", "--resume")) == 0
    assert (tmp_path / "work" / "results.jsonl").read_bytes() == before
