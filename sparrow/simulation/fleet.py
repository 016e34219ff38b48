"""A fleet of simulated devices, hosted by threads of this process (ONNX Runtime) or by a few processes (PyTorch).

ONNX Runtime computes without Python's interpreter lock, so threads can share imports, data and sessions. The fleet
polls the coordinator for open work and passes it to free hosts (``host``). An idle device takes only disk space.
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

from tqdm import tqdm

from edge_sdk.device.connection import token_of
from edge_sdk.device.opening import choose_engine, fetch_graphs
from edge_sdk.device.session import FAILURES, Known
from edge_sdk.device.state import FolderLock, Reference, default_root, write_atomically
from edge_sdk.device.transport import Transport
from edge_sdk.device.values import load_values
from edge_sdk.engines import EngineChoice, EngineName
from edge_sdk.errors import BadArgument, NotFound, NothingTrained, SdkError, translated
from edge_sdk.tasks import Task

from ..protocol import checkpoint
from ..protocol.manifest import Manifest, Tensors
from ..protocol.messages import FederationInfo, FederationStatus, Kind, OpenWork
from ..transport import connect, httpx, tls
from . import in_process
from .host import Host, OnnxTrainer, Plan, Stepped, TorchTrainer, Trainer
from .result import Result, read_ended

LOOK_SECONDS = 10.0
"""Duration of a long poll for open work, and longest time until a failed host is noticed, seconds."""

OVER = (FederationStatus.finished, FederationStatus.stopped)
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Access:
    """Access to a coordinator."""

    # By default SPARROW_ENROLMENT_TOKEN and SPARROW_OBSERVER_TOKEN; the latter is for listing open work.
    enrolment_token: str | None = None
    observer_token: str | None = None
    # How long calls retry if the coordinator does not answer; None for no limit.
    patience_seconds: float | None = None
    # Certificates for https.
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
    """Run the devices of ``plan`` until their federation ends, and return the results.

    server: the coordinator's address. app: alternatively its ASGI application, run in this process. engine: auto takes
    ONNX Runtime if the federation has a graph of its training step and ``plan`` does not need PyTorch. processes:
    number of devices that work at once, by default one per core, on an accelerator one. state_dir, in_memory, adapt:
    the options of ``simulate``. interrupted: called before each step and at least every ``LOOK_SECONDS``; True acts as
    Ctrl-C.

    Raises SdkError, and KeyboardInterrupt after every device has finished its step.
    """
    if (server is None) == (app is None):
        raise BadArgument("give either the coordinator's address or its application")
    check_run(engine, plan, processes)
    accelerated = plan.compute.device != "cpu"
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
            raise BadArgument(f"{processes} processes, but an application in this process allows only one: set 1")
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


def check_run(engine: EngineChoice, plan: Plan, processes: int | None) -> None:
    """Raise BadArgument for options of a fleet that exclude each other."""
    if plan.compute.device != "cpu" and processes not in (None, 1):
        raise BadArgument(f"{processes} processes, but an accelerator allows only one: set 1, or train on the cpu")
    if not plan.budgets and engine == "onnx":
        raise BadArgument("automatic budgets need PyTorch: give --engine torch, or --budgets")


def _chosen(asked: EngineChoice, plan: Plan, known: Known, first: Task) -> EngineName:
    """Return the engine for the devices of ``plan``. Raises CannotTrain if none is installed."""
    task = replace(first, compute=plan.compute)
    return choose_engine(asked if plan.budgets else "torch", task, known.manifest, known.info.method)


def _trainers(
    engine: EngineName,
    plan: Plan,
    known: Known,
    transport: Transport,
    task_of: Callable[[int], Task],
    frozen: Tensors,
    first: Tensors,
) -> Callable[[], Trainer]:
    """Return a function that makes the trainer of a thread or process."""
    if engine == "torch":
        import torch

        torch.set_num_threads(1)
        return lambda: TorchTrainer(task_of(0), known, plan.compute, {**frozen, **first})
    from edge_sdk.engines.onnx import Sessions

    found = fetch_graphs(known.manifest, partial(transport.graph, plan.federation), frozen, first)
    assert found is not None, "choose_engine has checked it"
    sessions = Sessions(found[0])
    return lambda: OnnxTrainer(task_of(0), known, sessions)


def connect_to(server: str | None, app: Any, trust: tls.Tls | None) -> contextlib.AbstractContextManager[httpx.Client]:
    """Return a client of the coordinator at this address, or of the application in this process."""
    return connect(str(server), trust) if app is None else in_process.running(app)


@contextlib.contextmanager
def _root(state_dir: Path | None, in_memory: bool, server: str, federation: str) -> Iterator[Path]:
    """Context manager: yield the folder of the devices' state, locked."""
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
    path = root / "reference.safetensors"
    if not path.exists():
        try:
            whole = transport.model(federation, manifest)
            model = {spec.name: whole[spec.name] for spec in manifest.kept}
        # without a global model, personal models are stored whole
        except NotFound:
            model = {}
        write_atomically(path, checkpoint.save(model))
    tensors, _ = checkpoint.load(path.read_bytes())
    return Reference.of(tensors) if tensors else None


# --- executors -------------------------------------------------------------------------------------------------------

_here = threading.local()
"""``host``: the host in this thread."""


def _become_worker(make_host: Callable[[], Host]) -> None:
    # Ctrl-C reaches every process of a terminal; only the parent handles it, and waits for steps to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _here.host = make_host()


def _end_with_parent() -> None:
    """End this process with its parent; otherwise it would keep the state folder locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(method: str, index: int) -> Any:
    return getattr(_here.host, method)(index)


def _pool(processes: int, make_host: Callable[[], Host]) -> Executor:
    """Return worker processes, forked from this one to share torch and the data."""
    # loads the data set, once
    make_host()
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=_become_worker, initargs=(make_host,)
    )
    # fork them all now, before this process starts threads for a progress bar
    pool.submit(os.getpid).result()
    return pool


def _threads(number: int, make_host: Callable[[], Host]) -> Executor:
    """Return threads of this process. Their hosts are made here, so that errors are raised to the caller."""
    hosts = [make_host() for _ in range(number)]
    return ThreadPoolExecutor(number, "host", initializer=lambda: setattr(_here, "host", hosts.pop()))


class _InProcess(Executor):
    """An executor that runs calls at once, in the calling thread."""

    def __init__(self, make_host: Callable[[], Host]) -> None:
        _here.host = make_host()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` and return its finished future. KeyboardInterrupt is raised."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """One run of a fleet."""

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
    # guards the fields above; notified when a step ends
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _failed: list[BaseException] = field(default_factory=list)
    _last_failure: str | None = None
    _seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result = Result(hosted=len(self.mine), engine=self.engine)
        self._begin = time.monotonic()
        self._indices = {self.plan.name(index): index for index in self.mine}

    def until_over(self) -> Result:
        """Enrol, work until the federation ends, adapt the devices that have no model."""
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
            reports = self.transport.reports(self.plan.federation, ended.round)
            self.result.devices = tuple(report for report in reports if report.kind is Kind.evaluate)
        return self.result

    def _work(self) -> None:
        etag = ""
        listed = OpenWork(at="", status=self.info.status, round=0, assignments=())
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
                    # No change and no device at work: the coordinator may have marked some absent. Announce all again.
                    self._given.clear()
                    self._all("start", [index for index in sorted(self.mine) if index < self.plan.devices])
                self._hand_out(listed)
        except KeyboardInterrupt:
            self._cancel()
            raise

    def _wait_for_steps(self) -> None:
        """Wait until no device is in a step, because a device may still repeat its last upload after the end."""
        with self._lock:
            while not self._lock.wait_for(lambda: not self._busy, LOOK_SECONDS):
                self._raise_interrupt()
        self._raise_failure()

    def _hand_out(self, work: OpenWork) -> None:
        # The slowest devices go first, so that no process has a long step left at a round's end.
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
        """Start a device's next step if one is due and none is running, because a device has only one session."""
        with self._lock:
            if self._due[index] and index not in self._busy and not self._ending:
                self._due[index] -= 1
                self._busy.add(index)
                self.executor.submit(_call, "step", index).add_done_callback(partial(self._done, index))

    def _all(self, method: str, indices: list[int]) -> None:
        """Call a method of the hosts for each device and wait for all."""
        try:
            futures = [self._submit(method, index) for index in indices]
            for future in futures:
                self._count(future.result())
        except KeyboardInterrupt:
            self._cancel()
            raise

    def _submit(self, method: str, index: int) -> Future[Any]:
        self._raise_interrupt()
        return self.executor.submit(_call, method, index)

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
        """Raise NothingTrained after ``times`` failures without a success."""
        done = self.result
        if done.failed >= times and not done.device_rounds and not done.adapted:
            self._cancel()
            raise NothingTrained(f"no device has trained; training failed {done.failed} times: {self._last_failure}")

    def _raise_interrupt(self) -> None:
        if self.interrupted():
            raise KeyboardInterrupt

    def _raise_failure(self) -> None:
        if self._failed:
            self._cancel()
            error = self._failed[0]
            if isinstance(error, BrokenProcessPool):
                raise SdkError(
                    "a process of the fleet died, perhaps out of memory; repeat the command to continue"
                ) from error
            raise error

    def _cancel(self) -> None:
        """Wait for running steps without starting new ones."""
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
