"""``make demo-seeds``: the demo over five seeds, and with the paper's stop rule: a section of docs/results/defaults.md.

A seed decides the initial weights, the split of the data, the masks and the order of batches. Personal and local-only
models are compared on the same device's held-out data, so differences are paired. Devices of one seed share a global
model and are not independent; the interval is Student's, over the means of the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm

from benchmarks import demo
from benchmarks.places import ROWS, write_section

SEEDS = range(5)
RULES = ("validation", "paper")


def paired(reports: list[dict[str, Any]], other: str) -> tuple[float, float, float, int]:
    """Return the mean over seeds of personal minus ``other`` in points, its 95 % interval, and the number of pairs
    below zero.
    """
    differences = [
        [100 * (row["accuracy_personal"] - row[f"accuracy_{other}"]) for row in report["devices"]] for report in reports
    ]
    means = np.array([np.mean(each) for each in differences])
    half = float(stats.t.ppf(0.975, len(means) - 1) * stats.sem(means))
    below = sum(value < 0 for each in differences for value in each)
    return float(means.mean()), float(means.mean()) - half, float(means.mean()) + half, below


def page(reports: list[dict[str, Any]]) -> str:
    """Return the reports as a page of Markdown."""
    settings = reports[0]["settings"]
    pairs = sum(len(report["devices"]) for report in reports)
    lines = [
        "# The demo over five seeds",
        "",
        f"FedSPU with early stopping on scikit-learn's digits: {len(demo.BUDGETS)} devices with budgets "
        f"{', '.join(map(str, demo.BUDGETS))}, Dirichlet({demo.ALPHA}), at most {settings['rounds']} rounds, "
        f"{settings['local_epochs']} local epochs, batch {settings['batch_size']}, learning rate "
        f"{settings['learning_rate']}, everything else by default; {reports[0]['parameters']:,} parameters. "
        "Coordinator and devices are separate processes that talk HTTP. Accuracies are on each device's own held-out "
        "samples (30 % of its data, seen neither in training nor by the stop rule).",
        "",
        f"Made with `make demo-seeds` on {reports[0]['machine']}. One line of JSON per run lies in `demo.jsonl`.",
        "",
        "| seed | rounds | ended by | devices stopped early | local-only | global | personal | difference | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        rows = report["devices"]
        mean = {
            model: 100 * float(np.mean([row[f"accuracy_{model}"] for row in rows]))
            for model in ("local_only", "global", "personal")
        }
        stopped = sum(row["stopped_round"] is not None for row in rows)
        lines.append(
            f"| {report['seed']} | {report['rounds']} | {report['reason']} | {stopped} of {len(rows)} | "
            f"{mean['local_only']:.1f} % | {mean['global']:.1f} % | {mean['personal']:.1f} % | "
            f"{mean['personal'] - mean['local_only']:+.1f} | {report['wall_seconds']:.0f} s |"
        )
    sizes = [row["held_out"] for report in reports for row in report["devices"]]
    held = (min(sizes), max(sizes))
    lines += ["", "Paired differences over devices, in points, with the 95 % interval over the seeds' means:", ""]
    for other, words in (
        ("local_only", "local-only, as many local steps and the best of its rounds"),
        ("global", "the global model"),
    ):
        mean_difference, low, high, below = paired(reports, other)
        lines.append(
            f"- personal minus {words}: **{mean_difference:+.1f}** ({low:+.1f} to {high:+.1f}); "
            f"below zero for {below} of {pairs} devices."
        )
    lines += [
        "",
        "By budget, means over the seeds; bytes are those of training, both ways, as a share of sending the whole "
        "model both ways in every round that the device took part in (the first download is always whole). Evaluation "
        "is counted apart: for its curve the demo has each device download the global model every second round.",
        "",
        "| budget | rounds | local-only | global | personal | bytes of whole |",
        "|---|---|---|---|---|---|",
    ]
    for index, budget in enumerate(demo.BUDGETS):
        rows = [report["devices"][index] for report in reports]
        mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key.startswith("accuracy")}
        lines.append(
            f"| {budget} | {np.mean([row['rounds'] for row in rows]):.0f} | {mean['accuracy_local_only']:.1%} | "
            f"{mean['accuracy_global']:.1%} | {mean['accuracy_personal']:.1%} | "
            f"{np.mean([row['traffic_share'] for row in rows]):.0%} |"
        )
    lines += [
        "",
        f"A device holds {held[0]} to {held[1]} held-out samples, so one right answer is up to {100 / held[0]:.0f} "
        "points for a single device: read the means. Seconds and joules depend on the machine; accuracies, rounds and "
        "bytes hardly do (float rounding differs between CPU types).",
    ]
    return "\n".join(lines) + "\n"


def stopping_section(by_rule: dict[str, list[dict[str, Any]]]) -> str:
    """Return the costs and gains of the stop rules, with the same five seeds each."""
    lines = [
        "",
        "## Early stopping",
        "",
        "`early_stopping=paper` stops a device at the first increase of its stop-rule loss. The same five seeds:",
        "",
        "| rule | rounds of a device, mean | stopped early | personal | minus local-only (95 %) | below zero |",
        "|---|---|---|---|---|---|",
    ]
    for rule, reports in by_rule.items():
        rows = [row for report in reports for row in report["devices"]]
        difference, low, high, below = paired(reports, "local_only")
        lines.append(
            f"| {rule} | {np.mean([row['rounds'] for row in rows]):.1f} | "
            f"{sum(row['stopped_round'] is not None for row in rows)} of {len(rows)} | "
            f"{np.mean([row['accuracy_personal'] for row in rows]):.1%} | "
            f"{difference:+.1f} ({low:+.1f} to {high:+.1f}) | {below} |"
        )
    lines += ["", "Local-only trains for as many steps as the device took, so it differs between the rows too."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all seeds and write the page."""
    argparse.ArgumentParser(prog="python -m benchmarks.demo_seeds", description="Run the demo over seeds.").parse_args()
    runs = tqdm([(rule, seed) for rule in RULES for seed in SEEDS], desc="federations", unit="federation", disable=None)
    by_rule: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    for rule, seed in runs:
        folder = Path(f"runs/demo-seed-{seed}")
        with demo.fresh(folder) as server:
            by_rule[rule].append(demo.run(folder, server, seed, early_stopping=rule))
    lines = [json.dumps(report) for reports in by_rule.values() for report in reports]
    (ROWS / "demo.jsonl").write_text("\n".join(lines) + "\n")
    text = page(by_rule["validation"]) + stopping_section(by_rule)
    write_section("defaults", "demo", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
