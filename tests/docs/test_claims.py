"""The measured figures of the hand-written pages are those of the committed rows, and no other decimals stand there."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import claims, places
from benchmarks.claims import NO_CLAIMS, Figures, evaluated, filled, rebuild, stray_figures, verdict
from benchmarks.places import ROWS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {DOCS / "choosing.md"} | {
    DOCS / "results" / f"{name}.md" for name in ("fedspu", "fedsgc", "dmpfl", "pfedgate", "defaults", "claims")
}
CLAIMS = claims.tomllib.loads((ROWS / "claims.toml").read_text())


def test_every_page_is_what_its_rows_make():
    rebuilt = rebuild()
    assert set(rebuilt) >= PAGES
    stale = [path.name for path, text in rebuilt.items() if text != path.read_text()]
    assert not stale, "run: python -m benchmarks claims"


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_no_decimal_stands_outside_markers(page):
    assert not stray_figures(page.read_text())


def test_what_counts_as_a_stray_figure():
    allowed = [
        "FedSPU <!-- value: x/FedSPU -->81.8<!-- end --> %",
        "at `alpha = 0.5`, rate `0.1`",
        "the paper has *84.4*, [here](fedsgc-1.2.md)",
        "**Read this.** 42 % of 1,234 MB",
    ]
    assert [stray_figures(line) for line in allowed] == [[]] * len(allowed)
    assert stray_figures("it wins by 7.4 points") == ["it wins by 7.4 points"]
    assert stray_figures("**81.8**") == ["**81.8**"]


@pytest.mark.parametrize("name", ["fedspu", "fedsgc", "dmpfl", "pfedgate", "defaults"])
def test_a_page_says_seeds_intervals_tuning_and_what_was_not_run(name):
    text = (DOCS / "results" / f"{name}.md").read_text().lower()
    assert all(word in text for word in ("seed", "95 %", "tun", "**not run**"))


@pytest.mark.parametrize("paper", CLAIMS["papers"])
def test_every_table_and_figure_of_a_paper_has_one_row(paper):
    numbers = CLAIMS["papers"][paper]
    expected = [f"Figure {i + 1}" for i in range(numbers["figures"])]
    expected += [f"Table {i + 1}" for i in range(numbers["tables"])]
    assert Counter(each["item"] for each in CLAIMS["claims"] if each["paper"] == paper) == Counter(expected)
    section = (DOCS / "results" / "claims.md").read_text().split(f"\n## {paper}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (?:Figure|Table) .*$", section, re.MULTILINE)
    assert len(lines) == len(expected)
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert all(cells), line
        assert re.match(
            r"\*\*(reproduced|partly|not|not \(at [0-9a-z ]+ rounds\)|not run|a drawing|a list of settings)\*\*",
            cells[-1],
        ), line


@pytest.mark.parametrize("claim", CLAIMS["claims"], ids=lambda claim: f"{claim['paper']} {claim['item']}")
def test_what_was_not_run_says_why(claim):
    assert claim.get("holds") or claim.get("missing") or claim["value"] in NO_CLAIMS
    assert "here" in claim or "holds" not in claim


@pytest.mark.parametrize("claim", CLAIMS["claims"], ids=lambda claim: f"{claim['paper']} {claim['item']}")
def test_what_does_not_hold_has_a_hypothesis_and_what_would_test_it(claim):
    figures = Figures(ROWS)
    if not all(evaluated(each, figures) for each in claim.get("holds", ())):
        words = claim.get("note", "").lower()
        assert "hypothesis" in words
        assert "test" in words.split("hypothesis", 1)[1]


@pytest.mark.parametrize(
    ("held", "missing", "expected"),
    [
        ([True, True], "", "reproduced"),
        ([True, True], "two data sets", "partly"),
        ([True, False], "", "not (at 40 rounds)"),
        ([False], "two data sets", "not (at 40 rounds)"),
        ([], "the data", "not run"),
    ],
)
def test_a_verdict_follows_from_its_comparisons(held, missing, expected):
    assert verdict(held, missing, "40 rounds") == expected


def test_a_verdict_without_rounds_names_none():
    assert verdict([False], "", "") == "not"


def accuracy(mean):
    return {"devices": 1, "mean": mean, "weighted": mean, "std": 0.0, "bottom_decile": mean}


def point(number, mean, bytes_up):
    costs = ("bytes_down", "evaluation_bytes_up", "evaluation_bytes_down", "training_flops")
    timing = ("seconds", "joules_measured", "joules_estimated", "seconds_without_joules", "wall_seconds")
    return {
        "row": "point",
        "round": number,
        "accuracy": accuracy(mean),
        "accuracy_global": None,
        "accuracy_validation": None,
        "train_loss": 0.0,
        "stopped": 0,
        "bytes_up": bytes_up,
        **dict.fromkeys(costs, 0),
        **dict.fromkeys(timing, 0.0),
    }


@pytest.fixture
def figures(tmp_path):
    """Two labels and two seeds: A ends at 60 and 62 % after 100 bytes, B rises from 40 over 50 to 70 % by 200 bytes."""
    rows = []
    for seed in (0, 1):
        for label, points in (
            ("A", [point(1, 0.5, 50), point(2, 0.6 + 0.02 * seed, 100)]),
            ("B", [point(1, 0.4, 80), point(2, 0.5, 120), point(3, 0.7, 200)]),
        ):
            name = f"{label}/seed={seed}"
            trial = {"experiment": "tiny", "label": label, "method": "fedavg", "task": "digits", "partition": "iid"}
            trial |= {"axes": {}, "seed": seed, "devices": 1, "new": 0, "boards": [], "budgets": [1.0], "settings": {}}
            last = points[-1]["accuracy"]["mean"]
            device = {"device": "d", "budget": 1.0, "new": False, "test_examples": 10, "accuracy": last}
            device |= {"accuracy_global": None, "rounds": 2, "stopped_round": None, "state_bytes": 0}
            devices = (
                [device, device | {"device": "late", "new": True, "accuracy": last - 0.1}] if label == "A" else [device]
            )
            result = {"rounds": len(points), "reason": None, "parameters": 1, "inference_flops": 1, "devices": devices}
            result |= {"row": "result", "model_sha256": "", "wall_seconds": 0.0, "machine": ""}
            rows += [{"row": "trial", **trial}, *points, result]
            rows[-len(points) - 2 :] = [each | {"trial": name} for each in rows[-len(points) - 2 :]]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Figures(tmp_path)


def test_figures_are_means_over_seeds_with_students_interval(figures):
    assert filled("{accuracy('tiny', 'A'):.1f} %, {spread('tiny', 'A'):.2f}", figures) == "61.0 %, 1.41"
    # Differences of -10 and -8: mean -9, standard error 1, t(0.975, 1) = 12.706.
    assert filled("{difference('tiny', 'A', 'B'):half}", figures) == "-9.0 ± 12.7"
    assert filled("{difference('tiny', 'A', 'B'):range}", figures) == "-9.0 (-21.7 to +3.7)"
    assert filled("{low(difference('tiny', 'A', 'B')) + 9:.1f}", figures) == "-12.7"
    assert filled("{accuracy('tiny', 'A', seed=1) - accuracy('tiny', 'A', at=1):.0f}", figures) == "12"


def test_at_equal_cost_the_dearer_is_read_between_its_evaluations(figures):
    # B has 45 % after 100 bytes, half-way between 80 and 120; A then has 60 and 62.
    assert f"{figures.difference_at_equal('bytes_up', 'tiny', 'A', 'B'):.1f}" == "16.0"
    assert f"{figures.difference_at_equal('bytes_up', 'tiny', 'B', 'A'):.1f}" == "-16.0"
    with pytest.raises(SystemExit, match="joules_measured"):
        figures.difference_at_equal("joules_measured", "tiny", "A", "B")


def test_within_an_upload_the_best_so_far_counts(figures):
    assert filled("{listed(each_within('tiny', 'A', 1))}", figures) == "60.0, 62.0"
    assert filled("{within('tiny', 'B', 130 / 1048576):.0f}", figures) == "50"
    assert filled("{difference_within('tiny', 'A', 'B', 130 / 1048576):half}", figures) == "+11.0 ± 12.7"
    with pytest.raises(SystemExit, match="not evaluated within"):
        figures.within("tiny", "A", 1 / 2**20)


def test_the_upload_until_an_accuracy_is_compared_by_seed(figures):
    # A has 60 and 62 % after 100 bytes, B has 70 % after 200; 50 % A has after 50, B after 120.
    assert filled("{share_until(0.6, 'tiny', 'A', 'B'):.2f}", figures) == "0.50"
    assert filled("{share_until(0.5, 'tiny', 'A', 'B'):.3f}", figures) == "0.417"
    with pytest.raises(SystemExit, match="did not both reach 65%"):
        figures.share_until(0.65, "tiny", "A", "B")


def test_costs_are_sums_over_devices(figures):
    assert (
        filled("{cost('tiny', 'B', 'bytes_up'):.0f}, {cost('tiny', 'B', 'bytes_up', at=1):.0f}", figures) == "200, 80"
    )
    assert filled("{participations('tiny', 'B', 1.0):.1f}", figures) == "2.0"
    with pytest.raises(SystemExit, match="counts no dropped"):
        figures.cost("tiny", "B", "dropped")


def test_a_curve_is_near_its_best_at_the_first_round_that_was_judged_so(figures):
    # Nine tenths of 70 % are reached in round 3 alone, seven tenths by 50 % in round 2.
    assert (figures.rounds_to(0.9, "tiny", "B"), figures.rounds_to(0.7, "tiny", "B")) == (3, 2)
    assert figures.rounds_to(0.82, "tiny", "A") == 1.5, "in round 1 with seed 0 alone"


def test_devices_that_never_trained_are_counted_apart(figures):
    assert filled("{accuracy('tiny', 'A', new=True):.1f} of {accuracy('tiny', 'A'):.1f}", figures) == "51.0 of 61.0"
    with pytest.raises(SystemExit, match=r"B.* in tiny\.jsonl was not evaluated so"):
        figures.accuracy("tiny", "B", new=True)


def test_corrupted_images_are_averaged_over_what_is_left_open(figures):
    file = figures.folder / "tiny.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for trial in {row["trial"] for row in lines if row["trial"].startswith("A")}:
        for kind, severity, mean in (("contrast", 1, 0.6), ("contrast", 5, 0.2), ("brightness", 1, 0.7)):
            shift = {"test_set": {"corruption": kind, "severity": severity}, "accuracy": accuracy(mean)}
            shift |= {"accuracy_personal": None, "accuracy_global": None, "devices": [], "devices_global": []}
            lines.insert(-1, {"row": "shift", "trial": trial, **shift})
    results = [row for row in lines if row["row"] == "result"]
    lines = [row for row in lines if row["row"] != "result"] + results
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert filled("{corrupted('tiny', 'A'):.1f}", figures) == "50.0"
    assert filled("{corrupted('tiny', 'A', 'contrast'):.1f}", figures) == "40.0"
    assert filled("{corrupted('tiny', 'A', 'contrast', 5):.1f}", figures) == "20.0"
    with pytest.raises(SystemExit, match=r"B.* in tiny\.jsonl was not evaluated so"):
        figures.corrupted("tiny", "B", "contrast")


def test_a_block_repeats_its_lines_for_each_label(figures, tmp_path):
    page = tmp_path / "results"
    page.mkdir()
    (tmp_path / "tiny.jsonl").rename(page / "tiny.jsonl")
    template = "each = A; B as other\n| | % |\n|---|---|\n| {each} | {accuracy('tiny', label):.0f} |\n"
    (page / "page.md").write_text(f"# Page\n\n<!-- measured: {template}-->old<!-- end -->\n")
    text = rebuild(tmp_path, page)[page / "page.md"]
    assert "-->\n\n| | % |\n|---|---|\n| A | 61 |\n| other | 70 |\n\n<!-- end -->" in text
    (page / "page.md").write_text(text)
    assert rebuild(tmp_path, page)[page / "page.md"] == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{accuracy('tiny', 'C')}", "no trials of C.*it has A; B"),
        ("{accuracy('tiny')}", "docs/benchmarks.md"),
        ("{__import__('os')}", "docs/benchmarks.md"),
        ("{_both('tiny', 'A', 'B', None, 1)}", "docs/benchmarks.md"),
        ("{nothing('tiny')}", "docs/benchmarks.md"),
    ],
)
def test_a_template_that_has_no_value_is_named(figures, template, message):
    with pytest.raises(SystemExit, match=message):
        filled(template, figures)


def test_a_value_comes_from_the_table_by_its_name(figures, tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "values.toml").write_text("""[tiny]\n"A, mean" = "{accuracy('tiny', 'A'):.0f} %"\n""")
    page.write_text("A has <!-- value: tiny/A, mean -->old<!-- end -->.\n")
    found = rebuild(tmp_path, tmp_path)
    assert found[page] == "A has <!-- value: tiny/A, mean -->61 %<!-- end -->.\n"
    assert json.loads(found[tmp_path / "values.json"]) == {"tiny/A, mean": "61 %"}
    page.write_text("<!-- value: tiny/A, man -->old<!-- end -->")
    with pytest.raises(SystemExit, match="no value 'tiny/A, man'"):
        rebuild(tmp_path, tmp_path)


def test_every_named_value_stands_on_a_page():
    named = {
        f"{file}/{name}"
        for file, values in claims.tomllib.loads((ROWS / "values.toml").read_text()).items()
        for name in values
    }
    shown = {name for page in DOCS.rglob("*.md") for _, name, _, _ in claims.VALUE.findall(page.read_text())}
    assert named <= shown


def test_sections_of_experiments_are_rebuilt_and_those_of_scripts_kept(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- section: fedsgc-cifar10 -->\nold\n<!-- end of fedsgc-cifar10 -->\n"
        "<!-- section: wire -->\nkept\n<!-- end of wire -->\n"
    )
    text = rebuild(tmp_path)[page]
    assert "old" not in text
    assert "\n## fedsgc-cifar10\n" in text
    assert "<!-- section: wire -->\nkept\n<!-- end of wire -->" in text
    assert not stray_figures(text)


def test_a_script_writes_its_section(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "PAGES", tmp_path)
    page = tmp_path / "speed.md"
    page.write_text("# Speed\n\n<!-- section: wire -->\nold\n<!-- end of wire -->\n\n## After\n")
    places.write_section("speed", "wire", "# Wire\n\n```sh\n# no heading\n```\n")
    inside = "\n## Wire\n\n```sh\n# no heading\n```\n\n"
    assert page.read_text() == f"# Speed\n\n<!-- section: wire -->\n{inside}<!-- end of wire -->\n\n## After\n"
    with pytest.raises(SystemExit, match="no section engines"):
        places.write_section("speed", "engines", "")


def test_without_the_pages_it_says_where_to_run(tmp_path):
    with pytest.raises(SystemExit, match="clone"):
        rebuild(tmp_path / "none")


def test_the_pages_are_those_of_the_clone():
    assert claims.DOCS == DOCS
