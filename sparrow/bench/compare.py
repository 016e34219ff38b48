"""``compare``: comparison of methods on the user's own data, without an experiment's file.

Settings have the defaults of ``sparrow publish``, including early stopping. If ``auto``, which sends int8, is among the
methods, all send int8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from edge_sdk.errors import BadArgument
from edge_sdk.methods import UnknownMethod
from edge_sdk.publish import read_settings
from edge_sdk.tasks import OWN
from edge_sdk.tasks.own.whole import read_whole
from sparrow.reading import read_options

from ..command_line.command import WrongUsage
from ..command_line.faults import faults
from ..command_line.installed import installed
from ..command_line.nearest import nearest
from ..coordinator.methods import load_method
from ..protocol.auto import FOR_NEURONS
from ..protocol.settings import AUTO, FederationSettings
from .experiment import DEFAULT, Experiment, MethodRun, Value, trials
from .files import PLACES, files_of_devices

METHODS = "auto,fedavg+ft,local"
FINE_TUNED = "+ft"
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
DEVICES = 10
SAMPLES_EACH = 40
"""Smallest number of samples per device, by which the default number of devices is chosen."""


def compared(
    task: str,
    data: str,
    *,
    methods: str = METHODS,
    devices: int | None = None,
    seeds: int = 3,
    partition: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Experiment:
    """Return the experiment that compares ``methods`` on ``data``.

    methods: names separated by commas; the suffix ``+ft`` evaluates fine-tuned copies of the global model. partition:
    name and options, such as ``dirichlet,alpha=0.3``. settings: settings of all methods. Raises WrongUsage,
    UnknownMethod, DataError.
    """
    if task == OWN and not data:
        raise WrongUsage("add --data, a table, an npz file or a folder; --task digits needs none")
    if seeds < 1:
        raise WrongUsage(f"--seeds {seeds}: give at least 1")
    number, about, usual = _devices(task, data, devices)
    if partition and files_of_devices(task, data, devices):
        raise WrongUsage(
            f"--partition {partition}: each device has its own file and nothing is distributed; leave it out"
        )
    rule, options = _partition(partition or usual)
    decided = {"seed": "--seeds", "method": "--methods", "finetune_epochs": "--methods NAME+ft"}
    for name in sorted({*(settings or {})} & {*decided}):
        raise WrongUsage(f"{name}: {decided[name]} decides it; leave it out")
    given = read_settings(settings or {})
    try:
        common = given.model_dump(mode="json", include=set(settings or {}))
        # auto sends int8, so all methods do
        if AUTO in methods.replace(" ", "").split(","):
            common.setdefault("precision", "int8")
        experiment = Experiment(
            title=f"Methods on {Path(data).name or task}",
            about=about,
            task=task,
            partition=rule,
            devices=number,
            rounds=given.rounds,
            evaluate_every=given.evaluation_interval,
            seeds=tuple(range(seeds)),
            as_published=True,
            data=options,
            settings={key: value for key, value in common.items() if key not in ("rounds", "evaluation_interval")},
            methods=tuple(_methods(methods, given)),
        )
        # each trial checks its settings
        for _ in trials(experiment, "", {}):
            pass
    except ValidationError as error:
        raise BadArgument("; ".join(f"{name}: {text}" for name, text in faults(error))) from None
    return experiment


def _devices(task: str, data: str, wanted: int | None) -> tuple[int, str, str]:
    if wanted is not None and wanted < 2:
        raise WrongUsage(f"--devices {wanted}: a comparison takes at least 2")
    files = files_of_devices(task, data, wanted)
    if files:
        return len(files), "Each device has its own file, whose numbers are used unchanged.", DEFAULT
    if task != OWN:
        return wanted or DEVICES, "", DEFAULT
    path, options, _ = read_options(data)
    whole = read_whole(path, options)
    inputs = whole.raw.inputs
    samples = len(inputs)
    scale = (
        "bytes are divided by 255"
        if inputs.dtype == np.uint8 and inputs.ndim > 2
        else "numbers are standardised by the mean and deviation of all devices' training samples"
    )
    meaning = f"of {len(whole.classes)} classes" if whole.kind == "classes" else "with a number each"
    about = f"{samples:,} samples {meaning}, shape {inputs.shape[1:]}; {scale}."
    if whole.people is not None:
        people = len(whole.names)
        return wanted or people, f"{about} They are of {people} people.", "person"
    usual = "dirichlet" if whole.kind == "classes" else "iid"
    return wanted or max(2, min(DEVICES, samples // SAMPLES_EACH)), about, usual


def _partition(text: str) -> tuple[str, dict[str, Value]]:
    rule, *rest = (part.strip() for part in text.split(","))
    options: dict[str, Value] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise WrongUsage(f"--partition {text}: give a name and options, as in dirichlet,alpha=0.3")
        options[key.strip()] = value.strip()
    return rule, options


def _methods(text: str, settings: FederationSettings) -> Iterator[MethodRun]:
    known = [AUTO, *installed("sparrow.device_methods")]
    labels = [part.strip() for part in text.split(",")]
    for label in labels:
        if labels.count(label) > 1:
            raise WrongUsage(f"--methods {text}: {label} is named twice; name it once")
        name = label.removesuffix(FINE_TUNED)
        if name not in known:
            raise UnknownMethod(
                f"--methods {label}: there is no such method{nearest(name, known)}; installed are {', '.join(known)}"
            )
        tuned: dict[str, Any] = {"finetune_epochs": 1} if label != name else {}
        everyone = load_method(FOR_NEURONS if name == AUTO else name).smallest_budget(settings) <= BUDGETS[0]
        yield MethodRun(label=label, method=name, settings=tuned, budgets=BUDGETS if everyone else (1.0,))


def name_of(task: str, data: str) -> str:
    """Return the name of the comparison's folder and files."""
    path = Path(data.partition(",")[0])
    if any(place in path.name for place in (*PLACES, "*", "?", "[")):
        path = path.parent
    return path.stem or task
