"""What this device can afford: the largest budget whose rounds fit into its memory and into their deadline.

A budget is tried, not guessed: a few steps of local training as rounds at that budget take them, on this device, of the
federation's own model (``training.rehearsal``), and the memory that they take (``training.footprint``). Most devices
can afford everything, which one try finds out; otherwise the tiers below are searched by halves.

What rounds then really take corrects what was predicted, and tells the speed of the link. After each round the choice
is looked at anew: down as soon as the tier no longer fits, or the device grew hot; up by a tier, and only where one is
left to spare, so that a device between two tiers does not go to and fro. The coordinator is told the new budget and
what limits it, and uses it from the next assignment on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, ValidationError

from edge_sdk.arguments import MIB
from edge_sdk.budget.demand import Demand, Needs, Simulated
from edge_sdk.budget.footprint import room
from edge_sdk.methods import load_method
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import BudgetLimit, FederationInfo, Phase
from edge_sdk.tasks import Task
from sparrow.devices.simulation import Board

DEADLINE_SHARE = 0.75
"""Of a round's deadline, what a device plans to need: predictions are off by up to a quarter, and others need the
network, too."""

NEW = 0.5
"""Weight of the latest round in what was learned from all of them."""

SAVES_LITTLE = 0.5
"""A budget that saves less than this share of what it gives up is hardly worth its losses: the user is told."""


class Learned(BaseModel):
    """What a device's own rounds have taught it: how much longer they take than was predicted, how much more they send,
    and how fast its link is, in bytes per second; None before the first transfer."""

    model_config = ConfigDict(frozen=True)

    seconds: float = 1.0
    bytes_down: float = 1.0
    bytes_up: float = 1.0
    down_rate: float | None = None
    up_rate: float | None = None

    def after(self, demand: Demand, duty: float, download: Phase, train: Phase) -> Learned:
        """The same after one more round, at the budget that ``demand`` is of."""
        computed = (train.seconds - train.paused_seconds) * duty
        changed: dict[str, float | None] = {"seconds": _mixed(self.seconds, computed, demand.seconds)}
        if download.bytes_down and download.seconds > 0:
            changed["bytes_down"] = _mixed(self.bytes_down, download.bytes_down, demand.bytes_down)
            changed["down_rate"] = _mixed(self.down_rate, download.bytes_down, download.seconds)
        return self.model_copy(update=changed)

    def after_upload(self, demand: Demand, upload: Phase) -> Learned:
        """The same once its update has been sent."""
        if not (upload.bytes_up and upload.seconds > 0):
            return self
        bytes_up = _mixed(self.bytes_up, upload.bytes_up, demand.bytes_up)
        up_rate = _mixed(self.up_rate, upload.bytes_up, upload.seconds)
        return self.model_copy(update={"bytes_up": bytes_up, "up_rate": up_rate})


NOTHING = Learned()
"""What a device knows that has not trained yet."""


def _mixed(known: float | None, above: float, below: float) -> float | None:
    if above <= 0 or below <= 0:
        return known
    return above / below if known is None else (1 - NEW) * known + NEW * above / below


@dataclass(frozen=True)
class Limits:
    """What a round may take: bytes that the process may hold, None where nobody limits it, and seconds from its start
    to its end, of which a device plans with ``DEADLINE_SHARE``."""

    memory: int | None
    deadline: float

    @property
    def seconds(self) -> float:
        """What a device plans with."""
        return DEADLINE_SHARE * self.deadline


@dataclass(frozen=True)
class Choice:
    """A budget and what a round at it is predicted to take: seconds in all, of which ``computing`` at work, bytes each
    way, bytes of memory. fits: whether that is within all limits; the smallest tier may not be. limited_by: what keeps
    it from being larger. reasons: in words, for the device's user; advice: what would help where a budget does not."""

    budget: float
    seconds: float
    computing: float
    bytes_down: int
    bytes_up: int
    memory: int
    fits: bool
    limited_by: BudgetLimit | None
    reasons: tuple[str, ...]
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def predict(demand: Demand, learned: Learned, duty: float) -> tuple[float, float, int, int]:
    """Seconds of a round in all and of its computing, bytes down and bytes up."""
    computing = demand.seconds * learned.seconds / duty
    down, up = round(demand.bytes_down * learned.bytes_down), round(demand.bytes_up * learned.bytes_up)
    transfer = sum(size / rate for size, rate in ((down, learned.down_rate), (up, learned.up_rate)) if rate)
    return computing + transfer, computing, down, up


def what_is_short(demand: Demand, limits: Limits, learned: Learned, duty: float) -> BudgetLimit | None:
    """What a round at this budget has too little of, memory first; None where it fits."""
    if limits.memory is not None and demand.memory > limits.memory:
        return BudgetLimit.memory
    return BudgetLimit.deadline if predict(demand, learned, duty)[0] > limits.seconds else None


def choose(
    needs: Needs,
    limits: Limits,
    info: FederationInfo,
    *,
    learned: Learned = NOTHING,
    duty: float = 1.0,
    most: float = 1.0,
) -> Choice:
    """The largest tier, up to ``most``, whose rounds fit into ``limits``; the smallest of all where none does.

    The larger a budget, the more it is taken to need. duty: share of the time that the device computes.
    """
    tiers = [tier for tier in needs.tiers if tier <= most + 1e-9] or [min(needs.tiers)]
    short = {}

    def fits(place: int) -> bool:
        found = what_is_short(needs.at(tiers[place]), limits, learned, duty)
        if found is not None:
            short[place] = found
        return found is None

    place = len(tiers) - 1
    if not fits(place):
        low, place = 0, place - 1  # the answer lies in low..place, or is none
        while low <= place:
            middle = (low + place + 1) // 2
            if fits(middle):
                low = middle + 1
            else:
                place = middle - 1
        place = max(place, -1)
    chosen = max(place, 0)
    limited = short.get(chosen if place < 0 else chosen + 1)
    return _described(needs, tiers[chosen], place >= 0, limited, limits, info, learned, duty)


def _described(
    needs: Needs,
    budget: float,
    fits: bool,
    limited: BudgetLimit | None,
    limits: Limits,
    info: FederationInfo,
    learned: Learned,
    duty: float,
) -> Choice:
    demand = needs.at(budget)
    seconds, computing, down, up = predict(demand, learned, duty)
    deadline = f" of {limits.deadline:,.0f}" if math.isfinite(limits.deadline) else ""
    reasons = [f"budget {budget:g}: a round takes {seconds:,.1f} s{deadline} (predicted)"]
    if demand.memory:
        reasons[0] += f", {demand.memory / MIB:,.0f} MiB of memory"
        reasons[0] += "" if limits.memory is None else f" of {limits.memory / MIB:,.0f}"
    if limited is BudgetLimit.memory:
        reasons.append("the next larger one has too little memory" if fits else "there is too little memory for any")
    elif limited is BudgetLimit.deadline:
        late = "a larger one would come too close to the deadline" if fits else "no budget meets the deadline"
        reasons.append(late)
    advice = _advice(needs, demand, limited, limits, info, learned, duty) if budget < 1 or not fits else ()
    return Choice(budget, seconds, computing, down, up, demand.memory, fits, limited, tuple(reasons), advice)


def _advice(
    needs: Needs,
    demand: Demand,
    limited: BudgetLimit | None,
    limits: Limits,
    info: FederationInfo,
    learned: Learned,
    duty: float,
) -> tuple[str, ...]:
    """What a device is told whose budget saves it less than it gives up."""
    if limited is BudgetLimit.memory:
        return (
            f"less memory is needed with smaller batches: ask the federation's operator for a batch_size below "
            f"{info.settings.batch_size}",
        )
    if limited is not BudgetLimit.deadline:
        return ()
    full = needs.at(1.0)
    saved = 1 - demand.seconds / full.seconds if full.seconds else 0.0
    given_up = 1 - demand.budget
    if given_up > 0 and saved >= SAVES_LITTLE * given_up and predict(demand, learned, duty)[0] <= limits.seconds:
        return ()
    of_steps = predict(full, learned, duty)
    left = limits.seconds - (of_steps[0] - of_steps[1]) - full.fixed * learned.seconds / duty
    per_step = (full.seconds - full.fixed) * learned.seconds / duty / max(1, needs.steps)
    steps = max(0, math.floor(left / per_step)) if per_step > 0 else 0
    method = load_method(info.method)
    why = f"{info.method} at a budget of {demand.budget:g} saves {max(0.0, saved):.0%} of a round's computing"
    if method.forward_stays:
        why += ", for the forward pass stays that of the whole model"
    helps = [f"{steps} local steps a round instead of {needs.steps}"] if 0 < steps < needs.steps else []
    helps.append(f"a batch_size below {info.settings.batch_size}")
    said = f"{why}; what helps more is {' or '.join(helps)}: ask the federation's operator"
    if predict(demand, learned, duty)[0] > limits.seconds:
        said += "; with --budget it takes part as you say, and may come too late"
    return (said,)


# --- keeping ---------------------------------------------------------------------------------------------------------


class Budgets:
    """The budget of one device through its federation's rounds.

    limits: what a round may take now, given its deadline in seconds. duty: share of the time that the device computes
    now. learned: what was kept of an earlier start. keep: told what has been learned.
    """

    def __init__(
        self,
        needs: Needs,
        info: FederationInfo,
        limits: Callable[[float], Limits],
        *,
        duty: Callable[[], float] = lambda: 1.0,
        learned: Learned = NOTHING,
        keep: Callable[[Learned], None] = lambda learned: None,
    ) -> None:
        self._needs, self._info, self._limits, self._duty, self._keep = needs, info, limits, duty, keep
        self.learned = learned
        self._trained: Demand | None = None
        self.choice = choose(needs, limits(info.settings.deadline_seconds), info, learned=learned, duty=duty())

    @property
    def share(self) -> float:
        """The budget now."""
        return self.choice.budget

    def observe(self, download: Phase, train: Phase) -> None:
        """Learn from a round that was trained at the budget now, before its update is sent."""
        self._trained = self._needs.at(self.share)
        self.learned = self.learned.after(self._trained, self._duty(), download, train)
        self._keep(self.learned)

    def sent(self, upload: Phase) -> None:
        """Learn from what sending that round's update took."""
        if self._trained is not None:
            self.learned = self.learned.after_upload(self._trained, upload)
            self._keep(self.learned)

    def reassess(self, deadline: float, *, hot: bool = False) -> bool:
        """Look at the choice anew, once a round is trained; whether it has changed.

        deadline: of rounds, in seconds; an operator may have changed it. hot: the device had to pause for heat or
        throttling since: it takes a tier less, whatever else allows more.
        """
        before, limits, duty = self.choice, self._limits(deadline), self._duty()
        tiers = self._needs.tiers
        place = tiers.index(before.budget)
        if hot and place > 0:
            found = self._choose(limits, duty, tiers[place - 1])
            if found.limited_by is None:
                found = _because_of_heat(found)
        else:
            found = self._choose(limits, duty, 1.0)
            most = tiers.index(found.budget)
            if most > place:
                # Up by a tier at a time, and only where one is left to spare: predictions are not better than that.
                most = min(place + 1, most if found.budget == 1 else most - 1)
                lower = self._choose(limits, duty, tiers[most])
                found = replace(lower, limited_by=lower.limited_by or found.limited_by)
        self.choice = found
        return (found.budget, found.limited_by) != (before.budget, before.limited_by)

    def _choose(self, limits: Limits, duty: float, most: float) -> Choice:
        return choose(self._needs, limits, self._info, learned=self.learned, duty=duty, most=most)


def _because_of_heat(choice: Choice) -> Choice:
    return replace(
        choice, limited_by=BudgetLimit.heat, reasons=(*choice.reasons, "a tier less, because the device grew too hot")
    )


def limits_here(task: Task, memory_limit: int | None, *, timed: bool = True) -> Callable[[float], Limits]:
    """The limits of this machine: memory as there is now, unless ``memory_limit`` bytes are given, and where seconds
    count (``timed``) a round's deadline."""

    def limits(deadline: float) -> Limits:
        return Limits(memory_limit or room(task.compute.device), deadline if timed else math.inf)

    return limits


def board_budget(board: Board, task: Task, manifest: Manifest, info: FederationInfo) -> Choice:
    """What a simulated board can afford: by its memory, its FLOPs per second and its link."""
    learned = Learned(down_rate=board.bytes_per_second, up_rate=board.bytes_per_second)
    limits = Limits(board.memory_bytes, info.settings.deadline_seconds)
    return choose(Simulated(board, task, manifest, info), limits, info, learned=learned)


def read_learned(data: bytes | None) -> Learned:
    """What was kept; nothing where that cannot be read, for it is learned again."""
    try:
        return NOTHING if data is None else Learned.model_validate_json(data)
    except ValidationError:
        return NOTHING
