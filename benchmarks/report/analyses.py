"""Tables and pictures of the analyses in the rows: masks, personal models, gates, and FedSPU's Theorem 1.

Numbers are means over seeds; matrices, histograms and scatter plots are of the first seed only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from benchmarks import plots as drawing
from sparrow.bench import plots
from sparrow.bench.report.cells import ABSENT, markdown_lines, percent, three_digits
from sparrow.bench.report.figures import Group, analysed, mean_analysed, number_in
from sparrow.bench.rows import Recorded

KINDS = ("masks", "pairs", "distances", "private", "kept", "gates", "theorem")
"""The kinds of pictures, by the endings of their files' names."""

NORMS = {
    "gradient": "‖∇F(w)‖²",
    "merged": "‖∇F(ŵ)‖²",
    "active": "‖∇F̄(ŵ)‖²",
    "drift": "‖ŵ - w‖²",
    "q": "Q at least",
    "steepness": "L at least",
}
"""Terms of Theorem 1 by their names in the rows."""

Points = tuple[Sequence[float], Sequence[float]]


def draw_analyses(
    found: Sequence[Group], folder: Path, name: str, kinds: Collection[str] = KINDS
) -> list[tuple[str, Path]]:
    """Draw every picture of these kinds with content; return (caption, file) of each."""
    colour = plots.colours(list(found[0].trials))
    first = {group.title: {label: done[0] for label, done in group.trials.items() if done} for group in found}
    pictures = []

    def wanted(kind: str, content: object) -> Path | None:
        return folder / f"{name}-{kind}.png" if kind in kinds and content else None

    rows = _by_round(found)
    if path := wanted("masks", rows):
        plots.rows_of_curves(rows, colour, path)
        pictures.append(("Similarity of masks by round: mean, the band from the least to the most similar", path))
    maps, order = _maps(first)
    if path := wanted("pairs", maps):
        drawing.heat_maps(maps, order, path)
        pictures.append(("Distance of labels, and similarity of masks after the last round, device by device", path))
    clouds = _clouds(first)
    if path := wanted("distances", clouds):
        drawing.scatters(clouds, colour, path)
        pictures.append(("Pairs of devices after the last round, by the distance of their labels", path))
    shared = {title: _shared(trials) for title, trials in first.items()}
    if path := wanted("private", any(shared.values())):
        drawing.scatters([(shared, "distance to all labels", "shared with the global mask, %")], colour, path)
        pictures.append(
            ("Share of a device's weights that the global mask has, too, by how usual its labels are", path)
        )
    kept = {label: layers for trials in first.values() for label, trial in trials.items() if (layers := _kept(trial))}
    if path := wanted("kept", kept):
        drawing.shares_by_layer(kept, colour, path)
        pictures.append(
            ("Share of a layer that devices keep: devices after the last round, the first one outlined", path)
        )
    gated = next((each for trials in first.values() for each in trials.values() if analysed(each, "gates")), None)
    if (path := wanted("gates", gated)) and gated is not None:
        _draw_gates(gated, path)
        pictures.append(
            ("Gating layers of the devices with the classes that they have, and gate weights by round", path)
        )
    terms = {
        f"{label}{f', {title}' if len(first) > 1 else ''}": _terms(trial)
        for title, trials in first.items()
        for label, trial in trials.items()
        if analysed(trial, "theorem")
    }
    if path := wanted("theorem", terms):
        drawing.quantities(terms, plots.colours(list(NORMS.values())), path, x="round")
        pictures.append(("Theorem 1's terms by round, means over devices; Q and L the largest of any device", path))
    return pictures


def _rows_of(trial: Recorded, kind: str) -> list[tuple[int, dict[str, Any]]]:
    return [(each.round, each.numbers) for each in trial.analyses if each.kind == kind]


def _by_round(found: Sequence[Group]) -> list[tuple[dict[str, dict[str, plots.Curve]], str, str, Sequence[float]]]:
    rows: list[tuple[dict[str, dict[str, plots.Curve]], str, str, Sequence[float]]] = []
    for kind, what, y in (
        ("masks", "jaccard", "two devices, Jaccard"),
        ("masks", "own", "with its own before, Jaccard"),
        ("global", "before", "global mask with that before, Jaccard"),
    ):
        panels: dict[str, dict[str, plots.Curve]] = {}
        for group in found:
            curves = {label: _curve(done, kind, what) for label, done in group.trials.items() if done}
            panels[group.title] = {label: each for label, each in curves.items() if each}
        if any(panels.values()):
            rows.append((panels, "round", y, ()))
    return rows


def _curve(done: Sequence[Recorded], kind: str, what: str) -> plots.Curve | None:
    """Return mean, minimum and maximum of a spread by round, or one number as all three; None if unknown."""
    by_round: dict[int, list[dict[str, float]]] = {}
    for trial in done:
        for number, numbers in _rows_of(trial, kind):
            value = numbers.get(what)
            if value is not None:
                alike = {"mean": value, "least": value, "most": value}
                by_round.setdefault(number, []).append(value if isinstance(value, dict) else alike)
    if not by_round:
        return None
    columns = [
        [fmean(each[name] for each in found) for found in by_round.values()] for name in ("mean", "least", "most")
    ]
    return plots.Curve(list(by_round), *columns)


def _maps(first: Mapping[str, Mapping[str, Recorded]]) -> tuple[dict[str, list[list[float]]], list[str]]:
    """Return the matrix of labels, then those of masks, with devices in the order of their labels' clusters."""
    maps: dict[str, list[list[float]]] = {}
    order: list[int] = []
    for title, trials in first.items():
        behind = f"\n{title}" if len(first) > 1 else ""
        for label, trial in trials.items():
            masks = analysed(trial, "masks")
            data = analysed(trial, "data")
            if masks is None or "matrix" not in masks:
                continue
            if not maps:
                order = _order(data["matrix"] if data else masks["matrix"])
            if data and f"label distance{behind}" not in maps:
                maps[f"label distance{behind}"] = _sorted(data["matrix"], range(len(data["matrix"])), order)
            maps[f"{label}{behind}"] = _sorted(masks["matrix"], masks["devices"], order)
    return maps, [str(index) for index in order]


def _order(distances: Sequence[Sequence[float]]) -> list[int]:
    """Return the devices in an order with similar neighbours."""
    if len(distances) < 3:
        return list(range(len(distances)))
    tree = hierarchy.linkage(squareform(np.array(distances), checks=False), "average")
    return [int(index) for index in hierarchy.leaves_list(tree)]


def _sorted(matrix: Sequence[Sequence[float]], devices: Sequence[int], order: Sequence[int]) -> list[list[float]]:
    """Return a matrix of some devices with rows and columns in this order; unknown ones are not a number."""
    whole = np.full((len(order), len(order)), np.nan)
    places = [list(order).index(device) for device in devices]
    whole[np.ix_(places, places)] = np.array(matrix)
    return [[float(value) for value in row] for row in whole]


def _clouds(first: Mapping[str, Mapping[str, Recorded]]) -> list[tuple[dict[str, dict[str, Points]], str, str]]:
    rows = []
    for kind, y in (("masks", "masks, Jaccard"), ("models", "personal models, Euclidean")):
        panels = {
            title: {label: cloud for label, trial in trials.items() if (cloud := _cloud(trial, kind))}
            for title, trials in first.items()
        }
        if any(panels.values()):
            rows.append((panels, "distance of labels", y))
    return rows


def _cloud(trial: Recorded, kind: str) -> Points | None:
    numbers = analysed(trial, kind)
    data = analysed(trial, "data")
    if numbers is None or data is None or "matrix" not in numbers:
        return None
    devices = numbers["devices"]
    labels = data["matrix"]
    matrix = numbers["matrix"]
    both = [(one, other) for one in range(len(devices)) for other in range(one)]
    return [labels[devices[one]][devices[other]] for one, other in both], [matrix[one][other] for one, other in both]


def _shared(trials: Mapping[str, Recorded]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for label, trial in trials.items():
        numbers = analysed(trial, "private")
        data = analysed(trial, "data")
        if numbers and data:
            far = [data["to_all"][device] for device in numbers["devices"]]
            found[label] = (far, [100 * share for share in numbers["each"]])
    return found


def _kept(trial: Recorded) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    first = analysed(trial, "kept", 0)
    last = analysed(trial, "kept")
    if first is None or last is None:
        return {}
    return {layer: (first["layers"][layer]["bins"], each["bins"]) for layer, each in last["layers"].items()}


def _draw_gates(trial: Recorded, path: Path) -> None:
    numbers = analysed(trial, "gates")
    data = analysed(trial, "data")
    assert numbers is not None, "this trial has gates"
    labels = data["labels"] if data else []
    names = []
    for device in numbers["devices"]:
        classes = [str(each) for each, count in enumerate(labels[device]) if count] if labels else []
        names.append(f"{device}: {', '.join(classes)}" if 0 < len(classes) <= 5 else str(device))
    drawing.gates(numbers["linkage"], names, {number: each["bins"] for number, each in _rows_of(trial, "gates")}, path)


def _terms(trial: Recorded) -> dict[str, Points]:
    rows = _rows_of(trial, "theorem")
    return {shown: ([number for number, _ in rows], [each[name] for _, each in rows]) for name, shown in NORMS.items()}


# --- tables ----------------------------------------------------------------------------------------------------------


def analysis_sections(found: Sequence[Group]) -> list[str]:
    """Return the tables of the analyses; empty without any."""
    return [line for title, note, table in _TABLES for line in _section(found, title, note, table)]


def _section(found: Sequence[Group], title: str, note: str, table: Any) -> Iterator[str]:
    tables = [(group.title, rows) for group in found if (rows := list(table(group)))]
    if not tables:
        return
    head = tables[0][1][0]
    yield from (f"## {title}", "", note, "")
    for point, rows in tables:
        yield from ([f"### {point}", ""] if point else [])
        yield from markdown_lines(list(head), [list(row.values()) for row in rows])


def _known(group: Group, kind: str) -> Iterator[tuple[str, Sequence[Recorded]]]:
    for label, done in group.trials.items():
        if done and all(analysed(trial, kind) for trial in done):
            yield label, done


def _spread(done: Sequence[Recorded], kind: str, what: str) -> str:
    mean, least, most = (mean_analysed(done, kind, f"{what}.{each}") for each in ("mean", "least", "most"))
    return ABSENT if mean is None else f"{mean:.2f} ({least:.2f} to {most:.2f})"


def _with(done: Sequence[Recorded], kind: str, what: str = "labels") -> str:
    """Return a correlation and its p; of several seeds the mean, without p."""
    r = mean_analysed(done, kind, f"{what}.r")
    if r is None:
        return ABSENT
    p = number_in(analysed(done[0], kind), f"{what}.p")
    return f"{r:+.2f}" + (f" (p = {p:.3f})" if len(done) == 1 and p is not None else "")


def _masks_table(group: Group) -> Iterator[dict[str, str]]:
    for label, done in _known(group, "masks"):
        numbers = analysed(done[0], "masks") or {}
        yield {
            "": label,
            "mask of": str(numbers["unit"]),
            "two devices, Jaccard": _spread(done, "masks", "jaccard"),
            "by chance": three_digits(mean_analysed(done, "masks", "chance.mean")),
            "two devices, overlap": _spread(done, "masks", "overlap"),
            "with its own at the evaluation before": _spread(done, "masks", "own"),
            "Jaccard with distance of labels, r": _with(done, "masks"),
        }


def _global_table(group: Group) -> Iterator[dict[str, str]]:
    for label, done in _known(group, "global"):
        yield {
            "": label,
            "kept, %": percent(mean_analysed(done, "global", "kept")),
            "with that at the evaluation before, Jaccard": three_digits(mean_analysed(done, "global", "before")),
            "with that at the first evaluation": three_digits(mean_analysed(done, "global", "first")),
        }


def _private_table(group: Group) -> Iterator[dict[str, str]]:
    for label, done in _known(group, "private"):
        yield {
            "": label,
            "shared with the global mask, mean (least to most)": _spread(done, "private", "shared"),
            "with the distance to all labels, r": _with(done, "private"),
        }


def _models_table(group: Group) -> Iterator[dict[str, str]]:
    for label, done in _known(group, "models"):
        yield {
            "": label,
            "Euclidean": _spread(done, "models", "euclidean"),
            "with distance of labels, r": _with(done, "models"),
            "1 - cosine": _spread(done, "models", "cosine"),
            "1 - cosine with distance of labels, r": _with(done, "models", "labels_cosine"),
        }


def _gates_table(group: Group) -> Iterator[dict[str, str]]:
    for label, done in _known(group, "gates"):
        count = len(_rows_of(done[0], "gates"))
        moved = [mean_analysed(done, "gates", "moved.mean", at) for at in ((1, -1) if count > 1 else ())]
        yield {
            "": label,
            "distance of gating layers": _spread(done, "gates", "euclidean"),
            "with distance of labels, r": _with(done, "gates"),
            "nearest device has a class in common, %": percent(mean_analysed(done, "gates", "common_nearest")),
            "any other, %": percent(mean_analysed(done, "gates", "common_any")),
            "a gate moves between evaluations, first and last": " and ".join(map(three_digits, moved)) or ABSENT,
        }


def _theorem_table(group: Group) -> Iterator[dict[str, str]]:
    for label, done in _known(group, "theorem"):
        first = analysed(done[0], "theorem", 0) or {}
        last = analysed(done[0], "theorem") or {}
        for before, each in zip(first["budgets"], last["budgets"], strict=True):
            yield {
                "": label,
                "p": f"{each['budget']:g}",
                "‖∇F(w)‖², first and last": f"{three_digits(before['gradient'])}, {three_digits(each['gradient'])}",
                "masked share of ‖∇F(ŵ)‖²": three_digits(each["lemma"]),
                "p²": three_digits(each["budget"] ** 2),
                "values in a mask": three_digits(each["values"]),
                "Q at least": three_digits(last["q"]),
                "σ² at least": three_digits(last["sigma2"]),
                "L at least": three_digits(last["steepness"]),
                "QL / p²": three_digits(each["condition"]),
                "ε² as printed": three_digits(each["epsilon2"]),
            }


_TABLES = (
    (
        "Masks",
        "After the last round: mean over pairs, with the least and the most similar pair in parentheses. *By chance*: "
        "the Jaccard index of random masks with the same number of entries per layer. *r*: Pearson's correlation over "
        "pairs, p by Mantel's test. Blocks that are always active are excluded.",
        _masks_table,
    ),
    ("Global mask", "The mask of the one sparse model after the last round.", _global_table),
    (
        "Shared weights",
        "Share of a device's mask that is also in the global mask, after the last round.",
        _private_table,
    ),
    ("Personal models", "Distance of two devices' trainable values after the last round.", _models_table),
    (
        "Gates",
        "Euclidean distance between the parameters of two gating layers, after the last round; a gate's move is the "
        "mean over blocks and devices.",
        _gates_table,
    ),
    (
        "Theorem 1",
        "Means over devices and two masks drawn for this analysis. Q, σ² and L are bounds over all rounds and devices. "
        "The largest measured value of any device after the last round is therefore a lower bound of each. The theorem "
        "requires QL / p² <= 1.",
        _theorem_table,
    ),
)
