"""Trackers of ``sparrow track``: TensorBoard's event files and MLflow's runs. Both are imported on first use.

A federation is one run, identified by its uid, since a new coordinator may reuse its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .protocol.errors import MissingPart, SdkError
from .protocol.messages import FederationInfo

EVERY_ROUND = "devices/updates"
"""A metric that every round has: its steps are the written rounds."""
EXPERIMENT = "sparrow"
UID = "sparrow.federation"


class TrackerFailed(SdkError):
    """TensorBoard's files or MLflow's store cannot be written."""


class Tracker(Protocol):
    """A sink of rounds."""

    # Description of the place for the user.
    where: str

    def written(self) -> set[int]:
        """Return the written rounds."""

    def write(self, number: int, found: Mapping[str, float], closed_at: str | None) -> None:
        """Write a round atomically. closed_at: ISO 8601."""

    def finish(self) -> None:
        """Mark the run as finished."""

    def close(self) -> None:
        """Close files."""


class TensorBoard:
    """Event files in the federation's own folder below ``folder``. Raises MissingPart without TensorBoard, OSError if
    the folder cannot be written.

    Each start writes a new file, since records after a truncated one are not read.
    """

    def __init__(self, folder: str, info: FederationInfo) -> None:
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        self._event = Event
        self._summary = Summary
        self._reader = EventAccumulator
        self._writer = RecordWriter
        self._folder = Path(folder) / f"{info.name}-{info.uid[:8]}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self.where = f"{self._folder}: view it with tensorboard --logdir {folder}"

    def written(self) -> set[int]:
        """Return the steps in this folder's files."""
        found = self._reader(str(self._folder), size_guidance={"scalars": 0}).Reload()
        return {point.step for point in found.Scalars(EVERY_ROUND)} if EVERY_ROUND in found.Tags()["scalars"] else set()

    def write(self, number: int, found: Mapping[str, float], closed_at: str | None) -> None:
        """Write a round as one event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in found.items()]
        if self._file is None:
            now = time.time()
            self._file = (self._folder / f"events.out.tfevents.{now:.6f}.{os.getpid()}").open("wb")
            self._add(wall_time=now, file_version="brain.Event:2")
        self._add(wall_time=_seconds(closed_at), step=number, summary=self._summary(value=values))

    def _add(self, **event: Any) -> None:
        # TensorBoard's EventFileWriter writes in a thread, whose errors do not reach the caller.
        assert self._file is not None, "write opens it"
        self._writer(self._file).write(self._event(**event).SerializeToString())
        self._file.flush()

    def finish(self) -> None:
        """Do nothing: event files need no end."""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class MLflow:
    """A run of the experiment ``sparrow``, with the federation's settings.

    Raises MissingPart without MLflow, TrackerFailed if a call fails.
    """

    def __init__(self, uri: str, info: FederationInfo) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        self._metric = Metric
        self._uri = uri
        with self._translated():
            self._client = client = MlflowClient(tracking_uri=uri)
            known = client.get_experiment_by_name(EXPERIMENT)
            experiment = known.experiment_id if known else client.create_experiment(EXPERIMENT)
            runs = client.search_runs([experiment], f"tags.`{UID}` = '{info.uid}'")
            if runs:
                self._run: str = runs[0].info.run_id
                client.update_run(self._run, status="RUNNING")
            else:
                self._run = client.create_run(experiment, run_name=info.name, tags={UID: info.uid}).info.run_id
                client.log_batch(self._run, params=[Param(name, text) for name, text in _parameters(info).items()])
        self.where = f"MLflow at {uri}: run {info.name} of the experiment {EXPERIMENT}"

    def written(self) -> set[int]:
        """Return the steps of the run's history."""
        with self._translated():
            return {point.step for point in self._client.get_metric_history(self._run, EVERY_ROUND)}

    def write(self, number: int, found: Mapping[str, float], closed_at: str | None) -> None:
        """Write a round in one call."""
        when = round(1000 * _seconds(closed_at))
        with self._translated():
            self._client.log_batch(
                self._run, [self._metric(name, value, when, number) for name, value in found.items()]
            )

    def finish(self) -> None:
        """Mark the run as finished."""
        with self._translated():
            self._client.set_terminated(self._run)

    def close(self) -> None:
        """Do nothing: no file is open."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        # MLflow passes on the errors of files, databases and servers.
        try:
            yield
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        except Exception as error:
            raise TrackerFailed(f"MLflow at {self._uri}: {error}") from error


def _parameters(info: FederationInfo) -> dict[str, str]:
    settings: dict[str, Any] = info.settings.model_dump(mode="json", exclude_none=True)
    of_method = {f"method_settings.{name}": value for name, value in settings.pop("method_settings").items()}
    return {name: str(value) for name, value in {"task": info.task, **settings, **of_method}.items()}


def _seconds(closed_at: str | None) -> float:
    """Return the seconds since the epoch of an ISO 8601 time."""
    assert closed_at is not None, "closed rounds have it"
    return datetime.fromisoformat(closed_at).timestamp()


def _missing(error: ModuleNotFoundError) -> MissingPart:
    name = (error.name or "a package").partition(".")[0]
    return MissingPart(f"{name} is not installed, which this needs: pip install 'sparrow-fl[tracking]'")
