"""Measured figures of the hand-written result pages, computed from the committed rows: ``python -m benchmarks claims``.

``benchmarks/rows/values.toml`` has the values in sentences, with their formulas. The values are written to
``values.json``, and from there to their places in the pages:

    FedSPU has <!-- value: fedspu-cifar10/FedSPU, alpha 0.1 -->81.8 %<!-- end -->

A table stands between markers of several lines, of which the first is the template of the table:

    <!-- measured: each = A; B as C
    | {each} | {accuracy('fedspu-cifar10', label, alpha=0.1):.1f} |
    -->
    <!-- end -->

Braces contain a call of a method of ``Figures``, or a sum, difference, product or quotient of such calls, and after the
last colon a format. A first line ``each = A; B as C`` repeats every line that has ``{each}``: ``each`` is a label's
name on the page, ``label`` its name in the rows.

``benchmarks/rows/claims.toml`` lists every table and figure of the papers, and ``Figures.claims`` makes their tables.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import queue
from benchmarks.places import DOCS, ROWS, lowered
from benchmarks.report.costs import at_equal_cost
from benchmarks.report.page import draw_all, section_text
from benchmarks.report.shifts import judged_on
from benchmarks.report.uploads import best_within, upload_until
from sparrow.bench import rows
from sparrow.bench.experiment import FOLDER, Value, load_experiment
from sparrow.bench.metrics import Point
from sparrow.bench.report.cells import markdown_lines
from sparrow.bench.report.comparisons import differences, paired, students
from sparrow.bench.report.figures import (
    MIB,
    accuracy_among,
    device_rounds,
    end_of,
    global_accuracy,
    groups,
    mean_analysed,
    participants,
    shift_of,
    stopped_devices,
)
from sparrow.bench.rows import DeviceResult, Recorded
from sparrow.command_line.nearest import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NO_CLAIMS = ("a drawing", "a list of settings")
"""The values, and the verdicts, of figures and tables that claim nothing that could be measured."""
MEASURED = re.compile(r"(<!-- measured:([^\n]*\n.*?)-->)(.*?)(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (.*?) -->)(.*?)(<!-- end -->)", re.DOTALL)
EXPRESSION = re.compile(r"\{([^{}]*?)(?::([^:{}'()]*))?\}")
SECTION = re.compile(r"(<!-- section: ([\w-]+)((?: \w+)*) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)
"""A section that is made whole: of an experiment, with the kinds of its pictures, or by the script of its name."""
NOT_MEASURED = (
    SECTION,
    MEASURED,
    VALUE,
    re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"(?<!\*)\*(?!\*)[^*\n]+\*(?!\*)"),
)
"""Where a page may have decimals: in sections and between markers; in code (settings, commands); in a link's address;
and in italics (a paper's own figures)."""
OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}


class Estimate(float):
    """A mean with its 95 % interval: Student's over seeds, or over devices if there is one seed; None if unknown.

    Formats: that of a float, ``range`` (+1.3 (-1.6 to +4.3)) and ``half`` (+1.3 ± 2.9).
    """

    interval: tuple[float, float] | None

    def __new__(cls, mean: float, interval: tuple[float, float] | None) -> Estimate:
        """Return the mean as a float that knows its interval."""
        made = super().__new__(cls, mean)
        made.interval = interval
        return made

    def __format__(self, spec: str) -> str:
        """Format the mean, or the mean with its interval."""
        if spec not in ("range", "half"):
            return super().__format__(spec)
        mean = super().__format__("+.1f")
        if self.interval is None:
            return mean
        low, high = self.interval
        return f"{mean} ({low:+.1f} to {high:+.1f})" if spec == "range" else f"{mean} ± {(high - low) / 2:.1f}"


class Figures:
    """Figures from the rows in a folder.

    A trial is named by its file without ``.jsonl``, its label and the values of its axes, and ``seed`` for one alone.
    Accuracies are per cent, means over devices and then over seeds, after the last round; differences are points.
    ``used`` collects the trials that figures were computed from, by file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: dict[str, list[Recorded]] = {}

    def trials(self, file: str, label: str, axes: dict[str, Value]) -> list[Recorded]:
        """Return the trials of a label by seed. Raises SystemExit if there are none, or if they differ in an axis."""
        known = _read(self.folder / f"{file}.jsonl")
        found = [
            each
            for each in known
            if each.trial.label == label and axes.items() <= {**each.trial.axes, "seed": each.trial.seed}.items()
        ]
        if not found:
            names = sorted({f"{each.trial.label} {each.trial.axes or ''}".strip() for each in known})
            raise SystemExit(f"{file}.jsonl has no trials of {label} {axes or ''}; it has {'; '.join(names)}")
        if len({str(each.trial.axes) for each in found}) > 1:
            raise SystemExit(f"{file}.jsonl, {label}: say which of {', '.join(found[0].trial.axes)}")
        self.used.setdefault(file, []).extend(found)
        return sorted(found, key=lambda each: each.trial.seed)

    def each_accuracy(
        self,
        file: str,
        label: str,
        *,
        figure: str = "mean",
        model: str = "accuracy",
        at: int | None = None,
        shift: float | None = None,
        budget: float | None = None,
        new: bool = False,
        **axes: Value,
    ) -> list[float]:
        """Return the accuracy of each seed.

        figure: mean, weighted or bottom_decile. model: accuracy (the one that counts), accuracy_global or
        accuracy_validation. at: a round, not the last. shift: on that shifted test set. budget: only of devices with
        it. new: only of devices that never trained.
        """
        found = []
        for trial in self.trials(file, label, axes):
            if shift is not None:
                shifted = shift_of({"shift": shift}, trial)
                known = getattr(shifted, model) if shifted else None
            elif at is not None:
                point = next((each for each in trial.points if each.round == at), None)
                known = getattr(point, model) if point else None
            elif model == "accuracy_validation":
                known = end_of(trial).accuracy_validation
            elif new:
                known = accuracy_among([device for device in trial.result.devices if device.new])
            elif budget is not None:
                known = accuracy_among([device for device in participants(trial) if device.budget == budget])
            else:
                known = global_accuracy(trial) if model == "accuracy_global" else accuracy_among(participants(trial))
            if known is None:
                raise SystemExit(f"{trial.trial.name} in {file}.jsonl was not evaluated so")
            found.append(100 * getattr(known, figure))
        return found

    def accuracy(self, file: str, label: str, **which: Any) -> Estimate:
        """Return the mean over seeds."""
        return _estimate(self.each_accuracy(file, label, **which))

    def spread(self, file: str, label: str, **which: Any) -> float:
        """Return the standard deviation over seeds."""
        return stdev(self.each_accuracy(file, label, **which))

    def over_shifts(self, file: str, label: str, **axes: Value) -> float:
        """Return the mean over all degrees of shift."""
        degrees = {each.test_set["shift"] for each in self.trials(file, label, axes)[0].shifts}
        return fmean(self.accuracy(file, label, shift=float(degree), **axes) for degree in degrees)

    def corrupted(
        self, file: str, label: str, kind: str | None = None, severity: int | None = None, **axes: Value
    ) -> Estimate:
        """Return the mean over seeds on corrupted test images: of one kind and severity, or over those left out."""
        asked = {"corruption": kind, "severity": severity}
        found = []
        for trial in self.trials(file, label, axes):
            shown = [
                each.accuracy.mean
                for each in trial.shifts
                if each.accuracy is not None
                and "corruption" in each.test_set
                and all(value in (None, each.test_set[key]) for key, value in asked.items())
            ]
            if not shown:
                raise SystemExit(f"{trial.trial.name} in {file}.jsonl was not evaluated so")
            found.append(100 * fmean(shown))
        return _estimate(found)

    def difference(
        self,
        file: str,
        label: str,
        other: str,
        *,
        shift: float | None = None,
        budget: float | None = None,
        **axes: Value,
    ) -> Estimate:
        """Return the first label's accuracy minus the other's, on the same devices and seeds.

        shift: as above. budget: of the devices that have it under the first label.
        """
        found = paired(*self._both(file, label, other, shift, axes), budget)
        if found is None:
            raise SystemExit(f"{file}.jsonl: {label} and {other} have no seed in common")
        return Estimate(found.mean, found.interval)

    def each_score(self, file: str, label: str) -> dict[int, float]:
        """Return the accuracy of each seed; of a regression the share of the targets' variance that its models explain,
        per cent, mean over devices."""
        found = {}
        for trial in self.trials(file, label, {}):
            among = participants(trial)
            known = accuracy_among(among)
            losses = [device.loss for device in among if device.loss is not None]
            if known is None and not losses:
                raise SystemExit(f"{trial.trial.name} in {file}.jsonl was not evaluated so")
            found[trial.trial.seed] = 100 * (known.mean if known is not None else 1 - fmean(losses))
        return found

    def score(self, file: str, label: str) -> Estimate:
        """Return its mean over seeds."""
        return _estimate(list(self.each_score(file, label).values()))

    def regret(self, file: str, label: str, against: str) -> Estimate:
        """Return the accuracy lost against another choice among the same candidates, in points, over seeds with such
        rows.

        against: oracle (each device's best candidate on its test data), pooled (the best single candidate for all), or
        a candidate.
        """
        found = []
        for trial in self.trials(file, label, {}):
            told = [device for device in participants(trial) if device.taken and device.others]
            if told:
                found.append(100 * fmean(_of(each, against) - each.others[each.taken or ""] for each in told))
        if not found:
            raise SystemExit(f"{file}.jsonl, {label}: no device has told of its candidates")
        return _estimate(found)

    def best_of(self, file: str, *labels: str) -> str:
        """Return the label of the highest mean score over the seeds that all have."""
        scores = {label: self.each_score(file, label) for label in labels}
        shared = set.intersection(*(set(each) for each in scores.values()))
        return max(labels, key=lambda label: fmean(scores[label][seed] for seed in shared))

    def difference_to_best(self, file: str, label: str, *others: str) -> Estimate:
        """Return the first label's score minus that of the best of the others, seed by seed."""
        own = self.each_score(file, label)
        best = self.each_score(file, self.best_of(file, *others))
        return _estimate([own[seed] - best[seed] for seed in sorted(own.keys() & best.keys())])

    def better(self, file: str, label: str, other: str, **axes: Value) -> float:
        """Return the share of devices for which the first label is better, in per cent."""
        by_seed = differences(*self._both(file, label, other, None, axes))
        return 100 * fmean(value > 0 for by_device in by_seed.values() for value in by_device.values())

    def least_difference(self, file: str, label: str, other: str, **axes: Value) -> float:
        """Return the difference of the worst seed."""
        by_seed = differences(*self._both(file, label, other, None, axes))
        return min(fmean(by_device.values()) for by_device in by_seed.values())

    def difference_at_equal(self, cost: str, file: str, label: str, other: str, **axes: Value) -> Estimate:
        """Return the first label's accuracy minus the other's by seed, both at the final cost of the cheaper one,
        interpolated between evaluations.

        cost: bytes_up, training_flops or joules_estimated.
        """
        found = at_equal_cost(
            self._pairs(file, label, other, axes), operator.attrgetter(cost), operator.attrgetter("mean")
        )
        if not found:
            raise SystemExit(f"{file}.jsonl: {label} and {other} were never evaluated at equal {cost}")
        return _estimate(found)

    def each_within(self, file: str, label: str, mib: float, **axes: Value) -> list[float]:
        """Return the best accuracy of each seed within an upload of all devices, weighted by test samples."""
        return [_within(trial, mib) for trial in self.trials(file, label, axes)]

    def within(self, file: str, label: str, mib: float, **axes: Value) -> Estimate:
        """Return its mean over seeds."""
        return _estimate(self.each_within(file, label, mib, **axes))

    def difference_within(self, file: str, label: str, other: str, mib: float, **axes: Value) -> Estimate:
        """Return the first label's minus the other's, seed by seed."""
        pairs = self._pairs(file, label, other, axes)
        return _estimate([_within(one, mib) - _within(two, mib) for one, two in pairs])

    def share_until(self, target: float, file: str, label: str, other: str, **axes: Value) -> Estimate:
        """Return the upload until an accuracy (0 to 1, weighted by test samples) as a share of the other label's.

        The mean of the seeds' shares. Raises SystemExit if a seed of either did not reach it.
        """
        shares = []
        for pair in self._pairs(file, label, other, axes):
            one, two = (upload_until(trial.points, target, lambda each: each.weighted) for trial in pair)
            if one is None or two is None:
                seed = pair[0].trial.seed
                raise SystemExit(f"{file}.jsonl, seed {seed}: {label} and {other} did not both reach {target:.0%}")
            shares.append(one / two)
        return _estimate(shares)

    def cost(self, file: str, label: str, what: str, at: int | None = None, **axes: Value) -> float:
        """Return the cost of all devices at the end or until a round, mean over seeds.

        what: a sum of ``Point`` (bytes_up, training_flops, ...), device_rounds, or a method's count, zero for methods
        without it.
        """
        trials = self.trials(file, label, axes)
        if what == "device_rounds":
            return fmean(map(device_rounds, trials))
        points = [next(each for each in trial.points if each.round == (at or end_of(trial).round)) for trial in trials]
        if what in Point.__dataclass_fields__:
            return fmean(getattr(each, what) for each in points)
        if not any(what in end_of(each).counted for each in _read(self.folder / f"{file}.jsonl")):
            raise SystemExit(f"{file}.jsonl counts no {what}")
        return fmean(each.counted.get(what, 0) for each in points)

    def rounds(self, file: str, label: str, **axes: Value) -> float:
        """Return the number of rounds that were played, mean over seeds."""
        return fmean(trial.result.rounds for trial in self.trials(file, label, axes))

    def rounds_to(self, share: float, file: str, label: str, **axes: Value) -> float:
        """Return the first evaluated round whose accuracy is ``share`` of the trial's best, mean over seeds."""
        found = []
        for trial in self.trials(file, label, axes):
            curve = [(point.round, point.accuracy.mean) for point in trial.points if point.accuracy]
            enough = share * max(mean for _, mean in curve)
            found.append(next(number for number, mean in curve if mean >= enough))
        return fmean(found)

    def stopped(self, file: str, label: str, **axes: Value) -> int:
        """Return the number of devices that stopped early, of all seeds."""
        return sum(map(stopped_devices, self.trials(file, label, axes)))

    def seeds(self, file: str, label: str, **axes: Value) -> int:
        """Return the number of seeds."""
        return len(self.trials(file, label, axes))

    def participations(self, file: str, label: str, budget: float, **axes: Value) -> float:
        """Return in how many rounds a device of a budget took part, mean over these devices of all seeds."""
        every = [device for trial in self.trials(file, label, axes) for device in participants(trial)]
        return fmean(device.rounds for device in every if device.budget == budget)

    def tests(self, file: str, label: str, **axes: Value) -> int:
        """Return the number of test samples of all devices, of the first seed."""
        return sum(device.test_examples for device in participants(self.trials(file, label, axes)[0]))

    def device_round(self, network: str, batch: int, run: str, what: str) -> float:
        """Return the seconds or bytes of a device-round in gating.jsonl, as a share of FedAvg's."""
        lines = map(json.loads, rows.text_of(self.folder / "gating.jsonl").splitlines())
        found = next(each for each in lines if (each["model"], each["batch"]) == (network, batch))[what]
        self.used.setdefault("gating", [])
        return float(found[run] / found["FedAvg"])

    def analysed(self, file: str, label: str, kind: str, what: str, at: int = -1, **axes: Value) -> float:
        """Return a number of an ``analysis`` row, such as jaccard.mean of masks, mean over seeds.

        at: the ``at``-th evaluated round, the last by default.
        """
        found = mean_analysed(self.trials(file, label, axes), kind, what, at)
        if found is None:
            raise SystemExit(f"{file}.jsonl, {label}: no analysis of {kind} has {what}")
        return found

    def low(self, estimate: Estimate) -> float:
        """Return the lower end of an interval; minus infinity if it is unknown."""
        return estimate.interval[0] if estimate.interval else -math.inf

    def listed(self, values: Sequence[float]) -> str:
        """Return values with one decimal, separated by commas."""
        return ", ".join(f"{value:.1f}" for value in values)

    def claims(self, paper: str) -> str:
        """Return the table of a paper's tables and figures."""
        every = tomllib.loads((self.folder / "claims.toml").read_text())["claims"]
        head = ("", "claim", "the paper", "here", "seeds, rounds", "rows", "result")
        return "\n".join(markdown_lines(head, [self._claim(each) for each in every if each["paper"] == paper])).rstrip()

    @cached_property
    def _running(self) -> dict[str, list[str]]:
        """The experiments of the queue that have trials without rows, by the claims that they are for."""
        found: dict[str, list[str]] = {}
        for each in queue.waiting(results=self.folder):
            for claim in each.entry.claims:
                if each.trial.experiment not in found.setdefault(claim, []):
                    found[claim].append(each.trial.experiment)
        return found

    def _claim(self, claim: dict[str, Any]) -> list[str]:
        """Return the cells of a table or figure of a paper."""
        own = Figures(self.folder)
        here = filled(claim.get("here", "–"), own)
        held = [bool(evaluated(each, own)) for each in claim.get("holds", ())]
        files = ", ".join(f"`{name}`" for name in own.used) or "–"
        played = "; ".join(_played(each) for each in own.used.values() if each)
        rounds = _rounds([trial for each in own.used.values() for trial in each])
        result = claim["value"] if claim["value"] in NO_CLAIMS else verdict(held, claim.get("missing", ""), rounds)
        missing = claim.get("missing", "")
        note = claim.get("note", "")
        if missing and held:
            missing = f"missing: {missing}"
        running = ", ".join(self._running.get(f"{claim['paper']} {claim['item']}", ()))
        words = "; ".join(each for each in (missing, note, running and f"running: {running}") if each)
        result = f"**{result}**: {words}" if words else f"**{result}**"
        return [claim["item"], claim["claim"], claim["value"], here, played or "–", files, result]

    def _pairs(self, file: str, label: str, other: str, axes: dict[str, Value]) -> list[tuple[Recorded, Recorded]]:
        """Return the trials of two labels, of each seed that both have."""
        others = {each.trial.seed: each for each in self.trials(file, other, axes)}
        return [(each, others[each.trial.seed]) for each in self.trials(file, label, axes) if each.trial.seed in others]

    def _both(
        self, file: str, label: str, other: str, shift: float | None, axes: dict[str, Value]
    ) -> tuple[list[Recorded], list[Recorded]]:
        """Return the trials of two labels, judged on a shifted test set unless ``shift`` is None."""
        first, second = (self.trials(file, each, axes) for each in (label, other))
        if shift is None:
            return first, second
        return judged_on({"shift": shift}, first), judged_on({"shift": shift}, second)


def verdict(held: Sequence[bool], missing: str, rounds: str) -> str:
    """Return the verdict on a claim. It holds only if all its comparisons do; if some were not run, it is at most
    partly reproduced. rounds: the number of rounds in words, or "".
    """
    if not held:
        return "not run"
    if all(held):
        return "partly" if missing else "reproduced"
    return f"not (at {rounds})" if rounds else "not"


def rebuild(docs: Path = DOCS, folder: Path = ROWS) -> dict[Path, str]:
    """Return the table of values, and the pages with measured figures, as they should be: path -> text.

    folder: of the rows, and of ``values.toml``.
    """
    if not docs.is_dir():
        raise SystemExit(f"{docs} is not there: run this in a clone, which has the pages and their rows")
    figures = Figures(folder)
    found = {}
    values = named_values(folder, figures)
    if values:
        found[folder / "values.json"] = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    for path in sorted(docs.rglob("*.md")):
        text = path.read_text()
        try:
            rebuilt = VALUE.sub(lambda each: each[1] + _value(each[2], values) + each[4], text)
            rebuilt = MEASURED.sub(lambda each: each[1] + _block(each[2], figures) + each[4], rebuilt)
            rebuilt = SECTION.sub(lambda each: each[1] + _section(each, folder) + each[5], rebuilt)
        except SystemExit as error:
            raise SystemExit(f"{path}: {error}") from None
        if any(kind.search(text) for kind in (VALUE, MEASURED, SECTION)):
            found[path] = rebuilt
    return found


def named_values(folder: Path, figures: Figures) -> dict[str, str]:
    """Return the values of ``values.toml`` by "FILE/NAME"."""
    path = folder / "values.toml"
    every = tomllib.loads(path.read_text()) if path.exists() else {}
    return {
        f"{file}/{name}": filled(template, figures) for file, named in every.items() for name, template in named.items()
    }


def _value(name: str, values: Mapping[str, str]) -> str:
    if name not in values:
        raise SystemExit(f"there is no value {name!r}{nearest(name, values)}; add it to values.toml")
    return values[name]


def _section(found: re.Match[str], folder: Path) -> str:
    """Return an experiment's section, rebuilt; sections of scripts, which have no experiment, are unchanged."""
    name = found[2]
    if not is_experiment(name):
        return found[4]
    return lowered(section_text(name, load_experiment(name), _read(folder / f"{name}.jsonl"), found[3].split()))


def is_experiment(name: str) -> bool:
    """Return whether an experiment of this name is built in."""
    return (FOLDER / f"{name}.toml").exists()


def draw_pictures(docs: Path = DOCS, folder: Path = ROWS) -> list[Path]:
    """Draw the pictures of experiments that pages show; return their files."""
    drawn: list[tuple[str, Path]] = []
    for path in sorted(docs.rglob("*.md")):
        shown: dict[str, list[str]] = {}
        for name, kind in re.findall(r"\(([\w-]+)-(\w+)\.png\)", path.read_text()):
            if is_experiment(name):
                shown.setdefault(name, []).append(kind)
        for name, kinds in shown.items():
            experiment = load_experiment(name)
            found = groups(experiment, _read(folder / f"{name}.jsonl"))
            drawn += draw_all(experiment, found, path.parent, name, kinds)
    return [path for _, path in drawn]


def stray_figures(text: str) -> list[str]:
    """Return the lines of a page with a decimal that is neither measured, nor a setting, nor a paper's."""
    for pattern in NOT_MEASURED:
        text = pattern.sub("", text)
    return [line for line in text.splitlines() if re.search(r"\d\.\d", line)]


def filled(template: str, figures: Figures, **names: str) -> str:
    """Return a template with the values of its expressions. Raises SystemExit, naming an expression without a value."""

    def value(found: re.Match[str]) -> str:
        try:
            return format(evaluated(found[1], figures, **names), found[2] or "")
        except (SyntaxError, TypeError, ValueError, AttributeError, KeyError, StopIteration) as error:
            raise SystemExit(f"{found[0]}: {error!r}; docs/benchmarks.md says what may stand there") from None

    return EXPRESSION.sub(value, template)


def evaluated(expression: str, figures: Figures, **names: str) -> Any:
    """Return the value of an expression: calls of ``figures``, constants, + - * /, comparisons."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp():
                return OPERATIONS[type(node.op)](value(node.left), value(node.right))
            case ast.Compare(ops=[how], comparators=[right]):
                return OPERATIONS[type(how)](value(node.left), value(right))
            case ast.Call(func=ast.Name(id=name)) if not name.startswith("_"):
                keywords = {each.arg or "": value(each.value) for each in node.keywords}
                return getattr(figures, name)(*map(value, node.args), **keywords)
        raise ValueError(f"{ast.unparse(node)} is no figure")

    return value(ast.parse(expression.strip(), mode="eval").body)


def _block(template: str, figures: Figures) -> str:
    """Return the text between two markers."""
    first, *lines = template.strip().splitlines()
    each = [] if not first.startswith("each = ") else [name.strip() for name in first[7:].split(";")]
    made = []
    for line in lines if each else [first, *lines]:
        for name in each if "{each}" in line else [""]:
            label, _, shown = name.partition(" as ")
            made.append(filled(line, figures, each=shown or label, label=label))
    return "\n\n" + "\n".join(made) + "\n\n"


@cache
def _read(path: Path) -> tuple[Recorded, ...]:
    recorded = rows.read(path)
    if not recorded:
        raise SystemExit(f"{path} has no trials")
    return tuple(rows.latest(recorded).values())


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), students(values))


def _of(device: DeviceResult, choice: str) -> float:
    """Return a device's score under another choice among its candidates."""
    if choice == "oracle":
        return max(device.others.values())
    if choice == "pooled":
        assert device.usual is not None, "such rows have both"
        return device.others[device.usual]
    return device.others[choice]


def _within(trial: Recorded, mib: float) -> float:
    best = best_within(trial.points, mib * MIB, lambda each: each.weighted)
    if best is None:
        raise SystemExit(f"{trial.trial.name} was not evaluated within {mib:g} MiB")
    return 100 * best


def _played(trials: Sequence[Recorded]) -> str:
    """Return the numbers of seeds and of rounds at most: 3 seeds, 12 to 40 rounds."""
    seeds = len({each.trial.seed for each in trials})
    return f"{seeds} seed{'s' if seeds > 1 else ''}, {_rounds(trials)}"


def _rounds(trials: Sequence[Recorded]) -> str:
    """Return the numbers of rounds at most, 12 to 40 rounds; "" of no trials."""
    rounds = sorted({int(each.trial.settings.get("rounds", each.result.rounds)) for each in trials})
    if not rounds:
        return ""
    return f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
