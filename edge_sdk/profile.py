"""``sparrow profile --task cifar10 --budget 0.4``: what a step of local training takes at a budget, here.

Prints FLOPs, peak memory and seconds per step, predicted and measured. Predicted memory comes from trainings on a
handful of samples (``training.footprint``), predicted seconds from steps under two other masks and counted FLOPs
(``training.pace``). Measured is a process of its own for each budget, which trains as a round does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from edge_sdk.device.trainable import exit_unless_trainable

if __name__ == "__main__":
    exit_unless_trainable("edge_sdk.profile")  # before what follows imports torch

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from edge_sdk import arguments as read
from edge_sdk.arguments import MIB
from edge_sdk.budget.footprint import held, predict_evaluation, predict_training, room, whole_round
from edge_sdk.budget.pace import measure_pace
from edge_sdk.methods import load_method
from edge_sdk.protocol.builtin import builtin_tasks, load_builtin
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.publish import add_method_set, read_setting, read_settings
from edge_sdk.tasks import Task, build_seeded, load_task
from edge_sdk.tasks.compute import ACCELERATORS, USUAL, Compute, choose_device
from edge_sdk.tasks.loading import EVALUATION_BATCH, ArrayBatches, Arrays
from edge_sdk.tasks.models import MODELS
from edge_sdk.tracing.untraced import describe_for
from edge_sdk.training.rehearsal import Rehearsal
from sparrow.command_line.command import Command, Parser, add_json
from sparrow.devices import memory

BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
STEPS = 20


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
        return task, describe_for(self.settings.method, task.model, example, task=task.name)

    def _task(self) -> Task:
        name, _, model = self.task.partition(":")
        choices = MODELS.get(name, {})
        if self.data is not None or not choices or (model and model not in choices):
            batch = self.settings.batch_size
            return load_task(self.task, self.data, device="profile", seed=self.settings.seed, batch_size=batch)
        choice = choices[model] if model else next(iter(choices.values()))
        network = build_seeded(choice.build, self.settings.seed)
        batch = self.settings.batch_size
        with torch.no_grad():
            classes = network.eval()(torch.zeros(1, *choice.shape)).shape[1]

        def random(samples: int) -> ArrayBatches:
            return ArrayBatches(
                Arrays(torch.rand(samples, *choice.shape), torch.arange(samples) % classes), samples, False
            )

        return Task(self.task, network, F.cross_entropy, random(batch), random(EVALUATION_BATCH))


@dataclass(frozen=True)
class Taken:
    """What a step of training takes: FLOPs; ``above`` bytes on top of the ``base`` held without it; seconds, the least
    of several steps, for whatever else runs on the machine only adds."""

    flops: int
    base: int
    above: int
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes in all, at the peak."""
        return self.base + self.above


@dataclass(frozen=True)
class Row:
    """One budget. needed: bytes that ``join`` asks for, of whole rounds: evaluation and held models included.
    measured: None where that is more than there is, or the process did not live to tell."""

    budget: float
    needed: int
    predicted: Taken
    measured: Taken | None


@dataclass(frozen=True)
class Profile:
    """What was found. samples: of a step. limit: bytes that may be held. whole_model: the method trains all of it,
    whatever the budget."""

    subject: Subject
    samples: int
    limit: int
    whole_model: bool
    rows: tuple[Row, ...]

    @property
    def largest_fitting(self) -> float | None:
        """The largest of the budgets whose rounds fit into ``limit``."""
        return max((row.budget for row in self.rows if row.needed <= self.limit), default=None)


def profile(
    subject: Subject,
    budgets: Sequence[float] = BUDGETS,
    *,
    steps: int = STEPS,
    limit: int | None = None,
    progress: Callable[[str], object] = lambda doing: None,
) -> Profile:
    """Predict and measure what training takes at each of ``budgets``, in (0, 1].

    steps: how many are measured. limit: bytes that a process may hold, what there is by default; a budget that does not
    fit is not measured. progress: told what is done next, ``2 * len(budgets) + 1`` times. Raises UnknownTask,
    UnknownMethod, DataError, UnsupportedLayer, Unpredictable, TrainingDiverged.
    """
    task, manifest = subject.load()
    method = load_method(subject.settings.method)
    masks = {budget: method.sample_mask(manifest, budget) for budget in sorted(budgets)}
    rehearsal = Rehearsal(task, manifest, subject.settings, narrow=method.narrow)
    device = subject.compute.device
    evaluation, added = predict_evaluation(rehearsal), {}
    for budget, mask in masks.items():
        progress(f"memory at {budget:g}")
        training = predict_training(rehearsal, mask)
        added[budget] = (training, whole_round(rehearsal, training, evaluation))
    base, limit = held(device), limit or room(device)
    few = rehearsal.samples
    while few > 2 and base + predict_training(rehearsal, None, few) > limit:
        few //= 2
    progress("seconds")
    pace = measure_pace(rehearsal, manifest, few)
    rows = []
    for budget, mask in masks.items():
        progress(f"measuring {budget:g}")
        above, in_all = added[budget]
        flops = rehearsal.flops(rehearsal.samples, mask)
        predicted = Taken(flops, base, above, pace.predict(rehearsal, mask))
        measured = _measured(subject, budget, steps) if base + in_all <= limit else None
        rows.append(Row(budget, base + in_all, predicted, measured))
    whole_model = min(budgets) < 1 and all(mask is None for mask in masks.values())
    return Profile(subject, rehearsal.samples, limit, whole_model, tuple(rows))


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
    method = load_method(subject.settings.method)
    mask = method.sample_mask(manifest, budget)
    rehearsal = Rehearsal(task, manifest, subject.settings, narrow=method.narrow)
    rehearsal.train(2, mask=mask, samples=2)  # what any training loads is part of the base
    device = subject.compute.device
    base = held(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory.forget_peak()
    seconds = min(rehearsal.train(1 + steps, mask=mask))
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else memory.peak_resident()
    with FlopCounterMode(display=False) as counter:
        rehearsal.train(1, mask=mask)
    return Taken(counter.get_total_flops(), base, max(0, peak - base), seconds)


# --- the command -----------------------------------------------------------------------------------------------------


def table(found: Profile) -> str:
    """What was found, for a person."""
    lines = [
        f"{found.subject.task}, {found.subject.settings.method}, {found.samples} samples a step; "
        f"on {found.subject.compute}",
        "",
        "         |     FLOPs per step    |     peak memory, MiB (above base)     |  seconds per step   |   join",
        "  budget |  predicted    counted |      predicted           measured     | predicted  measured | needs, MiB",
        "  -------+-----------------------+---------------------------------------+---------------------+-----------",
    ]
    for row in found.rows:
        pairs = zip(_cells(row.predicted), _cells(row.measured), strict=True)
        flops, bytes_, seconds = ("  ".join(pair) for pair in pairs)
        lines.append(f"  {row.budget:6.2f} | {flops} | {bytes_} | {seconds} | {row.needed / MIB:9,.0f}")
    fits, where = found.largest_fitting, f"{found.limit / MIB:,.0f} MiB"
    lines += ["", f"The largest of these budgets that fits into {where}: {fits:g}" if fits else ""]
    if not fits:
        lines[-1] = f"None of these budgets fits into {where}."
        if not found.whole_model:
            lines[-1] += " Try a smaller one."
        if found.samples > 1:
            lines[-1] += " A smaller --batch-size needs less."
    if found.whole_model:
        method = found.subject.settings.method
        lines.append(f"{method} runs the whole model at any budget; a device whose budget is too small is not drawn.")
    return "\n".join(lines)


def _cells(taken: Taken | None) -> tuple[str, str, str]:
    if taken is None:
        return f"{'-':>10}", f"{'does not fit':>18}", f"{'-':>9}"
    inside = f"({taken.above / MIB:,.1f})"
    return f"{taken.flops:10.3e}", f"{taken.memory / MIB:8,.1f} {inside:>9}", f"{taken.seconds:9.4f}"


def as_json(found: Profile) -> str:
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
            "memory_limit": found.limit,
            "largest_budget": found.largest_fitting,
            "budgets": [asdict(row) for row in found.rows],
        }
    )


def _command(options: argparse.Namespace) -> None:
    settings = read_settings(
        {
            **dict(options.set),
            "method": options.method,
            "batch_size": options.batch_size,
            "method_settings": dict(options.method_set),
        },
        options=True,
    )
    compute = Compute(choose_device(options.accelerator), options.threads, bfloat16=options.bfloat16)
    subject = Subject(options.task, settings, options.data, compute)
    budgets = options.budget or BUDGETS
    # Shown on a terminal only.
    with tqdm(total=2 * len(budgets) + 1, unit="part", disable=None, leave=False) as bar:
        found = profile(subject, budgets, steps=options.steps, limit=options.memory_limit, progress=partial(_show, bar))
    print(as_json(found) if options.json else table(found))


def _show(bar: tqdm[Any], doing: str) -> None:
    bar.set_description(doing, refresh=False)
    bar.update()


def _options(parser: Parser) -> None:
    parser.add_argument("--task", required=True, help="cifar10, mnist:leaf, or any that join knows")
    parser.add_argument("--data", help="this device's data, as for join (default: random inputs of the task's shape)")
    parser.add_argument("--method", default="fedspu", help="the federated method (default: %(default)s)")
    parser.add_argument(
        "--budget",
        type=read.budget,
        action="append",
        help=f"may be given again (default: {', '.join(map(str, BUDGETS))})",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step (default: %(default)s)")
    parser.add_argument(
        "--steps", type=read.count, default=STEPS, help="steps that are measured (default: %(default)s)"
    )
    parser.add_argument(
        "--memory-limit", type=read.mebibytes, metavar="MIB", help="what may be held (default: what there is)"
    )
    parser.add_argument("--threads", type=read.count, help="CPU threads (default: torch's choice)")
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
    add_json(parser, ": bytes, seconds, FLOPs")


COMMAND = Command(
    "sparrow profile",
    "What a step of local training takes at a budget on this device, predicted and measured.",
    _options,
    _command,
)
main = COMMAND.main


if __name__ == "__main__":
    # As a module it would be __main__ here and edge_sdk.profile in the processes that measure.
    from edge_sdk.budget import profile as module

    sys.exit(module.main())
