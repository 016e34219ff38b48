"""Find trials whose method had no effect: they are marked *mechanism idle*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from edge_sdk.methods import DeviceMethod, UnknownMethod, load_method

from ..metrics import total
from ..rows import Recorded
from .figures import end_of

IDLE = "mechanism idle"
WEAK = "mechanism had little effect"
LEAST_SHARE = 0.01
"""Smallest fraction of its possible actions for which a mechanism is not reported as having little effect."""


def acts_of(method: str) -> tuple[str, ...]:
    """Return the names of counts that show that a method's mechanism was active."""
    found = _installed(method)
    return found.acts if found else ()


def _installed(method: str) -> DeviceMethod | None:
    try:
        return load_method(method)
    except UnknownMethod:
        return None


def idle_in(trial: Recorded, among: Sequence[Recorded]) -> tuple[str, ...] | None:
    """Return the names of a trial's counts that should be positive and are zero; None if unknown."""
    # Older rows omit zeros: a missing count is zero if another older row of the same method has it.
    if trial.result.idle is not None:
        return trial.result.idle
    acts = acts_of(trial.trial.method)
    as_old = [each for each in among if each.trial.method == trial.trial.method and each.result.idle is None]
    counted = total(end_of(each).counted for each in as_old)
    if any(name not in counted for name in acts):
        return None
    return tuple(name for name in acts if not end_of(trial).counted.get(name))


def shares_in(trial: Recorded) -> dict[str, float]:
    """Return the fractions of possible actions that a trial's mechanism took.

    The key says of what: "of the personal weights are private".
    """
    counted = end_of(trial).counted
    method = _installed(trial.trial.method)
    return {
        f"of the {whole} weights are {name}": counted.get(name, 0) / counted[whole]
        for name, whole in (method.act_on if method else {}).items()
        if counted.get(whole)
    }


def mean_shares(done: Sequence[Recorded]) -> dict[str, float]:
    """Return the means of ``shares_in`` over trials."""
    found: dict[str, list[float]] = {}
    for trial in done:
        for name, share in shares_in(trial).items():
            found.setdefault(name, []).append(share)
    return {name: fmean(shares) for name, shares in found.items()}


def listed(shares: Mapping[str, float]) -> str:
    """Format shares: 0.5 % of the personal weights are private, and so on."""
    return ", ".join(f"{100 * share:.2g} % {name}" for name, share in shares.items())


def idle_lines(recorded: Sequence[Recorded]) -> list[str]:
    """Return the page's warnings about labels whose mechanism was idle or had little effect."""
    names: dict[str, set[str]] = {}
    trials: dict[str, int] = {}
    for trial in recorded:
        idle = idle_in(trial, recorded)
        if idle:
            names.setdefault(trial.trial.label, set()).update(idle)
            trials[trial.trial.label] = trials.get(trial.trial.label, 0) + 1
    warnings = [
        f"**{label}: {IDLE} in {trials[label]} {'trial' if trials[label] == 1 else 'trials'}** "
        f"(no {', '.join(sorted(missing))}): its results are not those of this method."
        for label, missing in names.items()
    ]
    for label in dict.fromkeys(trial.trial.label for trial in recorded):
        shares = mean_shares([trial for trial in recorded if trial.trial.label == label])
        few = {name: share for name, share in shares.items() if share < LEAST_SHARE}
        if few and label not in names:
            warnings.append(f"**{label}: the {WEAK}** (only {listed(few)}), so these results say little about it.")
    return [line for warning in warnings for line in (warning, "")]
