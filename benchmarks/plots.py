"""Pictures of analyses, of single measurements and of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparrow.bench.plots import DPI, Colours, Curve, Panels, finish, rows_of_curves, save


def curves(panels: Panels[Curve], colour: Colours, path: Path, *, x: str, y: str, marks: Sequence[float] = ()) -> None:
    """Draw lines with bands. ``marks``: dotted lines at these ``x``; the axis ends shortly after the last one."""
    rows_of_curves([(panels, x, y, marks)], colour, path)


def heat_maps(panels: Mapping[str, Sequence[Sequence[float]]], ticks: Sequence[str], path: Path) -> None:
    """Draw matrices of values in 0..1 of the same devices, at most four in a row. ticks: the devices' names."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    size = (0.9 + 2.5 * columns, 0.5 + 2.5 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, dpi=DPI, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    image = None
    for axes, (title, matrix) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
        axes.set_title(title, size=9)
        axes.set_xticks(range(len(ticks)), ticks, size=5, rotation=90)
        axes.set_yticks(range(len(ticks)), ticks, size=5)
    if image is not None:
        figure.colorbar(image, ax=list(grid.flat), shrink=0.6)
    save(figure, path)


def scatters(
    rows: Sequence[tuple[Panels[tuple[Sequence[float], Sequence[float]]], str, str]], colour: Colours, path: Path
) -> None:
    """Draw a row of scatter plots for each (panels, x, y), a column for each label; panels are titles of the axes."""
    columns = [
        (title, label) for title in rows[0][0] for label in colour if any(label in row[0][title] for row in rows)
    ]
    size = (0.9 + 2.1 * len(columns), 0.5 + 2.2 * len(rows))
    figure, grid = pyplot.subplots(len(rows), len(columns), figsize=size, dpi=DPI, squeeze=False, sharey="row")
    for axes_row, (panels, x, y) in zip(grid, rows, strict=True):
        for axes, (title, label) in zip(axes_row, columns, strict=True):
            if label not in panels[title]:
                axes.set_axis_off()
                continue
            xs, ys = panels[title][label]
            axes.plot(xs, ys, ".", ms=3, color=colour[label])
            axes.set_title(f"{label}\n{title}" if len(rows[0][0]) > 1 else label, size=9)
            axes.set_xlabel(x, size=8)
            axes.grid(alpha=0.3)
        axes_row[0].set_ylabel(y, size=8)
    save(figure, path)


def quantities(panels: Panels[tuple[Sequence[float], Sequence[float]]], colour: Colours, path: Path, *, x: str) -> None:
    """Draw lines of several quantities on a logarithmic axis, a panel for each title."""
    figure, row = _row(panels)
    for axes, (title, by_name) in zip(row, panels.items(), strict=True):
        for name, (xs, ys) in by_name.items():
            axes.plot(xs, ys, "o-", ms=2.5, lw=1.2, color=colour[name])
        axes.set(title=title, xlabel=x, yscale="log")
    finish(figure, list(colour), colour, path)


def shares_by_layer(
    panels: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[int]]]], colour: Colours, path: Path
) -> None:
    """Draw histograms over devices in 20 bins of 0..1 (label -> layer -> first and last round): the last one is filled.

    A row for each label, a column for each of its layers.
    """
    columns = max(map(len, panels.values()))
    size = (1.0 + 1.7 * columns, 0.6 + 1.15 * len(panels))
    figure, grid = pyplot.subplots(len(panels), columns, figsize=size, dpi=DPI, squeeze=False, sharex=True, sharey=True)
    for row, (label, layers) in zip(grid, panels.items(), strict=True):
        for axes in row[len(layers) :]:
            axes.set_axis_off()
        for axes, (layer, (first, last)) in zip(row, layers.items(), strict=False):
            edges = np.linspace(0, 1, len(last) + 1)
            axes.bar(edges[:-1], last, width=edges[1], align="edge", color=colour[label], alpha=0.7)
            axes.stairs(first, edges, color="black", lw=0.9)
            axes.set_title(layer, size=7)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        row[0].set_ylabel(label, size=8, color=colour[label], weight="bold")
    for axes in grid[-1]:
        axes.set_xlabel("share kept", size=8)
    save(figure, path)


def gates(
    linkage: Sequence[Sequence[float]],
    names: Sequence[str],
    by_round: Mapping[int, Sequence[int]],
    path: Path,
) -> None:
    """Draw a dendrogram of devices, and histograms in 20 bins of 0..1 by round, from pale to strong."""
    # Imported here, because the import takes a second.
    from scipy.cluster.hierarchy import dendrogram

    figure, (tree, bins) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), dpi=DPI)
    dendrogram(np.array(linkage), labels=list(names), orientation="right", ax=tree, color_threshold=0)
    tree.set_xlabel("distance of gating layers (Ward)")
    tree.tick_params(axis="y", labelsize=8)
    for place, (number, counts) in enumerate(by_round.items()):
        strength = (place + 1) / len(by_round)
        share = 100 * np.array(counts) / sum(counts)
        bins.stairs(share, np.linspace(0, 1, len(counts) + 1), color=(0.1, 0.2, 0.6, strength), label=f"round {number}")
    bins.set(xlabel="mean gate of a block on a device", ylabel="blocks, %", yscale="log")
    bins.legend(fontsize=7, frameon=False)
    bins.grid(alpha=0.3)
    save(figure, path)


def _row(panels: Panels[Any]) -> tuple[Figure, list[Axes]]:
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(1.4 + 3.2 * len(panels), 3.6), dpi=DPI, squeeze=False, sharey=True
    )
    for axes in grid[0]:
        axes.grid(alpha=0.3)
    return figure, list(grid[0])


def accuracy_by_round(report: dict[str, Any], path: Path) -> None:
    """Draw the demo's mean accuracy of personal and global models by round, with the devices' stops."""
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
