"""Pictures of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


def accuracy_by_round(report: dict[str, Any], path: Path) -> None:
    """Mean accuracy of personal and global models by round, with the rounds in which devices stopped."""
    points = report["accuracy_by_round"]
    rounds = [point["round"] for point in points]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for model, color in (("personal", "tab:blue"), ("global", "tab:orange")):
        axes.plot(rounds, [100 * point[model] for point in points], "o-", color=color, label=f"{model} model", ms=4)
    local = sum(row["accuracy_local_only"] for row in report["devices"]) / len(report["devices"])
    axes.axhline(100 * local, color="tab:gray", ls="--", label="trained alone, as many steps")
    stops: dict[int, list[str]] = {}
    for row in report["devices"]:
        if row["stopped_round"]:
            stops.setdefault(row["stopped_round"], []).append(f"{row['budget']:.1f}")
    for number, budgets in stops.items():
        axes.axvline(number, color="tab:red", lw=0.8, alpha=0.6)
        axes.text(number, axes.get_ylim()[0], f" budget {', '.join(budgets)} stops", rotation=90, va="bottom", size=7)
    axes.set(xlabel="round", ylabel="accuracy on held-out data, %, mean of devices", title="FedSPU on digits")
    axes.legend(loc="center right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
