"""``sparrow profile --task cifar10 --budget 0.4``: predict and measure a training step on this device.

``join`` chooses its budget by the same predictions (``edge_sdk.budget.prediction``). Each budget is measured in a
separate process.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from sparrow.command_line.command import Command, Parser
from sparrow.command_line.options import add_json
from sparrow.devices import memory
from sparrow.graphs import Graphs
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.settings import FederationSettings

from . import arguments as read
from .arguments import MIB
from .budget.prediction import Memory, Prediction, Predictor, held, rehearse_torch, room
from .budget.search import Choice, Limits, choose
from .device.opening import add_compute, choose_compute, choose_engine
from .engines import EngineChoice
from .engines.onnx import Sessions
from .engines.rehearsal import OnnxRehearsal, Rehearse
from .errors import BadArgument
from .methods import UnknownWork, load_method
from .methods.describing import describe_for
from .publish import read_settings
from .publishing.preparation import prepare_to_publish
from .tasks import Seeded, Task, is_module, load_task
from .tasks.compute import USUAL, Compute
from .tasks.loading import EVALUATION_BATCH, ArrayBatches, Arrays, cross_entropy
from .tasks.public import BY_DEVICES, MODELS
from .training.local import as_tensor

BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
STEPS = 20
BATCH_SIZE = 16


@dataclass(frozen=True)
class Subject:
    """A task as named for ``join``, with this device's data or random inputs of the task's shape."""

    task: str
    settings: FederationSettings
    data: str | None = None
    compute: Compute = USUAL
    engine: EngineChoice = "auto"

    def load(self) -> tuple[Task, Manifest, Rehearse]:
        """Return the task, its model's manifest, and the constructor of rehearsals. Raises UnknownTask, DataError,
        UnsupportedLayer, CannotTrain.
        """
        task = replace(self._task(), compute=self.compute)
        if (builtin := load_builtin(task.name) if task.name in builtin_tasks() else None) is not None:
            manifest = builtin.manifest
            if choose_engine(self.engine, task, manifest, self.settings.method) == "onnx":
                task = replace(task, compute=Compute(threads=self.compute.threads or 1))
                graphs = Graphs(builtin.graphs["step"], builtin.graphs["evaluation"])
                return task, manifest, partial(OnnxRehearsal, sessions=cache(partial(_sessions, graphs)))
        task = task.seeded(self.settings.seed).on(self.compute)
        if builtin is None:
            example = as_tensor(next(iter(task.train))[0])[:2].to(self.compute.device)
            manifest = describe_for(self.settings.method, task.model, example, task=task.name)
        return task, manifest, rehearse_torch

    def _task(self) -> Task:
        name, _, model = self.task.partition(":")
        choices = MODELS.get(name, {})
        batch = self.settings.batch_size
        if self.data is not None or not choices or name in BY_DEVICES or (model and model not in choices):
            task = load_task(self.task, self.data, device="profile", seed=self.settings.seed, batch_size=batch)
            return prepare_to_publish(task)[0]
        choice = choices[model] if model else next(iter(choices.values()))
        (classes,) = load_builtin(self.task).manifest.output_shape
        random = np.random.default_rng(self.settings.seed)

        def batches(samples: int) -> ArrayBatches:
            return ArrayBatches(
                Arrays(random.random((samples, *choice.shape), np.float32), np.arange(samples) % classes), samples
            )

        return Task(self.task, Seeded(choice.build), cross_entropy, batches(batch), batches(EVALUATION_BATCH))


def _sessions(graphs: Graphs, threads: int) -> Sessions:
    return Sessions(graphs, threads=threads)


@dataclass(frozen=True)
class Measured:
    """A measured training step: FLOPs (None if not counted), bytes held before it, bytes added, mean seconds."""

    flops: int | None
    base: int
    above: int
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return self.base + self.above


@dataclass(frozen=True)
class Row:
    """One budget."""

    predicted: Prediction
    # None if memory does not suffice.
    measured: Measured | None

    @property
    def memory(self) -> Memory:
        """The predicted memory."""
        assert self.predicted.memory is not None, "Predictor.at always predicts it"
        return self.predicted.memory


@dataclass(frozen=True)
class Profile:
    """The result of ``profile``."""

    # The measured task with its engine and compute.
    subject: Subject
    # Samples per step.
    samples: int
    # Available bytes.
    limit: int
    # The method trains the whole model at any budget.
    whole_model: bool
    # The budget ``join`` would choose by memory.
    choice: Choice
    rows: tuple[Row, ...]

    @property
    def largest_fitting(self) -> float | None:
        """The largest budget whose rounds fit into ``limit``."""
        return self.choice.budget if self.choice.fits else None


def profile(
    subject: Subject,
    budgets: Sequence[float] | None = None,
    *,
    steps: int = STEPS,
    limit: int | None = None,
    progress: Callable[[str], object] = lambda doing: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Predict and measure the cost of training at each of ``budgets``, in (0, 1].

    budgets: default: those of ``BUDGETS`` that the method supports. steps: measured ones. limit: bytes for a process,
    default: all available; a larger budget is not measured. progress: called with a description of each phase.

    Raises UnknownTask, UnknownMethod, DataError, UnsupportedLayer, BudgetTooSmall, Unpredictable, TrainingDiverged.
    """
    task, manifest, rehearse = subject.load()
    subject = replace(subject, compute=task.compute, engine="torch" if is_module(task.model) else "onnx")
    predictor = _predictor(task, manifest, subject.settings, rehearse, clock)
    budgets = sorted(budgets or [each for each in BUDGETS if each in predictor.budgets])
    predictions = []
    for budget in budgets:
        progress(f"predicting {budget:g}")
        predictions.append(predictor.at(budget))
    limit = limit or room(subject.compute.device)
    choice = choose(predictor, Limits(limit, math.inf), subject.settings, among=budgets)
    rows = []
    for predicted in predictions:
        progress(f"measuring {predicted.budget:g}")
        row = Row(predicted, None)
        if row.memory.total <= limit:
            row = Row(predicted, _measured(subject, predicted.budget, steps, clock))
        rows.append(row)
    whole_model = budgets[0] < 1 and len({row.predicted.flops for row in rows} | {predictor.whole_flops}) == 1
    return Profile(subject, predictor.samples, limit, whole_model, choice, tuple(rows))


def _predictor(
    task: Task, manifest: Manifest, settings: FederationSettings, rehearse: Rehearse, clock: Callable[[], float]
) -> Predictor:
    # A method with a network of its own, or without a required setting, depends on the coordinator.
    if load_method(settings.method).network is None:
        with suppress(KeyError, UnknownWork):
            predictor = Predictor(task, manifest, settings, rehearse=rehearse, clock=clock)
            if predictor.budgets:
                return predictor
    raise BadArgument(
        f"method={settings.method} cannot be profiled before its federation exists, because the coordinator "
        f"completes its settings and prepares its model; sparrow join predicts its rounds"
    )


def _measured(subject: Subject, budget: float, steps: int, clock: Callable[[], float]) -> Measured | None:
    # Spawned, not forked, so that it holds only the memory of a device's process.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, subject, budget, steps, clock).result()
        except BrokenProcessPool:
            # The system killed it for its memory.
            return None


def measure(subject: Subject, budget: float, steps: int, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Train ``steps`` steps at ``budget`` in this process, which must run no other work: it measures peak memory."""
    task, manifest, rehearse = subject.load()
    method = load_method(subject.settings.method)
    rehearsal = rehearse(task, manifest, subject.settings, narrow=method.narrow, clock=clock)
    effort = method.at_budget(rehearsal, budget)
    # Warm up, so that the base includes libraries that any training loads.
    effort.train(2, 2)
    device = task.compute.device
    base = held(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory.forget_peak()
    seconds = fmean(effort.train(1 + steps))
    peak = torch.cuda.max_memory_reserved(device) if device == "cuda" else memory.peak_resident()
    flops = None
    if is_module(task.model):
        with FlopCounterMode(display=False) as counter:
            effort.train(1)
        flops = counter.get_total_flops()
    return Measured(flops, base, max(0, peak - base), seconds)


# --- the command -----------------------------------------------------------------------------------------------------


def table(found: Profile) -> str:
    """Return the result as a table."""
    steps = found.rows[0].predicted.steps
    lines = [
        f"{found.subject.task}, {found.subject.settings.method}, {found.samples} samples a step, {steps} steps a round "
        f"with {found.subject.engine} on {found.subject.compute}",
        "",
        "         |     FLOPs per step    |     peak memory, MiB (above base)     |  seconds per step   |  join, round",
        "  budget |  predicted    counted |      predicted           measured     | predicted  measured |   MiB      s",
        "  -------+-----------------------+---------------------------------------+---------------------+-------------",
    ]
    for row in found.rows:
        predicted = row.predicted
        own = _cells(predicted.flops, row.memory.held, row.memory.training, predicted.step_seconds)
        flops, bytes_, seconds = ("  ".join(pair) for pair in zip(own, _measured_cells(row.measured), strict=True))
        needs = f"{row.memory.total / MIB:5,.0f} {predicted.seconds:6.1f}"
        lines.append(f"  {predicted.budget:6.2f} | {flops} | {bytes_} | {seconds} | {needs}")
    fits = found.largest_fitting
    limit = f"{found.limit / MIB:,.0f} MiB"
    lines += ["", f"The largest of these budgets that fits into {limit}: {fits:g}" if fits else ""]
    if not fits:
        lines[-1] = f"None of these budgets fits into {limit}."
        if not found.whole_model:
            lines[-1] += " Try a smaller one."
        if found.samples > 1:
            lines[-1] += " A smaller batch_size needs less."
    if found.whole_model:
        method = found.subject.settings.method
        lines.append(f"{method} trains the whole model at any budget; devices with too small a budget are not drawn.")
    return "\n".join(lines)


def _cells(flops: int | None, base: int, above: int, seconds: float) -> tuple[str, str, str]:
    inside = f"({above / MIB:,.1f})"
    return (
        f"{'-':>10}" if flops is None else f"{flops:10.3e}",
        f"{(base + above) / MIB:8,.1f} {inside:>9}",
        f"{seconds:9.4f}",
    )


def _measured_cells(measured: Measured | None) -> tuple[str, str, str]:
    if measured is None:
        return f"{'-':>10}", f"{'does not fit':>18}", f"{'-':>9}"
    return _cells(measured.flops, measured.base, measured.above, measured.seconds)


def as_json(found: Profile) -> str:
    """Return the result as JSON, in bytes, seconds and FLOPs."""
    compute = found.subject.compute
    return json.dumps(
        {
            "task": found.subject.task,
            "method": found.subject.settings.method,
            "samples": found.samples,
            "engine": found.subject.engine,
            "device": compute.device,
            "threads": compute.threads or torch.get_num_threads(),
            "bfloat16": compute.bfloat16,
            "memory_limit": found.limit,
            "largest_budget": found.largest_fitting,
            "budgets": [_as_json(row) for row in found.rows],
        }
    )


def _as_json(row: Row) -> dict[str, Any]:
    predicted = row.predicted
    memory = row.memory
    return {
        "budget": predicted.budget,
        "needed": memory.total,
        "predicted": {
            "flops": predicted.flops,
            "base": memory.held,
            "above": memory.training,
            "seconds": predicted.step_seconds,
            "round_seconds": predicted.seconds,
            "bytes_down": predicted.bytes_down,
            "bytes_up": predicted.bytes_up,
        },
        "measured": None if row.measured is None else asdict(row.measured),
    }


def _command(options: argparse.Namespace) -> None:
    settings = read_settings({"batch_size": BATCH_SIZE, **read.settings_of(options.settings)})
    engine, compute = choose_compute(options.engine, options.accelerator, options.threads, bfloat16=options.bfloat16)
    subject = Subject(options.task, settings, options.data, compute, engine)
    # Shown on a terminal only.
    with tqdm(total=2 * len(options.budget or BUDGETS), unit="part", disable=None, leave=False) as bar:
        found = profile(
            subject, options.budget, steps=options.steps, limit=options.memory_limit, progress=partial(_show, bar)
        )
    print(as_json(found) if options.json else table(found))


def _show(bar: tqdm[Any], doing: str) -> None:
    bar.set_description(doing, refresh=False)
    bar.update()


def _options(parser: Parser) -> None:
    read.add_settings(parser, more=f"; batch_size is {BATCH_SIZE} unless given")
    parser.add_argument("--task", required=True, help="cifar10, mnist:leaf or any task of sparrow join")
    parser.add_argument("--data", help="this device's data, as for join (default: random inputs of the task's shape)")
    parser.add_argument(
        "--budget",
        type=read.budget,
        action="append",
        help=f"budget to profile; may be repeated (default: {', '.join(map(str, BUDGETS))})",
    )
    parser.add_argument("--steps", type=read.count, default=STEPS, help="steps to measure (default: %(default)s)")
    parser.add_argument(
        "--memory-limit",
        type=read.mebibytes,
        metavar="MIB",
        help="memory for a process (default: all available memory)",
    )
    parser.add_argument("--threads", type=read.count, help="CPU threads (default: PyTorch's choice, or 1 with onnx)")
    add_compute(parser)
    add_json(parser, ": bytes, seconds, FLOPs")


COMMAND = Command(
    "sparrow profile",
    "Predict and measure the cost of a local training step at a budget on this device.",
    _options,
    _command,
)
main = COMMAND.main
