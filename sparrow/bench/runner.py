"""Run trials: a coordinator process, a fleet, and the rows of their results.

Each trial has a folder with the coordinator's records and the devices' state, from which it resumes after an
interruption.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from tqdm import tqdm

from edge_sdk.engines import EngineName
from edge_sdk.methods import Evaluated, load_method
from edge_sdk.publish import PublishOptions, load_to_publish, publish
from edge_sdk.tasks import OWN, Task, load_task
from edge_sdk.tasks import own as own_files
from edge_sdk.tasks.compute import USUAL, Compute
from sparrow.reading.errors import DataError

from ..coordinator.methods import load_method as load_server_half
from ..devices.simulation import load_boards
from ..protocol.flops import forward_flops
from ..protocol.manifest import Manifest
from ..protocol.messages import (
    DeviceInfo,
    DeviceReport,
    FederationInfo,
    Kind,
    Receipt,
    RoundRecord,
    UpdateReport,
)
from ..protocol.settings import AUTO
from ..simulation.fleet import run_fleet
from ..simulation.host import Plan, Stepped
from ..simulation.result import Result
from ..transport import connect
from . import rows
from .experiment import DEFAULT, FOLDER, Experiment, Trial, Value, trials
from .files import files_of_devices
from .metrics import Shifted, idle, judged, own, point_after, rejudged, shifted
from .provenance import provenance
from .rows import Analysis, DeviceResult, Recorded, TrialResult
from .server import coordinator, machine
from .shift import Finished, check_test_sets, judge, read_finished

FEDERATION = "trial"

FINE_TUNING = "finetune_"
"""Prefix of the settings for fine-tuning a copy before its evaluation."""

TUNED = FOLDER / "tuned.json"
"""Tuned settings of the built-in experiments and their scores: name -> the experiment's ``tuned.json``."""


class Observer(Protocol):
    """An observer of a trial's devices, which work one at a time."""

    # Its failure, which ends the fleet.
    error: Exception | None

    def __call__(self, stepped: Stepped) -> None:
        """Analyse a device after a step."""

    def rows(self) -> tuple[Analysis, ...]:
        """Return the rows of the ended trial. Raises ``error``."""


Observe = Callable[[str, Plan, Path], AbstractContextManager[Observer]]
"""Function from a trial's server, devices and folder to its observer."""


@dataclass(frozen=True)
class Where:
    """The data and the work folder of an experiment, the number of processes and the device that trains."""

    data: str
    folder: Path
    processes: int | None = None
    compute: Compute = USUAL


def run(
    experiment: Experiment,
    name: str,
    where: Where,
    *,
    scale: float,
    resume: bool,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    observe: Observe | None = None,
) -> list[Recorded]:
    """Run the trials of an experiment and return their rows.

    only, seeds: labels and seeds to run (empty: all). resume: keep complete trials and continue an interrupted one.
    observe: analyse the mechanisms into a separate file; an interrupted trial then restarts.
    """
    file = where.folder / ("analysis.jsonl" if observe else "results.jsonl")
    if not resume:
        shutil.rmtree(where.folder / ("analyses" if observe else "trials"), ignore_errors=True)
        file.unlink(missing_ok=True)
    done = rows.latest(rows.read(file))
    every = list(trials(experiment, name, read_tuned(where.folder, name, experiment), scale))
    wanted = [trial for trial in every if (not only or trial.label in only) and (not seeds or trial.seed in seeds)]
    check([trial for trial in wanted if not _is_done(trial, done)], where)
    with tqdm(wanted, desc=name, unit="trial", dynamic_ncols=True, disable=None) as bar:
        for number, trial in enumerate(bar, start=1):
            bar.set_postfix_str(trial.name)
            if _is_done(trial, done):
                continue
            if bar.disable:  # no terminal: a line for each trial
                print(f"{name}: trial {number} of {len(wanted)}, {trial.name}", file=sys.stderr, flush=True)
            trained = _same_training(trial, done.values())
            alike = [each for each in every if each.training == trial.training]
            for each in [rows.of_global_model(trained, trial)] if trained else run_trial(alike, where, observe=observe):
                done[each.trial.name] = each
                rows.append(file, each)
    done = rows.latest(rows.read(file))  # all alike, whether run now or before
    return [done[trial.name] for trial in wanted]


def _is_done(trial: Trial, done: Mapping[str, Recorded]) -> bool:
    return trial.name in done and done[trial.name].trial.asked == trial


def _same_training(trial: Trial, done: Iterable[Recorded]) -> Recorded | None:
    """Return a recorded trial with the same training that also evaluates fine-tuned copies, or None."""
    # Fine-tuned copies are discarded, so both trainings are bitwise equal. This does not hold for new devices, which
    # keep their copies, and for methods with personal models, whose copies are fine-tuned.
    if trial.method == AUTO or trial.settings.get("finetune_epochs", 0) or trial.new:
        return None
    if load_server_half(trial.method).personal_models:
        return None
    plain = without_fine_tuning(trial)
    for each in done:
        other = without_fine_tuning(each.trial).model_copy(update={"label": trial.label})
        if each.trial.settings.get("finetune_epochs", 0) and other == plain:
            return each
    return None


def without_fine_tuning(trial: Trial) -> Trial:
    """Return the trial without settings for fine-tuned copies."""
    left = {key: value for key, value in trial.settings.items() if not key.startswith(FINE_TUNING)}
    return trial.model_copy(update={"settings": left})


def read_tuning(folder: Path, name: str, experiment: Experiment) -> dict[str, Any]:
    """Return the record of tuning from this folder, else the built-in one, else {}."""
    record: dict[str, Any] = {}
    if (folder / "tuned.json").exists():
        record = json.loads((folder / "tuned.json").read_text())
    elif TUNED.exists():
        committed = json.loads(TUNED.read_text())
        record = committed.get(name) or committed.get(experiment.like, {})
    return record


def read_tuned(folder: Path, name: str, experiment: Experiment) -> dict[str, dict[str, Value]]:
    """Return the tuned settings by label."""
    tuned: dict[str, dict[str, Value]] = read_tuning(folder, name, experiment).get("tuned", {})
    return tuned


def run_trial(
    trials: Sequence[Trial], where: Where, retuned: Sequence[Trial] = (), *, observe: Observe | None = None
) -> list[Recorded]:
    """Run or resume one training and return the rows of each trial that evaluates it.

    retuned: trials that differ only in fine-tuning copies; they only have the last point. observe: start again, and
    analyse devices after evaluations.
    """
    trial = trials[0]
    digest = hashlib.sha256(trial.model_dump_json().encode()).hexdigest()[:16]
    folder = where.folder / ("analyses" if observe else "trials") / digest
    if observe:
        shutil.rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    plan = plan_of(trial, where)
    test_sets = [(each, _data_text(where, trial.tested_on(each))) for each in trial.test_sets]
    check_test_sets(plan, trial.task, trial.seed, [text for _, text in test_sets])
    found: list[list[Evaluated]] = []
    with coordinator(folder) as server:
        publishing = publishing_of(trial, plan)
        task = load_to_publish(trial.task, plan.data_of(0), trial.settings, device=plan.name(0), publishing=publishing)
        settings = {"draws": "seed", **trial.settings}
        publish(
            server,
            FEDERATION,
            task,
            options=PublishOptions(compiled=trial.engine != "torch"),
            exist_ok=True,
            **settings,
        )
        fleet, analyses = _play(server, trial, plan, folder, where, observe)
        seconds = time.monotonic() - begin
        found_by = (seconds, fleet.engine, where.compute)
        recorded = [replace(collect(server, each, *found_by), analyses=analyses) for each in trials]
        others: list[Recorded] = []
        late = [_index(each.device) for each in recorded[0].result.devices if each.new and each.accuracy is None]
        if test_sets or retuned or late:
            finished = read_finished(server, FEDERATION, folder, fleet.engine)
            if late:
                (own_models,) = judge(finished, plan, [plan.data], processes=where.processes, devices=late)
                recorded = [_with_late(each, dict(zip(late, own_models, strict=True))) for each in recorded]
            if test_sets:
                found = judge(finished, plan, [text for _, text in test_sets], processes=where.processes)
            others = [_retuned(finished, recorded[0], each, plan, where) for each in retuned]
    shutil.rmtree(folder)
    return [*(replace(each, shifts=_shifts(each.trial, found)) for each in recorded), *others]


def _play(
    server: str, trial: Trial, plan: Plan, folder: Path, where: Where, observe: Observe | None
) -> tuple[Result, tuple[Analysis, ...]]:
    with observe(server, plan, folder) if observe else nullcontext() as observer:
        fleet = run_fleet(
            server,
            plan,
            engine=trial.engine,
            processes=1 if observer else where.processes,
            state_dir=folder / "devices",
            on_step=observer or (lambda stepped: None),
            interrupted=lambda: observer is not None and observer.error is not None,
        )
        return fleet, observer.rows() if observer else ()


def _with_late(recorded: Recorded, found: Mapping[int, Evaluated]) -> Recorded:
    """Add the results of new devices without a report: index -> result."""

    # A new device of DM-PFL catches up on the last common round, which has no evaluation, and does not adapt.
    def judged_late(device: DeviceResult) -> DeviceResult:
        each = found.get(_index(device.device))
        judgement = own(each, recorded.trial.judged_as) if each and each.personal else None
        if judgement is None:
            return device
        shared = each.global_model.accuracy if each and each.global_model else None
        return replace(
            device, test_examples=judgement.num_examples, accuracy=judgement.accuracy, accuracy_global=shared
        )

    devices = tuple(map(judged_late, recorded.result.devices))
    return replace(recorded, result=replace(recorded.result, devices=devices))


def _retuned(finished: Finished, recorded: Recorded, trial: Trial, plan: Plan, where: Where) -> Recorded:
    tuning = {key: value for key, value in trial.settings.items() if key.startswith(FINE_TUNING)}
    known = finished.known
    settings = known.info.settings.model_copy(update=tuning)
    info = known.info.model_copy(update={"settings": settings})
    (found,) = judge(replace(finished, known=replace(known, info=info)), plan, [plan.data], processes=where.processes)
    last = rejudged(recorded.points[-1], found, trial.judged_as)
    devices = tuple(
        replace(device, accuracy=each.accuracy if each else None)
        for device, each in zip(recorded.result.devices, (own(one, trial.judged_as) for one in found), strict=False)
    )
    return Recorded(trial, (last,), replace(recorded.result, devices=devices))


def plan_of(trial: Trial, where: Where) -> Plan:
    """Return the devices of a trial and their data.

    Raises DataError if files are too few, or given with a partition.
    """
    files = files_of_devices(trial.task, where.data, trial.devices + trial.new)
    if files and trial.data_text:
        raise DataError(
            f"--data {where.data}: each device has its own file, so nothing is distributed, but the experiment says "
            f'{trial.data_text}; set partition = "{DEFAULT}" in it, without axes and data'
        )
    return Plan(
        FEDERATION,
        devices=trial.devices,
        new=trial.new,
        data=files or _data_text(where, trial.data_text),
        budgets=trial.budgets,
        boards=load_boards(",".join(trial.boards)) if trial.boards else (),
        compute=where.compute,
    )


def check(trials: Iterable[Trial], where: Where) -> None:
    """Load the devices' data, to report missing data before the training.

    Raises DataError, UnknownTask, UnknownMethod.
    """
    seen: set[tuple[object, int]] = set()
    for trial in trials:
        if trial.method != AUTO:
            load_method(trial.method)
        plan = plan_of(trial, where)
        if (plan.data, trial.seed) in seen:
            continue
        every = range(plan.total) if trial.partition == DEFAULT and not seen else range(1)
        seen.add((plan.data, trial.seed))
        publishing = publishing_of(trial, plan)
        models = []
        for index in every:
            load = load_task if publishing is None else partial(_load_own, publishing)
            task = load(trial.task, plan.data_of(index), device=plan.name(index), seed=trial.seed, batch_size=1)
            models.append(task.seeded(trial.seed).model)
        check_alike(models, plan)


def _load_own(publishing: own_files.Publishing, task: str, data: str, **given: Any) -> Task:
    return own_files.load(data, **given, publishing=publishing)


def publishing_of(trial: Trial, plan: Plan) -> own_files.Publishing | None:
    """Return the classes of all devices' files, which are published; None for other data."""
    if trial.task != OWN or not isinstance(plan.data, tuple):
        return None
    return own_files.Publishing(classes=own_files.classes_of(plan.data))


def check_alike(models: Sequence[nn.Module], plan: Plan) -> None:
    """Raise DataError unless all devices' models have the same parameters."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} for model in models]
    for index, found in enumerate(shapes):
        if found != shapes[0]:
            name = next(name for name in (*shapes[0], *found) if found.get(name) != shapes[0].get(name))
            raise DataError(
                f"{plan.data_of(index)}: its model has {name} of {found.get(name, 'no shape')}, that of "
                f"{plan.data_of(0)} {shapes[0].get(name, 'no shape')}; samples must have the same shape on all devices"
            )


def _shifts(trial: Trial, found: Sequence[Sequence[Evaluated]]) -> tuple[Shifted, ...]:
    return tuple(
        shifted(options, results, trial.judged_as) for options, results in zip(trial.test_sets, found, strict=False)
    )


def _data_text(where: Where, dealt: str) -> str:
    return ",".join(part for part in (where.data, dealt) if part)  # some tasks bring their data along


def collect(server: str, trial: Trial, wall_seconds: float, engine: EngineName, compute: Compute) -> Recorded:
    """Return the rows of an ended trial from its coordinator's records.

    engine, compute: engine and precision of the training.
    """
    with connect(server, timeout=60) as client:

        def get(path: str) -> Any:
            return client.get(f"/v1/federations/{FEDERATION}{path}").raise_for_status().json()

        info = FederationInfo.model_validate(get(""))
        manifest = Manifest.model_validate(get("/manifest"))
        devices = [DeviceInfo.model_validate(each) for each in get("/devices")]
        records = [RoundRecord.model_validate(each) for each in get("/rounds")]
        reports = {
            record.round: [DeviceReport.model_validate(each) for each in get(f"/rounds/{record.round}/reports")]
            for record in records
        }
    if info.warning:
        print(f"{trial.name}: {info.warning}", file=sys.stderr, flush=True)
    points = [
        point_after(records[: index + 1], reports[record.round], trial.judged_as)
        for index, record in enumerate(records)
        if record.evaluated_devices
    ]
    return Recorded(
        trial=trial.model_copy(update={"method": info.method}),  # what auto has chosen
        points=tuple(points),
        result=TrialResult(
            rounds=info.round,
            reason=info.reason,
            parameters=info.parameters,
            inference_flops=forward_flops(manifest),
            model_sha256=info.model_sha256,
            devices=_devices(trial, devices, reports),
            wall_seconds=wall_seconds,
            machine=machine(compute),
            # What auto has chosen acts only where budgets or data give it something to do.
            idle=idle(() if trial.method == AUTO else load_method(info.method).acts, records),
            engine=engine,
            provenance=provenance(compute.threads or 1),
        ),
    )


def _devices(
    trial: Trial, devices: Sequence[DeviceInfo], reports: dict[int, list[DeviceReport]]
) -> tuple[DeviceResult, ...]:
    """Return each device's last evaluation, or a new device's report after adapting."""
    last: dict[str, Receipt] = {}
    rounds: dict[str, int] = {}
    for number in sorted(reports):
        for name, receipt in judged(reports[number]):
            last[name] = receipt
        for each in reports[number]:
            if isinstance(each.report, UpdateReport):
                rounds[each.device] = rounds.get(each.device, 0) + 1
            elif each.kind is Kind.adapt:
                last.setdefault(each.device, each.report)
    return tuple(
        _result(trial, device, last.get(device.name), rounds.get(device.name, 0))
        for device in sorted(devices, key=lambda each: _index(each.name))
    )


def _result(trial: Trial, device: DeviceInfo, receipt: Receipt | None, rounds: int) -> DeviceResult:
    judgement = own(receipt, trial.judged_as) if receipt else None
    shared = receipt.global_model if receipt else None
    return DeviceResult(
        device=device.name,
        budget=device.budget,
        new=_index(device.name) >= trial.devices,
        test_examples=judgement.num_examples if judgement else 0,
        accuracy=judgement.accuracy if judgement else None,
        accuracy_global=shared.accuracy if shared else None,
        rounds=rounds,
        stopped_round=device.stopped_round,
        state_bytes=receipt.state_bytes if receipt else 0,
        inference_flops=(receipt.inference_flops or None) if receipt else None,
        loss=judgement.loss if judgement else None,
        metrics=dict(judgement.metrics) if judgement else {},
        taken=receipt.taken if receipt else None,
        usual=receipt.usual if receipt else None,
        others={}
        if receipt is None or receipt.taken is None
        else {name: 1 - each.loss if each.accuracy is None else each.accuracy for name, each in receipt.others.items()},
    )


def _index(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
