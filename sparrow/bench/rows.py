"""Results as JSON lines: per trial a ``trial`` row, a ``point`` row per evaluated round, a ``shift`` row per further
test set of its last models, ``analysis`` rows where its mechanism was analysed, and a ``result`` row.

The rows of a trial are written together when it has ended, so a file has complete trials only, and an interrupted and
resumed trial has the same rows as an uninterrupted one. ``NAME.jsonl`` may be stored as ``NAME.jsonl.gz``: it is read
and appended by either name.
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
    """The end of a trial for one device. ``accuracy`` as in ``metrics``; ``state_bytes``: the size of its state.

    inference_flops: one sample through its judged model, weights of zero left out; None if unknown. loss: of the judged
    model; metrics: what else was measured of it, as of a regression. taken: the candidate that it ended with, where the
    fleet helped to choose; usual: the one that was best for all; others: accuracies of all of them, or of a regression
    what is left of 1 when their loss is taken off. The last five are missing in older rows.
    """

    device: str
    budget: float
    new: bool
    test_examples: int
    accuracy: float | None
    accuracy_global: float | None
    rounds: int
    stopped_round: int | None
    state_bytes: int
    inference_flops: int | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    taken: str | None = None
    usual: str | None = None
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial; ``wall_seconds`` from its first call to its last.

    inference_flops: one sample through the whole model. idle: the counts that prove that the method acted and are zero
    over all rounds; None in rows that are older than such counts. engine: what trained; rows without are PyTorch's.
    provenance: None in rows that are older than it.
    """

    rounds: int
    reason: str | None
    parameters: int
    inference_flops: int
    model_sha256: str
    devices: tuple[DeviceResult, ...]
    wall_seconds: float
    machine: str
    idle: tuple[str, ...] | None = None
    engine: EngineName = "torch"
    provenance: Provenance | None = None


@dataclass(frozen=True)
class Analysis:
    """Numbers of one kind of analysis (``benchmarks.analysis``) after an evaluated round; 0: of the data."""

    kind: str
    round: int
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The rows of one trial. The last point is the end, because a federation is always evaluated at its end."""

    trial: Trial
    points: tuple[Point, ...]
    result: TrialResult
    shifts: tuple[Shifted, ...] = ()
    analyses: tuple[Analysis, ...] = ()


def append(path: Path, recorded: Recorded) -> None:
    """Append a trial's rows to the file at ``path`` in one write, and cut off an earlier incomplete write."""
    name = recorded.trial.name
    rows = [
        # Not shortened: a trial is found again by its settings and the values of its axes.
        {"row": "trial", "trial": name, **recorded.trial.model_dump(mode="json")},
        *(_short({"row": "point", "trial": name, **asdict(point)}) for point in recorded.points),
        *(
            # Nor is a test set, which is found again by what it is.
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
    """Return the file in which the rows of ``path`` are: the compressed one if it exists."""
    compressed = path if path.suffix == GZIP else path.with_name(path.name + GZIP)
    return compressed if compressed.exists() else path


def write_gzip(path: Path, content: bytes) -> None:
    """Replace a compressed file; equal content gives equal bytes."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress(content, 9, mtime=0))
    part.replace(path)


def text_of(path: Path) -> str:
    """Return the text of a file of rows, compressed or not; "" if there is none."""
    file = stored(path)
    if not file.exists():
        return ""
    return (gzip.decompress(file.read_bytes()) if file.suffix == GZIP else file.read_bytes()).decode()


def of_global_model(recorded: Recorded, trial: Trial) -> Recorded:
    """Return the rows of ``trial``, which is the training of ``recorded`` with only its global model evaluated."""
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
    """Return the complete trials in a file, in its order. Raises SystemExit if it cannot be read.

    A last line without its end is of a write that was cut short, as is a trial without its result: both are left out.
    """
    trials: dict[str, Trial] = {}
    points: dict[str, list[Point]] = {}
    shifts: dict[str, list[Shifted]] = {}
    analyses: dict[str, list[Analysis]] = {}
    recorded = []
    for number, line in enumerate(text_of(path).split("\n")[:-1], start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            kind, name = row.pop("row"), row.pop("trial")
            if kind == "trial":
                trials[name], points[name] = Trial.model_validate(row), []
                shifts[name], analyses[name] = [], []
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
    """Return the last rows of each trial by its name; a repeated run with other settings replaces the first."""
    return {each.trial.name: each for each in recorded}


def _point(row: dict[str, Any]) -> Point:
    return Point(**_with_accuracies(row, "accuracy", "accuracy_global", "accuracy_validation"))


def _shifted(row: dict[str, Any]) -> Shifted:
    lists = {key: tuple(row[key]) for key in ("devices", "devices_global")}
    return Shifted(**_with_accuracies(row | lists, "accuracy", "accuracy_personal", "accuracy_global"))


def _with_accuracies(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return row | {key: Accuracy(**row[key]) if row[key] is not None else None for key in keys}


def _short(value: Any) -> Any:
    """Round floats to six significant digits, because rows are committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def without_timing(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Return the rows without the values that differ from run to run: seconds, joules, what computed, and bytes up,
    because an update carries its seconds as text.
    """
    energy = {"joules_measured", "joules_estimated", "seconds_without_joules"}
    timing = {"seconds", "wall_seconds", "machine", "provenance", "bytes_up", "evaluation_bytes_up"} | energy
    return [
        {
            "trial": each.trial.model_dump(mode="json"),
            "points": [
                {key: item for key, item in asdict(point).items() if key not in timing} for point in each.points
            ],
            "shifts": [asdict(shift) for shift in each.shifts],
            "result": {key: item for key, item in asdict(each.result).items() if key not in timing},
        }
        for each in recorded
    ]
