"""The model, data and engine with which a device trains in its federation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np
from pydantic import ValidationError

from sparrow.devices.memory import available
from sparrow.graphs import Graphs
from sparrow.protocol import personal
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Array, GraphName, Manifest, Tensors
from sparrow.protocol.messages import FederationInfo

from ...budget.prediction import held
from ...budget.preparation import Prepared
from ...budget.search import Choice
from ...engines import Engine
from ...errors import BadArgument, ModelReplaced, SdkError
from ...methods import Job, load_method
from ...methods.merging import is_whole, whole_model
from ...tasks import Batches, Task, as_arrays
from ...tasks.compute import PROCESSOR
from ...tasks.intake import random_state_kept, take_in
from ...tasks.metrics import METRICS
from ..label_prior import LabelPrior
from ..opening import Prepare, as_taken, check_digest, choose_engine, fetch_graphs, open_onnx, open_torch
from ..trust import Trust
from ..values import load_values
from .identity import Identified
from .options import Device, SessionOptions

log = logging.getLogger(__name__)

# Bytes of validation data that the digest covers.
MOST_BYTES = 2**28


class Learning(Identified):
    """A device with its federation's model, its own data and an engine. Raises SdkErrors."""

    def __init__(self, device: Device, options: SessionOptions) -> None:
        super().__init__(device, options)
        known = options.known
        self._make_task = device.make_task
        self.trust = known.trust if known else Trust(device.federation, options.demands, device.folder)
        self.manifest = known.manifest if known else self._load_manifest(self.info)
        self._method = load_method(self.info.method)
        with self._reporting_why_not():
            self._open(device, options)
        if known is None:
            self._note_membership()

    def _open(self, device: Device, options: SessionOptions) -> None:
        """Load the task, and create the engine."""
        transport = device.transport
        folder = device.folder
        federation = device.federation
        known = options.known
        engine = options.engine
        prepare = options.prepare
        budget = options.budget
        if options.local_noise is not None:
            options.local_noise.check(self._method, self.manifest, self.info.settings)
        self.differences: list[tuple[str, str]] = []
        task = self._load_task()
        self.frozen = Tensors()
        self._first = Tensors()
        if known is None:
            share = not options.demands.own_frozen
            self.frozen = load_values("frozen", self.manifest, federation, transport, folder.path, share=share)
            self._first = load_values("first", self.manifest, federation, transport, folder.path)
        # Built-in steps are known by their digests.
        self._step_checked = self.trust.built_in
        # Whether the engine runs published graphs and belongs only to this session.
        self._own_graphs = False
        self._prepared: Prepared
        self.engine: Engine
        if not isinstance(engine, str):
            self._prepared = Prepared(task, budget)
            self.engine = engine
        elif choose_engine(engine, task, self.manifest, self.info.method) == "onnx":
            self._own_graphs = True
            self._prepared, self.engine = self._open_onnx(task, prepare, budget)
        else:
            values = {**self.frozen, **self._first}
            self._prepared, self.engine = open_torch(task, self.manifest, self.info, values, prepare, budget)
        self.task = self._prepared.task
        log.info("%s trains with %s", self.name, self.engine.title)
        self._prior = LabelPrior.of(self.task, self.manifest, self.info.settings)
        if self._prior is not None:
            self._prior.check(self.engine, self.task.train)

    @property
    def budget(self) -> float:
        """The current share of each layer's neurons to train."""
        return self._prepared.budget

    @property
    def choice(self) -> Choice | None:
        """The reasons for the budget; None if the user gave it."""
        return self._prepared.choice

    def _load_manifest(self, info: FederationInfo) -> Manifest:
        """Return the federation's manifest, downloaded if the stored one differs.

        Raises BadPublication if this device does not accept it.
        """
        cached = self.folder.cached(personal.MANIFEST)
        manifest = None
        # Downloaded again if it is damaged.
        with suppress(ValidationError):
            manifest = Manifest.model_validate_json(cached) if cached else None
        before = manifest
        if manifest is None or manifest.digest != info.manifest_digest:
            manifest = self.transport.manifest(self._federation)
        self.trust.admit(info, manifest, lambda: self.transport.publication(self._federation))
        if manifest is not before:
            prepared_by = manifest.preparation_sha256
            if before and before.tensors_digest == manifest.tensors_digest and before.preparation_sha256 != prepared_by:
                log.warning("the federation's preparation of samples has changed; this device's model starts again")
                self.folder.forget_model()
            self.folder.cache(personal.MANIFEST, manifest.model_dump_json().encode(), durable=False)
        return manifest

    def _load_task(self) -> Task:
        """Return this device's task, with data prepared for the federation's model."""
        task = self._make_task(self.info, self.manifest)
        if task.prepared is None and not self._options.hosted:
            task = self._prepare(task)
        if self._method.check_data is not None:
            self._method.check_data(task, self.info.settings)
        # A device with only data uses the federation's metrics.
        if not task.metrics:
            task = replace(task, metrics=tuple(name for name in self.manifest.metrics if name in METRICS))
        return task

    def _prepare(self, task: Task) -> Task:
        description = self.manifest.preparation
        statistics: Mapping[str, Array] = {}
        if description is None:
            if task.preparation is not None:
                raise BadArgument(
                    f"the task has a preparation, but the federation {self.info.name} was published without one; leave "
                    "preparation out and give prepared samples, or publish the model again (replace=True)"
                )
            task = take_in(as_taken(task, self.manifest), self.manifest)
        else:
            task = take_in(task, self.manifest)
            # Imported here, because it imports ONNX Runtime.
            from ...tasks.prepared import compute_own, differences, load_preparer, prepared, raw_statistics

            digest = str(self.manifest.preparation_sha256)
            if description.own:
                kept = personal.read_own(self.folder.cached(personal.OWN), digest)
                statistics = compute_own(task.train, description) if kept is None else kept
            if description.mean:
                self.differences = differences(raw_statistics(task.train, description), description)
            preparer = load_preparer(self.manifest, self._graph("preparation"), statistics)
            task = prepared(task, preparer, memory_limit=self._options.memory_limit)
        if statistics or task.class_names:
            own = personal.write_own(statistics, self.manifest.preparation_sha256, task.class_names)
            self.folder.cache(personal.OWN, own)
        return task

    def skeleton(self) -> bytes:
        """Return the ONNX skeleton of the federation's model, downloaded once. Raises GraphError if it is refused."""
        return self._graph("skeleton")

    @cached_property
    def graphs(self) -> Graphs | None:
        """The checked graphs of training step and evaluation; None if unpublished.

        Raises GraphError if one is refused.
        """
        found = fetch_graphs(self.manifest, self._graph, self.frozen, self._first)
        if found is None:
            return None
        graphs, self._needs = found
        return graphs

    def _open_onnx(self, task: Task, prepare: Prepare | None, budget: float) -> tuple[Prepared, Engine]:
        assert self.graphs is not None, "the manifest names them"
        free = available() if self._options.memory_limit is None else self._options.memory_limit - held(PROCESSOR)
        return open_onnx(
            task,
            self.manifest,
            self.info,
            self.graphs,
            prepare,
            budget,
            needs=self._needs,
            free=free,
            trial=not self.trust.built_in,
        )

    def _take_new_version(self) -> None:
        """Take a new version of the federation's model, with the same tensors and new graphs.

        Raises ModelReplaced with PyTorch, which has the old code, and in a fleet, whose devices share an engine.
        """
        manifest = self._load_manifest(self.transport.federation(self._federation))
        if manifest.tensors_digest != self.manifest.tensors_digest:
            raise ManifestError("the federation's model has other tensors than this device's; join under another name")
        if not self._own_graphs:
            raise ModelReplaced(
                f"the model of federation {self.info.name} has a new version, but this device trains the old one; "
                f"restart it, with the new code if it trains with PyTorch (--engine onnx needs no code)"
            )
        log.warning("the federation's model has a new version; this device continues with it")
        before = self.manifest
        self.manifest = manifest
        prepares_alike = before.preparation_sha256 == manifest.preparation_sha256
        self.__dict__.pop("graphs", None)
        try:
            task = self.task if prepares_alike else replace(self._load_task(), compute=self.task.compute)
            _, engine = self._open_onnx(task, None, self.budget)
        except SdkError:
            # The next assignment tries again.
            self.manifest = before
            raise
        if prepares_alike:
            engine.load(self.engine.read())
        self.engine = engine
        self.task = task
        self._step_checked = False
        # Stored for a later export, as in ``join``.
        with suppress(SdkError):
            self.skeleton()

    def _graph(self, name: GraphName) -> bytes:
        """Return the manifest's graph, downloaded once. Raises GraphError if it is refused."""
        file = personal.graph_file(name)
        wanted = self.manifest.graphs.get(name)
        graph = self.folder.cached(file)
        if graph is None or hashlib.sha256(graph).hexdigest() != wanted:
            graph = self.transport.graph(self._federation, name)
            check_digest(self.manifest, name, graph)
            self.folder.cache(file, graph, durable=False)
        return graph

    def _note_membership(self) -> None:
        membership = personal.Membership(device=self.identity.name, budget=self.budget, federation=self.info)
        self.folder.cache(personal.MEMBERSHIP, membership.model_dump_json(indent=1).encode())

    def _never_sent(self) -> Tensors:
        shared = {spec.name for spec in self.manifest.shared}
        return {name: tensor for name, tensor in self.engine.read().items() if name not in shared}

    def _check_step(self, job: Job) -> None:
        """Before the first training, compare a published step's gradients with its loss.

        Raises ImplausibleStep if they differ.
        """
        if self._step_checked or not self._own_graphs:
            return
        # Imported here, because PyTorch's engine needs no ONNX Runtime.
        from ...engines.engine import OnnxEngine

        engine = self.engine
        assert isinstance(engine, OnnxEngine), "it trains with the published graphs"
        before = {name: np.array(tensor) for name, tensor in engine.read().items()}
        try:
            if job.received is not None and not self.manifest.outputs and is_whole(self.manifest, job.received):
                engine.load({**before, **whole_model(self.manifest, job.received)})
            # Seeded by the samples, so that a publisher cannot predict the directions.
            found = engine.check_plausible(self.task.train, int(self._data[:15], 16))
        finally:
            engine.load(before)
        if not found.judged:
            log.warning(
                "the gradients of the training step could not be compared with its loss; it is used without this check"
            )
        self._step_checked = True

    @cached_property
    def _data(self) -> str:
        return digest_of(self.task.validation)


def digest_of(batches: Batches) -> str:
    """Return the SHA-256 of the samples in order, independent of batch sizes."""
    inputs = hashlib.sha256()
    targets = hashlib.sha256()
    left = MOST_BYTES
    with random_state_kept(batches):
        for samples, wanted in map(as_arrays, batches):
            inputs.update(f"{samples.dtype} {samples.shape[1:]}".encode() if left == MOST_BYTES else b"")
            for digest, array in ((inputs, samples), (targets, wanted)):
                digest.update(array.reshape(-1).view(np.uint8).data)
            left -= samples.nbytes + wanted.nbytes
            if left <= 0:
                break
    return hashlib.sha256(inputs.digest() + targets.digest()).hexdigest()
