"""The counts that a method's mechanism left in the rows; a trial in which it did nothing is marked *mechanism idle*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from edge_sdk.methods import DeviceMethod, UnknownMethod, load_method
from sparrow.benchmarks.metrics import total
from sparrow.benchmarks.report.cells import ABSENT, for_each_group, markdown_lines, three_digits
from sparrow.benchmarks.report.figures import Group, end_of, stopped_devices, stops_early
from sparrow.benchmarks.rows import Recorded

IDLE = "mechanism idle"
HARDLY = "mechanism hardly acted"
LEAST_SHARE = 0.01
"""Of what a mechanism may touch: below this its figures are as good as those of the method without it."""


def acts_of(method: str) -> tuple[str, ...]:
    """Return the counts that prove that a method acted; none of a method that is not installed."""
    found = _installed(method)
    return found.acts if found else ()


def _installed(method: str) -> DeviceMethod | None:
    try:
        return load_method(method)
    except UnknownMethod:
        return None


def idle_in(trial: Recorded, among: Sequence[Recorded]) -> tuple[str, ...] | None:
    """Return the counts of a trial that should have proved that its mechanism acted, and are zero; None if unknown.

    Rows from before such counts have what was counted then, without zeros: there a count is zero if it is missing, and
    another such trial of the same method among these rows has it.
    """
    if trial.result.idle is not None:
        return trial.result.idle
    acts = acts_of(trial.trial.method)
    as_old = [each for each in among if each.trial.method == trial.trial.method and each.result.idle is None]
    counted = total(end_of(each).counted for each in as_old)
    if any(name not in counted for name in acts):
        return None
    return tuple(name for name in acts if not end_of(trial).counted.get(name))


def shares_in(trial: Recorded) -> dict[str, float]:
    """Return the shares that a trial's mechanism changed of all that it could, by "COUNT of COUNT"; none if the rows
    have no such counts."""
    counted, method = end_of(trial).counted, _installed(trial.trial.method)
    return {
        f"{name} of {whole}": counted.get(name, 0) / counted[whole]
        for name, whole in (method.act_on if method else {}).items()
        if counted.get(whole)
    }


def mechanism_sections(found: Sequence[Group]) -> list[str]:
    """Return the table of counts of every point of the axes."""
    return ["## What the mechanism did", "", _NOTE, "", *for_each_group(found, _table)]


_NOTE = (
    "Counts of the devices' and the coordinator's halves of the method, sums over rounds and devices, means over "
    f"seeds. *{IDLE[0].upper()}{IDLE[1:]}*: a count that proves that the method did what it is named for is zero over "
    f"all rounds, so the trial did not test it. *{HARDLY[0].upper()}{HARDLY[1:]}*: it touched less than "
    f"{100 * LEAST_SHARE:.0f} % of what it may. *Not counted*: the rows are older than such counts. "
    f"{ABSENT}: plain training, or a method that names no such count."
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
    """Return the counts of a trial, with the devices that stopped where these may stop early."""
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
    shares = _shares(done)
    acted = f"**{HARDLY}**" if any(share < LEAST_SHARE for share in shares.values()) else "acted"
    return f"{acted}: {_listed(shares)}" if shares else acted


def _shares(done: Sequence[Recorded]) -> dict[str, float]:
    """Return the means of ``shares_in`` over the trials that have them."""
    found: dict[str, list[float]] = {}
    for trial in done:
        for name, share in shares_in(trial).items():
            found.setdefault(name, []).append(share)
    return {name: fmean(shares) for name, shares in found.items()}


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{100 * share:.2g} % {name}" for name, share in shares.items())


def idle_lines(recorded: Sequence[Recorded]) -> list[str]:
    """Return a warning for each label with an idle trial, or whose mechanism hardly acted, for the head of a page."""
    names: dict[str, set[str]] = {}
    trials: dict[str, int] = {}
    for trial in recorded:
        idle = idle_in(trial, recorded)
        if idle:
            names.setdefault(trial.trial.label, set()).update(idle)
            trials[trial.trial.label] = trials.get(trial.trial.label, 0) + 1
    warnings = [
        f"**{label}: {IDLE} in {trials[label]} {'trial' if trials[label] == 1 else 'trials'}** "
        f"(no {', '.join(sorted(missing))}): its figures are not of this method."
        for label, missing in names.items()
    ]
    for label in dict.fromkeys(trial.trial.label for trial in recorded):
        shares = _shares([trial for trial in recorded if trial.trial.label == label])
        few = {name: share for name, share in shares.items() if share < LEAST_SHARE}
        if few and label not in names:
            warnings.append(f"**{label}: {HARDLY}** ({_listed(few)}): its figures tell little of that mechanism.")
    return [line for warning in warnings for line in (warning, "")]
