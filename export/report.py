"""What an export is worth: side by side with the dense one, as a table, as JSON, as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_sdk.protocol.errors import MissingPart
from sparrow.export.errors import ExportError
from sparrow.export.measure import LOADS, Latency, LoadCost, latencies, load_costs
from sparrow.export.ort_format import OrtFile
from sparrow.export.running import Parity, accuracy, compare, predict
from sparrow.export.samples import Array, Samples

LARGEST_DIFFERENCE = 1e-4
"""Largest difference between outputs of the same model that float rounding explains, per unit of the largest output."""

MEASUREMENTS = 2 * LOADS + 2
"""How often ``measure`` says that it went on."""


class NotTheSame(ExportError):
    """The export predicts something else than the model it was made from; it was not written."""


@dataclass(frozen=True)
class Costs:
    """What running one file takes; latencies are of one sample alone, on one thread and on all."""

    load: LoadCost
    one_thread: Latency
    all_threads: Latency


@dataclass(frozen=True)
class Figures:
    """One file: its bytes, its share of right answers where labels are known, what it takes where that was measured."""

    bytes: int
    accuracy: float | None
    costs: Costs | None = None


@dataclass(frozen=True)
class Report:
    """An export and the dense one. samples: how many labelled ones the accuracies are of. notes: which precisions were
    tried."""

    path: str
    mode: str
    precision: str
    steps: tuple[str, ...]
    properties: Mapping[str, str]
    parity: Parity
    samples: int
    export: Figures
    dense: Figures
    notes: tuple[str, ...] = ()
    ort: OrtFile | None = None

    def json(self) -> str:
        """Everything, in seconds and bytes."""
        return json.dumps(asdict(self), indent=1, default=str)

    def table(self) -> str:
        """Everything, for a person."""
        made = ", ".join(self.steps) or "nothing to gain: as the dense one"
        lines = [f"{self.path}: {made}"]
        lines.append("  " + ", ".join(f"{name} {value}" for name, value in self.properties.items() if len(value) < 40))
        parity = self.parity
        same = "" if parity.same_class is None else f", same class for {parity.same_class:.2%}"
        lines.append(
            f"  parity over {parity.inputs} inputs: differs by at most {parity.max_difference:.3g} on outputs up to "
            f"{parity.largest_output:.3g}{same}"
        )
        lines.append(f"  {'':<26}{'export':>12}{'dense':>12}{'ratio':>9}")
        for name, export, dense, unit in self._rows():
            ratio = f"{export / dense:9.3f}" if dense else ""
            lines.append(f"  {name:<26}{unit(export):>12}{unit(dense):>12}{ratio}")
        if self.export.accuracy is not None and self.dense.accuracy is not None:
            lines.append(
                f"  {f'accuracy on {self.samples}':<26}{self.export.accuracy:>12.2%}{self.dense.accuracy:>12.2%}"
            )
        lines += [f"  tried {note}" for note in self.notes]
        if self.ort is not None:
            lines.append(f"  {self.ort.path}: {_size(self.ort.bytes)}; a minimal build needs {self.ort.config}:")
            lines += [f"    {domain}: {', '.join(names)}" for domain, names in self.ort.operators.items()]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, float, float, Callable[[float], str]]]:
        rows: list[tuple[str, float, float, Callable[[float], str]]] = [
            ("file", self.export.bytes, self.dense.bytes, _size)
        ]
        mine, theirs = self.export.costs, self.dense.costs
        if mine is None or theirs is None:
            return rows
        rows.append(("load", mine.load.load_seconds, theirs.load.load_seconds, _time))
        rows.append(("memory at most", mine.load.peak, theirs.load.peak, _size))
        for name, own, other in (
            ("1 thread", mine.one_thread, theirs.one_thread),
            ("all threads", mine.all_threads, theirs.all_threads),
        ):
            rows.append((f"one sample, {name}, p50", own.p50, other.p50, _time))
            rows.append((f"one sample, {name}, p95", own.p95, other.p95, _time))
        return rows

    def draw(self, path: Path) -> None:
        """A picture of each ratio to the dense export, shorter being better. Raises MissingPart without matplotlib."""
        figure_type = picture_maker()
        rows = [(name, export / dense, unit(export)) for name, export, dense, unit in self._rows() if dense]
        figure = figure_type(figsize=(7, 1.2 + 0.4 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        bars = axes.barh([name for name, *_ in rows], [ratio for _, ratio, _ in rows], color="tab:blue")
        axes.bar_label(bars, [f"{ratio:.2f} ({value})" for _, ratio, value in rows], padding=3)
        axes.axvline(1, color="grey", linestyle="--", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.5 * max([1.0, *(ratio for _, ratio, _ in rows)]))
        axes.set_xlabel("of the dense export")
        axes.set_title(f"{Path(self.path).name}: {', '.join(self.steps) or 'dense'}")
        figure.savefig(path, dpi=90)


def picture_maker() -> Any:
    """matplotlib's figure, which needs no display. Raises MissingPart where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPart("a picture needs matplotlib: pip install matplotlib, or leave --picture out") from None
    return Figure


def judge(
    export: Path, dense: Path, inputs: Array, samples: Samples | None, *, exact: bool
) -> tuple[Parity, Figures, Figures]:
    """Parity over ``inputs`` [N, *input_shape], and the figures of both files but for their costs.

    Raises NotTheSame where they differ by more than ``LARGEST_DIFFERENCE`` allows and ``exact`` says they must not.
    """
    parity = compare(predict(export, inputs), predict(dense, inputs))
    if exact and not parity.max_difference <= LARGEST_DIFFERENCE * max(1.0, parity.largest_output):
        raise NotTheSame(
            f"the export differs from the dense one by {parity.max_difference:g} on outputs up to "
            f"{parity.largest_output:g}; it was not written. Report this, and export another --mode meanwhile"
        )
    found = []
    for path in (export, dense):
        right = None if samples is None else accuracy(predict(path, samples.inputs), samples.labels)
        found.append(Figures(path.stat().st_size, right))
    return parity, found[0], found[1]


def measure(export: Path, dense: Path, sample: Array, done: Callable[[], object] = lambda: None) -> tuple[Costs, Costs]:
    """What running each takes; ``done`` is told ``MEASUREMENTS`` times. sample: [1, *input_shape]."""
    paths = (export, dense)
    loads = load_costs(paths, sample, repeats=LOADS, done=done)
    one = latencies(paths, sample, threads=1)
    done()
    every = latencies(paths, sample, threads=None)
    done()
    first, second = (Costs(*each) for each in zip(loads, one, every, strict=True))
    return first, second


def _size(count: float) -> str:
    return (
        f"{count:.0f} B" if count < 1024 else f"{count / 1024:.1f} KiB" if count < 2**20 else f"{count / 2**20:.2f} MiB"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
