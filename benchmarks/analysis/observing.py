"""Read the state of each device of a running trial after its evaluation.

The fleet must work one device at a time. Then each device is read before it trains again, and the global model before
the next round closes, so the state is the one that was evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.analysis.looking import Look, StoredState, look, read_folder
from benchmarks.analysis.summaries import Summaries
from benchmarks.analysis.theorem import Terms, measure_terms, summarise
from edge_sdk.device.session import Known, Outcome
from edge_sdk.device.state import Reference
from edge_sdk.device.transport import Transport
from edge_sdk.errors import NotFound
from edge_sdk.methods import load_method
from edge_sdk.tasks import as_arrays
from edge_sdk.training.engine import TorchEngine
from sparrow.bench.rows import Analysis
from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.messages import Kind
from sparrow.simulation.host import Plan, Stepped
from sparrow.transport import connect, httpx


@contextmanager
def observed(server: str, plan: Plan, folder: Path) -> Iterator[Observer]:
    """Yield the observer of a trial that is about to run. folder: the trial's.

    An error of the observer stops the fleet and is raised.
    """
    with connect(server, timeout=60) as client:
        observer = Observer(client, plan, folder / "devices", folder / "coordinator")
        try:
            yield observer
        except KeyboardInterrupt:
            if observer.error is not None:
                raise observer.error from None
            raise


@dataclass
class _Seen:
    """The looks at devices after one round, by index."""

    global_model: Tensors | None
    looks: dict[int, Look] = field(default_factory=dict)
    terms: list[Terms] = field(default_factory=list)


class Observer:
    """Callback for every step of a fleet that works one device at a time; ``rows`` returns the analysis.

    client: of the coordinator. root: the devices' state folders. records: the coordinator's data folder.
    """

    def __init__(self, client: httpx.Client, plan: Plan, root: Path, records: Path) -> None:
        self._transport = Transport(client)
        self._plan = plan
        self._root = root
        self._records = records
        self._known = Known.of(self._transport, plan.federation)
        self._info = self._known.info
        self._manifest = self._known.manifest
        self._method = load_method(self._info.method)
        self._summaries = Summaries(self._labels())
        self._seen: dict[int, _Seen] = {}
        self.error: Exception | None = None

    def __call__(self, stepped: Stepped) -> None:
        """Look at a device that has been evaluated; keep an error as ``error``."""
        try:
            self._look(stepped)
        except Exception as error:
            self.error = self.error or error

    def _look(self, stepped: Stepped) -> None:
        index = stepped.index
        if stepped.kind is not Kind.evaluate or stepped.outcome is not Outcome.worked or index >= self._plan.devices:
            return
        number = self._evaluated_round(index)
        if number is None:
            return
        seen = self._seen.get(number)
        if seen is None:
            seen = self._seen[number] = _Seen(self._global_model())
        name = self._plan.name(index)
        stored = read_folder(self._root / name, self._manifest, self._reference())
        seen.looks[index] = look(stored, self._manifest, self._info, name, self._records)
        if self._method.forward_stays and stored.personal is not None and seen.global_model is not None:
            seen.terms.append(self._terms(index, number, stored, seen.global_model))
        if len(seen.looks) == self._plan.devices:
            self.close(number)

    def rows(self) -> tuple[Analysis, ...]:
        """Return the rows of the trial, which has ended. Raises ``error``."""
        if self.error is not None:
            raise self.error
        for number in sorted(self._seen):
            # Rounds that are still open lacked the answers of some devices.
            self.close(number)
        return self._summaries.rows()

    def close(self, number: int) -> None:
        """Summarise a round, after which all devices have been looked at."""
        seen = self._seen[number]
        if seen.looks:
            self._summaries.add(number, [seen.looks.get(index) for index in range(self._plan.devices)])
        if seen.terms:
            rate = self._info.settings.learning_rate_of(number)
            self._summaries.note("theorem", number, summarise(seen.terms, rate))
        seen.looks = {}
        seen.terms = []
        seen.global_model = None

    def _evaluated_round(self, index: int) -> int | None:
        """Return the round after which a device has just been evaluated: of the reported ones, the first not seen."""
        federation = self._plan.federation
        name = self._plan.name(index)
        for record in self._transport.rounds(federation):
            seen = self._seen.get(record.round)
            if not record.evaluated_devices or (seen and (index in seen.looks or not seen.looks)):
                continue
            reports = self._transport.reports(federation, record.round)
            if any(each.device == name and each.kind is Kind.evaluate for each in reports):
                return record.round
        return None

    def _global_model(self) -> Tensors | None:
        if not self._info.global_model_usable:
            return None
        try:
            return self._transport.model(self._plan.federation, self._manifest)
        except NotFound:
            return None

    def _reference(self) -> Reference | None:
        """Return the model that the fleet stores personal ones as differences from."""
        tensors, _ = checkpoint.load((self._root / "reference.safetensors").read_bytes())
        return Reference.of(tensors) if tensors else None

    def _labels(self) -> NDArray[np.int64] | None:
        """Return the training samples by device and class, [n, classes]; None for a task without classes."""
        found = []
        for index in range(self._plan.devices):
            task = self._plan.task(index, self._known)
            if not task.classification:
                return None
            targets = np.concatenate([as_arrays(batch)[1].reshape(-1) for batch in task.train])
            found.append(np.bincount(targets))
        classes = max(map(len, found))
        return np.array([np.pad(each, (0, classes - len(each))) for each in found], dtype=np.int64)

    def _terms(self, index: int, number: int, stored: StoredState, global_model: Tensors) -> Terms:
        assert stored.personal is not None, "asked only for such devices"
        task = self._plan.task(index, self._known).seeded(self._info.settings.seed).on(self._plan.compute)
        return measure_terms(
            TorchEngine(task, self._manifest),
            self._manifest,
            task.train,
            personal=stored.personal,
            global_model=global_model,
            budget=self._plan.budget(index) or 1.0,
            key=f"analysis-{number}-{self._plan.name(index)}",
        )
