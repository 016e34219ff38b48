"""The committed list of long trials: the order in which they run, their rows, and errors of an impossible list."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import queue
from sparrow.bench import rows
from sparrow.bench.experiment import BadExperiment, load_experiment

LONGER = """
like = "digits"
title = "Longer"
devices = 3
rounds = 2
evaluate_every = 2
seeds = [0, 1]
[settings]
cohort = 2
local_steps = 30
"""


SMALL = """
title = "Small"
task = "npz"
partition = "iid"
devices = 2
rounds = 1
evaluate_every = 1
[settings]
local_steps = 2
[[methods]]
label = "alone"
method = "local"
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A list with a label and a seed of one experiment; the folders of its rows and of its work."""
    monkeypatch.setattr(queue.runner, "TUNED", tmp_path / "tuned.json")
    (tmp_path / "longer.toml").write_text(LONGER)
    (tmp_path / "queue.toml").write_text(
        f'[[entry]]\nexperiment = "{tmp_path}/longer.toml"\nonly = ["FedAvg"]\nseeds = [1]\n'
    )
    return tmp_path / "queue.toml", tmp_path / "results", tmp_path / "work"


def test_an_experiment_inherits_from_the_one_it_is_like(places):
    longer, digits = load_experiment(str(places[0].with_name("longer.toml"))), load_experiment("digits")
    assert (longer.rounds, longer.devices, longer.title) == (2, 3, "Longer")
    assert (longer.task, longer.methods) == (digits.task, digits.methods)


def test_an_experiment_is_like_a_committed_one_alone(places):
    path = places[0].with_name("longer.toml")
    for other in ("nothing", "dmpfl-har-paper"):
        path.write_text(LONGER.replace("digits", other))
        with pytest.raises(BadExperiment, match=f"like is '{other}'"):
            load_experiment(str(path))


@pytest.mark.integration
def test_what_waits_is_run_once_and_its_rows_are_kept(places, capsys):
    path, results, folder = places
    assert [each.trial.name for each in queue.waiting(path, results)] == ["FedAvg/alpha=0.3/seed=1"]
    for _ in range(2):
        queue.work("", path, results, folder)
    assert list(queue.waiting(path, results)) == []
    (recorded,) = rows.read(results / "longer.jsonl")
    assert recorded.trial.name == "FedAvg/alpha=0.3/seed=1"
    assert recorded.points[-1].round == 2
    assert capsys.readouterr().err.count("longer: FedAvg/alpha=0.3/seed=1; 1 left") == 1
    path.write_text(path.read_text() + "anew = true\n")
    assert list(queue.waiting(path, results, folder)) == [], "they say what computed them"
    old = replace(recorded, result=replace(recorded.result, provenance=None))
    rows.append(results / "longer.jsonl", old)
    assert [each.trial.name for each in queue.waiting(path, results, folder)] == ["FedAvg/alpha=0.3/seed=1"]


@pytest.mark.integration
def test_a_small_set_is_made_where_an_entry_runs_on_one(places):
    path, results, folder = places
    path.with_name("small.toml").write_text(SMALL)
    path.write_text(f'[[entry]]\nexperiment = "{path.with_name("small.toml")}"\nsmall = "digits"\n')
    queue.work("", path, results, folder)
    assert (folder / "small" / "digits.npz").exists()
    (recorded,) = rows.read(results / "small.jsonl")
    assert recorded.result.devices[0].loss is not None


@pytest.mark.integration
def test_rows_of_auto_are_kept_once(places):
    path, results, folder = places
    small = path.with_name("small.toml")
    auto = SMALL.replace('method = "local"', 'method = "auto"')
    small.write_text(f'{auto}[[methods]]\nlabel = "a"\nmethod = "local"\n')
    path.write_text(f'[[entry]]\nexperiment = "{small}"\nsmall = "digits"\n')
    queue.work("", path, results, folder)
    kept = [(each.trial.label, each.trial.method) for each in rows.read(results / "small.jsonl")]
    assert kept == [("alone", "fedspu"), ("a", "local")]


@pytest.mark.integration
def test_settings_are_chosen_first_from_the_points_that_are_missing(places, capsys):
    path, results, folder = places
    path.write_text(path.read_text() + "tune = true\n")
    longer = path.with_name("longer.toml")
    longer.write_text(
        longer.read_text() + "[tune]\ngrid = { learning_rate = [1e-9, 0.1] }\nextensions = 0\naxes = { alpha = 0.3 }\n"
    )
    (first, *_) = queue.waiting(path, results, folder)
    assert (first.tunes, first.trial.settings["learning_rate"]) == (True, 1e-9)
    queue.work("", path, results, folder)
    assert list(queue.waiting(path, results, folder)) == []
    assert json.loads(queue.runner.TUNED.read_text())["longer"]["tuned"] == {"FedAvg": {"learning_rate": 0.1}}
    (recorded,) = rows.read(results / "longer.jsonl")
    assert recorded.trial.settings["learning_rate"] == 0.1
    longer.write_text(longer.read_text().replace("[1e-9, 0.1]", "[1e-9, 0.1, 0.2]"))
    assert [each.trial.settings["learning_rate"] for each in queue.waiting(path, results, folder)] == [0.2]
    assert len(rows.read(results / "longer.tuning.jsonl")) == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"FedAvg"', '"FedAvgg"', "has no 'FedAvgg'"),
        ("seeds = [1]", "seeds = [7]", "has no 7"),
        ("seeds", "seed", "seed"),
    ],
)
def test_an_impossible_list_is_refused(places, old, new, why):
    path = places[0]
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadExperiment, match=why):
        list(queue.waiting(path, places[1]))


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="no sessions in this kernel's scheduler")
def test_a_session_without_a_terminal_yields_to_other_sessions():
    lower = "from benchmarks import queue; queue.yield_to_others(); print(open('/proc/self/autogroup').read())"
    said = subprocess.run([sys.executable, "-c", lower], start_new_session=True, capture_output=True, check=True)
    assert said.stdout.decode().split()[-1] == "19"
