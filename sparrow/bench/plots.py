"""Plots of results: small PNGs with a panel per point of the axes and consistent colours of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

DPI = 90
Shape = TypeVar("Shape")
Panels = Mapping[str, Mapping[str, Shape]]
"""Title of a panel -> label -> its values."""
Colours = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Curve:
    """A line with a band: ``y`` between ``low`` and ``high`` at each ``x``."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def colours(labels: Sequence[str]) -> Colours:
    """Return a colour for each label."""
    palette = matplotlib.color_sequences["tab10" if len(labels) <= 10 else "tab20"]
    return {label: matplotlib.colors.to_rgb(palette[i % len(palette)]) for i, label in enumerate(labels)}


def rows_of_curves(
    rows: Sequence[tuple[Panels[Curve], str, str, Sequence[float]]], colour: Colours, path: Path
) -> None:
    """Draw a row of panels with lines and bands for each (panels, x, y, marks).

    marks: dotted lines at these ``x``; the axis ends shortly after the last one.
    """
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
    finish(figure, [label for label in colour if label in drawn], colour, path)


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
    save(figure, path)


def finish(figure: Figure, labels: Sequence[str], colour: Colours, path: Path) -> None:
    """Add one legend below all panels."""
    handles = [Line2D([], [], color=colour[label], lw=2, label=label) for label in labels]
    columns = max(1, min(len(labels), round(figure.get_figwidth() / 1.6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Save a PNG with a palette, a third of the size."""
    figure.set_layout_engine("constrained")
    figure.savefig(path)
    pyplot.close(figure)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
