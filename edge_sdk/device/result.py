"""The record of a device's work in a federation, and its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from sparrow.command_line.table import percent
from sparrow.protocol.messages import Evaluation, Moved

from ..budget.search import Choice
from ..engines import ONNX_RUNTIME
from .local_noise import DELTA, LocalNoise, epsilon
from .session import Session
from .state import Progress, Totals

if TYPE_CHECKING:
    from .exporting import Export


@dataclass(frozen=True)
class Result:
    """The record of a device's work in a federation. Accuracies are on held-out data, None if unknown."""

    name: str
    rounds: int
    steps: int
    stopped_round: int | None
    # Round of the kept personal model, the best on validation data; None: the last one.
    best_round: int | None
    # Share of the global model in the kept one.
    global_share: float
    # Whether the device joined after the end and fine-tuned the global model.
    adapted: bool
    accuracy_before: float | None
    # Accuracy of a model trained only on its own data (``methods.alone``).
    accuracy_alone: float | None
    accuracy_after: float | None
    # Costs of training and of evaluations.
    training: Totals
    evaluation: Totals
    # Bytes of all calls.
    everything: Moved
    export: Export | None
    engine: str
    budget: float = 1.0
    # Reasons for the budget; None if given.
    choice: Choice | None = None
    # Warnings about the personal model.
    warnings: tuple[str, ...] = ()
    # Metrics of the task, of the kept model.
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Whether its program stopped it; another call resumes (``engine`` is empty if it was stopped before the coordinator
    # answered).
    interrupted: bool = False
    # Number of failed rounds.
    failures: int = 0
    # Number of rounds whose update the coordinator refused.
    refused: int = 0
    # Reason of the last failure or refusal.
    failure: str | None = None
    # Privacy loss of all sent updates (``device.local_noise``); None without local noise.
    local_epsilon: float | None = None
    # The candidate that all devices chose together (``protocol.evidence``), or "".
    taken: str = ""

    @property
    def gain(self) -> float | None:
        """The accuracy gained over training alone; None if either is unknown."""
        if self.accuracy_after is None or self.accuracy_alone is None:
            return None
        return self.accuracy_after - self.accuracy_alone

    @property
    def trained_nothing(self) -> bool:
        """Whether training failed in all of this device's rounds."""
        return self.failures > 0 and not self.rounds

    @property
    def nothing_accepted(self) -> bool:
        """Whether the coordinator refused all of this device's updates."""
        return self.refused > 0 and self.refused >= self.rounds


def result_of(
    session: Session, name: str, exported: Export | None, interrupted: bool, noise: LocalNoise | None
) -> Result:
    """Evaluate the kept model on held-out data, and return the record."""
    best = session.best
    judged = session.evaluate(best) if best is not None else None
    return replace(
        result_before(session.progress, name, session.budget, noise),
        accuracy_after=judged.accuracy if judged else None,
        metrics=judged.metrics if judged else {},
        everything=session.moved,
        export=exported,
        engine=session.engine.title,
        choice=session.choice,
        warnings=tuple(_warnings(session.progress, tuned=bool(session.info.settings.finetune_epochs))),
        interrupted=interrupted,
    )


def result_before(progress: Progress, name: str, budget: float, noise: LocalNoise | None) -> Result:
    """Return the result of a device that was stopped before the coordinator answered."""
    return Result(
        name=name,
        rounds=progress.rounds,
        steps=progress.steps,
        stopped_round=progress.stopped_round,
        best_round=progress.best.round if progress.best else None,
        global_share=progress.best.global_share if progress.best else 0.0,
        taken=progress.best.taken if progress.best else "",
        adapted=progress.adapted,
        failures=progress.failures,
        refused=progress.refused,
        failure=progress.failure,
        local_epsilon=None if noise is None else epsilon(progress.updates),
        accuracy_before=progress.accuracy_before,
        accuracy_alone=progress.accuracy_alone,
        accuracy_after=None,
        training=progress.training,
        evaluation=progress.evaluation,
        everything=progress.everything,
        export=None,
        engine="",
        budget=budget,
        interrupted=True,
    )


def _warnings(progress: Progress, *, tuned: bool = False) -> Iterator[str]:
    if progress.failures and not progress.rounds:
        yield (
            f"warning: this device has trained nothing: {failed(progress.failures)}; the last error: "
            f"{progress.failure}. Its model is the global one, {'fine-tuned on its data' if tuned else 'as received'}"
        )
    if progress.refused:
        yield (
            f"warning: the coordinator refused {progress.refused} of this device's {progress.rounds} updates; the last "
            f"failure: {progress.failure}"
        )
    yield from _of_new_data(progress)
    if progress.best is None:
        return
    found = progress.best.validation
    if progress.validation_before is not None and _worse(found, progress.validation_before):
        yield (
            f"warning: the personal model predicts worse than the model that this device began with "
            f"({_judged(found)}, {_judged(progress.validation_before)} before, on validation data); give this "
            f"device more data, or the federation more rounds or another learning_rate"
        )
    # The samples of all devices chose it, which say more than this device's.
    if progress.best.taken:
        return
    if progress.validation_global is not None and _worse(found, progress.validation_global):
        yield (
            f"warning: the global model predicts better here than the personal one "
            f"({_judged(progress.validation_global)}, {_judged(found)} personal, on validation data); let the "
            f"federation train for more rounds, give this device a larger budget, or use the global model"
        )


def _of_new_data(progress: Progress) -> Iterator[str]:
    new = progress.new_data
    if new is None or (new.after is not None and not _worse(new.after, new.before)):
        return
    now = "no finite loss" if new.after is None else _judged(new.after)
    best = progress.best
    if best is not None and best.round != new.round:
        use = f"the model of round {best.round} is used now ({_judged(best.validation)})"
    else:
        use = "no better model is known; let the federation train for more rounds with the new data"
    yield (
        f"warning: the validation data changed: the model of round {new.round} had {_judged(new.before)} on the old "
        f"data, and has {now} on the new; {use}"
    )


def failed(rounds: int) -> str:
    """Return a text with the number of failed rounds."""
    return "its only round failed" if rounds == 1 else f"all of its {rounds} rounds failed"


def refused(result: Result) -> str:
    """Return a text with the number of refused updates."""
    count = f"all of its {result.rounds}" if result.nothing_accepted else f"{result.refused} of {result.rounds}"
    return "its only update was refused" if result.rounds == 1 else f"{count} updates were refused"


def _worse(found: Evaluation, than: Evaluation) -> bool:
    return than.loss < found.loss and (than.accuracy or 0.0) >= (found.accuracy or 0.0)


def _judged(found: Evaluation) -> str:
    loss = f"loss {found.loss:.3f}"
    return loss if found.accuracy is None else f"accuracy {percent(found.accuracy)}, {loss}"


# Candidate -> description.
TAKEN = {
    "global": "the global model",
    "personal": "the personal model of the last round",
    "mixture": "a mixture, half personal, half global",
    "finished": "a mixture, half personal, half global, trained once more",
    "alone": "a model trained only on its own data",
}


def _kept(result: Result) -> str:
    if result.taken:
        return f", keeps {TAKEN.get(result.taken, result.taken)}, chosen by all devices together"
    if not result.global_share:
        return f", keeps the model of round {result.best_round}" if result.best_round and not result.adapted else ""
    if result.global_share == 1:
        return ", keeps the finished global model"
    mixed = f", keeps a mixture of {percent(1 - result.global_share, 0)} personal model"
    when = f" of round {result.best_round}" if result.best_round and not result.adapted else ""
    return f"{mixed}{when} and {percent(result.global_share, 0)} finished global model"


def report(result: Result, energy: str) -> str:
    """Return the result as text."""
    lines = [
        f"{result.name}: {_count(result.rounds, 'round')}, {_count(result.steps, 'local step')}"
        + (f", stopped early in round {result.stopped_round}" if result.stopped_round else "")
        + _kept(result)
        + (f", trained nothing: {failed(result.failures)}" if result.trained_nothing else "")
        + (f", {refused(result)}" if result.refused else "")
        + (", adapted the finished global model" if result.adapted and not result.trained_nothing else ""),
        *_accuracy_lines(result),
        *(f"  {name + ', held-out data':<27}{value:.4g} after" for name, value in result.metrics.items()),
        f"  training                   {_cost(result.training)}",
        f"  evaluation                 {_cost(result.evaluation)}",
        f"  bytes                      training {_both(result.training)}; everything {_both(result.everything)}"
        + (f", of which {result.everything.frozen_down:,} frozen, once" if result.everything.frozen_down else ""),
        f"  engine                     {result.engine}",
        f"  energy source              {energy}",
        f"  energy per update          {_joules_per(result.training, result.rounds)}",
        f"  energy per point           {_joules_per(result.training, _points(result))}",
        f"  heat                       {_heat(result.training)}",
        *_noise_lines(result),
        f"  budget                     {result.choice or f'{result.budget:g}, as given'}",
    ]
    lines += [f"                             {text}" for text in (result.choice.advice if result.choice else ())]
    if result.export:
        lines.append(
            f"  ONNX                       {result.export.path}: {result.export.bytes:,} bytes "
            f"({_form(result.export)}), {result.export.latency_ms:.2f} ms a sample (p50){_difference(result.export)}"
        )
    return "\n".join(lines)


def _count(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _difference(export: Export) -> str:
    """Return the difference from the engine; nothing if ONNX Runtime gives the same outputs as in training."""
    if export.engine == ONNX_RUNTIME and not export.max_difference:
        return ""
    compared = _count(export.samples, "sample")
    return f", largest difference from {export.engine} {export.max_difference:.1e} on {compared}"


def _form(export: Export) -> str:
    """Return the form of the file, and the size of the dense file if it differs."""
    if not export.steps:
        return "dense"
    return f"{', '.join(export.steps)}; {export.dense_bytes:,} dense"


def _noise_lines(result: Result) -> list[str]:
    if result.local_epsilon is None:
        return []
    return [f"  local noise                epsilon {result.local_epsilon:.4g} at delta {DELTA:g}, of all updates sent"]


def _accuracy_lines(result: Result) -> list[str]:
    # A regression has metrics instead.
    if result.accuracy_after is None and result.metrics:
        return []
    after = _percent(result.accuracy_after)
    against = f"{_percent(result.accuracy_before)} before"
    if (gain := result.gain) is not None:
        against = f"{_percent(result.accuracy_alone)} alone, {100 * gain:+.1f} points by the federation"
    return [f"  accuracy, held-out data    {against}, {after} after"]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else percent(share)


def _points(result: Result) -> float:
    """Return the gain in accuracy, in percentage points."""
    if result.accuracy_before is None or result.accuracy_after is None:
        return 0.0
    return 100 * (result.accuracy_after - result.accuracy_before)


def _joules_per(totals: Totals, count: float) -> str:
    """Return measured and estimated joules, each divided by ``count``."""
    kinds = (("measured", totals.joules_measured), ("estimated", totals.joules_estimated))
    known = [f"{joules / count:.2f} J {kind}" for kind, joules in kinds if joules and count > 0]
    return ", ".join(known) or "unknown"


def _heat(totals: Totals) -> str:
    peak = "no temperature known" if totals.celsius_peak is None else f"at most {totals.celsius_peak:.0f} °C"
    throttled = totals.throttled_seconds
    slow = "throttling unknown" if throttled is None else f"throttled for {throttled:.0f} s"
    return f"{peak}, {slow}, paused for {totals.paused_seconds:.0f} s"


def _both(moved: Totals | Moved) -> str:
    return f"{moved.bytes_down:,} down and {moved.bytes_up:,} up"


def _cost(totals: Totals) -> str:
    joules = []
    if totals.joules_measured:
        joules.append(f"{totals.joules_measured:.1f} J measured")
    if totals.joules_estimated:
        joules.append(f"{totals.joules_estimated:.1f} J estimated")
    if totals.seconds_without_joules or not joules:
        joules.append(f"joules unavailable for {totals.seconds_without_joules:.1f} s")
    return (
        f"{totals.seconds:.1f} s, {totals.bytes_down:,} bytes down, {totals.bytes_up:,} bytes up, {', '.join(joules)}"
    )


def as_json(result: Result, energy: str) -> str:
    """Return the result as JSON: seconds, bytes, joules, and shares of samples."""
    totals = {name: getattr(result, name).model_dump() for name in ("training", "evaluation", "everything")}
    more = {
        "trained_nothing": result.trained_nothing,
        "nothing_accepted": result.nothing_accepted,
        "gain": result.gain,
        "energy_source": energy,
    }
    return json.dumps({**asdict(result), **totals, **more}, default=str)
