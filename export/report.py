"""Comparison of an export with the dense export, as a table, JSON or a chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparrow.command_line.table import percent
from sparrow.protocol.errors import MissingPart

from .measure import LOADS, Latency, LoadCost, latencies, load_costs
from .ort_format import OrtFile
from .running import Parity
from .samples import Array

__all__ = ["Costs", "Figures", "Report"]

MEASUREMENTS = 2 * LOADS + 2
"""Number of progress calls of ``measure``."""


@dataclass(frozen=True)
class Costs:
    """Costs of a file: loading, and latency of a single sample with one and with all threads."""

    load: LoadCost
    one_thread: Latency
    all_threads: Latency


@dataclass(frozen=True)
class Figures:
    """Size, accuracy (if there are labels) and costs (if measured) of one file."""

    bytes: int
    accuracy: float | None
    costs: Costs | None = None


@dataclass(frozen=True)
class Report:
    """An export and the dense export. samples: number of labelled samples. notes: remarks on other modes and
    precisions.
    """

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
        """Return the report as JSON, in seconds and bytes."""
        return json.dumps(asdict(self), indent=1, default=str)

    def table(self) -> str:
        """Return the report as a table."""
        made = ", ".join(self.steps) or "dense, no step made it smaller"
        lines = [f"{self.path}: {made}"]
        lines.append("  " + ", ".join(f"{name} {value}" for name, value in self.properties.items() if len(value) < 40))
        parity = self.parity
        same = "" if parity.same_class is None else f", same class for {percent(parity.same_class, 2)}"
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
        mine = self.export.costs
        theirs = self.dense.costs
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
        """Draw the ratios to the dense export; smaller is better. Raises MissingPart without matplotlib."""
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
    """Return matplotlib's Figure, which needs no display. Raises MissingPart without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPart("a picture needs matplotlib: pip install matplotlib, or leave --picture out") from None
    return Figure


def measure(export: Path, dense: Path, sample: Array, done: Callable[[], object] = lambda: None) -> tuple[Costs, Costs]:
    """Measure the costs of both files. sample: [1, *input_shape]. done: called ``MEASUREMENTS`` times."""
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
