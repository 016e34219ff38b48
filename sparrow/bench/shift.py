"""Evaluate a trial's last models on shifted test sets, without rounds.

Each device is opened from its state folder with a ``--data`` that only changes its test samples, and the method's
device half evaluates as in the federation's last evaluation. State folders and the coordinator's records do not change.

With ``finetune_epochs``, the fine-tuned copy of a model is trained again, bitwise equal, once for all test sets of a
device. The adapted model of a device that was never drawn is ignored.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from edge_sdk.device.label_prior import LabelPrior
from edge_sdk.device.opening import fetch_graphs, share_onnx
from edge_sdk.device.session import Known, load_mask
from edge_sdk.device.state import Reference, StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.engines import Engine, EngineName
from edge_sdk.engines.onnx import Sessions
from edge_sdk.engines.training import LocalResult, TrainingDiverged
from edge_sdk.methods import DeviceState, Evaluated, Job, load_method
from edge_sdk.tasks import load_task
from edge_sdk.tasks.compute import PROCESSOR
from edge_sdk.training.engine import TorchEngine

from ..coordinator.methods import load_method as load_coordinator_method
from ..coordinator.methods import sends_values
from ..protocol import bundle, checkpoint
from ..protocol.elements import ElementMask
from ..protocol.errors import ProtocolError
from ..protocol.manifest import Manifest, Tensors
from ..protocol.masks import Mask, pack
from ..protocol.messages import Assignment, FederationInfo, Kind
from ..protocol.parts import expected
from ..simulation.host import Plan
from ..transport import connect

log = logging.getLogger(__name__)

DataOfDevices = str | tuple[str, ...] | None
"""``--data`` of all devices, or one per device; None for the task's built-in data."""


@dataclass(frozen=True)
class Finished:
    """A federation that has ended."""

    known: Known
    # The global one, or its shared part; None if evaluations send no model.
    model: Tensors | None
    # Folder of the devices' state folders.
    root: Path
    # Model from which personal models are stored as differences.
    reference: Reference | None
    # ONNX Runtime's sessions of the training step, None with PyTorch.
    sessions: Sessions | None


def read_finished(server: str, federation: str, folder: Path, engine: EngineName) -> Finished:
    """Read an ended federation from its coordinator and the trial's folder. engine: the training engine."""
    root = folder / "devices"
    with connect(server, timeout=60) as client:
        transport = Transport(client)
        known = Known.of(transport, federation)
        info, manifest = known.info, known.manifest
        model = None
        if info.global_model_usable:
            model = transport.model(federation, manifest)
        elif sends_values(load_coordinator_method(info.method), Kind.evaluate, holds_model=True):
            model = _newest_values(folder)
        stored, _ = checkpoint.load((root / "reference.safetensors").read_bytes())
        found = fetch_graphs(manifest, partial(transport.graph, federation)) if engine == "onnx" else None
        reference = Reference.of(stored) if stored else None
        return Finished(known, model, root, reference, Sessions(found[0]) if found else None)


def check_test_sets(plan: Plan, task: str, seed: int, texts: Sequence[str]) -> None:
    """Load the first device's task on each test set, to report errors before training.

    texts: the value of ``Plan.data`` for each test set. Raises DataError if data cannot be read.
    """
    for text in texts:
        load_task(task, replace(plan, data=text).data_of(0), device=plan.name(0), seed=seed, batch_size=1)


def _newest_values(folder: Path) -> Tensors:
    files = sorted((folder / "coordinator").glob("**/models/*.safetensors"))
    return checkpoint.load([file for file in files if ".state." not in file.name][-1].read_bytes())[0]


def judge(
    finished: Finished,
    plan: Plan,
    texts: Sequence[DataOfDevices],
    *,
    processes: int | None,
    devices: Sequence[int] | None = None,
) -> list[list[Evaluated]]:
    """Return the results of ``devices`` (by default those that trained) by test set, each given as ``Plan.data``.
    Raises DataError if data cannot be read, KeyboardInterrupt.
    """
    number = 1 if plan.compute.device != PROCESSOR else processes or os.cpu_count() or 1
    devices = range(plan.devices) if devices is None else devices

    def judge_one(index: int) -> list[Evaluated]:
        return judge_device(finished, plan, index, texts)

    calls = map(judge_one, devices) if number == 1 else _in_processes(judge_one, devices, number)
    with tqdm(
        calls, total=len(devices), desc="judging", unit=" device", dynamic_ncols=True, leave=False, disable=None
    ) as bar:
        found = list(bar)
    return [list(results) for results in zip(*found, strict=True)]


def _train_once(engine: Engine, trained: list[tuple[LocalResult, Tensors]]) -> None:
    """Let a device's engine reuse the trainings of its first test set, since they do not depend on test data."""
    train = engine.train
    calls = itertools.count()

    def once(*what: Any, **how: Any) -> LocalResult:
        number = next(calls)
        if number < len(trained):
            result, tensors = trained[number]
            engine.load(tensors)
            return result
        result = train(*what, **how)
        trained.append((result, engine.read()))
        return result

    engine.train = once  # type: ignore[method-assign]


def judge_device(finished: Finished, plan: Plan, index: int, texts: Sequence[DataOfDevices]) -> list[Evaluated]:
    """Evaluate one device on each test set."""
    info, manifest = finished.known.info, finished.known.manifest
    folder = StateFolder(finished.root / plan.name(index), durable=False, reference=finished.reference)
    try:
        personal, progress = folder.load(manifest)
        own, mask = folder.own, load_mask(folder, manifest)
    finally:
        folder.close()
    body = None if finished.model is None else _payload(manifest, finished.model, mask, info)
    found = []
    trained: list[tuple[LocalResult, Tensors]] = []
    engine: Engine
    for text in texts:
        task = replace(plan, data=text).task(index, finished.known)
        if finished.sessions is not None:
            engine = share_onnx(task, manifest, info, finished.sessions)
        else:
            task = load_method(info.method).task_of(task, manifest, info.settings.seed)  # with a model made anew
            task = task.on(plan.compute)
            engine = TorchEngine(task, manifest)
        _train_once(engine, trained)
        parts = expected(load_method(info.method).payload_parts, manifest, {})
        job = Job(
            assignment=Assignment(
                assignment_id="judging",
                kind=Kind.evaluate,
                round=info.round,
                deadline_seconds=0.0,
                settings=info.settings,
            ),
            manifest=manifest,
            task=task,
            engine=engine,
            state=DeviceState(None if progress.adapted else personal, progress.memory, own),
            received=None if body is None else bundle.decode(body, manifest, parts=parts),
            federation=info.name,
            device=plan.name(index),
        )
        prior = LabelPrior.of(task, manifest, info.settings)
        found.append(_judge(job if prior is None else prior.received(job), info.method))
    return found


def _judge(job: Job, method: str) -> Evaluated:
    try:
        return load_method(method).evaluate(job)
    except (TrainingDiverged, ProtocolError) as error:  # as in a session: the device goes without a figure
        log.warning("%s: %s", job.device, error)
        return Evaluated(None, None)


def _payload(manifest: Manifest, model: Tensors, held: Mask | None, info: FederationInfo) -> bytes:
    mask = held if isinstance(held, ElementMask) and _covers(held, model) else None  # else it is sent whole
    precision = info.settings.precision_of("down", Kind.evaluate)
    return bundle.encode(manifest, pack(manifest, model, mask), mask, precision=precision)


def _covers(mask: ElementMask, model: Tensors) -> bool:
    return not any(model[name][~flags.reshape(model[name].shape)].any() for name, flags in mask.exists.items())


# --- processes -------------------------------------------------------------------------------------------------------

_judge_one: Callable[[int], list[Evaluated]] | None = None
"""Function of a worker process, from an index to a result; inherited by the fork."""


def _become_worker(judge_one: Callable[[int], list[Evaluated]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    global _judge_one
    _judge_one = judge_one


def _call(index: int) -> list[Evaluated]:
    assert _judge_one is not None, "the pool's initializer has set it"
    return _judge_one(index)


def _in_processes(
    judge_one: Callable[[int], list[Evaluated]], devices: Sequence[int], number: int
) -> Iterator[list[Evaluated]]:
    with ProcessPoolExecutor(
        number, multiprocessing.get_context("fork"), initializer=_become_worker, initargs=(judge_one,)
    ) as pool:
        futures = [pool.submit(_call, index) for index in devices]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
