"""Results of a fleet: counts, the federation's records, a table and a plot."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from edge_sdk.engines import EngineName
from edge_sdk.errors import BadArgument

from ..command_line.table import percent
from ..protocol.errors import MissingPart
from ..protocol.messages import JUDGING, DeviceReport, FederationStatus, Kind, RoundRecord
from .host import Stepped

__all__ = ["Ended", "Result"]


@dataclass(frozen=True)
class Ended:
    """A federation's last evaluation, as means over devices (None without such a model), and its bytes."""

    round: int
    accuracy_personal: float | None
    accuracy_personal_decile: float | None
    accuracy_global: float | None
    metrics_personal: Mapping[str, float]
    metrics_global: Mapping[str, float]
    bytes_up: int
    bytes_down: int
    evaluation_bytes_up: int
    evaluation_bytes_down: int

    def __str__(self) -> str:
        parts = [
            f"{name} {percent(accuracy)}"
            for name, accuracy in (
                ("personal models", self.accuracy_personal),
                ("worst tenth at most", self.accuracy_personal_decile),
                ("global model", self.accuracy_global),
            )
            if accuracy is not None
        ]
        metrics = [
            f"{name} {value:.4g} ({whose})"
            for whose, named in (("personal", self.metrics_personal), ("global", self.metrics_global))
            for name, value in named.items()
        ]
        up, down, judged_up, judged_down = (
            f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
            for count in (self.bytes_up, self.bytes_down, self.evaluation_bytes_up, self.evaluation_bytes_down)
        )
        data = f"on the devices' own test data after round {self.round}"
        lines = [f"accuracy {data}: {', '.join(parts)}"] if parts else []
        lines += [f"metrics {data}: {', '.join(metrics)}"] if metrics else []
        lines.append(f"training moved {up} up and {down} down, evaluation {judged_up} and {judged_down}")
        return "\n".join(lines)


def installed(module: str, package: str) -> Any:
    """Import a module of a pip ``package``. Raises MissingPart if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPart(f"{error.name} is not installed, which this needs: pip install {package}") from error


def read_ended(records: Sequence[RoundRecord]) -> Ended | None:
    """Return the last evaluation's results, None before the first."""
    judged = next((record for record in reversed(records) if record.evaluated_devices), None)
    if judged is None:
        return None
    return Ended(
        round=judged.round,
        accuracy_personal=judged.accuracy_personal,
        accuracy_personal_decile=judged.accuracy_personal_decile,
        accuracy_global=judged.accuracy_global,
        metrics_personal=judged.metrics_personal,
        metrics_global=judged.metrics_global,
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        evaluation_bytes_up=sum(record.evaluation_bytes_up for record in records),
        evaluation_bytes_down=sum(record.evaluation_bytes_down for record in records),
    )


@dataclass
class Result:
    """The results of one run of a fleet.

    failed: number of failed work items. seconds_to_first: until the first device has trained. ended: None before the
    federation's end. devices: the reports of the last evaluation.
    """

    hosted: int
    engine: EngineName
    device_rounds: int = 0
    evaluations: int = 0
    adapted: int = 0
    failed: int = 0
    seconds: float = 0.0
    seconds_to_first: float | None = None
    status: FederationStatus = FederationStatus.waiting
    ended: Ended | None = None
    rounds: tuple[RoundRecord, ...] = ()
    devices: tuple[DeviceReport, ...] = ()

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row per round. Raises MissingPart without pandas."""
        pandas = installed("pandas", "pandas")
        excluded = {"download", "train", "upload", "evaluation", "per_update"}
        rows = [record.model_dump(exclude=excluded) for record in self.rounds]
        if not rows:
            return pandas.DataFrame()
        numbers = [name for name, field in RoundRecord.model_fields.items() if field.annotation == (float | None)]
        return pandas.DataFrame(rows).astype(dict.fromkeys(numbers, float)).set_index("round")

    def plot(self, path: Path | str | None = None) -> Any:
        """Plot accuracy by round and by uploaded megabytes as a matplotlib figure. path: file to write it to.

        Raises MissingPart without matplotlib, BadArgument if the file cannot be written.
        """
        figure = installed("matplotlib.figure", "'sparrow-fl[bench]'").Figure(figsize=(9, 3.2), layout="constrained")
        rounds = [record.round for record in self.rounds]
        uploaded = [total / 1e6 for total in accumulate(record.bytes_up for record in self.rounds)]
        scales: tuple[tuple[str, list[Any]], ...] = (("round", rounds), ("MB uploaded", uploaded))
        for axes, (label, places) in zip(figure.subplots(1, 2), scales, strict=True):
            for name in ("personal", "global"):
                found = [getattr(record, f"accuracy_{name}") for record in self.rounds]
                known = [(place, 100 * value) for place, value in zip(places, found, strict=True) if value is not None]
                if known:
                    axes.plot([x for x, _ in known], [y for _, y in known], marker="o", label=f"{name} model")
            axes.set(xlabel=label, ylabel="accuracy, %", ylim=(0, 100))
            axes.grid(alpha=0.3)
            if places is rounds:
                axes.xaxis.get_major_locator().set_params(integer=True)
            if axes.has_data():
                axes.legend()
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:
                raise BadArgument(f"{path} cannot be written: {error}") from None
        return figure

    def add(self, stepped: Stepped, now: float) -> None:
        """Count one step."""
        if stepped.failed is not None and stepped.kind not in JUDGING:
            self.failed += 1
        elif stepped.kind in (Kind.train, Kind.personalise):
            self.device_rounds += 1
            self.seconds_to_first = now if self.seconds_to_first is None else self.seconds_to_first
        elif stepped.kind in JUDGING:
            self.evaluations += 1
        elif stepped.kind is Kind.adapt:
            self.adapted += 1
