"""An experiment as a short TOML file (``sparrow/bench/experiments/*.toml``): task, methods, settings, rounds and seeds.

    title = "FedSPU on CIFAR-10"
    like = "fedspu-emnist"          base experiment: its fields and tuned settings apply unless given here
    task = "cifar10"
    partition = "dirichlet"         options are axes or follow after commas; "default": the task's own partition, or
                                    a file for each device
    devices = 100
    new = 20                        extra devices that never train: they adapt the finished model, evaluated separately
    rounds = 150
    evaluate_every = 25
    seeds = [0, 1, 2]
    engine = "torch"                engine for all methods; default: ONNX Runtime if possible, else PyTorch
    as_published = true             defaults of ``sparrow publish`` instead of ``AS_IN_PAPERS``
    data = { test = "published" }   further options of --data for every trial; { leave_out = "sketch" }: exclude this
                                    person or domain from training and test on it
    upload_caps = [100, 200]        MiB; adds a table of the best accuracy within these cumulative uploads
    accuracy_targets = [0.9]        fractions; adds a table of the cumulative upload until this accuracy
    shifts = [0, 0.5, 1]            further test sets of the last models: fractions of samples from all devices,
    corruptions = ["contrast"]      kinds of corruption,
    severities = [1, 3, 5]          their severities (default 1 to 5),
    test_on = ["phone", "watch"]    and recording devices

    [settings]                      fields of FederationSettings, for all methods
    cohort = 10

    [axes]                          options of --data, or devices = [10, 100]; all combinations are run
    alpha = [0.1, 0.5, 1.0]

    [[methods]]
    label = "FedSPU"
    method = "fedspu"
    budgets = [0.2, 0.4, 0.6, 0.8, 1.0]

    [[methods]]
    label = "FedProx"
    method = "fedprox"
    grid = { "method_settings.proximal_weight" = [0.1, 1.0] }      tuned only for this method

    [[methods]]
    label = "FedAvg+FT"
    method = "fedavg"
    grid = { finetune_epochs = [1, 5], finetune_learning_rate = [0.01, 0.03, 0.1] }

    [[methods]]
    label = "FedAvg"
    method = "fedavg"
    tuned_as = "FedAvg+FT"
    settings = { finetune_epochs = 0 }      overrides the tuned value of FedAvg+FT

    [tune]                          trials on validation data, the same for all methods; see ``tuning``
    grid = { learning_rate = [0.01, 0.03, 0.1] }            a method that sets one of these is not tuned for it
    rounds = 75                     default: half of the method's rounds

The table ``method_settings`` is merged entry by entry. A *trial* is one federation: a method on one point of the axes
with one seed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from edge_sdk.engines import EngineChoice
from edge_sdk.errors import SdkError
from edge_sdk.tasks.corruption import SEVERITIES, check_corruption

from ..command_line.exits import Exit
from ..command_line.nearest import nearest
from ..devices.simulation import load_boards
from ..protocol.settings import FederationSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "experiments"

AS_IN_PAPERS: dict[str, Any] = {
    "early_stopping": "off",
    "personal_model": "last",
}
"""Default settings of an experiment: devices train to the last round, and their last model is evaluated."""

Value = bool | int | float | str
Options = dict[str, Value]
"""Options of ``--data`` by name."""

DEFAULT = "default"
"""The partition of a task that divides its own data, or that has a file for each device."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MethodRun(_Part):
    """One method of an experiment, and one row of its tables."""

    label: str = Field(min_length=1, max_length=64)
    method: str
    settings: dict[str, Any] = {}
    budgets: tuple[float, ...] = (1.0,)
    tuned_as: str | None = Field(default=None, description="Takes the tuned settings of this label")
    grid: dict[str, tuple[Value, ...]] = Field(
        default={}, description="The grid of this method in addition to the common one"
    )
    judged_as: str | None = Field(
        default=None, description="Another prediction of the method to compare, such as DM-PFL's adaptive"
    )


class Tuning(_Part):
    """Trials that choose settings. Each method runs with all combinations of ``grid`` and its own grid."""

    grid: dict[str, tuple[Value, ...]] = Field(min_length=1)
    rounds: int | None = Field(default=None, ge=1, description="None: half of the method's run, which is the least")
    extensions: int = Field(default=3, ge=0, description="How often a grid may go on beyond its edges")
    seeds: tuple[int, ...] = (1000,)
    axes: dict[str, Value] = {}


class Experiment(_Part):
    """The content of an experiment's file."""

    title: str
    like: str | None = None
    about: str = ""
    task: str
    partition: str = "dirichlet"
    devices: int = Field(ge=1)
    new: int = Field(default=0, ge=0)
    rounds: int = Field(ge=1)
    evaluate_every: int = Field(ge=0)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    boards: tuple[str, ...] = ()
    engine: EngineChoice = "auto"
    data: dict[str, Value] = {}
    upload_caps: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()
    accuracy_targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()
    shifts: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    corruptions: tuple[str, ...] = ()
    severities: tuple[Annotated[int, Field(ge=1, le=SEVERITIES)], ...] = ()
    test_on: tuple[str, ...] = ()
    as_published: bool = False
    settings: dict[str, Any] = {}
    axes: dict[str, tuple[Value, ...]] = {}
    methods: tuple[MethodRun, ...] = Field(min_length=1)
    tune: Tuning | None = None

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        labels = [run.label for run in self.methods]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two methods have the same label; there are {', '.join(labels)}")
        tuned = [run.label for run in (self.tuned if self.tune else self.methods) if run.tuned_as is None]
        for run in self.methods:
            if run.tuned_as is not None and run.tuned_as not in tuned:
                raise ValueError(f"{run.label}: tuned_as is {run.tuned_as!r}; tuned by themselves: {', '.join(tuned)}")
            if run.grid and (self.tune is None or run.tuned_as is not None):
                raise ValueError(f"{run.label}: has a grid but is not tuned; add [tune] and leave tuned_as out")
            both = sorted(set(flat(run.settings)) & set(run.grid))
            if both:
                raise ValueError(f"{run.label}: {', '.join(both)} is set and tuned; leave one of them out")
        decided = sorted(set(self.data) & {"partition", "seed", "index", "of", *self.axes})
        if decided:
            raise ValueError(f"data: {', '.join(decided)} is set elsewhere in the experiment; leave it out of data")
        if any(type(count) is not int or count < 1 for count in self.axes.get("devices", ())):
            raise ValueError(f"axes: devices is {list(self.axes['devices'])}; give whole numbers from 1")
        self._check_shifts()
        return self

    def _check_shifts(self) -> None:
        """Reject impossible test sets before training begins."""
        for name in ("shifts", "corruptions", "severities", "test_on"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name}: a test set is named twice; name each once")
        if self.severities and not self.corruptions:
            raise ValueError("severities need corruptions; name these, or leave severities out")
        if self.tests_on_published and any(self.shifts):
            raise ValueError("shifts draw from the devices' own test samples; leave out shifts, or test = published")
        for name in self.corruptions:
            check_corruption(name, published=self.tests_on_published)
        both = sorted({key for each in self.test_sets for key in each} & {"shift", "corruption"} & set(self.data))
        if both:
            raise ValueError(f"data: {', '.join(both)} is changed by the test sets; leave it out of data")

    @property
    def test_sets(self) -> tuple[Options, ...]:
        """Return the further test sets of the last models, as options of ``--data``."""
        severities = self.severities or tuple(range(1, SEVERITIES + 1))
        shifted: list[Options] = [{"shift": share} for share in self.shifts]
        corrupted: list[Options] = [
            {"corruption": name, "severity": severity}
            for name, severity in itertools.product(self.corruptions, severities)
        ]
        elsewhere: list[Options] = [{"test_on": source} for source in self.test_on]
        return (*shifted, *corrupted, *elsewhere)

    def grid_of(self, run: MethodRun) -> dict[str, tuple[Value, ...]]:
        """Return the grid of a method without its fixed settings; empty without ``[tune]``."""
        fixed = flat(run.settings)
        common = {} if self.tune is None else self.tune.grid
        return {**{key: values for key, values in common.items() if key not in fixed}, **run.grid}

    @property
    def tuned(self) -> tuple[MethodRun, ...]:
        """Return the methods that have their own tuning, not that of another label."""
        return tuple(run for run in self.methods if run.tuned_as is None and self.grid_of(run))

    def rounds_of(self, run: MethodRun) -> int:
        """Return the number of rounds of a method."""
        return int(run.settings.get("rounds", self.settings.get("rounds", self.rounds)))

    def half(self, run: MethodRun) -> int:
        """Return half of a method's rounds, rounded up."""
        return math.ceil(self.rounds_of(run) / 2)

    def tuning_rounds(self, run: MethodRun, scale: float = 1.0) -> int:
        """Return the number of rounds of a method's tuning runs."""
        asked = self.tune.rounds if self.tune else None
        return max(1, round((asked or self.half(run)) * scale))

    @property
    def tests_on_published(self) -> bool:
        """Return whether the devices' test samples together are the published test set."""
        leaves_out = "leave_out" in {**self.data, **self.axes}
        return self.data.get("test", "published" if leaves_out else "own") == "published"


class Trial(_Part):
    """One federation of an experiment, with all its settings."""

    experiment: str
    label: str
    method: str
    task: str
    partition: str
    axes: dict[str, Value]
    seed: int
    devices: int
    new: int
    boards: tuple[str, ...]
    budgets: tuple[float, ...]
    settings: dict[str, Any]
    data: dict[str, Value] = {}
    test_sets: tuple[Options, ...] = ()
    judged_as: str | None = None
    engine: EngineChoice = "auto"

    @model_serializer(mode="wrap")
    def _without_nothing(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit newer fields with default values, so that the names of older rows do not change."""
        fields: dict[str, Any] = dump(self)
        for name in ("test_sets", "judged_as"):
            if not fields.get(name):
                fields.pop(name, None)
        if self.engine == "auto":
            fields.pop("engine", None)
        return fields

    @property
    def training(self) -> Trial:
        """Return a value that is equal for trials with the same training."""
        return self.model_copy(update={"label": "", "judged_as": None})

    @property
    def asked(self) -> Trial:
        """Return the trial as requested, with ``auto`` instead of its choice."""
        return self.model_copy(update={"method": self.settings.get("method", self.method)})

    @property
    def name(self) -> str:
        """Return a name that is unique within its experiment."""
        axes = [f"{key}={value}" for key, value in self.axes.items()]
        return "/".join([self.label, *axes, f"seed={self.seed}"])

    @property
    def data_text(self) -> str:
        """Return the options of ``--data`` that follow its path."""
        options = [f"{key}={value}" for key, value in {**self.axes, **self.data}.items() if key != "devices"]
        dealt = self.partition != DEFAULT
        return ",".join([*[f"partition={self.partition}"] * dealt, *options, *[f"seed={self.seed}"] * dealt])

    def tested_on(self, options: Options) -> str:
        """Return ``data_text`` with another test set and the same training data."""
        return self.model_copy(update={"data": {**self.data, **options}}).data_text


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Flatten tables into dotted names: {"a": {"b": 1}} becomes {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return found


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merge settings, with or without dotted names, into nested tables; later parts win."""
    settings: dict[str, Any] = {}
    for key, value in {name: value for part in parts for name, value in flat(part).items()}.items():
        table, dot, name = key.partition(".")
        if dot:
            settings.setdefault(table, {})[name] = value
        else:
            settings[key] = value
    return settings


class UnknownExperiment(SdkError):
    """No experiment has this name."""

    exit_code = Exit.NOT_FOUND


class BadExperiment(SdkError):
    """The experiment's file is invalid; the message gives the reason."""

    exit_code = Exit.USAGE


def load_experiment(name: str) -> Experiment:
    """Return the built-in experiment ``name``, or that of a file.

    Raises UnknownExperiment if neither exists, BadExperiment if it is invalid.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        experiment = Experiment.model_validate(_with_like(tomllib.loads(path.read_text())))
        if experiment.boards:
            load_boards(",".join(experiment.boards))
        # Each trial checks its settings: fail now and not after hours of training.
        for _ in trials(experiment, name, {}):
            pass
        if experiment.tune is not None:
            for _ in tuning_trials(experiment, name):
                pass
    except FileNotFoundError:
        known = sorted(file.stem for file in FOLDER.glob("*.toml"))
        raise UnknownExperiment(
            f"there is no experiment {name!r}{nearest(name, known)}; there are {', '.join(known)}, or give a .toml file"
        ) from None
    # The errors of TOML and pydantic are ValueErrors.
    except (OSError, ValueError, SdkError) as error:
        raise BadExperiment(f"{path}: {error}") from None
    return experiment


def _with_like(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment's fields, completed from the experiment named by ``like``."""
    if "like" not in fields:
        return fields
    path = FOLDER / f"{fields['like']}.toml"
    base = tomllib.loads(path.read_text()) if path.is_file() else {"like": None}
    if "like" in base:
        raise ValueError(f"like is {fields['like']!r}; name a committed experiment that is not like another")
    return {**base, **fields}


def trials(
    experiment: Experiment, name: str, tuned: dict[str, dict[str, Value]], scale: float = 1.0
) -> Iterator[Trial]:
    """Return all trials, seed by seed, so that an interrupted run has complete comparisons.

    tuned: label -> chosen settings. scale: factor on the number of rounds.
    """
    rounds = max(1, round(experiment.rounds * scale))
    every = max(1, round(experiment.evaluate_every * scale)) if experiment.evaluate_every else 0
    for seed, axes in itertools.product(experiment.seeds, grid_points(experiment.axes)):
        for run in experiment.methods:
            chosen = tuned.get(run.tuned_as or run.label, {})
            first = {"rounds": rounds, "evaluation_interval": every}
            settings = merged(first, experiment.settings, chosen, run.settings)
            trial = _trial(experiment, name, run, axes, seed, settings)
            yield trial.model_copy(update={"test_sets": experiment.test_sets})


def tuning_trials(
    experiment: Experiment, name: str, scale: float = 1.0
) -> Iterator[tuple[str, dict[str, Value], Trial]]:
    """Return (label, settings, trial) for each tuned method, point of its grid, and seed."""
    assert experiment.tune is not None, "only experiments with a [tune] section are tuned"
    for run in experiment.tuned:
        for point in grid_points(experiment.grid_of(run)):
            for seed in experiment.tune.seeds:
                yield run.label, point, tuning_trial(experiment, name, run, point, seed, scale)


def tuning_trial(
    experiment: Experiment, name: str, run: MethodRun, point: dict[str, Value], seed: int, scale: float = 1.0
) -> Trial:
    """Return the trial of a method at a point of the grid, evaluated only at its end."""
    assert experiment.tune is not None, "only experiments with a [tune] section are tuned"
    last = {"rounds": experiment.tuning_rounds(run, scale), "evaluation_interval": 0}
    settings = merged(experiment.settings, run.settings, point, last)
    return _trial(experiment, name, run, {**experiment.tune.axes}, seed, settings)


def _trial(
    experiment: Experiment, name: str, run: MethodRun, axes: dict[str, Value], seed: int, settings: dict[str, Any]
) -> Trial:
    devices = int(axes.get("devices", experiment.devices))
    # All means are over all devices, so all must be enrolled and evaluate the global model.
    always = {"min_devices": devices, "global_evaluation_devices": devices + experiment.new}
    complete = {**always, "deadline_seconds": 86400.0, **settings}
    if not experiment.as_published:
        # Every evaluation is of both models.
        every = complete.get("evaluation_interval", FederationSettings().evaluation_interval)
        complete = {**AS_IN_PAPERS, "global_evaluation_interval": every, **complete}
    complete |= {"method": run.method, "seed": seed}
    FederationSettings.model_validate(complete)
    return Trial(
        experiment=name,
        label=run.label,
        method=run.method,
        task=experiment.task,
        partition=experiment.partition,
        axes=axes,
        seed=seed,
        devices=devices,
        new=experiment.new,
        boards=experiment.boards,
        budgets=run.budgets,
        settings=complete,
        data=experiment.data,
        judged_as=run.judged_as,
        engine=experiment.engine,
    )


def grid_points(axes: dict[str, tuple[Value, ...]]) -> list[dict[str, Value]]:
    """Return all combinations of the values, in order."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
