"""Judging what a trial has left behind on test sets that moved away from the devices' own: no training, no rounds.

When a federation has ended, its fleet's state folders hold the personal models and the coordinator has the global one.
Here each device is opened once more, with other words behind ``--data`` that change its test samples alone, and the
method's device half is asked to ``evaluate``, as in the evaluation that ended the federation: so a method with a rule
of its own for which model answers is judged by that rule. Nothing is written, and the coordinator's records stay as
they are.

Two things have changed since that evaluation. Where the federation has ``finetune_epochs``, evaluating trains a copy of
the global model and throws it away; here the copy is judged that the device kept when it adapted the finished model,
which is the same, bit for bit. And a device that was never drawn had no personal model to be judged; the one that it
has adapted since does not count.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import torch
from tqdm import tqdm

from benchmarks.experiment import Options
from benchmarks.metrics import Shifted, shifted
from coordinator.methods import load_method as load_coordinator_method
from edge_sdk.host import Plan
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.protocol import bundle, checkpoint
from edge_sdk.protocol.elements import ElementMask, from_bits
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.masks import pack
from edge_sdk.protocol.messages import Assignment, Evaluation, FederationInfo, Kind
from edge_sdk.session import MASK
from edge_sdk.state import Reference, StateFolder
from edge_sdk.tasks import load_task
from edge_sdk.training.local import TrainingDiverged, evaluate, set_tensors
from edge_sdk.transport import Transport

log = logging.getLogger(__name__)

Found = tuple[Evaluation | None, Evaluation | None]
"""What a device found of its personal model and of the global one."""


@dataclass(frozen=True)
class Finished:
    """A federation that has ended. model: the global one, None where it means nothing by itself. root: where the
    devices' state folders lie; reference: what their personal models are stored as differences from."""

    info: FederationInfo
    manifest: Manifest
    model: Tensors | None
    root: Path
    reference: Reference | None


def read_finished(server: str, federation: str, root: Path) -> Finished:
    """What the coordinator and the fleet's folder say of a federation that has ended."""
    with httpx.Client(base_url=server, timeout=60) as client:
        transport = Transport(client)
        info = transport.federation(federation)
        model = transport.model(federation) if info.global_model_usable else None
        stored, _ = checkpoint.load((root / "reference.safetensors").read_bytes())
        return Finished(
            info, transport.manifest(federation), model, root, reference=Reference.of(stored) if stored else None
        )


def check_test_sets(plan: Plan, task: str, seed: int, texts: Sequence[str]) -> None:
    """Load the first device's task on each test set, so that what cannot be had is said before hours of training.

    texts: of ``--data``, as ``Plan`` has them. Raises DataError.
    """
    for text in texts:
        load_task(task, replace(plan, data=text).data_of(0), device=plan.name(0), seed=seed, batch_size=1)


def judge(
    finished: Finished, plan: Plan, test_sets: Sequence[tuple[Options, str]], *, processes: int | None
) -> tuple[Shifted, ...]:
    """Every device that trained, on every test set: its options, and the text of ``--data`` that they make.

    Raises DataError, and KeyboardInterrupt.
    """
    texts = [text for _, text in test_sets]
    number = processes or os.cpu_count() or 1
    devices = range(plan.devices)

    def judge_one(index: int) -> list[Found]:
        return judge_device(finished, plan, index, texts)

    calls = map(judge_one, devices) if number == 1 else _in_processes(judge_one, devices, number)
    with tqdm(calls, total=len(devices), desc="judging", unit=" device", dynamic_ncols=True, leave=False) as bar:
        found = list(bar)
    by_set = zip(*found, strict=True)
    return tuple(shifted(options, results) for (options, _), results in zip(test_sets, by_set, strict=True))


def judge_device(finished: Finished, plan: Plan, index: int, texts: Sequence[str]) -> list[Found]:
    """One device on each test set."""
    info, manifest = finished.info, finished.manifest
    folder = StateFolder(finished.root / plan.name(index), durable=False, reference=finished.reference)
    try:
        personal, progress = folder.load(manifest)
        own, bits = folder.own, folder.cached(MASK)
    finally:
        folder.close()
    adapted = personal if progress.adapted else None
    keeps = load_coordinator_method(info.method).personal_models
    kept = adapted if info.settings.finetune_epochs and not keeps else None
    settings = info.settings.model_copy(update={"finetune_epochs": 0})
    body = None if finished.model is None else _payload(manifest, finished.model, bits, info)
    found = []
    for text in texts:
        task = replace(plan, data=text).task(index, info).on(plan.compute)  # with a model of its own, made anew
        job = Job(
            assignment=Assignment(
                assignment_id="", kind=Kind.evaluate, round=info.round, deadline_seconds=0.0, settings=settings
            ),
            manifest=manifest,
            task=task,
            model=task.model,
            state=DeviceState(None if progress.adapted else personal, progress.memory, own),
            received=None if body is None else bundle.decode(body, manifest),
            federation=info.name,
            device=plan.name(index),
        )
        found.append(_judge(job, info.method, kept))
    return found


def _judge(job: Job, method: str, kept: Tensors | None) -> Found:
    """By the method's rule; ``kept``: a fine-tuned copy of the global model, to be judged beside it."""
    try:
        evaluated = load_method(method).evaluate(job)
        personal = evaluated.personal
        if kept is not None:
            set_tensors(job.model, kept)
            personal = evaluate(job.model, job.task, job.task.held_out)
    except (TrainingDiverged, ProtocolError) as error:  # as in a session: the device goes without a figure
        log.warning("%s: %s", job.device, error)
        return None, None
    return personal, evaluated.global_model


def _payload(manifest: Manifest, model: Tensors, bits: bytes | None, info: FederationInfo) -> bytes:
    """The global model as an evaluation brings it. ``bits``: the mask of elements that the device received last."""
    mask = None if bits is None else from_bits(manifest, bits)
    if mask is not None and not _covers(mask, model):
        mask = None  # of an earlier model: this one is sent whole, which says the same of its values
    precision = info.settings.precision_of("down", Kind.evaluate)
    return bundle.encode(manifest, pack(manifest, model, mask), mask, precision=precision)


def _covers(mask: ElementMask, model: Tensors) -> bool:
    return not any(model[name][~flags.reshape(model[name].shape)].any() for name, flags in mask.exists.items())


# --- processes -------------------------------------------------------------------------------------------------------

_judge_one: Callable[[int], list[Found]] | None = None
"""What a worker process does with an index; it inherits it, being forked."""


def _become_worker(judge_one: Callable[[int], list[Found]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    global _judge_one
    _judge_one = judge_one


def _call(index: int) -> list[Found]:
    assert _judge_one is not None, "the pool's initializer has set it"
    return _judge_one(index)


def _in_processes(
    judge_one: Callable[[int], list[Found]], devices: Sequence[int], number: int
) -> Iterator[list[Found]]:
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
