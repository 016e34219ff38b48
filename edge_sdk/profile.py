"""``python -m edge_sdk.profile --task cifar10 --budget 0.4``: what a step of local training takes at a budget, here.

Prints FLOPs, peak memory and seconds per step, predicted and measured. Predicted memory comes from trainings on a
handful of samples (``training.footprint``), predicted seconds from steps at other budgets and from the weight gradients
of single layers (``training.pace``). Measured is a process of its own for each budget, which trains as a round does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from pydantic import ValidationError

from devices import memory
from edge_sdk.errors import SdkError
from edge_sdk.methods import UnknownMethod, load_method
from edge_sdk.protocol.builtin import builtin_tasks, load_builtin
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.publish import add_method_set, read_setting
from edge_sdk.tasks import Task, UnknownTask, load_task
from edge_sdk.tasks.loading import ArrayBatches, Arrays, DataError, build_seeded
from edge_sdk.tasks.models import MODELS
from edge_sdk.tracing import UnsupportedLayer, describe
from edge_sdk.training.compute import ACCELERATORS, USUAL, Compute, choose_device
from edge_sdk.training.footprint import Unpredictable, held, predict_training, room
from edge_sdk.training.pace import measure_pace
from edge_sdk.training.rehearsal import Rehearsal

BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
STEPS = 10
MIB = 2**20


@dataclass(frozen=True)
class Subject:
    """What is profiled: a task as it is named to ``join``, on this device's data or on random inputs of its shape."""

    task: str
    settings: FederationSettings
    data: str | None = None
    compute: Compute = USUAL

    def load(self) -> tuple[Task, Manifest]:
        """The task, and its model's manifest. Raises UnknownTask, DataError, UnsupportedLayer."""
        task = self._task().on(self.compute)
        if task.name in builtin_tasks():
            return task, load_builtin(task.name).manifest
        example = next(iter(task.train))[0][:2].to(self.compute.device)
        return task, describe(task.model, example, task=task.name)

    def _task(self) -> Task:
        name, _, model = self.task.partition(":")
        choices = MODELS.get(name, {})
        if self.data is not None or not choices or (model and model not in choices):
            batch = self.settings.batch_size
            return load_task(self.task, self.data, device="profile", seed=self.settings.seed, batch_size=batch)
        choice = choices[model] if model else next(iter(choices.values()))
        network = build_seeded(choice.build, self.settings.seed)
        inputs = torch.rand(self.settings.batch_size, *choice.shape)
        with torch.no_grad():
            classes = network.eval()(inputs[:1]).shape[1]
        arrays = Arrays(inputs, torch.randint(classes, (len(inputs),)))
        batches = ArrayBatches(arrays, self.settings.batch_size, shuffle=True)
        return Task(self.task, network, F.cross_entropy, batches, batches)


@dataclass(frozen=True)
class Taken:
    """What training takes: seconds per step; ``above`` bytes on top of the ``base`` that the process holds without."""

    base: int
    above: int
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return self.base + self.above


@dataclass(frozen=True)
class Row:
    """One budget. flops: per step, counted. measured: None where the process did not live to tell."""

    budget: float
    flops: int
    predicted: Taken
    measured: Taken | None


@dataclass(frozen=True)
class Profile:
    """What was found. samples: of a step. whole_model: the method trains all of it, whatever the budget."""

    subject: Subject
    samples: int
    whole_model: bool
    rows: tuple[Row, ...]

    def largest_fitting(self, limit: int) -> float | None:
        """The largest budget whose predicted memory is at most ``limit`` bytes."""
        return max((row.budget for row in self.rows if row.predicted.memory <= limit), default=None)


def profile(
    subject: Subject, budgets: Sequence[float] = BUDGETS, *, steps: int = STEPS, limit: int | None = None
) -> Profile:
    """Predict and measure what training takes at each of ``budgets``, in (0, 1].

    steps: how many are measured. limit: bytes that this process may use, what there is by default; a budget that does
    not fit is not measured. Raises UnknownTask, UnknownMethod, DataError, UnsupportedLayer, Unpredictable.
    """
    task, manifest = subject.load()
    method = load_method(subject.settings.method)
    masks = {budget: method.sample_mask(manifest, budget) for budget in sorted(budgets)}
    rehearsal = Rehearsal(task, manifest, subject.settings)
    samples = rehearsal.samples
    above = {budget: predict_training(rehearsal, mask) for budget, mask in masks.items()}
    base, limit = held(subject.compute.device), limit or room(subject.compute.device)
    few = samples
    while few > 2 and base + predict_training(rehearsal, None, few) > limit:
        few //= 2
    pace = measure_pace(rehearsal, manifest, few)
    rows = []
    for budget, mask in masks.items():
        predicted = Taken(base, above[budget], pace.predict(mask))
        measured = _measured(subject, budget, steps) if predicted.memory <= limit else None
        flops = training_flops(manifest, samples, weight_gradients=mask)
        rows.append(Row(budget, flops, predicted, measured))
    whole = min(budgets) < 1 and all(mask is None for mask in masks.values())
    return Profile(subject, samples, whole, tuple(rows))


def _measured(subject: Subject, budget: float, steps: int) -> Taken | None:
    # Spawned, not forked: it is to hold what a device's process would.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, subject, budget, steps).result()
        except BrokenProcessPool:  # killed for its memory
            return None


def measure(subject: Subject, budget: float, steps: int) -> Taken:
    """Train ``steps`` steps at ``budget`` in this process, whose peak memory should be nobody else's."""
    task, manifest = subject.load()
    mask = load_method(subject.settings.method).sample_mask(manifest, budget)
    rehearsal = Rehearsal(task, manifest, subject.settings)
    rehearsal.train(2, mask=mask, samples=2)  # what any training loads is part of the base
    device = subject.compute.device
    base = held(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory.forget_peak()
    seconds = median(rehearsal.train(1 + steps, mask=mask))
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else memory.peak_resident()
    return Taken(base, max(0, peak - base), seconds)


# --- the command -----------------------------------------------------------------------------------------------------


def table(found: Profile, limit: int) -> str:
    """What was found, for a person; ``limit`` is in bytes."""
    lines = [
        f"{found.subject.task}, {found.subject.settings.method}, {found.samples} samples a step; "
        f"on {found.subject.compute}",
        "",
        "          |                | peak memory, MiB: above the process, in all |  seconds per step   ",
        "   budget | FLOPs per step |      predicted      |       measured      | predicted  measured ",
        "  --------+----------------+---------------------+---------------------+---------------------",
    ]
    for row in found.rows:
        lines.append(
            f"  {row.budget:7.2f} | {row.flops:14.3e} | {_memory(row.predicted)} | {_memory(row.measured)} | "
            f"{_seconds(row.predicted)} {_seconds(row.measured)}"
        )
    fits = found.largest_fitting(limit)
    where = f"{limit / MIB:,.0f} MiB"
    lines += ["", f"The largest budget that fits into {where}: {fits:g}" if fits else f"No budget fits into {where}."]
    if not fits and found.samples > 1:
        lines[-1] += " Try a smaller --batch-size."
    if found.whole_model:
        method = found.subject.settings.method
        lines.append(f"{method} trains the whole model; a device whose budget is below 1 is not drawn.")
    return "\n".join(lines)


def _memory(taken: Taken | None) -> str:
    return f"{'does not fit':>19}" if taken is None else f"{taken.above / MIB:9.1f} {taken.memory / MIB:9.1f}"


def _seconds(taken: Taken | None) -> str:
    return f"{'-':>9}" if taken is None else f"{taken.seconds:9.4f}"


def as_json(found: Profile, limit: int) -> str:
    """What was found, for a program: bytes, seconds and FLOPs."""
    compute = found.subject.compute
    return json.dumps(
        {
            "task": found.subject.task,
            "method": found.subject.settings.method,
            "samples": found.samples,
            "device": str(compute.device),
            "threads": torch.get_num_threads(),
            "bfloat16": compute.bfloat16,
            "memory_limit": limit,
            "largest_budget": found.largest_fitting(limit),
            "budgets": [asdict(row) for row in found.rows],
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        settings = FederationSettings.model_validate(
            {
                **dict(options.set),
                "method": options.method,
                "batch_size": options.batch_size,
                "method_settings": dict(options.method_set),
            }
        )
        compute = Compute(choose_device(options.accelerator), options.threads, bfloat16=options.bfloat16)
        subject = Subject(options.task, settings, options.data, compute)
        limit = options.memory * MIB if options.memory else None
        found = profile(subject, options.budget or BUDGETS, steps=options.steps, limit=limit)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            print(f"edge_sdk.profile: {'.'.join(map(str, fault['loc']))}: {fault['msg']}", file=sys.stderr)
        return 2
    except (SdkError, ProtocolError, UnknownMethod, UnknownTask, DataError, UnsupportedLayer, Unpredictable) as error:
        print(f"edge_sdk.profile: {error}", file=sys.stderr)
        return 1
    limit = limit or room(compute.device)
    print(as_json(found, limit) if options.json else table(found, limit))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m edge_sdk.profile",
        description="What a step of local training takes at a budget on this device, predicted and measured.",
    )
    parser.add_argument("--task", required=True, help="cifar10, mnist:leaf, or any that join knows")
    parser.add_argument("--data", help="this device's data, as for join (default: random inputs of the task's shape)")
    parser.add_argument("--method", default="fedspu", help="the federated method (default: %(default)s)")
    parser.add_argument(
        "--budget", type=_budget, action="append", help=f"may be given again (default: {', '.join(map(str, BUDGETS))})"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step (default: %(default)s)")
    parser.add_argument("--steps", type=_count, default=STEPS, help="steps that are measured (default: %(default)s)")
    parser.add_argument("--memory", type=_count, metavar="MIB", help="what may be used, MiB (default: what there is)")
    parser.add_argument("--threads", type=_count, help="CPU threads (default: torch's choice)")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="auto", help="default: %(default)s")
    parser.add_argument("--bfloat16", action="store_true", help="forward passes in bfloat16, by torch's autocast")
    parser.add_argument(
        "--set",
        type=read_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="other settings: optimizer=adam",
    )
    add_method_set(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, FLOPs")
    return parser


def _budget(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


if __name__ == "__main__":
    # As a module it would be __main__ here and edge_sdk.profile in the processes that measure.
    from edge_sdk import profile as module

    sys.exit(module.main())
