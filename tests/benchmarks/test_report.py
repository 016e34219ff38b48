"""The report's figures against sums done by hand, on trials made by hand."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.report.costs import STOPPING_COSTS, accuracy_at, at_equal_cost, cost_sections, stopping_sections
from benchmarks.report.page import draw_all, more_sections, write_page
from benchmarks.report.savings import savings, stopping_pairs
from benchmarks.report.shifts import shift_curve
from benchmarks.report.uploads import best_within
from edge_sdk.methods import Evaluated, load_method
from sparrow.bench import rows
from sparrow.bench.experiment import Experiment, load_experiment, trials
from sparrow.bench.html import write_html
from sparrow.bench.metrics import Accuracy, Point, shifted
from sparrow.bench.provenance import Provenance
from sparrow.bench.report import idle
from sparrow.bench.report import page as core
from sparrow.bench.report.comparisons import paired
from sparrow.bench.report.figures import groups
from sparrow.bench.report.pictures import curve
from sparrow.bench.report.summary import summary
from sparrow.bench.rows import DeviceResult, Recorded, TrialResult
from sparrow.protocol.messages import Evaluation

COMMAND = "python -m benchmarks report tiny"
FEDSPU = {"label": "FedSPU", "method": "fedspu", "budgets": [0.5, 1.0]}
FEDSPU_ES = {
    **FEDSPU,
    "label": "FedSPU+ES",
    "tuned_as": "FedSPU",
    "settings": {"early_stopping": "paper", "patience": 2},
}
FEDAVG = {"label": "FedAvg", "method": "fedavg"}


report_text = partial(core.report_text, more=more_sections)


def experiment(**changes):
    return Experiment.model_validate(
        {
            "title": "Tiny",
            "about": "Figures that can be checked by hand.",
            "task": "digits",
            "devices": 2,
            "rounds": 20,
            "evaluate_every": 10,
            "seeds": [0, 1],
            "settings": {"cohort": 2},
            "axes": {"alpha": [0.1, 1.0]},
            "methods": [FEDSPU, FEDSPU_ES, FEDAVG],
            "tune": {"grid": {"learning_rate": [0.1, 0.2]}, "rounds": 5},
            **changes,
        }
    )


def accuracy(mean):
    return Accuracy(devices=2, mean=mean, weighted=mean, std=0.0, bottom_decile=mean)


def point(number, mean, scale=1.0, **changes):
    return Point(
        **{
            "round": number,
            "accuracy": accuracy(mean),
            "accuracy_global": None,
            "accuracy_validation": None,
            "train_loss": 0.5,
            "stopped": 0,
            "bytes_up": int(1_000_000 * number * scale),
            "bytes_down": int(2_000_000 * number * scale),
            "evaluation_bytes_up": 30_000,
            "evaluation_bytes_down": 4_000_000,
            "training_flops": int(5_000_000_000 * number * scale),
            "seconds": 3.0 * number,
            "joules_measured": 0.0,
            "joules_estimated": 7.0 * number * scale,
            "seconds_without_joules": 0.25 * number,
            "wall_seconds": 1.5 * number,
            **changes,
        }
    )


def device(index, accuracy, *, examples=10, rounds=20, stopped=None, new=False, shared=None):
    return DeviceResult(f"device-{index}", 0.5, new, examples, accuracy, shared, rounds, stopped, 2000 * (index + 1))


def record(trial, devices, points=None, **changes):
    """A trial as recorded: with two devices of 10 and 30 test samples, unless they are given whole."""
    devices = tuple(
        each if isinstance(each, DeviceResult) else device(index, each, examples=(10, 30)[index])
        for index, each in enumerate(devices)
    )
    result = {"rounds": 20, "reason": "max_rounds", "parameters": 1234, "inference_flops": 2_500_000}
    result |= {"model_sha256": "0" * 64, "wall_seconds": 30.0, "machine": "2 cores, Linux", **changes}
    return Recorded(trial, points or (point(10, 0.5), point(20, 0.8)), TrialResult(**result, devices=devices))


def run(plan, results):
    """Every trial of the experiment; results: (label, seed) -> accuracies of its devices, at every alpha."""
    return [
        record(trial, results[trial.label, trial.seed])
        for trial in trials(plan, "tiny", {"FedSPU": {"learning_rate": 0.2}, "FedAvg": {"learning_rate": 0.1}})
        if (trial.label, trial.seed) in results
    ]


RESULTS = {
    ("FedSPU", 0): (0.9, 0.7),
    ("FedSPU", 1): (0.8, 0.8),
    ("FedSPU+ES", 0): (0.9, 0.6),
    ("FedSPU+ES", 1): (0.8, 0.8),
    ("FedAvg", 0): (0.6, 0.8),
    ("FedAvg", 1): (0.5, 0.8),
}


@pytest.fixture(scope="module")
def plan():
    return experiment()


@pytest.fixture(scope="module")
def recorded(plan):
    return run(plan, RESULTS)


def cells(page, row, section):
    """The cells of the first row that begins so after that heading, without bold."""
    text = page[page.index(f"## {section}") :]
    line = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip().replace("**", "") for cell in line.group(1).split("|")]


def test_accuracy_is_mean_and_spread_over_seeds(plan, recorded):
    page = report_text(plan, recorded, command=COMMAND)
    # One column for each alpha: FedAvg's seeds have means 0.7 and 0.65; their sample standard deviation is 0.0354.
    assert cells(page, "FedAvg", "Accuracy after") == ["67.5 ± 3.5", "67.5 ± 3.5"]
    # Weighted: (0.6*10 + 0.8*30)/40 = 0.75 and 0.725; over devices: 0.1 and 0.15; worst device: 0.6 and 0.5.
    at_alpha = page[page.index("### alpha = 0.1") :]
    assert cells("## x\n" + at_alpha, "FedAvg", "x") == ["67.5 ± 3.5", "73.8", "12.5", "55.0", "–", "2 of 2"]


def test_the_summary_has_each_label_with_its_interval_and_the_difference(plan, recorded):
    head, *lines = summary(plan, recorded).splitlines()
    assert "FedSPU minus it, points" in head
    # FedAvg's seeds have means 70 and 65: 67.5 ± 12.706 * 2.5, cut at 100 above none; FedSPU's two are both 80.
    assert re.match(r"alpha = 0.1: FedSPU +80.0 \(80.0 to 80.0\) +75.0 +– +20 +40 +60$", lines[0])
    assert re.match(r"alpha = 0.1: FedAvg +67.5 \(35.7 to 99.3\) +55.0 +\+12.5 \(-19.3 to \+44.3\) ", lines[2])
    assert "Means over 2 devices and 2 seeds" in lines[-1]


def test_the_summary_counts_the_seeds_that_were_run(plan, recorded):
    """Not those of the plan: a preview with --seed is of one."""
    one = [each for each in recorded if each.trial.seed == plan.seeds[0]]
    said = summary(plan, one).splitlines()[-1]
    assert "Means over 2 devices and 1 seed, " in said
    assert "over the devices of the one seed only" in said


def test_a_page_of_markdown_becomes_one_of_html(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    page = tmp_path / "a.md"
    page.write_text(
        "# A & B\n\n- one: `x<y`\n- two\n\n|  | a |\n|---|---|\n| b | **1** |\n\nText, *so*:\n\n![a](a.png)\n"
    )
    text = write_html(page).read_text()
    for part in (
        "<title>A &amp; B</title>",
        "<h1>A &amp; B</h1>",
        "<ul><li>one: <code>x&lt;y</code></li><li>two</li></ul>",
        "<tr><th></th><th>a</th></tr><tr><td>b</td><td><b>1</b></td></tr>",
        "<p>Text, <i>so</i>:</p>",
        'src="data:image/png;base64,cGljdHVyZQ=="',
    ):
        assert part in text


def test_costs_are_those_of_the_last_point_in_units(plan, recorded):
    page = report_text(plan, recorded, command=COMMAND)
    # Best is 0.8 at round 20; 80 % of it is 0.64, which 0.5 at round 10 has not.
    costs = ["20", "20", "20", "20", "40", "0.03", "4", "100", "100", "2.5", "not counted", "3"]
    assert cells(page, "FedSPU", "Rounds, traffic") == costs
    assert cells(page, "FedSPU", "Time and energy") == ["60", "–", "140", "5", "30"]


def test_the_page_says_how_it_came_about(plan, recorded):
    page = report_text(plan, recorded, command=COMMAND)
    assert page.startswith("# Tiny\n\nFigures that can be checked by hand.\n")
    for fact in (
        "- Task: digits, 1,234 parameters",
        "- Partition: dirichlet; alpha in 0.1, 1.0",
        "- Devices: 2\n",
        "- Rounds: at most 20, judged every 10 rounds and at the end",
        "- Settings of all: cohort = 2",
        "- Tuned: learning_rate in 0.1, 0.2; 5 rounds, seeds 1000, on validation data",
        "- Machine: 2 cores, Linux",
        "- Computed by: not recorded, the rows are older\n",
        f"- Command: `{COMMAND}`",
    ):
        assert fact in page
    assert (
        "| FedSPU+ES | fedspu | 0.5, 1.0 | early_stopping = paper, patience = 2 | learning_rate = 0.2, as FedSPU |"
        in page
    )
    assert "| FedAvg | fedavg | 1.0 | – | learning_rate = 0.1 |" in page
    assert "Incomplete" not in page
    assert "trials ran with" not in page


def test_a_page_says_what_computed_its_trials(plan):
    known = Provenance("abcdef0123456789", 2, {"python": "3.11.7", "torch": "2.13.0"}, "AMD EPYC", ("avx2", "fma"), 1)
    first, *others = list(trials(plan, "tiny", {}))[:3]
    one, older = record(first, (0.5, 0.5), provenance=known), [record(each, (0.5, 0.5)) for each in others]
    said = "commit abcdef0123 with 2 changed files, python 3.11.7, torch 2.13.0, AMD EPYC (avx2 fma), threads: 1"
    assert f"- Computed by: {said}\n" in report_text(plan, [one], command=COMMAND)
    both = report_text(plan, [one, *older], command=COMMAND)
    assert f"- Computed by: 1 of 3 trials: {said}; 2 of 3 trials: not recorded, the rows are older\n" in both


def test_paired_difference_with_students_interval(plan, recorded):
    [group, _] = groups(plan, recorded)
    pair = paired(group.trials["FedSPU"], group.trials["FedAvg"])
    # Seed 0: +30, -10; seed 1: +30, 0. Means 10 and 15; t(0.975, 1) = 12.706, standard error 2.5.
    assert pair.mean == pytest.approx(12.5)
    assert pair.interval == pytest.approx((12.5 - 12.7062 * 2.5, 12.5 + 12.7062 * 2.5), abs=1e-3)
    assert (pair.seeds, pair.pairs) == (2, 4)
    assert (pair.better, pair.equal, pair.worse) == (0.5, 0.25, 0.25)
    row = cells(report_text(plan, recorded, command=COMMAND), "FedAvg", "FedSPU against")
    assert row == ["+12.5 (-19.3 to +44.3)", "50 / 25 / 25", "4 in 2 seeds"]


def test_devices_of_a_budget_are_compared_apart():
    fedspu = FEDSPU | {"budgets": [0.2, 1.0]}
    plan = experiment(seeds=[0, 1], axes={}, methods=[fedspu, FEDAVG], tune=None)
    accuracies = {"FedSPU": [(0.7, 0.5), (0.8, 0.5)], "FedAvg": [(0.6, 0.6), (0.6, 0.6)]}
    done = []
    for trial in trials(plan, "tiny", {}):
        budgets = trial.budgets * 2
        devices = [
            replace(device(index, each), budget=budgets[index])
            for index, each in enumerate(accuracies[trial.label][trial.seed])
        ]
        done.append(record(trial, devices))
    page = report_text(plan, done, command=COMMAND)
    assert cells(page, "FedSPU, %", "By budget") == ["75.0 ± 7.1", "50.0 ± 0.0"]
    # Of p = 0.2: +10 and +20; t(0.975, 1) = 12.706, standard error 5.
    assert cells(page, "minus FedAvg", "By budget") == ["+15.0 (-48.5 to +78.5)", "-10.0 (-10.0 to -10.0)"]


def test_one_seed_has_the_bootstrap_over_devices():
    plan = experiment(seeds=[0], axes={}, devices=40, methods=[FEDSPU, FEDAVG], tune=None)
    [first, other] = trials(plan, "tiny", {})
    accuracies = [0.5 + 0.01 * index for index in range(40)]
    done = [
        record(first, [device(index, each) for index, each in enumerate(accuracies)]),
        record(other, [device(index, 0.5) for index in range(40)]),
    ]
    [group] = groups(plan, done)
    pair = paired(group.trials["FedSPU"], group.trials["FedAvg"])
    assert pair.mean == pytest.approx(19.5)
    # The mean of 40 has a standard error of sqrt((40**2 - 1) / 12 / 40) = 1.825 points.
    half = 1.96 * math.sqrt((40**2 - 1) / 12 / 40)
    assert pair.interval == pytest.approx((19.5 - half, 19.5 + half), abs=0.15)
    assert paired(group.trials["FedSPU"], group.trials["FedAvg"]) == pair  # chance is seeded
    page = report_text(plan, done, command=COMMAND)
    assert "over the devices of one seed (bootstrap, 10,000 resamples)" in page
    assert "±" not in page
    assert cells(page, "FedSPU", "Accuracy after")[0] == "69.5"


def test_pairs_with_different_data_are_refused(plan):
    [first, *_] = trials(plan, "tiny", {})
    with pytest.raises(SystemExit, match="device-0 has 10 test samples here and 11"):
        paired([record(first, [device(0, 0.5)])], [record(first, [device(0, 0.5, examples=11)])])


def test_a_device_that_was_not_judged_is_left_out(plan):
    [first, *_] = trials(plan, "tiny", {})
    unjudged = device(0, None, examples=0)
    pair = paired([record(first, [unjudged, 0.8])], [record(first, (0.5, 0.5))])
    assert (pair.mean, pair.pairs) == (pytest.approx(30.0), 1)
    assert paired([record(first, [unjudged])], [record(first, (0.5, 0.5))]) is None


def test_early_stopping_saves(plan):
    done = []
    for trial in trials(plan, "tiny", {}):
        accuracies = RESULTS[trial.label, trial.seed]
        if trial.label == "FedSPU+ES":  # half of everything, and of device-rounds 12 + 18 of 40
            devices = (
                device(0, accuracies[0], rounds=12, stopped=12),
                device(1, accuracies[1], examples=30, rounds=18),
            )
            done.append(record(trial, devices, (point(20, 0.8, 0.5),), rounds=18 + trial.seed, reason="all_stopped"))
        else:
            done.append(record(trial, accuracies))
    [group, _] = groups(plan, done)
    [saving] = savings(group)
    assert (saving.label, saving.without) == ("FedSPU+ES", "FedSPU")
    assert saving.device_rounds == pytest.approx(0.25)
    assert saving.traffic == saving.training_flops == saving.joules_estimated == pytest.approx(0.5)
    assert saving.joules_measured is None
    assert saving.difference.mean == pytest.approx(-2.5)
    page = report_text(plan, done, command=COMMAND)
    row = cells(page, "FedSPU+ES", "Savings of early stopping")
    assert row[:6] == ["FedSPU", "25.0", "50.0", "50.0", "–", "50.0"]
    assert cells(page, "FedSPU+ES", "Early stops") == ["1 of 2", "12 / 12 / 12", "18.5", "all_stopped", "30"]
    assert "| FedAvg |" not in page[page.index("## Early stops") : page.index("## Rounds, traffic")]


def test_a_label_with_other_settings_beside_early_stopping_is_no_saving():
    other = {**FEDSPU_ES, "settings": {"early_stopping": "paper", "local_epochs": 7}}
    plan = experiment(methods=[FEDSPU, other, FEDAVG])
    assert savings(groups(plan, run(plan, RESULTS))[0]) == []


def test_missing_trials_are_said_above_the_tables(plan, recorded):
    some = [each for each in recorded if each.trial.seed == 0 and each.trial.label != "FedAvg"]
    page = report_text(plan, some, command=COMMAND)
    said = page.index("**Incomplete: 4 of 12 trials.**")
    assert said < page.index("## Accuracy after")
    at_alpha = "## x\n" + page[page.index("### alpha = 0.1") :]
    assert cells(at_alpha, "FedSPU", "x")[-1] == "1 of 2"
    assert set(cells(at_alpha, "FedAvg", "x")) == {"–"}
    assert set(cells(page, "FedAvg", "FedSPU against")) == {"–"}
    assert cells(page, "FedSPU+ES", "FedSPU against")[-1] == "2 in 1 seed"


def test_nothing_recorded_is_said(plan, tmp_path):
    with pytest.raises(SystemExit, match="no trial of 'Tiny' is recorded yet"):
        write_page(plan, [], tmp_path / "results", command=COMMAND, tuning={})
    assert not (tmp_path / "results").exists()


def test_trials_that_were_run_otherwise_are_said(plan):
    short = [record(trial, RESULTS[trial.label, trial.seed]) for trial in trials(plan, "tiny", {}, scale=0.1)]
    page = report_text(plan, short, command=COMMAND)
    assert "**12 of 12 trials ran with rounds = 2, in the file 20.**" in page
    gone = experiment(methods=[FEDSPU, FEDAVG])
    page = report_text(gone, short, command=COMMAND)
    assert "**Left out: 4 recorded trials that are not of this experiment (any more).**" in page
    assert "FedSPU+ES" not in page


def test_settings_of_a_table_are_told_and_compared_one_by_one():
    fedprox = {"label": "FedProx", "method": "fedprox", "grid": {"method_settings.proximal_weight": [0.1, 1.0]}}
    other = {
        "label": "FedProx+",
        "method": "fedprox",
        "tuned_as": "FedProx",
        "settings": {"method_settings": {"cut": 2}},
    }
    plan = experiment(axes={}, seeds=[0], methods=[fedprox, other], data={"validation": 0.1})
    chosen = {"FedProx": {"learning_rate": 0.2, "method_settings.proximal_weight": 0.1}}
    done = [record(trial, (0.5, 0.5)) for trial in trials(plan, "tiny", chosen)]
    page = report_text(plan, done, command=COMMAND)
    tuned = "learning_rate = 0.2, method_settings.proximal_weight = 0.1"
    assert f"| FedProx | fedprox | 1.0 | – | {tuned} |" in page
    assert f"| FedProx+ | fedprox | 1.0 | method_settings.cut = 2 | {tuned}, as FedProx |" in page
    assert "- Tuned: learning_rate in 0.1, 0.2; FedProx: method_settings.proximal_weight in 0.1, 1.0; 5 rounds" in page
    assert "trials ran with" not in page
    changed = experiment(axes={}, seeds=[0], methods=[fedprox, {**other, "settings": {}}], data={"validation": 0.2})
    page = report_text(changed, done, command=COMMAND)
    assert "**1 of 2 trials ran with method_settings.cut = 2, in the file None.**" in page
    assert "**2 of 2 trials ran with data.validation = 0.1, in the file 0.2.**" in page


def test_the_last_rows_of_a_trial_that_was_run_again_count(plan, recorded):
    again = record(recorded[0].trial, (1.0, 1.0))
    assert groups(plan, [*recorded, again])[0].trials["FedSPU"][0] is again


def test_new_devices_stand_apart():
    plan = experiment(seeds=[0], axes={}, methods=[FEDSPU], new=1, tune=None)
    [trial] = trials(plan, "tiny", {})
    devices = (device(0, 0.9, shared=0.4), device(1, 0.7, shared=0.6), device(2, 0.25, new=True))
    page = report_text(plan, [record(trial, devices)], command=COMMAND)
    assert cells(page, "FedSPU", "Accuracy after") == ["80.0", "80.0", "10.0", "70.0", "50.0", "25.0", "1 of 1"]
    assert "- Devices: 2, and 1 new ones" in page
    assert "against the others" not in page


def test_a_curve_stays_where_a_trial_ended(plan):
    [trial, *_] = trials(plan, "tiny", {})
    early = record(trial, (0.5, 0.5), (point(10, 0.4), point(15, 0.6)))
    late = record(trial, (0.5, 0.5), (point(5, 0.1), point(10, 0.2), point(20, 0.4)))
    drawn = curve([early, late], lambda each: each.round, lambda each: each.mean)
    assert drawn.x == [10, 12.5, 17.5]
    assert drawn.y == pytest.approx([30, 40, 50])
    assert drawn.low == pytest.approx([20, 20, 40])
    assert drawn.high == pytest.approx([40, 60, 60])
    assert curve([], lambda each: each.round, lambda each: each.mean) is None


# --- what the mechanism did -----------------------------------------------------------------------------------------


@pytest.fixture
def replacing(monkeypatch):
    """FedSPU as a method that proves itself by two counts."""
    found = replace(load_method("fedspu"), acts=("replaced", "union"), act_on={"replaced": "dropped"})
    plain = replace(load_method("fedavg"), acts=())
    monkeypatch.setattr(idle, "load_method", {"fedspu": found, "fedavg": plain}.__getitem__)


def counted(trial, counts, notes=None, idle=()):
    points = (point(20, 0.8, counts=counts, notes=notes or {}),)
    return record(trial, (0.5, 0.5), points, idle=idle)


def test_counts_are_on_the_page_and_an_idle_trial_is_marked(replacing):
    plan = experiment(axes={}, methods=[FEDSPU, FEDSPU_ES, FEDAVG], tune=None)
    done = []
    for trial in trials(plan, "tiny", {}):
        acted = trial.label == "FedSPU" or trial.seed == 0
        counts = {"replaced": 3000 * (trial.seed + 1) if acted else 0} if trial.method == "fedspu" else {}
        done.append(counted(trial, counts, {"union": 7}, () if acted or not counts else ("replaced",)))
    page = report_text(plan, done, command=COMMAND)
    assert cells(page, "FedSPU", "What the mechanism") == ["acted", "replaced 4,500, union 7"]
    marked = ["mechanism idle: no replaced in 1 of 2 trials", "devices_stopped 0, replaced 1,500, union 7"]
    assert cells(page, "FedSPU+ES", "What the mechanism") == marked
    assert cells(page, "FedAvg", "What the mechanism") == ["–", "union 7"]
    assert page.index("**FedSPU+ES: mechanism idle in 1 trial** (no replaced)") < page.index("## Accuracy after")
    assert "FedSPU+ES: mechanism idle in 1 trial (no replaced)" in summary(plan, done)
    assert "**FedSPU: mechanism idle" not in page


def test_a_mechanism_that_touched_little_of_what_it_may_is_marked(replacing):
    plan = experiment(axes={}, methods=[FEDSPU, FEDAVG], tune=None)
    done = [
        counted(trial, {"replaced": [4, 6][trial.seed], "dropped": 1000}, {"union": 7})
        for trial in trials(plan, "tiny", {})
    ]
    page = report_text(plan, done, command=COMMAND)
    assert (
        cells(page, "FedSPU", "What the mechanism")[0]
        == "mechanism had little effect: 0.5 % of the dropped weights are replaced"
    )
    assert "**FedSPU: the mechanism had little effect** (only 0.5 % of the dropped weights are replaced)" in page
    more = [counted(each.trial, {"replaced": 20, "dropped": 1000}, {"union": 7}) for each in done]
    page = report_text(plan, more, command=COMMAND)
    assert cells(page, "FedSPU", "What the mechanism")[0] == "acted: 2 % of the dropped weights are replaced"
    assert "little effect**" not in page


def test_rows_without_counts_say_not_counted(replacing, plan, recorded):
    page = report_text(plan, recorded, command=COMMAND)
    assert cells(page, "FedSPU", "What the mechanism") == ["not counted", "not counted"]
    assert cells(page, "FedAvg", "What the mechanism") == ["–", "not counted"]
    assert "mechanism idle in" not in page


def test_missing_counts_of_old_rows_are_zero(replacing):
    """Such rows have what was counted among their notes, and nothing of what was zero."""
    paper = {**FEDSPU, "label": "FedSPU (paper)"}
    plan = experiment(axes={}, seeds=[0], methods=[FEDSPU, paper], tune=None)
    [ours, theirs] = trials(plan, "tiny", {})
    acted = counted(ours, None, {"replaced": 9, "union": 7}, None)
    dead = counted(theirs, None, {"union": 7}, None)
    page = report_text(plan, [acted, dead], command=COMMAND)
    assert cells(page, "FedSPU", "What the mechanism")[0] == "acted"
    assert cells(page, "FedSPU (paper)", "What the mechanism")[0] == "mechanism idle: no replaced"
    page = report_text(plan, [dead, replace(dead, trial=ours)], command=COMMAND)
    assert cells(page, "FedSPU (paper)", "What the mechanism")[0] == "not counted", "no row has it"
    newer = counted(ours, {"replaced": 9, "union": 7})
    page = report_text(plan, [newer, dead], command=COMMAND)
    assert cells(page, "FedSPU (paper)", "What the mechanism")[0] == "not counted", "but a newer one, which counts more"


# --- at equal cost ---------------------------------------------------------------------------------------------------


def test_labels_are_compared_at_equal_upload_flops_and_joules():
    plan = experiment(axes={}, methods=[FEDSPU, FEDAVG], tune=None)
    done = []
    for trial in trials(plan, "tiny", {}):
        if trial.label == "FedSPU":  # half of the costs
            points = (point(10, 0.4, 0.5, joules_estimated=10.0), point(20, 0.6 + 0.1 * trial.seed, 0.5))
        else:  # at half of its costs, which is round 10, it has 0.5
            points = (point(5, 0.3, 0.5), point(10, 0.5), point(20, 0.7))
            points = tuple(replace(each, joules_estimated=0.0) for each in points)
        done.append(record(trial, (0.5, 0.5), points))
    page = report_text(plan, done, command=COMMAND)
    # Differences of the seeds: 0.6 - 0.5 and 0.7 - 0.5; half an interval of two is 12.706 * 10 / 2.
    both = "+15.0 (-48.5 to +78.5)"
    assert cells(page, "FedAvg", "At equal cost") == [both, both, "–"], "the joules of one are unknown"


def test_fine_tuned_copies_count_among_the_flops_and_old_rows_say_that_they_do_not():
    tuned = {**FEDAVG, "label": "FedAvg+FT", "settings": {"finetune_epochs": 1}}
    plan = experiment(axes={}, seeds=[0], methods=[FEDSPU, tuned], tune=None)
    [first, other] = trials(plan, "tiny", {})
    points = tuple(point(number, mean, finetune_flops=10**10) for number, mean in ((10, 0.5), (20, 0.8)))
    done = [record(first, (0.5, 0.5)), record(other, (0.5, 0.5), points)]
    page = report_text(plan, done, command=COMMAND)
    assert cells(page, "FedAvg+FT", "Rounds, traffic")[7:9] == ["100", "110"]
    # 100 GFLOP of FedSPU; FedAvg+FT has 60 after ten rounds and 110 after twenty: four fifths of the way to 0.8.
    assert cells(page, "FedAvg+FT", "At equal cost")[1] == "+6.0"
    old = [done[0], record(other, (0.5, 0.5))]
    page = report_text(plan, old, command=COMMAND)
    assert cells(page, "FedAvg+FT", "Rounds, traffic")[7:9] == ["100", "not counted"]
    assert "These rows are from before fine-tuned copies were counted" in page


def test_inference_costs_what_the_judged_models_cost():
    fjord = {"label": "FjORD", "method": "fjord", "budgets": [0.5, 1.0]}
    plan = experiment(axes={}, seeds=[0], methods=[FEDSPU, fjord], tune=None)
    [first, other] = trials(plan, "tiny", {})
    devices = [replace(device(index, 0.5), inference_flops=flops) for index, flops in enumerate((10**6, 2 * 10**6))]
    half = replace(device(0, 0.5), budget=0.5), replace(device(1, 0.5), budget=1.0)
    page = report_text(plan, [record(first, devices), record(other, half)], command=COMMAND)
    assert cells(page, "FedSPU", "Rounds, traffic")[9:11] == ["2.5", "1.5 (1 to 2)"]
    # Of old rows, a narrow network of half of the neurons of digits' two convolutions and hidden layer.
    small, whole = (2 * sum(each) / 1e6 for each in (NARROW, WHOLE))
    cell = f"{(small + whole) / 2:.3g} ({small:.3g} to {whole:.3g})"
    assert cells(page, "FjORD", "Rounds, traffic")[10] == cell


WHOLE = (64 * 16 * 9, 16 * 32 * 16 * 9, 64 * 128, 10 * 64)
NARROW = (64 * 8 * 9, 16 * 16 * 8 * 9, 32 * 64, 10 * 32)


def committed(name):
    """The trials of the results that are committed, by point of the axes."""
    path = Path(__file__).parents[2] / "benchmarks" / "rows" / f"{name}.jsonl"
    return groups(load_experiment(name), list(rows.latest(rows.read(path)).values()))


def test_early_stopping_loses_to_a_fixed_horizon_as_measured():
    found = committed("fedspu-cifar10")
    mean = [
        {
            name: fmean(at_equal_cost(pairs, STOPPING_COSTS[name], lambda each: each.mean))
            for _, _, pairs in stopping_pairs(group)
            for name in ("FLOPs", "bytes")
        }
        for group in found
    ]
    assert [round(each["FLOPs"], 1) for each in mean] == [-1.9, -3.7, -4.8]  # at alpha 0.1, 0.5 and 1.0
    assert [round(each["bytes"], 1) for each in mean] == [-0.6, -1.5, -1.6]
    lines = stopping_sections(load_experiment("fedspu-early-stopping"), committed("fedspu-early-stopping"))
    assert "| FedSPU, first 100 rounds | -0.6 | 79.9 | 79.0 | 79.1 |" in lines
    assert "| FedSPU+ES | -5.1 | 81.7 | 86.9 | 69.3 |" in lines


def test_at_equal_upload_fedspu_is_above_fine_tuned_fedavg_as_measured():
    page = "\n".join(cost_sections(load_experiment("fedspu-cifar10"), committed("fedspu-cifar10")))
    found = re.findall(r"^\| FedAvg\+FT \| \*\*(\S+)\*\* \((\S+) to (\S+)\)", page, re.MULTILINE)
    assert found == [("+2.5", "+1.2", "+3.9"), ("+3.8", "+2.2", "+5.5"), ("+3.9", "+2.8", "+5.0")]


# --- at fixed upload ------------------------------------------------------------------------------------------------


def uploads(*accuracies, weighted=None, step=10 * 2**20):
    """Points after rounds 1, 2, ... that upload ``step`` bytes each."""
    return tuple(
        point(number, mean, bytes_up=step * number)
        if weighted is None
        else point(number, 0.0, bytes_up=step * number, accuracy=Accuracy(2, mean, weighted[number - 1], 0.0, mean))
        for number, mean in enumerate(accuracies, start=1)
    )


def capped(**changes):
    return experiment(axes={}, methods=[FEDSPU, FEDAVG], tune=None, upload_caps=[5, 10, 25, 40], **changes)


def test_the_best_accuracy_so_far_at_fixed_upload_is_a_mean_with_students_interval():
    plan = capped()
    points = {
        ("FedSPU", 0): uploads(0.3, 0.5, 0.4),
        ("FedSPU", 1): uploads(0.4, 0.3, 0.6),
        ("FedAvg", 0): uploads(0.2, 0.1, 0.7, 0.8, step=8 * 2**20),
        ("FedAvg", 1): uploads(0.2, 0.1, 0.7, 0.8, step=10 * 2**20 + 1),
    }
    done = [record(trial, (0.5, 0.5), points[trial.label, trial.seed]) for trial in trials(plan, "tiny", {})]
    page = report_text(plan, done, command=COMMAND)
    assert "| | 5 MiB" in page.replace("|  |", "| |")
    # 10 MiB are reached, not passed, by the first round. Half an interval over two seeds: 12.706 * spread / 2.
    # At 25 MiB: best of 0.3, 0.5 and of 0.4, 0.3. Neither seed uploaded 40 MiB.
    assert cells(page, "FedSPU", "Accuracy at fixed") == [
        "–",
        "35.0 (-28.5 to 98.5)",
        "45.0 (-18.5 to 108.5)",
        "55.0 (-8.5 to 118.5) †",
    ]
    # One seed's first round is a byte over 10 MiB, so there is no figure of both; only the other ended before 40 MiB.
    assert cells(page, "FedAvg", "Accuracy at fixed") == [
        "–",
        "–",
        "45.0 (-272.7 to 362.7)",
        "75.0 (11.5 to 138.5) †",
    ]
    assert "†: a trial ended before the limit" in page
    assert "unweighted over devices" in page


def test_with_one_seed_there_is_no_interval_and_without_caps_no_table(plan, recorded):
    single = capped(seeds=[0])
    done = [record(trial, (0.5, 0.5), uploads(0.2, 0.3, 0.25, 0.4)) for trial in trials(single, "tiny", {})]
    page = report_text(single, done, command=COMMAND)
    assert cells(page, "FedSPU", "Accuracy at fixed") == ["–", "20.0", "30.0", "40.0"]
    assert "The parentheses contain Student's 95 % interval over seeds. †" not in page
    assert "fixed upload" not in report_text(plan, recorded, command=COMMAND)


def test_the_upload_until_an_accuracy_is_shown_per_seed_and_relative():
    plan = experiment(axes={}, methods=[FEDSPU, FEDAVG], tune=None, accuracy_targets=[0.5, 0.7])
    points = {
        ("FedSPU", 0): uploads(0.3, 0.5, 0.4),
        ("FedSPU", 1): uploads(0.4, 0.3, 0.6),
        ("FedAvg", 0): uploads(0.2, 0.1, 0.7, 0.8),
        ("FedAvg", 1): uploads(0.2, 0.4),
    }
    done = [record(trial, (0.5, 0.5), points[trial.label, trial.seed]) for trial in trials(plan, "tiny", {})]
    page = report_text(plan, done, command=COMMAND)
    # 0.5 is met by FedSPU after 20 and 30 MiB, and by one of FedAvg's seeds after 30.
    assert cells(page, "FedSPU", "Upload until") == ["25.0 (20.0, 30.0)", "1.00 (1.00, 1.00)", "– (–, –)", "–"]
    assert cells(page, "FedAvg", "Upload until") == ["– (30.0, –)", "1.50 (1.50)", "– (30.0, –)", "–"]
    assert "| until 50 %, MiB | of FedSPU's |" in page


def test_on_the_published_test_set_devices_count_by_test_samples():
    plan = capped(seeds=[0], data={"test": "published"})
    points = uploads(0.9, 0.9, 0.9, 0.9, weighted=(0.2, 0.3, 0.25, 0.4))
    done = [record(trial, (0.5, 0.5), points) for trial in trials(plan, "tiny", {})]
    page = report_text(plan, done, command=COMMAND)
    assert cells(page, "FedSPU", "Accuracy at fixed") == ["–", "20.0", "30.0", "40.0"]
    assert "- Data: test = published" in page
    assert "weighted by test samples over devices" in page
    assert (
        "slice of the published test set, whose weighted mean for a global model is its accuracy on the whole" in page
    )


def test_a_curve_of_the_best_so_far_never_falls(plan):
    [trial, *_] = trials(plan, "tiny", {})
    early = record(trial, (0.5, 0.5), (point(10, 0.6), point(15, 0.4)))
    late = record(trial, (0.5, 0.5), (point(10, 0.2), point(20, 0.4)))
    drawn = curve([early, late], lambda each: each.round, lambda each: each.mean, best=True)
    assert drawn.x == [10, 12.5, 17.5]
    assert drawn.y == pytest.approx([40, 40, 50])
    assert drawn.low == pytest.approx([20, 20, 40])
    assert drawn.high == pytest.approx([60, 60, 60])


@pytest.mark.integration
def test_the_picture_by_upload_shows_the_best_accuracy_so_far(tmp_path):
    plan = capped()
    done = [record(trial, (0.5, 0.5), uploads(0.2, 0.3, 0.25, 0.4)) for trial in trials(plan, "tiny", {})]
    [picture] = [path for caption, path in draw_all(plan, groups(plan, done), tmp_path, "tiny") if "so far" in caption]
    assert picture.name == "tiny-curves.png"
    assert is_png(picture)


# --- on other test sets ---------------------------------------------------------------------------------------------


def judged(accuracy):
    return None if accuracy is None else Evaluation(num_examples=10, loss=0.5, accuracy=accuracy)


def on(trial, found):
    """The trial as judged on its test sets; found: for each, (personal, global) accuracies of its two devices."""
    devices = [device(index, accuracy, examples=10) for index, accuracy in enumerate((0.5, 0.5))]
    shifts = [
        shifted(test_set, [Evaluated(judged(personal), judged(shared)) for personal, shared in accuracies])
        for test_set, accuracies in zip(trial.test_sets, found, strict=True)
    ]
    return replace(record(trial, devices), shifts=tuple(shifts))


PERSONAL = {
    0: [((1.0, 0.6), (0.8, 0.4)), ((0.6, 0.5), (0.2, 0.3))],  # at 0 and at 100 %
    1: [((0.9, 0.6), (0.9, 0.4)), ((0.5, 0.5), (0.3, 0.3))],
}
GLOBAL = {
    0: [((None, 0.7), (None, 0.5)), ((None, 0.6), (None, 0.6))],
    1: [((None, 0.7), (None, 0.5)), ((None, 0.6), (None, 0.6))],
}


def shift_plan(**changes):
    return experiment(**{"axes": {}, "methods": [FEDSPU, FEDAVG], "tune": None, "shifts": [0, 1], **changes})


def judged_by_degree(plan):
    found = {"FedSPU": PERSONAL, "FedAvg": GLOBAL}
    return [on(trial, found[trial.label][trial.seed]) for trial in trials(plan, "tiny", {})]


def test_accuracy_by_degree_of_shift_is_mean_and_spread_over_devices():
    plan = shift_plan()
    page = report_text(plan, judged_by_degree(plan), command=COMMAND)
    # At 0 %: means 0.9 and 0.9, deviations 0.1 and 0; at 100 %: 0.4 and 0.4, 0.2 and 0.1. Average of 90 and 40.
    assert cells(page, "FedSPU", "Accuracy by degree") == ["90.0 ± 5.0", "40.0 ± 15.0", "65.0"]
    assert cells(page, "FedSPU, global model", "Accuracy by degree") == ["50.0 ± 10.0", "40.0 ± 10.0", "45.0"]
    assert cells(page, "FedAvg", "Accuracy by degree") == ["60.0 ± 10.0", "60.0 ± 0.0", "60.0"]
    assert "| FedAvg, global model |" not in page
    assert "corrupted" not in page
    # FedSPU less FedAvg, by seed: (30, 30) and (20, 40), so 30 and 30; (0, -40) and (-10, -30), so -20 and -20.
    differences = page[page.index("| FedSPU minus | 0 % | 100 % |") :]
    assert cells("## x\n" + differences, "FedAvg", "x") == ["+30.0 (+30.0 to +30.0)", "-20.0 (-20.0 to -20.0)"]


def test_a_label_needs_evaluations_in_every_trial():
    plan = shift_plan()
    done = judged_by_degree(plan)
    [bare] = [each for each in done if (each.trial.label, each.trial.seed) == ("FedAvg", 1)]
    old = replace(bare, shifts=(), trial=bare.trial.model_copy(update={"test_sets": ()}))
    page = report_text(plan, [old if each is bare else each for each in done], command=COMMAND)
    assert cells(page, "FedAvg", "Accuracy by degree") == ["–", "–", "–"]
    assert cells(page, "FedSPU", "Accuracy by degree")[-1] == "65.0"
    assert "**1 of 4 trials were evaluated on other shifted test sets than in the file.**" in page
    assert shift_curve([old], [0, 1]) is None
    plain = shift_plan(shifts=[])
    assert "shift" not in report_text(plain, [record(each, (0.5, 0.5)) for each in trials(plain, "x", {})], command="")


def test_what_samples_were_recorded_with_has_a_table_of_its_own():
    plan = shift_plan(shifts=[], test_on=["phone", "watch"])
    page = report_text(plan, judged_by_degree(plan), command=COMMAND)
    assert cells(page, "FedAvg", "Accuracy by recording device") == ["60.0 ± 10.0", "60.0 ± 0.0", "60.0"]
    assert "| FedSPU minus | phone | watch |" in page


def test_corruptions_are_a_table_by_kind_and_severity():
    plan = shift_plan(shifts=[], seeds=[0], corruptions=["contrast", "jpeg_compression"], severities=[1, 5])
    found = [((None, mean + 0.1), (None, mean - 0.1)) for mean in (0.8, 0.4, 0.6, 0.2)]  # kind by kind
    done = [on(trial, found) for trial in trials(plan, "tiny", {})]
    page = report_text(plan, done, command=COMMAND)
    assert "|  | accuracy, % | severity 1 | severity 5 | mean |" in page
    assert "| contrast | FedSPU | 80.0 | 40.0 | **60.0** |" in page
    assert "| jpeg compression | FedAvg | 60.0 | 20.0 | **40.0** |" in page
    assert "| all kinds | FedAvg | 70.0 | 30.0 | **50.0** |" in page
    half = [replace(each, shifts=each.shifts[:3]) for each in done]
    page = report_text(plan, half, command=COMMAND)
    assert "| jpeg compression | FedAvg | 60.0 | – | – |" in page
    assert "| all kinds | FedAvg | 70.0 | – | – |" in page


@pytest.mark.integration
def test_the_curve_over_degrees_is_the_mean_with_its_seeds(tmp_path):
    plan = shift_plan()
    done = judged_by_degree(plan)
    drawn = shift_curve([each for each in done if each.trial.label == "FedSPU"], [1, 0])
    assert drawn.x == [0, 100]
    assert drawn.y == pytest.approx([90, 40])
    assert drawn.low == pytest.approx([90, 40])
    pictures = dict(draw_all(plan, groups(plan, done), tmp_path, "tiny"))
    [picture] = [path for caption, path in pictures.items() if "degree of shift" in caption]
    assert picture.name == "tiny-shift.png"
    assert is_png(picture)


def judged_points(*means):
    made = []
    for number, mean in enumerate(means, start=1):
        accuracy = None if mean is None else Accuracy(1, mean, mean, 0.0, mean)
        made.append(Point(10 * number, accuracy, None, None, None, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0))
    return made


def test_the_best_within_an_upload_is_of_the_rounds_up_to_it():
    uploads = zip((100, 200, 300, 400), judged_points(0.45, 0.65, None, 0.8), strict=True)
    measured = [replace(each, bytes_up=bytes_up) for bytes_up, each in uploads]
    falling = [*measured, replace(measured[0], bytes_up=500)]
    found = [best_within(falling, cap, lambda each: each.mean) for cap in (99.5, 100, 350, 400, 1000)]
    assert found == [None, 0.45, 0.65, 0.8, 0.8]
    assert best_within(falling, 100, lambda each: each.weighted) == falling[0].accuracy.weighted
    assert best_within([], 100, lambda each: each.mean) is None


def test_accuracy_at_a_cost_is_between_two_judged_rounds():
    spent_points = [
        replace(each, bytes_up=spent)
        for spent, each in zip((100, 200, 300, 400), judged_points(0.4, 0.6, None, 0.8), strict=True)
    ]

    def at(spent):
        return accuracy_at(spent_points, lambda point: point.bytes_up, spent, lambda each: each.mean)

    assert [at(100), at(150), at(200), at(300), at(400)] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8])
    assert (at(99), at(401)) == (None, None)
    assert accuracy_at([], lambda point: 0.0, 0.0, lambda each: each.mean) is None


# --- the files ------------------------------------------------------------------------------------------------------


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 2000 < path.stat().st_size < 80_000


@pytest.mark.integration
def test_the_page_and_its_pictures_are_written(plan, recorded, tmp_path):
    page, *pictures = write_page(plan, recorded, tmp_path / "results", command=COMMAND, tuning={})
    assert page == tmp_path / "results" / "tiny.md"
    kinds = ("accuracy", "curves")
    assert [picture.name for picture in pictures] == [f"tiny-{kind}.png" for kind in kinds]
    assert all(is_png(picture) for picture in pictures)
    assert all(f"]({picture.name})" in page.read_text() for picture in pictures)
    assert sorted(file.name for file in page.parent.iterdir()) == sorted(file.name for file in (page, *pictures))


def test_no_picture_without_evaluations(tmp_path):
    plan = experiment(seeds=[0], axes={}, methods=[FEDSPU, FEDAVG], tune=None)
    done = [record(trial, (None, None), (point(20, 0, accuracy=None),)) for trial in trials(plan, "tiny", {})]
    assert draw_all(plan, groups(plan, done), tmp_path, "tiny") == []
    page = report_text(plan, done, command=COMMAND)
    assert cells(page, "FedSPU", "Accuracy after") == ["–", "–", "–", "–", "–", "1 of 1"]
    assert cells(page, "FedSPU", "Rounds, traffic")[:3] == ["20", "–", "–"]


@pytest.mark.integration
def test_a_partly_run_experiment_can_be_drawn(plan, recorded, tmp_path):
    some = [each for each in recorded if each.trial.axes["alpha"] == 0.1 and each.trial.label != "FedSPU"]
    pictures = draw_all(plan, groups(plan, some), tmp_path, "tiny")
    assert [path.name for _, path in pictures] == ["tiny-accuracy.png", "tiny-curves.png"]
    assert all(is_png(path) for _, path in pictures)
