"""``python -m benchmarks.budgets``: the effect of automatic budgets on the spread of the devices' times.

Five devices of a pFedGate federation, real sessions against a coordinator process on a port of this machine. Their
policy's ``duty`` makes them unequal: a device that rests half of the time takes twice as long, like a board of half the
speed. Each measures the federation's model, chooses a budget for a deadline that only the fastest meets at a budget of
1, and trains. Then all train with the mean of these budgets. Devices train one after the other, so that they do not
slow each other down. Inputs are random, because the learned model does not matter.

It compares the seconds of a round's training with the prediction before the first round, and their spread over devices
with the spread for equal budgets. With ``--processor-time``, for a shared machine, it counts processor time and rests
instead of wall time. It writes a section of ``docs/results/speed.md``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.markdown import markdown_table
from benchmarks.places import write_section
from edge_sdk.budget.prediction import Predictor
from edge_sdk.budget.preparation import Prepared
from edge_sdk.budget.search import DEADLINE_SHARE, BudgetController, Limits
from edge_sdk.device.opening import Prepare
from edge_sdk.device.policy import Policy
from edge_sdk.device.session import Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.telemetry import Telemetry
from edge_sdk.device.transport import Transport
from edge_sdk.device.watchdog import Watchdog
from edge_sdk.engines.rehearsal import Rehearse
from edge_sdk.profile import Subject
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.compute import Compute
from sparrow.bench.server import coordinator, machine
from sparrow.devices import EnergyMeter
from sparrow.devices.conditions import ConditionsReader
from sparrow.devices.system import System
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import FederationInfo, UpdateReport
from sparrow.transport import connect

TASK = "mnist:leaf"
DUTIES = (1.0, 0.85, 0.7, 0.6, 0.5)
ROUNDS = 3
STEPS = 25
BATCH = 32
SPARE = 1.05
"""The deadline leaves the fastest device this times what its whole round takes."""

SPREAD_BOUND = 0.7
SECONDS_BOUND = 0.25


@dataclass(frozen=True)
class Row:
    """One device: its duty, its budget, and the seconds of a round's training, predicted before the first round and
    measured (the median of its rounds).
    """

    duty: float
    budget: float
    predicted: float
    measured: float


class Clock:
    """A device's clock: wall time, or the processor time of this process, in which rests take no time."""

    def __init__(self, *, processor: bool) -> None:
        self._processor = processor
        self._rested = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._rested if self._processor else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Rest for these seconds."""
        if self._processor:
            self._rested += seconds
        else:
            time.sleep(seconds)


def run(folder: Path, planned: float | None, budget: float | None, clock: Clock) -> tuple[float, list[Row]]:
    """Run a federation of five devices; return the seconds that they plan with, and a row per device.

    planned: those seconds; None: measure them. budget: of all devices; None: each chooses its own.
    """
    with coordinator(folder) as server, ExitStack() as stack:
        publish(
            server,
            "budgets",
            TASK,
            method="pfedgate",
            rounds=ROUNDS,
            cohort=len(DUTIES),
            min_devices=len(DUTIES),
            local_steps=STEPS,
            batch_size=BATCH,
            early_stopping="off",
            evaluation_interval=0,
            deadline_seconds=3600.0,
            method_settings={"cost": "flops", "smallest_budget": 0.3},
        )
        planned = planned or SPARE * _whole_round(server, clock)
        sessions: list[Session] = []
        chosen: list[tuple[float, float]] = []
        for index, duty in enumerate(DUTIES):
            read = ConditionsReader(System.here()).read
            watch = Watchdog(Policy(duty=duty), read, clock=clock, sleep=clock.sleep)
            prepare = _prepare(planned, duty, budget, chosen, clock)
            sessions.append(_open(stack, server, folder, index, watch, prepare))
        # Until the last round has closed: the evaluation that follows is no matter here.
        while sum(session.progress.rounds for session in sessions) < ROUNDS * len(sessions):
            for session in sessions:
                if session.progress.rounds < ROUNDS:
                    session.step(0.2)
        seconds = _seconds(server)
    rows = [
        Row(duty, share, predicted, seconds[f"device-{index}"])
        for index, (duty, (share, predicted)) in enumerate(zip(DUTIES, chosen, strict=True))
    ]
    return planned, rows


def _open(
    stack: ExitStack,
    server: str,
    folder: Path,
    index: int,
    watch: Watchdog,
    prepare: Prepare,
) -> Session:
    client = stack.enter_context(connect(server, timeout=60))
    state = stack.enter_context(closing(StateFolder(folder / f"device-{index}")))
    return Session(
        Transport(client),
        state,
        federation="budgets",
        name=f"device-{index}",
        make_task=_task,
        options=SessionOptions(
            prepare=prepare,
            engine="torch",
            telemetry=lambda traffic: Telemetry(stack.enter_context(EnergyMeter()), traffic, watch.clock),
            watchdog=watch,
        ),
    )


def _task(info: FederationInfo, manifest: Manifest) -> Task:
    return Subject(TASK, info.settings, compute=Compute(threads=1), engine="torch").load()[0]


def _whole_round(server: str, clock: Clock) -> float:
    """Return the seconds of a round's training at budget 1, measured on this machine."""
    with connect(server, timeout=60) as client:
        transport = Transport(client)
        info = transport.federation("budgets")
        manifest = transport.manifest("budgets")
    return Predictor(_task(info, manifest), manifest, info.settings, memory=False, clock=clock).at(1.0).seconds


def _prepare(
    planned: float, duty: float, budget: float | None, chosen: list[tuple[float, float]], clock: Clock
) -> Prepare:
    def prepare(task: Task, manifest: Manifest, info: FederationInfo, rehearse: Rehearse) -> Prepared:
        predictor = Predictor(task, manifest, info.settings, memory=False, rehearse=rehearse, clock=clock)
        if budget is not None:
            chosen.append((budget, predictor.at(budget).seconds / duty))
            return Prepared(task, budget)
        # The choice of the first round stands: later ones would have learned.
        limits = Limits(None, planned / DEADLINE_SHARE)
        choice = BudgetController(predictor, info.settings, lambda deadline: limits, duty=lambda: duty).choice
        chosen.append((choice.budget, choice.computing))
        return Prepared(task, choice.budget)

    return prepare


def _seconds(server: str) -> dict[str, float]:
    """Return device -> the median seconds of its rounds' training."""
    taken: dict[str, list[float]] = {}
    with connect(server, timeout=60) as client:
        for number in range(1, ROUNDS + 1):
            answer = client.get(f"/v1/federations/budgets/rounds/{number}/reports").raise_for_status()
            for each in answer.json():
                if each["kind"] == "train":
                    report = UpdateReport.model_validate(each["report"])
                    taken.setdefault(each["device"], []).append(report.telemetry.train.seconds)
    return {device: median(seconds) for device, seconds in taken.items()}


def spread(rows: list[Row]) -> float:
    """Return the seconds between the fastest and the slowest device."""
    return max(row.measured for row in rows) - min(row.measured for row in rows)


def page(planned: float, own: list[Row], equal: list[Row], by: str) -> str:
    """Return both federations as Markdown."""
    ratio = spread(own) / spread(equal)
    errors = [abs(row.predicted / row.measured - 1) for row in own]
    verdicts = [
        ["spread of a round's seconds, of that with equal budgets", f"{SPREAD_BOUND:.2f}", f"**{ratio:.2f}**"],
        ["largest error of predicted seconds", f"{SECONDS_BOUND:.0%}", f"**{max(errors):.0%}**"],
        ["its median", "", f"{median(errors):.0%}"],
    ]

    def table(rows: list[Row]) -> str:
        head = ["duty", "budget", "predicted, s", "measured, s", "off by"]
        lines = [
            [
                f"{row.duty:g}",
                f"{row.budget:g}",
                f"{row.predicted:.2f}",
                f"{row.measured:.2f}",
                f"{row.predicted / row.measured - 1:+.0%}",
            ]
            for row in rows
        ]
        return markdown_table(head, lines)

    return (
        "# Budgets that devices choose themselves\n\n"
        f"Made by `python -m benchmarks.budgets` on {machine()}, one thread per device. pFedGate, `{TASK}`, {STEPS} "
        f"local steps of {BATCH} samples, blocks by FLOPs. Five devices train one after the other, and each computes "
        f"for a share of the time (duty). They plan for {planned:.2f} s per round, {SPARE:g} times the whole round of "
        f"the fastest device. The seconds are those of training, {by}, medians of {ROUNDS} rounds.\n\n"
        + markdown_table(["", "at most", "found"], verdicts)
        + "\n## Chosen by each device\n\n"
        + table(own)
        + "\n## The same for all: their mean\n\n"
        + table(equal)
    )


def main(arguments: list[str] | None = None) -> int:
    """Run both federations, print and write the page; return 1 if a bound is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--processor-time", action="store_true", help="measure processor time, for a machine with other load"
    )
    options = parser.parse_args(arguments)
    clock = Clock(processor=options.processor_time)
    by = "as processor time plus pauses" if options.processor_time else "as elapsed time"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        planned, own = run(Path(folder) / "own", None, None, clock)
        mean = sum(row.budget for row in own) / len(own)
        _, equal = run(Path(folder) / "equal", planned, round(mean, 2), clock)
    text = page(planned, own, equal, by)
    write_section("speed", "budgets", text)
    print(text)
    met = spread(own) <= SPREAD_BOUND * spread(equal)
    return 0 if met and all(abs(row.predicted / row.measured - 1) <= SECONDS_BOUND for row in own) else 1


if __name__ == "__main__":
    sys.exit(main())
