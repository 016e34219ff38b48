"""Many simulated devices, hosted by a few threads of this process or, where PyTorch trains, by a few processes.

ONNX Runtime computes without Python's interpreter lock, so that threads share what processes would each have: imports,
data, the runtime's sessions. The coordinator is asked who is being waited for. Those devices are handed to whichever
host is free, which opens the device's session from its state folder, lets it do its one thing and closes it. A device
that is not asked for anything costs nothing but its files. This works over HTTP or, with the coordinator's application,
in one process without sockets: the same sessions, the same calls, the same final model.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from edge_sdk.device.connection import connect, token_of
from edge_sdk.device.opening import choose_engine, fetch_graphs
from edge_sdk.device.session import FAILURES, Known
from edge_sdk.device.state import FolderLock, Reference, default_root, write_atomically
from edge_sdk.device.transport import Transport
from edge_sdk.device.values import load_values
from edge_sdk.engines import EngineChoice, EngineName
from edge_sdk.errors import BadArgument, NotFound, NothingTrained, SdkError, translated
from edge_sdk.tasks import Task

from ..protocol import checkpoint, tls
from ..protocol.manifest import Manifest, Tensors
from ..protocol.messages import FederationInfo, FederationStatus, Kind, OpenWork
from . import in_process
from .host import Host, OnnxTrainer, Plan, Stepped, TorchTrainer, Trainer
from .result import Result, read_ended

LOOK_SECONDS = 10.0
"""How long the coordinator is asked to wait for news; a host that failed is noticed no later."""

OVER = (FederationStatus.finished, FederationStatus.stopped)
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Access:
    """The way a coordinator is called.

    enrolment_token, observer_token: where the coordinator asks for them, the latter to see who is being waited for;
    without, those of SPARROW_ENROLMENT_TOKEN and SPARROW_OBSERVER_TOKEN. patience_seconds: how long to wait for a
    coordinator that does not answer; None: for ever. trust: certificates for https.
    """

    enrolment_token: str | None = None
    observer_token: str | None = None
    patience_seconds: float | None = None
    trust: tls.Tls | None = None


USUAL = Access()


@translated()
def run_fleet(
    server: str | None,
    plan: Plan,
    *,
    app: Any = None,
    engine: EngineChoice = "auto",
    processes: int | None = None,
    state_dir: Path | None = None,
    in_memory: bool = False,
    adapt: bool = True,
    access: Access = USUAL,
    quiet: bool = False,
    on_step: Callable[[Stepped], None] = lambda stepped: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Result:
    """Run the devices of ``plan`` until their federation has ended, and return what was done.

    server: the coordinator's address; or app: its ASGI application, run in this process, which then hosts all devices.
    engine: what trains; auto: ONNX Runtime where the federation has its training step as a graph, and PyTorch
    otherwise, or where ``plan`` needs it. processes: how many devices work at once, one per core by default: in threads
    of this process with ONNX Runtime, in processes with PyTorch, and one at a time on an accelerator. state_dir: where
    the devices keep their state; a second call with the same folder goes on. in_memory: keep it in memory instead, and
    forget it. adapt: let devices that end without a model of their own fetch the finished one, and tune it where the
    federation says so; without, the records lack what the last upload of each device cost.
    on_step: told of each step. interrupted: asked before each, and at least every ``LOOK_SECONDS``; true is as good as
    Ctrl-C, which reaches only a process's main thread. Raises SdkError; KeyboardInterrupt once every device has
    finished the step it was in.
    """
    if (server is None) == (app is None):
        raise BadArgument("give the coordinator's address, or its application")
    accelerated = plan.compute.device != "cpu"
    if accelerated and processes not in (None, 1):
        raise BadArgument(f"{processes} processes, but an accelerator is served by one: set 1, or train on the cpu")
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect_to(server, app, access.trust))
        root = stack.enter_context(_root(state_dir, in_memory, server or in_process.ADDRESS, plan.federation))
        transport = Transport(client, patience_seconds=access.patience_seconds)
        enrolment_token = access.enrolment_token or token_of("enrolment")
        transport.token = access.observer_token or token_of("observer") or enrolment_token
        known = Known.of(transport, plan.federation)
        task_of = cache(lambda index: plan.task(index, known))
        chosen = _chosen(engine, plan, known, task_of(0))
        in_threads = chosen == "onnx"
        if app is not None and not in_threads and processes not in (None, 1):
            raise BadArgument(f"{processes} processes, but an application in process is served by one: set 1")
        number = 1 if accelerated or (app is not None and not in_threads) else processes or os.cpu_count() or 1
        reference = _reference(root, transport, plan.federation, known.manifest)
        frozen = load_values("frozen", known.manifest, plan.federation, transport, root)
        first = load_values("first", known.manifest, plan.federation, transport, root)
        make_trainer = _trainers(chosen, plan, known, transport, task_of, frozen, first)

        def make_host() -> Host:
            return Host(
                plan,
                client if number == 1 or in_threads else connect(str(server), access.trust),
                root,
                known,
                task_of,
                make_trainer(),
                reference=reference,
                enrolment_token=enrolment_token,
                patience_seconds=access.patience_seconds,
            )

        make_executor = _threads if in_threads else _pool
        executor = stack.enter_context(_InProcess(make_host) if number == 1 else make_executor(number, make_host))
        mine = frozenset(range(plan.total) if plan.indices is None else plan.indices)
        run = _Run(plan, mine, executor, transport, known.info, quiet, on_step, interrupted, chosen, adapt)
        return run.until_over()


def _chosen(asked: EngineChoice, plan: Plan, known: Known, first: Task) -> EngineName:
    """Return what trains the devices of ``plan``. Raises CannotTrain, and BadArgument for what does not go together."""
    if not plan.budgets:
        if asked == "onnx":
            raise BadArgument("what a board can afford is found out with PyTorch: give --engine torch, or --budgets")
        asked = "torch"
    task = replace(first, compute=plan.compute)
    return choose_engine(asked, task, known.manifest, known.info.method)


def _trainers(
    engine: EngineName,
    plan: Plan,
    known: Known,
    transport: Transport,
    task_of: Callable[[int], Task],
    frozen: Tensors,
    first: Tensors,
) -> Callable[[], Trainer]:
    """Return the function that makes what trains in one thread or process."""
    if engine == "torch":
        import torch

        torch.set_num_threads(1)
        return lambda: TorchTrainer(task_of(0), known, plan.compute, {**frozen, **first})
    from edge_sdk.engines.onnx import Sessions

    found = fetch_graphs(known.manifest, partial(transport.graph, plan.federation), frozen, first)
    assert found is not None, "the engine was chosen because they are there"
    sessions = Sessions(found[0])
    return lambda: OnnxTrainer(task_of(0), known, sessions)


def connect_to(server: str | None, app: Any, trust: tls.Tls | None) -> contextlib.AbstractContextManager[httpx.Client]:
    """Return a client of the coordinator at this address, or of the application that runs in this process."""
    return connect(str(server), trust) if app is None else in_process.running(app)


@contextlib.contextmanager
def _root(state_dir: Path | None, in_memory: bool, server: str, federation: str) -> Iterator[Path]:
    """Yield the folder of all devices' state, locked for this fleet."""
    if in_memory:
        memory = Path(tempfile.mkdtemp(prefix="sparrow-fleet-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
        try:
            yield memory
        finally:
            shutil.rmtree(memory, ignore_errors=True)
        return
    root = state_dir or default_root(server, federation) / "fleet"
    with FolderLock(root):
        yield root


def _reference(root: Path, transport: Transport, federation: str, manifest: Manifest) -> Reference | None:
    """Return the model that personal ones are stored as differences from: the global one when the fleet began."""
    path = root / "reference.safetensors"
    if not path.exists():
        try:
            whole = transport.model(federation, manifest)
            model = {spec.name: whole[spec.name] for spec in manifest.kept}
        except NotFound:
            model = {}  # no global model that could be looked at: personal models are stored whole
        write_atomically(path, checkpoint.save(model))
    tensors, _ = checkpoint.load(path.read_bytes())
    return Reference.of(tensors) if tensors else None


# --- who does the work -----------------------------------------------------------------------------------------------

_here = threading.local()
"""``host``: the host of this thread, which may be the only one of a worker process."""


def _become_worker(make_host: Callable[[], Host]) -> None:
    # Ctrl-C reaches every process of a terminal; here it is the parent's business, which lets steps end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _here.host = make_host()


def _end_with_parent() -> None:
    """End this process with its parent: it would keep the fleet's state folder locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(what: str, index: int) -> Any:
    return getattr(_here.host, what)(index)


def _pool(processes: int, make_host: Callable[[], Host]) -> Executor:
    """Worker processes, forked from this one: torch and the data that it has loaded are shared, not loaded again."""
    # The first task of the fleet's data set, made here, loads it once.
    make_host()
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=_become_worker, initargs=(make_host,)
    )
    pool.submit(os.getpid).result()  # forks them all: now, before this process has a progress bar and its threads
    return pool


def _threads(number: int, make_host: Callable[[], Host]) -> Executor:
    """Threads of this process; their hosts are made here, where an error of the first is raised."""
    hosts = [make_host() for _ in range(number)]
    return ThreadPoolExecutor(number, "host", initializer=lambda: setattr(_here, "host", hosts.pop()))


class _InProcess(Executor):
    """Does the work where it is asked for, at once."""

    def __init__(self, make_host: Callable[[], Host]) -> None:
        _here.host = make_host()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the finished future of ``fn``; KeyboardInterrupt passes."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """One fleet at work."""

    plan: Plan
    mine: frozenset[int]
    executor: Executor
    transport: Transport
    info: FederationInfo
    quiet: bool
    on_step: Callable[[Stepped], None]
    interrupted: Callable[[], bool]
    engine: EngineName
    adapt: bool
    result: Result = field(init=False)
    _given: set[str] = field(default_factory=set)
    _due: Counter[int] = field(default_factory=Counter)
    _busy: set[int] = field(default_factory=set)
    _ending: bool = False
    _lock: threading.Condition = field(default_factory=threading.Condition)  # over all of these; rung when a step ends
    _failed: list[BaseException] = field(default_factory=list)
    _last_failure: str | None = None
    _seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result = Result(hosted=len(self.mine), engine=self.engine)
        self._begin = time.monotonic()
        self._indices = {self.plan.name(index): index for index in self.mine}

    def until_over(self) -> Result:
        """Enrol, work until the federation is over, adapt what came late."""
        training = [index for index in sorted(self.mine) if index < self.plan.devices]
        settings = self.info.settings
        with self._bar(len(training), "enrolling", "device") as self.bar:
            if self.info.status not in OVER:
                self._all("start", training)
        with self._bar(settings.rounds * min(settings.cohort, self.plan.devices), "", "device-round") as self.bar:
            self._work()
        finishing = sorted(self.mine) if self.adapt else []
        with self._bar(len(finishing), "finishing", "device") as self.bar:
            self._all("finish", finishing)
        self._raise_nothing_trained(1)
        self.result.seconds = time.monotonic() - self._begin
        self.result.rounds = tuple(self.transport.rounds(self.plan.federation))
        self.result.ended = ended = read_ended(self.result.rounds)
        if ended is not None:
            told = self.transport.reports(self.plan.federation, ended.round)
            self.result.devices = tuple(report for report in told if report.kind is Kind.evaluate)
        return self.result

    def _work(self) -> None:
        etag, listed = "", OpenWork(at="", status=self.info.status, round=0, assignments=())
        try:
            while True:
                work, etag = self.transport.open_work(self.plan.federation, LOOK_SECONDS, etag)
                self._raise_failure()
                self._raise_nothing_trained(FAILURES * len(self.mine))
                self._raise_interrupt()
                if work is not None:
                    listed = work
                self.result.status = listed.status
                self.bar.set_description(f"round {listed.round + 1}" if listed.assignments else listed.status.value)
                if listed.status in OVER and not listed.assignments:
                    self._wait_for_steps()
                    return
                if work is None and not self._busy:
                    # Nothing has moved and nobody is at work: whoever missed a deadline is thought away. Say otherwise.
                    self._given.clear()
                    self._all("start", [index for index in sorted(self.mine) if index < self.plan.devices])
                self._hand_out(listed)
        except KeyboardInterrupt:
            self._cancel()
            raise

    def _wait_for_steps(self) -> None:
        """Until nobody is in a step: a device whose last answer was lost is still sending it when all is over."""
        with self._lock:
            while not self._lock.wait_for(lambda: not self._busy, LOOK_SECONDS):
                self._raise_interrupt()
        self._raise_failure()

    def _hand_out(self, work: OpenWork) -> None:
        # Whoever took longest the last time goes first, so that no process is left with a long one at a round's end.
        for assignment in sorted(work.assignments, key=lambda each: -self._seconds.get(each.device, 0.0)):
            index = self._indices.get(assignment.device)
            if index is None or assignment.assignment_id in self._given:
                continue
            self._raise_interrupt()
            with self._lock:
                self._given.add(assignment.assignment_id)
                self._due[index] += 1
                self._go_on(index)
        self._given &= {assignment.assignment_id for assignment in work.assignments}

    def _go_on(self, index: int) -> None:
        """Let a device take its next step, if one is due and it is in none: it has one folder, and one session."""
        with self._lock:
            if self._due[index] and index not in self._busy and not self._ending:
                self._due[index] -= 1
                self._busy.add(index)
                self.executor.submit(_call, "step", index).add_done_callback(partial(self._done, index))

    def _all(self, what: str, indices: list[int]) -> None:
        """Make one call for each of ``indices`` and wait for all."""
        try:
            futures = [self._submit(what, index) for index in indices]
            for future in futures:
                self._count(future.result())
        except KeyboardInterrupt:
            self._cancel()
            raise

    def _submit(self, what: str, index: int) -> Future[Any]:
        self._raise_interrupt()
        return self.executor.submit(_call, what, index)

    def _done(self, index: int, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._failed.append(error)
        try:
            if error is None and not future.cancelled():
                self._count(future.result())
        finally:
            with self._lock:
                self._busy.discard(index)
                if error is None:
                    self._go_on(index)
                self._lock.notify_all()

    def _count(self, stepped: Stepped | None) -> None:
        if stepped is not None:
            if stepped.kind in (Kind.train, Kind.personalise):
                self._seconds[self.plan.name(stepped.index)] = stepped.seconds
            self.result.add(stepped, time.monotonic() - self._begin)
            self.on_step(stepped)
        if stepped is None or stepped.kind in (Kind.train, Kind.personalise, Kind.adapt):
            self.bar.update()
        if stepped is not None and stepped.failed is not None:
            self._last_failure = stepped.failed

    def _raise_nothing_trained(self, times: int) -> None:
        """Raise NothingTrained if work has failed ``times`` times and has never succeeded."""
        done = self.result
        if done.failed >= times and not done.device_rounds and not done.adapted:
            self._cancel()
            raise NothingTrained(f"no device has trained, {done.failed} times it failed: {self._last_failure}")

    def _raise_interrupt(self) -> None:
        if self.interrupted():
            raise KeyboardInterrupt

    def _raise_failure(self) -> None:
        if self._failed:
            self._cancel()
            error = self._failed[0]
            if isinstance(error, BrokenProcessPool):
                raise SdkError("a process of the fleet died (out of memory?); the same command goes on") from error
            raise error

    def _cancel(self) -> None:
        """Let every process end the step it is in, and begin no other."""
        self._ending = True
        self.executor.shutdown(wait=True, cancel_futures=True)

    def _bar(self, total: int, description: str, unit: str) -> tqdm[Any]:
        return tqdm(
            total=total,
            desc=description,
            unit=f" {unit}",
            disable=self.quiet or None,
            dynamic_ncols=True,
            file=sys.stderr,
        )
