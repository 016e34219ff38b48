"""The largest budget whose rounds fit into a device's memory and their deadline.

Measured rounds correct the predictions and give the speed of the link. After each round the device chooses again: a
smaller budget if the current one no longer fits or the device became hot; the next larger one only if the one after it
would also fit, so that the device does not alternate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from sparrow.command_line.table import percent
from sparrow.devices.simulation import Board
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import BudgetLimit, Phase
from sparrow.protocol.settings import FederationSettings

from ..arguments import MIB
from ..methods import load_method
from ..tasks import Task
from .prediction import Prediction, Predictor

# Usable share of a round's deadline: predictions are off by up to a quarter, and devices share the network.
DEADLINE_SHARE = 0.75

# Weight of the latest round in the corrections.
LATEST_WEIGHT = 0.5

# If a budget saves less than this share of its reduction, the user gets advice.
SAVES_LITTLE = 0.5


class Learned(BaseModel):
    """Corrections from a device's rounds."""

    model_config = ConfigDict(frozen=True)

    # Measured / predicted.
    seconds: float = 1.0
    bytes_down: float = 1.0
    bytes_up: float = 1.0
    # Bytes per second; None before the first transfer.
    down_rate: float | None = None
    up_rate: float | None = None

    def after_training(self, prediction: Prediction, duty: float, download: Phase, train: Phase) -> Learned:
        """Return the corrections after a round with this prediction."""
        computed = (train.seconds - train.paused_seconds) * duty
        changed: dict[str, float | None] = {"seconds": _mixed(self.seconds, computed, prediction.seconds)}
        if download.bytes_down and download.seconds > 0:
            changed["bytes_down"] = _mixed(self.bytes_down, download.bytes_down, prediction.bytes_down)
            changed["down_rate"] = _mixed(self.down_rate, download.bytes_down, download.seconds)
        return self.model_copy(update=changed)

    def after_upload(self, prediction: Prediction, upload: Phase) -> Learned:
        """Return the corrections after sending a round's update."""
        if not (upload.bytes_up and upload.seconds > 0):
            return self
        bytes_up = _mixed(self.bytes_up, upload.bytes_up, prediction.bytes_up)
        up_rate = _mixed(self.up_rate, upload.bytes_up, upload.seconds)
        return self.model_copy(update={"bytes_up": bytes_up, "up_rate": up_rate})


NOTHING = Learned()


def _mixed(known: float | None, above: float, below: float) -> float | None:
    if above <= 0 or below <= 0:
        return known
    return above / below if known is None else (1 - LATEST_WEIGHT) * known + LATEST_WEIGHT * above / below


@dataclass(frozen=True)
class Limits:
    """Limits of a round: bytes of the process, and seconds until its deadline."""

    memory: int | None
    deadline: float

    @property
    def seconds(self) -> float:
        """The usable seconds."""
        return DEADLINE_SHARE * self.deadline


@dataclass(frozen=True)
class Choice:
    """A budget, and its predicted round."""

    budget: float
    # Seconds in total.
    seconds: float
    # Computing without transfers.
    computing: float
    bytes_down: int
    bytes_up: int
    # Bytes; None if plentiful.
    memory: int | None
    # False if even the smallest budget exceeds a limit.
    fits: bool
    # Why the budget is not larger.
    limited_by: BudgetLimit | None
    # Texts for the user.
    reasons: tuple[str, ...]
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class Corrected(NamedTuple):
    """A corrected prediction; see ``Choice``."""

    seconds: float
    computing: float
    bytes_down: int
    bytes_up: int


def correct(prediction: Prediction, learned: Learned, duty: float) -> Corrected:
    """Return the corrected ``prediction``."""
    computing = prediction.seconds * learned.seconds / duty
    down = round(prediction.bytes_down * learned.bytes_down)
    up = round(prediction.bytes_up * learned.bytes_up)
    transfer = sum(size / rate for size, rate in ((down, learned.down_rate), (up, learned.up_rate)) if rate)
    return Corrected(computing + transfer, computing, down, up)


def shortage(prediction: Prediction, limits: Limits, learned: Learned, duty: float) -> BudgetLimit | None:
    """Return the limit that a round exceeds, memory first; None if it fits."""
    if limits.memory is not None and prediction.memory is not None and prediction.memory.total > limits.memory:
        return BudgetLimit.memory
    return BudgetLimit.deadline if correct(prediction, learned, duty).seconds > limits.seconds else None


def choose(
    predictor: Predictor,
    limits: Limits,
    settings: FederationSettings,
    *,
    among: Sequence[float] | None = None,
    learned: Learned = NOTHING,
    duty: float = 1.0,
) -> Choice:
    """Return the largest budget within ``limits``, or else the smallest, by binary search.

    among: rising budgets. duty: share of the time that the device computes.
    """
    budgets = among or predictor.budgets
    short = {}

    def fits(place: int) -> bool:
        found = shortage(predictor.at(budgets[place]), limits, learned, duty)
        if found is not None:
            short[place] = found
        return found is None

    place = len(budgets) - 1
    if not fits(place):
        # Invariant: the answer lies in low..place, unless no budget fits.
        low = 0
        place -= 1
        while low <= place:
            middle = (low + place + 1) // 2
            if fits(middle):
                low = middle + 1
            else:
                place = middle - 1
        place = max(place, -1)
    chosen = max(place, 0)
    limited = short.get(chosen if place < 0 else chosen + 1)
    return _described(predictor, budgets[chosen], place >= 0, limited, limits, settings, learned, duty)


def _described(
    predictor: Predictor,
    budget: float,
    fits: bool,
    limited: BudgetLimit | None,
    limits: Limits,
    settings: FederationSettings,
    learned: Learned,
    duty: float,
) -> Choice:
    prediction = predictor.at(budget)
    round_ = correct(prediction, learned, duty)
    memory = None if prediction.memory is None else prediction.memory.total
    deadline = f" of {limits.deadline:,.0f}" if math.isfinite(limits.deadline) else ""
    reasons = [f"budget {budget:g}: a round takes {round_.seconds:,.1f} s{deadline} (predicted)"]
    if memory is not None:
        reasons[0] += f", {memory / MIB:,.0f} MiB of memory"
        reasons[0] += "" if limits.memory is None else f" of {limits.memory / MIB:,.0f}"
    if limited is BudgetLimit.memory:
        reasons.append("memory does not suffice for the next larger one" if fits else "memory suffices for no budget")
    elif limited is BudgetLimit.deadline:
        late = "a larger one would come too close to the deadline" if fits else "no budget meets the deadline"
        reasons.append(late)
    advice = _advice(predictor, prediction, limited, limits, settings, learned, duty) if budget < 1 or not fits else ()
    return Choice(budget, *round_, memory, fits, limited, tuple(reasons), advice)


def _advice(
    predictor: Predictor,
    prediction: Prediction,
    limited: BudgetLimit | None,
    limits: Limits,
    settings: FederationSettings,
    learned: Learned,
    duty: float,
) -> tuple[str, ...]:
    if limited is BudgetLimit.memory:
        return (
            f"smaller batches need less memory: ask the federation's operator for a batch_size below "
            f"{settings.batch_size}",
        )
    if limited is not BudgetLimit.deadline:
        return ()
    full = predictor.at(1.0)
    saved = 1 - prediction.seconds / full.seconds if full.seconds else 0.0
    given_up = 1 - prediction.budget
    late = correct(prediction, learned, duty).seconds > limits.seconds
    if given_up > 0 and saved >= SAVES_LITTLE * given_up and not late:
        return ()
    whole = correct(full, learned, duty)
    left = limits.seconds - (whole.seconds - whole.computing) - full.fixed_seconds * learned.seconds / duty
    per_step = full.step_seconds * learned.seconds / duty
    steps = max(0, math.floor(left / per_step)) if per_step > 0 else 0
    share = percent(max(0.0, saved), 0)
    why = f"{settings.method} at a budget of {prediction.budget:g} saves {share} of a round's computing"
    if load_method(settings.method).forward_stays:
        why += ", because the forward pass uses the whole model"
    helps = [f"{steps} local steps a round instead of {full.steps}"] if 0 < steps < full.steps else []
    helps.append(f"a batch_size below {settings.batch_size}")
    said = f"{why}; {' or '.join(helps)} would save more: ask the federation's operator"
    if late:
        said += "; with --budget the device takes part at a fixed budget, but its updates may be late"
    return (said,)


# --- through the rounds ----------------------------------------------------------------------------------------------


class BudgetController:
    """A device's budget, adapted after each round.

    limits: returns the current limits, given a deadline in seconds. learned: corrections of an earlier start.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: FederationSettings,
        limits: Callable[[float], Limits],
        *,
        duty: Callable[[], float] = lambda: 1.0,
        learned: Learned = NOTHING,
        keep: Callable[[Learned], None] = lambda learned: None,
    ) -> None:
        self.predictor = predictor
        self._settings = settings
        self._limits = limits
        self._duty = duty
        self._keep = keep
        self.learned = learned
        self._trained: Prediction | None = None
        self.choice = choose(predictor, limits(settings.deadline_seconds), settings, learned=learned, duty=duty())

    @property
    def budget(self) -> float:
        """The current budget."""
        return self.choice.budget

    def after_training(self, download: Phase, train: Phase) -> None:
        """Update the corrections after a round at the current budget, before its update is sent."""
        self._trained = self.predictor.at(self.budget)
        self.learned = self.learned.after_training(self._trained, self._duty(), download, train)
        self._keep(self.learned)

    def after_upload(self, upload: Phase) -> None:
        """Update the corrections after sending the round's update."""
        if self._trained is not None:
            self.learned = self.learned.after_upload(self._trained, upload)
            self._keep(self.learned)

    def reassess(self, deadline: float, *, hot: bool = False) -> bool:
        """Choose again after a round; return True if the choice changed.

        deadline: the round's, in seconds. hot: the device paused for heat or throttling; take the next smaller budget.
        """
        before = self.choice
        limits = self._limits(deadline)
        duty = self._duty()
        budgets = self.predictor.budgets
        place = budgets.index(before.budget)
        if hot and place > 0:
            found = self._choose(limits, duty, place - 1)
            if found.limited_by is None:
                reasons = (*found.reasons, "one step smaller, because the device grew too hot")
                found = replace(found, limited_by=BudgetLimit.heat, reasons=reasons)
        else:
            found = self._choose(limits, duty, len(budgets) - 1)
            most = budgets.index(found.budget)
            if most > place:
                # Predictions are inaccurate: grow by one step, and only if the one after it would also fit.
                most = min(place + 1, most if found.budget == 1 else most - 1)
                lower = self._choose(limits, duty, most)
                found = replace(lower, limited_by=lower.limited_by or found.limited_by)
        self.choice = found
        return (found.budget, found.limited_by) != (before.budget, before.limited_by)

    def _choose(self, limits: Limits, duty: float, most: int) -> Choice:
        among = self.predictor.budgets[: most + 1]
        return choose(self.predictor, limits, self._settings, among=among, learned=self.learned, duty=duty)


def board_budget(board: Board, task: Task, manifest: Manifest, settings: FederationSettings) -> Choice:
    """Return the budget of a simulated board, from its memory, FLOPs per second and link."""
    learned = Learned(down_rate=board.bytes_per_second, up_rate=board.bytes_per_second)
    limits = Limits(board.memory_bytes, settings.deadline_seconds)
    return choose(Predictor(task, manifest, settings, board=board), limits, settings, learned=learned)


def read_learned(data: bytes | None) -> Learned:
    """Return the stored corrections; ``NOTHING`` if they cannot be read."""
    try:
        return NOTHING if data is None else Learned.model_validate_json(data)
    except ValidationError:
        return NOTHING
