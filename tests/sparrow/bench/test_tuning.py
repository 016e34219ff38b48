"""Tuning, on results made by hand: validation data decide, edges move, and what did nothing is no basis of a choice."""

import json

import pytest

from sparrow.bench.__main__ import main
from sparrow.bench.experiment import BadExperiment, Experiment, load_experiment, trials
from sparrow.bench.metrics import Accuracy, Point
from sparrow.bench.report.facts import tuning_lines
from sparrow.bench.rows import Recorded, TrialResult
from sparrow.bench.runner import Where
from sparrow.bench.tuning import NothingActed, search, tune
from sparrow.command_line.exits import Exit

FEDAVG = {"label": "FedAvg", "method": "fedavg"}


def experiment(method=FEDAVG, grid=None, rounds=40, **tuning):
    grid = {"learning_rate": [0.01, 0.03, 0.1]} if grid is None else grid
    plan = {"title": "Tiny", "task": "digits", "devices": 2, "rounds": rounds, "evaluate_every": 10}
    return Experiment.model_validate({**plan, "methods": [method], "tune": {"grid": grid, **tuning}})


def accuracy(mean):
    return Accuracy(2, mean, mean, 0.0, mean)


def recorded(trial, validation, test=0.5, idle=()):
    point = Point(20, accuracy(test), None, accuracy(validation), 0.5, 0, *[0] * 5, *[0.0] * 5, counts={})
    return Recorded(trial, (point,), TrialResult(20, "max_rounds", 9, 9, "", (), 1.0, "a machine", idle=idle))


class Results:
    """Rows of trials as they are asked for. score: settings -> validation accuracy; test, idle: likewise."""

    def __init__(self, score, test=lambda settings: 0.5, idle=lambda settings: ()):
        self.score, self.test, self.idle = score, test, idle
        self.asked, self.beside = [], []

    def __call__(self, trial, others):
        settings = trial.settings
        self.asked.append(settings)
        self.beside.append(len(others))
        return recorded(trial, self.score(settings), self.test(settings), self.idle(settings))

    @property
    def rates(self):
        return [settings["learning_rate"] for settings in self.asked]


def searched(plan, results):
    return search(plan, "tiny", plan.methods[0], results)


def test_validation_decides_and_the_test_set_nothing():
    test = {0.01: 0.99, 0.03: 0.1, 0.1: 0.98}
    validation = {0.01: 0.3, 0.03: 0.6, 0.1: 0.4}
    results = Results(lambda s: validation[s["learning_rate"]], lambda s: test[s["learning_rate"]])
    choice = searched(experiment(), results)
    assert choice.best == {"learning_rate": 0.03}
    assert choice.scores == {json.dumps({"learning_rate": rate}): score for rate, score in validation.items()}
    assert results.rates == [0.01, 0.03, 0.1], "the best is inside, so the grid stays as it is"
    assert (choice.beyond, choice.open_edges) == ([], {})


@pytest.mark.parametrize(
    ("best", "tried"),
    [(0.33, [0.33, 1.1]), (0.0033, [0.0033, 0.0011])],
)
def test_a_rate_that_wins_at_the_edge_extends_the_grid_until_it_is_inside(best, tried):
    results = Results(lambda s: 1 / (1 + abs(s["learning_rate"] - best)))
    choice = searched(experiment(), results)
    assert results.rates == [0.01, 0.03, 0.1, *tried]
    assert choice.best == {"learning_rate": best}
    assert choice.beyond == [{"learning_rate": rate} for rate in tried]
    assert choice.open_edges == {}


def test_the_grid_is_extended_up_to_a_recorded_limit():
    results = Results(lambda s: s["learning_rate"])
    choice = searched(experiment(extensions=2), results)
    assert results.rates == [0.01, 0.03, 0.1, 0.33, 1.1]
    assert (choice.best, choice.open_edges) == ({"learning_rate": 1.1}, {"learning_rate": [3.7]})


def test_beyond_a_setting_s_bounds_nothing_is_tried():
    results = Results(lambda s: s["learning_rate"])
    choice = searched(experiment(grid={"learning_rate": [10, 100]}), results)
    assert results.rates == [10, 100], "a rate of 1,000 is none"
    assert choice.best == {"learning_rate": 100}


def test_fine_tuning_is_tuned_like_everything_else():
    """Its rate goes on from its edge, with the other settings as in the best point; epochs and clip do not."""
    grid = {"finetune_epochs": [1, 2], "finetune_learning_rate": [0.05, 0.1], "clip": [1.0, 2.0]}
    results = Results(lambda s: s["clip"] - abs(s["finetune_epochs"] - 4) - abs(s["finetune_learning_rate"] - 0.2))
    choice = searched(experiment({**FEDAVG, "grid": grid}, {"local_epochs": [3]}), results)
    assert choice.best == {"local_epochs": 3, "finetune_epochs": 2, "finetune_learning_rate": 0.2, "clip": 2.0}
    assert choice.open_edges == {}
    assert {settings["clip"] for settings in results.asked} == {1.0, 2.0}
    assert len(results.asked) == 8 + len(choice.beyond)


# --- long enough ---------------------------------------------------------------------------------------------------


def test_a_tuning_run_has_half_the_rounds_by_default():
    short = {**FEDAVG, "settings": {"rounds": 13}}
    for plan, rounds in ((experiment(), 20), (experiment(short), 7), (experiment(rounds=30), 15)):
        results = Results(lambda s: 0.5)
        assert searched(plan, results).rounds == rounds
        assert {settings["rounds"] for settings in results.asked} == {rounds}
    assert searched(experiment(rounds=40), Results(lambda s: 0.5)).rounds == 20


def test_shorter_tuning_runs_are_refused(tmp_path):
    plan = Experiment.model_validate({**experiment().model_dump(), "tune": {"grid": {"clip": [1.0]}, "rounds": 19}})
    with pytest.raises(BadExperiment, match=r"rounds is 19\b.*FedAvg.*\b20 rounds"):
        tune(plan, "tiny", Where("", tmp_path), scale=1.0, resume=False)
    assert not (tmp_path / "tuned.json").exists()


def test_trials_in_which_nothing_acted_are_no_basis_of_a_choice():
    idle = Results(lambda s: 0.5, idle=lambda s: ("replaced",))
    said = r"FedAvg: mechanism idle in every tuning trial \(replaced stayed 0 over 10 rounds\).*\[tune\] rounds = 20"
    with pytest.raises(NothingActed, match=said):
        searched(experiment(rounds=20), idle)
    assert len(idle.asked) == 3, "nor is the grid extended"
    whole = Experiment.model_validate({**experiment().model_dump(), "tune": {"grid": {"clip": [1.0]}, "rounds": 40}})
    with pytest.raises(NothingActed, match="40 rounds"):
        searched(whole, idle)
    some = Results(lambda s: s["learning_rate"], idle=lambda s: ("replaced",) if s["learning_rate"] > 0.05 else ())
    choice = searched(experiment(), some)
    assert choice.best == {"learning_rate": 0.03}, "the rate of 0.1 counts more, but nothing was replaced"
    assert choice.scores['{"learning_rate": 0.1}'] is None


def test_of_a_grid_that_is_not_complete_nothing_is_chosen():
    rates = {0.01: 0.5, 0.03: 0.6}
    plan = experiment()
    assert searched(plan, lambda t, _: recorded(t, 0.5) if t.settings["learning_rate"] in rates else None) is None


# --- what is told ---------------------------------------------------------------------------------------------------


def test_the_page_tells_short_runs_and_edges():
    plan = Experiment.model_validate(
        {**experiment().model_dump(), "tune": {"grid": {"learning_rate": [0.1, 0.2]}, "rounds": 10}}
    )
    points = {'{"learning_rate": 0.1}': 0.5, '{"learning_rate": 0.2}': 0.75}
    record = {"tuned": {"FedAvg": {"learning_rate": 0.2}}, "validation_accuracy": {"FedAvg": points}}
    row = "| FedAvg | learning_rate = 0.2 | 75.0 | 2 | 10 of 40, **too short** | **at the edge**: learning_rate |"
    assert row in tuning_lines(plan, record)
    wider = {**points, '{"learning_rate": 0.4}': None}
    record |= {"validation_accuracy": {"FedAvg": wider}, "rounds": {"FedAvg": 20}}
    assert "| FedAvg | learning_rate = 0.2 | 75.0 | 3, 1 idle | 20 of 40 | inside |" in tuning_lines(plan, record)
    assert tuning_lines(plan, {}) == []


@pytest.mark.parametrize(
    ("command", "label", "said"),
    [
        ("run", "FedSPU+SE", "no method of this label is run (did you mean FedSPU+ES?); there are FedSPU, FedSPU+ES,"),
        (
            "tune",
            "FedSPU+ES",
            "no method of this label is tuned separately (did you mean FedSPU?); there are FedSPU, FedAvg",
        ),
    ],
)
def test_only_names_a_label_that_there_is(command, label, said, capsys, tmp_path):
    arguments = [command, "fedspu-cifar10", "--only", label, "--folder", str(tmp_path / "work")]
    assert main(arguments) == Exit.USAGE
    assert f"--only {label}: {said}" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_seed_that_there_is_not_is_refused(capsys, tmp_path):
    work = tmp_path / "work"
    assert main(["run", "fedspu-cifar10", "--seed", "0", "--seed", "7", "--folder", str(work)]) == Exit.USAGE
    assert "--seed 7: there are 0, 1, 2" in capsys.readouterr().err
    assert not work.exists()


def test_the_plain_form_of_a_fine_tuned_label_says_so(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(
        'title = "Tiny"\ntask = "digits"\ndevices = 2\nrounds = 4\nevaluate_every = 2\n'
        '[[methods]]\nlabel = "FedAvg+FT"\nmethod = "fedavg"\ngrid = { finetune_epochs = [1, 5] }\n'
        '[[methods]]\nlabel = "FedAvg"\nmethod = "fedavg"\ntuned_as = "FedAvg+FT"\nsettings = { finetune_epochs = 0 }\n'
        "[tune]\ngrid = { learning_rate = [0.1, 0.2] }\n"
    )
    chosen = {"FedAvg+FT": {"learning_rate": 0.2, "finetune_epochs": 5}}
    found = {each.label: each.settings for each in trials(load_experiment(str(file)), "tiny", chosen)}
    assert [found[label]["finetune_epochs"] for label in ("FedAvg+FT", "FedAvg")] == [5, 0]
    assert {settings["learning_rate"] for settings in found.values()} == {0.2}
