"""The recorded trials of an experiment, grouped by point of the axes, and the results of one trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from edge_sdk.errors import SdkError
from edge_sdk.methods import load_method

from ...coordinator.methods import load_method as load_coordinator_method
from ...protocol.builtin import builtin_tasks, load_builtin
from ...protocol.flops import forward_flops
from ...protocol.settings import FederationSettings
from ..experiment import Experiment, Options, Trial, Value, trials
from ..metrics import Accuracy, Point, Shifted, accuracy_over
from ..rows import DeviceResult, Recorded

MIB = 2**20


@dataclass(frozen=True)
class Group:
    """The trials with the same values of the experiment's axes. trials: label -> trials in the order of the seeds."""

    title: str
    trials: dict[str, tuple[Recorded, ...]]


def groups(experiment: Experiment, recorded: Sequence[Recorded]) -> list[Group]:
    """Return the experiment's recorded trials, with one group for each point of the axes."""
    known = {each.trial.name: each for each in recorded}
    found: dict[str, dict[str, list[Recorded]]] = {}
    for expected in trials(experiment, "", {}):
        done = found.setdefault(axes_title(expected.axes), {}).setdefault(expected.label, [])
        if expected.name in known:
            done.append(known[expected.name])
    return [Group(title, {label: tuple(done) for label, done in by_label.items()}) for title, by_label in found.items()]


def stops_early(trial: Trial) -> bool:
    """Return True if the trial's devices stop early."""
    rule = trial.settings.get("early_stopping", FederationSettings().early_stopping)
    return rule != "off" or trial.settings.get("joules_per_device") is not None


def participants(trial: Recorded) -> list[DeviceResult]:
    """Return the devices that trained."""
    return [device for device in trial.result.devices if not device.new]


def shift_of(test_set: Options, trial: Recorded) -> Shifted | None:
    """Return a trial's result on a test set; None if it was not evaluated there."""
    return next((each for each in trial.shifts if each.test_set == test_set), None)


def accuracy_among(devices: Iterable[DeviceResult]) -> Accuracy | None:
    """Return the accuracy over these devices."""
    return accuracy_over([(device.accuracy, device.test_examples) for device in devices])


def global_accuracy(trial: Recorded) -> Accuracy | None:
    """Return the accuracy of the global model over the devices that trained."""
    return accuracy_over([(device.accuracy_global, device.test_examples) for device in participants(trial)])


def end_of(trial: Recorded) -> Point:
    """Return the trial's last point."""
    return trial.points[-1]


def device_rounds(trial: Recorded) -> int:
    """Return the number of rounds summed over devices."""
    return sum(device.rounds for device in participants(trial))


def judged_flops(trial: Recorded) -> list[int]:
    """Return the known FLOPs per sample of the evaluated models, for devices that trained."""
    # Older rows have no such numbers; for methods with narrow personal networks they follow from the budget.
    if any(device.inference_flops is not None for device in participants(trial)):
        return [each.inference_flops for each in participants(trial) if each.inference_flops is not None]
    by_budget = _narrow_flops(trial.trial.method, trial.trial.task)
    return [] if by_budget is None else [by_budget(device.budget) for device in participants(trial)]


@cache
def _narrow_flops(method: str, task: str) -> Callable[[float], int] | None:
    try:
        rounds = load_method(method)
        personal = load_coordinator_method(method).personal_models
    except SdkError:
        return None
    if not rounds.narrow or not personal or task not in builtin_tasks():
        return None
    manifest = load_builtin(task).manifest
    return cache(lambda budget: forward_flops(manifest, rounds.sample_mask(manifest, budget)))


def finetune_flops(trial: Recorded) -> int | None:
    """Return the FLOPs of fine-tuning for the last evaluation; None if not counted."""
    counted = end_of(trial).finetune_flops
    return 0 if counted is None and not trial.trial.settings.get("finetune_epochs") else counted


def counting(experiment: Experiment) -> Callable[[Accuracy], float]:
    """Return the mean over devices for curves."""
    # On the published set, a global model's weighted mean is its accuracy on the whole set.
    return (lambda each: each.weighted) if experiment.tests_on_published else (lambda each: each.mean)


def stopped_devices(trial: Recorded) -> int:
    """Return the number of devices that stopped early."""
    return sum(device.stopped_round is not None for device in participants(trial))


def mean_state_bytes(trial: Recorded) -> float:
    """Return the mean size of a device's state in bytes."""
    return fmean(device.state_bytes for device in participants(trial))


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def trial_means(done: Sequence[Recorded]) -> list[float]:
    """Return the mean accuracy over devices of each evaluated trial, in per cent."""
    return [100 * each.mean for each in (accuracy_among(participants(trial)) for trial in done) if each]


def axes_title(axes: dict[str, Value]) -> str:
    """Return the title of a point of the axes."""
    return ", ".join(f"{key} = {value}" for key, value in axes.items())


def share_counted(trial: Recorded, count: str) -> float | None:
    """Return the fraction of values with this count, over device-rounds; None if the method does not count it."""
    notes = end_of(trial).notes
    return notes[count] / notes["values"] if notes.get("values") and count in notes else None


def over_seeds(
    done: Sequence[Recorded], test_set: Options, figure: Callable[[Shifted], Accuracy | None]
) -> list[Accuracy]:
    """Return the accuracies on a test set; empty if any trial lacks one, because means must be over the same seeds."""
    judged = [shift_of(test_set, trial) for trial in done]
    known = [accuracy for accuracy in (figure(each) for each in judged if each) if accuracy]
    return known if len(known) == len(done) else []


def analysed(trial: Recorded, kind: str, at: int = -1) -> dict[str, Any] | None:
    """Return the numbers of the ``at``-th analysis of this kind, by default the last; None without any."""
    found = [each.numbers for each in trial.analyses if each.kind == kind]
    return found[at] if found else None


def number_in(numbers: dict[str, Any] | None, what: str) -> float | None:
    """Return one number by its dotted name, such as ``jaccard.mean``; None if missing."""
    value: Any = numbers
    for name in what.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else float(value)


def mean_analysed(done: Sequence[Recorded], kind: str, what: str, at: int = -1) -> float | None:
    """Return the mean over trials of one number of a kind of analysis."""
    return known_mean(number_in(analysed(trial, kind, at), what) for trial in done)
