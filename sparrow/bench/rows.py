"""Results as JSON lines.

A trial has a ``trial`` row, a ``point`` row per evaluated round, a ``shift`` row per additional test set, ``analysis``
rows if its mechanism was analysed, and a ``result`` row. They are written together at its end, so a resumed trial has
the same rows. ``NAME.jsonl`` may be stored as ``NAME.jsonl.gz``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_sdk.engines import EngineName

from .experiment import Trial
from .metrics import Accuracy, Point, Shifted
from .provenance import Provenance

GZIP = ".gz"


@dataclass(frozen=True)
class DeviceResult:
    """The result of a trial for one device."""

    device: str
    budget: float
    new: bool
    test_examples: int
    # Accuracy, as in ``metrics``.
    accuracy: float | None
    accuracy_global: float | None
    rounds: int
    stopped_round: int | None
    # Size of its state.
    state_bytes: int
    # Inference flops of one sample in the evaluated model, without zero weights; None if unknown.
    inference_flops: int | None = None
    # Results of the evaluated model.
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    # The final candidate, if the fleet helped to choose.
    taken: str | None = None
    # The best candidate over all devices.
    usual: str | None = None
    # Accuracies of all candidates, or 1 minus the loss for a regression. Older rows lack the last five.
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    rounds: int
    reason: str | None
    parameters: int
    # Inference flops of one sample in the whole model.
    inference_flops: int
    model_sha256: str
    devices: tuple[DeviceResult, ...]
    # Wall seconds from its first call to its last.
    wall_seconds: float
    machine: str
    # Counts of the method's actions that stayed zero.
    idle: tuple[str, ...] | None = None
    # PyTorch in rows without one. idle and provenance are None in older rows.
    engine: EngineName = "torch"
    provenance: Provenance | None = None


@dataclass(frozen=True)
class Analysis:
    """The numbers of an analysis (``benchmarks.analysis``) after an evaluated round; round 0: of the data."""

    kind: str
    round: int
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The rows of one trial. The last point is at its end."""

    trial: Trial
    points: tuple[Point, ...]
    result: TrialResult
    shifts: tuple[Shifted, ...] = ()
    analyses: tuple[Analysis, ...] = ()


def append(path: Path, recorded: Recorded) -> None:
    """Append a trial's rows to a file in one write."""
    name = recorded.trial.name
    rows = [
        # Not shortened, since settings and axes identify a trial.
        {"row": "trial", "trial": name, **recorded.trial.model_dump(mode="json")},
        *(_short({"row": "point", "trial": name, **asdict(point)}) for point in recorded.points),
        *(
            # Test sets are identified likewise.
            {**_short({"row": "shift", "trial": name, **asdict(each)}), "test_set": each.test_set}
            for each in recorded.shifts
        ),
        *(_short({"row": "analysis", "trial": name, **asdict(each)}) for each in recorded.analyses),
        _short({"row": "result", "trial": name, **asdict(recorded.result)}),
    ]
    added = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = stored(path)
    if path.suffix == GZIP:
        write_gzip(path, gzip.decompress(path.read_bytes()) + added)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(added)


def stored(path: Path) -> Path:
    """Return the compressed file of ``path`` if it exists, else ``path``."""
    compressed = path if path.suffix == GZIP else path.with_name(path.name + GZIP)
    return compressed if compressed.exists() else path


def write_gzip(path: Path, content: bytes) -> None:
    """Replace a compressed file. Deterministic."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress(content, 9, mtime=0))
    part.replace(path)


def text_of(path: Path) -> str:
    """Return the text of a file of rows, compressed or not; "" if it does not exist."""
    file = stored(path)
    if not file.exists():
        return ""
    return (gzip.decompress(file.read_bytes()) if file.suffix == GZIP else file.read_bytes()).decode()


def of_global_model(recorded: Recorded, trial: Trial) -> Recorded:
    """Return the rows of ``trial``, which evaluates only the global model of ``recorded``."""
    points = [
        replace(point, accuracy=point.accuracy_global, accuracy_validation=None, finetune_flops=0)
        for point in recorded.points
    ]
    devices = [replace(device, accuracy=device.accuracy_global) for device in recorded.result.devices]
    shifts = [
        replace(each, accuracy=each.accuracy_global, accuracy_personal=None, devices=each.devices_global)
        for each in recorded.shifts
    ]
    return Recorded(trial, tuple(points), replace(recorded.result, devices=tuple(devices)), tuple(shifts))


def read(path: Path) -> list[Recorded]:
    """Return the complete trials in a file, in order. Raises SystemExit if it cannot be read.

    A truncated last line and a trial without a result are skipped.
    """
    trials: dict[str, Trial] = {}
    points: dict[str, list[Point]] = {}
    shifts: dict[str, list[Shifted]] = {}
    analyses: dict[str, list[Analysis]] = {}
    recorded = []
    for number, line in enumerate(text_of(path).split("\n")[:-1], start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            kind = row.pop("row")
            name = row.pop("trial")
            if kind == "trial":
                trials[name] = Trial.model_validate(row)
                points[name] = []
                shifts[name] = []
                analyses[name] = []
            elif kind == "point":
                points[name].append(_point(row))
            elif kind == "shift":
                shifts[name].append(_shifted(row))
            elif kind == "analysis":
                analyses[name].append(Analysis(**row))
            else:
                devices = tuple(DeviceResult(**each) for each in row.pop("devices"))
                idle = None if row.get("idle") is None else tuple(row["idle"])
                provenance = Provenance.of(row["provenance"]) if row.get("provenance") else None
                result = TrialResult(**{**row, "devices": devices, "idle": idle, "provenance": provenance})
                recorded.append(
                    Recorded(trials[name], tuple(points[name]), result, tuple(shifts[name]), tuple(analyses[name]))
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(f"{path}, line {number}: not a row of a trial ({error}); move the file away") from None
    return recorded


def latest(recorded: Sequence[Recorded]) -> dict[str, Recorded]:
    """Return the last rows of each trial by name."""
    return {each.trial.name: each for each in recorded}


def _point(row: dict[str, Any]) -> Point:
    return Point(**_with_accuracies(row, "accuracy", "accuracy_global", "accuracy_validation"))


def _shifted(row: dict[str, Any]) -> Shifted:
    lists = {key: tuple(row[key]) for key in ("devices", "devices_global")}
    return Shifted(**_with_accuracies(row | lists, "accuracy", "accuracy_personal", "accuracy_global"))


def _with_accuracies(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return row | {key: Accuracy(**row[key]) if row[key] is not None else None for key in keys}


def _short(value: Any) -> Any:
    """Round floats to six significant digits, since rows are committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
