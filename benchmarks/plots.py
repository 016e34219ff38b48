"""Pictures of results: small PNGs, one panel per point of the axes, and one colour per label everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

DPI = 90
Shape = TypeVar("Shape")
Panels = Mapping[str, Mapping[str, Shape]]
"""Title of the panel -> label -> what is drawn for it."""
Colours = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Curve:
    """A line with a band: ``y`` between ``low`` and ``high`` at each ``x``."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def colours(labels: Sequence[str]) -> Colours:
    """Return a colour for each label, by its place among them."""
    palette = matplotlib.color_sequences["tab10" if len(labels) <= 10 else "tab20"]
    return {label: matplotlib.colors.to_rgb(palette[i % len(palette)]) for i, label in enumerate(labels)}


def curves(panels: Panels[Curve], colour: Colours, path: Path, *, x: str, y: str, marks: Sequence[float] = ()) -> None:
    """Draw lines with bands. ``marks``: dotted lines at these ``x``; the axis ends shortly after the last one."""
    rows_of_curves([(panels, x, y, marks)], colour, path)


def rows_of_curves(
    rows: Sequence[tuple[Panels[Curve], str, str, Sequence[float]]], colour: Colours, path: Path
) -> None:
    """Draw a row of panels with lines and bands for each (panels, x, y, marks), as ``curves`` draws one."""
    columns = len(rows[0][0])
    size = (1.4 + 3.2 * columns, 3.6 if len(rows) == 1 else 0.6 + 2.8 * len(rows))
    figure, grid = pyplot.subplots(len(rows), columns, figsize=size, dpi=DPI, squeeze=False, sharey="row")
    for row, (panels, x, y, marks) in zip(grid, rows, strict=True):
        for axes, (title, by_label) in zip(row, panels.items(), strict=True):
            for label, curve in by_label.items():
                axes.plot(curve.x, curve.y, "o-", ms=2.5, lw=1.2, color=colour[label], label=label)
                axes.fill_between(curve.x, curve.low, curve.high, color=colour[label], alpha=0.15, lw=0)
            for mark in marks:
                axes.axvline(mark, color="black", ls=":", lw=0.8)
            if marks:
                axes.set_xlim(0, 1.05 * max(marks))
            axes.set(title=title, xlabel=x)
            axes.grid(alpha=0.3)
        row[0].set_ylabel(y)
    drawn = {label for panels, *_ in rows for by_label in panels.values() for label in by_label}
    _finish(figure, [label for label in colour if label in drawn], colour, path)


def dots(
    panels: Panels[Sequence[float]],
    intervals: Panels[tuple[float, float]],
    colour: Colours,
    path: Path,
    *,
    x: str,
) -> None:
    """Draw a row per label: its values as dots, their mean as a stroke, and a line over the interval."""
    labels = [label for label in colour if any(label in by_label for by_label in panels.values())]
    figure, grid = pyplot.subplots(
        1,
        len(panels),
        figsize=(1.8 + 3.6 * len(panels), 0.9 + 0.42 * len(labels)),
        dpi=DPI,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axes, (title, by_label) in zip(grid[0], panels.items(), strict=True):
        for height, label in enumerate(labels):
            values = by_label.get(label, ())
            if not len(values):
                continue
            low, high = intervals[title][label]
            axes.plot([low, high], [height, height], lw=2, color=colour[label], alpha=0.45, solid_capstyle="butt")
            axes.plot([np.mean(values)], [height], "|", ms=16, mew=2, color=colour[label])
            axes.plot(values, [height] * len(values), "o", ms=4, color=colour[label], alpha=0.8)
        axes.set(title=title, xlabel=x, yticks=range(len(labels)), yticklabels=labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    _save(figure, path)


def sorted_differences(panels: Panels[Sequence[float]], colour: Colours, path: Path, *, y: str) -> None:
    """Draw each label's differences in order over the share of devices, with a line at zero."""
    figure, row = _row(panels)
    for axes, (title, by_label) in zip(row, panels.items(), strict=True):
        axes.axhline(0, color="black", lw=0.8)
        for label, values in by_label.items():
            share = 100 * (np.arange(len(values)) + 0.5) / len(values)
            axes.plot(share, sorted(values), ".-", ms=3, lw=1.2, color=colour[label], label=label)
        axes.set(title=title, xlabel="devices, sorted, %", xlim=(0, 100))
    row[0].set_ylabel(y)
    _finish(figure, [label for label in colour if any(label in each for each in panels.values())], colour, path)


def bars(quantities: Mapping[str, Panels[Sequence[float]]], colour: Colours, path: Path) -> None:
    """Draw a row of panels per quantity, named with its unit. A bar's parts are stacked, the upper ones paler."""
    titles = list(next(iter(quantities.values())))
    figure, grid = pyplot.subplots(
        len(quantities),
        len(titles),
        figsize=(1.2 + 2.8 * len(titles), 0.6 + 1.7 * len(quantities)),
        dpi=DPI,
        squeeze=False,
        sharey="row",
        sharex="col",
    )
    for row, (quantity, panels) in zip(grid, quantities.items(), strict=True):
        for axes, title in zip(row, titles, strict=True):
            for label, parts in panels[title].items():
                bottom = 0.0
                for depth, value in enumerate(parts):
                    axes.bar(label, value, bottom=bottom, color=colour[label], alpha=0.5**depth)
                    bottom += value
            axes.grid(alpha=0.3, axis="y")
            axes.set_axisbelow(True)
            axes.tick_params(axis="x", rotation=30, labelsize=8)
            for tick in axes.get_xticklabels():
                tick.set_horizontalalignment("right")
        row[0].set_ylabel(quantity)
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    _save(figure, path)


def histograms(panels: Panels[Sequence[float]], colour: Colours, path: Path, *, x: str) -> None:
    """Draw per-device values in per cent, in bins of 5: a column per panel, a row per label, the mean dashed."""
    labels = [label for label in colour if any(label in by_label for by_label in panels.values())]
    figure, grid = pyplot.subplots(
        len(labels),
        len(panels),
        figsize=(1.2 + 2.8 * len(panels), 0.8 + 1.05 * len(labels)),
        dpi=DPI,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for row, label in zip(grid, labels, strict=True):
        for axes, by_label in zip(row, panels.values(), strict=True):
            values = by_label.get(label, ())
            if len(values):
                share = np.full(len(values), 100 / len(values))
                axes.hist(values, bins=np.arange(0, 105, 5).tolist(), weights=share, color=colour[label], alpha=0.8)
                axes.axvline(float(np.mean(values)), color="black", ls="--", lw=0.9)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        row[0].set_ylabel("devices, %", size=8)
        row[0].text(0.02, 0.94, label, transform=row[0].transAxes, va="top", size=9, color=colour[label], weight="bold")
    for axes, title in zip(grid[0], panels, strict=True):
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel(x)
    _save(figure, path)


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
    _save(figure, path)


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
    _save(figure, path)


def quantities(panels: Panels[tuple[Sequence[float], Sequence[float]]], colour: Colours, path: Path, *, x: str) -> None:
    """Draw lines of several quantities on a logarithmic axis, a panel for each title."""
    figure, row = _row(panels)
    for axes, (title, by_name) in zip(row, panels.items(), strict=True):
        for name, (xs, ys) in by_name.items():
            axes.plot(xs, ys, "o-", ms=2.5, lw=1.2, color=colour[name])
        axes.set(title=title, xlabel=x, yscale="log")
    _finish(figure, list(colour), colour, path)


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
    _save(figure, path)


def gates(
    linkage: Sequence[Sequence[float]],
    names: Sequence[str],
    by_round: Mapping[int, Sequence[int]],
    path: Path,
) -> None:
    """Draw a dendrogram of devices, and histograms in 20 bins of 0..1 by round, from pale to strong."""
    from scipy.cluster.hierarchy import dendrogram  # takes a second

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
    _save(figure, path)


def _row(panels: Panels[Any]) -> tuple[Figure, list[Axes]]:
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(1.4 + 3.2 * len(panels), 3.6), dpi=DPI, squeeze=False, sharey=True
    )
    for axes in grid[0]:
        axes.grid(alpha=0.3)
    return figure, list(grid[0])


def _finish(figure: Figure, labels: Sequence[str], colour: Colours, path: Path) -> None:
    """Add one legend below all panels, where it hides nothing."""
    handles = [Line2D([], [], color=colour[label], lw=2, label=label) for label in labels]
    columns = max(1, min(len(labels), round(figure.get_figwidth() / 1.6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Save a PNG with a palette, which takes a third of the size; the pictures are committed."""
    figure.set_layout_engine("constrained")
    figure.savefig(path)
    pyplot.close(figure)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


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
