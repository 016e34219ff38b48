"""The page of an experiment with everything that its rows say."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.plots import curves
from benchmarks.report import analyses
from benchmarks.report.costs import cost_sections, stopping_sections
from benchmarks.report.mechanism import mechanism_sections, share_sections
from benchmarks.report.savings import saving_sections
from benchmarks.report.shifts import shift_curve, shift_sections
from benchmarks.report.uploads import upload_sections
from sparrow.bench.experiment import Experiment
from sparrow.bench.plots import colours
from sparrow.bench.report import pictures
from sparrow.bench.report.facts import warning_lines
from sparrow.bench.report.figures import Group, groups
from sparrow.bench.report.idle import idle_lines
from sparrow.bench.report.page import accuracy_sections, comparison_sections, write_report
from sparrow.bench.rows import Recorded

KINDS = (*pictures.KINDS, "shift", *analyses.KINDS)
"""The kinds of pictures, by the endings of their files' names."""


def write_page(
    experiment: Experiment,
    recorded: Sequence[Recorded],
    folder: Path,
    *,
    command: str,
    tuning: dict[str, Any],
    kinds: Collection[str] = KINDS,
) -> list[Path]:
    """Write the page and its pictures of these kinds into ``folder``; return the files."""
    draw = partial(draw_all, kinds=kinds)
    return write_report(experiment, recorded, folder, command=command, tuning=tuning, more=more_sections, pictures=draw)


def more_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return every table that ``sparrow bench report`` does not have."""
    return [
        *upload_sections(experiment, found),
        *cost_sections(experiment, found),
        *shift_sections(experiment, found),
        *saving_sections(found),
        *stopping_sections(experiment, found),
        *share_sections(found),
        *mechanism_sections(found),
        *analyses.analysis_sections(found),
    ]


def section_text(name: str, experiment: Experiment, recorded: Sequence[Recorded], drawn: Sequence[str]) -> str:
    """Return an experiment's section in a page of results:

    accuracies, comparisons and its purpose. drawn: kinds of its pictures.
    """
    found = groups(experiment, recorded)
    mine = [trial for group in found for done in group.trials.values() for trial in done]
    run = "python -m benchmarks analyse" if any(each.analyses for each in mine) else "sparrow bench run"
    lines = [
        f"{experiment.title}: `{run} {name} --data DIR`. Settings, costs and all other tables: "
        f"`python -m benchmarks report {name}`.",
        "",
        *_warnings(warning_lines(experiment, recorded)),
        *idle_lines(mine),
        *accuracy_sections(experiment, found),
        *comparison_sections(experiment, found),
        *upload_sections(experiment, found),
        *analyses.analysis_sections(found),
        *(line for kind in drawn for line in (f"![{experiment.title}: {kind}]({name}-{kind}.png)", "")),
    ]
    # One heading for an experiment: those of its tables become bold lines, and what all pages would repeat is left out.
    kept = [re.sub(r"^#+ (.*)$", r"**\1**", line) for line in lines if not line.startswith(REPEATED)]
    return f"# {name}\n\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def _warnings(lines: Sequence[str]) -> list[str]:
    """Return warnings, with the warnings about single settings merged."""
    departures = [line for line in lines if " ran with " in line]
    others = [line for line in lines if line not in departures]
    if departures:
        others += [f"**Some trials ran with other settings than the file says, {len(departures)} in all.**", ""]
    return others


REPEATED = ("On each device's ", "The interval in parentheses is", "The interval is over the devices")
"""Beginnings of notes that docs/benchmarks.md also has."""


def draw_all(
    experiment: Experiment, found: Sequence[Group], folder: Path, name: str, kinds: Collection[str] = KINDS
) -> list[tuple[str, Path]]:
    """Draw every picture of these kinds with content; return (caption, file) of each."""
    drawn = pictures.draw(experiment, found, folder, name, kinds)
    if "shift" in kinds:
        drawn += _draw_shift(experiment, found, folder / f"{name}-shift.png")
    return [*drawn, *analyses.draw_analyses(found, folder, name, kinds)]


def _draw_shift(experiment: Experiment, found: Sequence[Group], path: Path) -> list[tuple[str, Path]]:
    panels = pictures.panels_of(found, lambda group, label: shift_curve(group.trials[label], experiment.shifts))
    if not any(panels.values()):
        return []
    colour = colours(list(found[0].trials))
    curves(panels, colour, path, x="test samples from all devices, %", y=pictures.MEAN_ACCURACY)
    return [(f"Accuracy by degree of shift: {pictures.BAND}", path)]
