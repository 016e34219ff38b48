"""The table of the counts that methods' mechanisms left in the rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from sparrow.bench.report.cells import (
    ABSENT,
    Column,
    for_each_group,
    label_table,
    markdown_lines,
    percent_cell,
    three_digits,
)
from sparrow.bench.report.figures import Group, end_of, share_counted, stopped_devices, stops_early
from sparrow.bench.report.idle import IDLE, LEAST_SHARE, WEAK, acts_of, idle_in, listed, mean_shares
from sparrow.bench.rows import Recorded

SHARE_COLUMNS: tuple[Column, ...] = (
    ("on in a batch, %", percent_cell(lambda trial: share_counted(trial, "values_kept"))),
    ("touched in a round, %", percent_cell(lambda trial: share_counted(trial, "values_touched"))),
)


def mechanism_sections(found: Sequence[Group]) -> list[str]:
    """Return the table of counts of every point of the axes."""
    return ["## What the mechanism did", "", _NOTE, "", *for_each_group(found, _table)]


_NOTE = (
    "Counts of the devices' and the coordinator's halves of the method, as sums over rounds and devices and means over "
    f"seeds. *{IDLE[0].upper()}{IDLE[1:]}*: a count that shows the method's mechanism is zero over all rounds, so the "
    f"trial did not test the method. *{WEAK[0].upper()}{WEAK[1:]}*: the mechanism took less than "
    f"{100 * LEAST_SHARE:.0f} % of its possible actions. *Not counted*: the rows are older than these counts. "
    f"{ABSENT}: plain training, or a method without such a count."
)


def _table(group: Group) -> list[str]:
    among = [trial for done in group.trials.values() for trial in done]
    rows = [[label, _state(done, among), _counts(done)] for label, done in group.trials.items() if done]
    return markdown_lines(["", "mechanism", "counted"], rows)


def _counts(done: Sequence[Recorded]) -> str:
    known = [_counted(trial) for trial in done]
    names = sorted({name for each in known for name in each})
    nothing = "not counted" if any(end_of(trial).counts is None for trial in done) else ABSENT
    return ", ".join(f"{name} {three_digits(fmean(each.get(name, 0) for each in known))}" for name in names) or nothing


def _counted(trial: Recorded) -> dict[str, int]:
    """Return the counts of a trial, with the number of stopped devices if early stopping is on."""
    stopped = {"devices_stopped": stopped_devices(trial)} if stops_early(trial.trial) else {}
    return {**end_of(trial).counted, **stopped}


def _state(done: Sequence[Recorded], among: Sequence[Recorded]) -> str:
    if not acts_of(done[0].trial.method):
        return ABSENT
    states = [idle_in(trial, among) for trial in done]
    names = sorted({name for each in states for name in each or ()})
    if names:
        idle = sum(bool(each) for each in states)
        return f"**{IDLE}**: no {', '.join(names)}" + (f" in {idle} of {len(done)} trials" if idle < len(done) else "")
    if None in states:
        return "not counted"
    shares = mean_shares(done)
    acted = f"**{WEAK}**" if any(share < LEAST_SHARE for share in shares.values()) else "acted"
    return f"{acted}: {listed(shares)}" if shares else acted


def share_sections(found: Sequence[Group]) -> list[str]:
    """Return the tables of the blocks that were used, of methods that use some in a batch."""
    by_block = [group for group in map(_by_block, found) if group.trials]
    if not by_block:
        return []
    note = (
        "Values of the active blocks, as a mean over batches, and of the uploaded blocks, which any batch of a "
        "device's round has used. Both are shares of the model's values, and means over device-rounds and seeds."
    )
    tables = for_each_group(by_block, lambda group: label_table(group.trials, SHARE_COLUMNS))
    return ["## Used share of the model", "", note, "", *tables]


def _by_block(group: Group) -> Group:
    """Return the labels whose method uses some blocks of the model in a batch."""
    return Group(
        group.title,
        {
            label: done
            for label, done in group.trials.items()
            if any(share_counted(each, "values_kept") for each in done)
        },
    )
