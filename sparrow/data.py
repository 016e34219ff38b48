"""``sparrow data``: check a file or folder of samples without publishing or joining.

sparrow data check kitchen.csv,label=activity            as sparrow publish reads it
sparrow data check bath.csv --federation falls           as sparrow join reads it
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from edge_sdk import arguments as read
from edge_sdk.tasks import OWN, Task, collect_targets, count_examples, load_data_of, load_task
from edge_sdk.tasks.preparing import Statistics

from .command_line.command import Command, Parser
from .command_line.options import add_skip_unreadable, with_skipped
from .command_line.table import printable, table
from .operating import add_coordinator, connected
from .protocol.manifest import Manifest
from .protocol.messages import FederationInfo
from .protocol.preparation import Preparation
from .protocol.settings import FederationSettings

DEVICE = "check"
"""The device name for reading the file."""


def _options(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "read a file or folder as publish or join does, and print a summary"
    part = parts.add_parser("check", help=text, description=f"{text[0].upper()}{text[1:]}.")
    part.add_argument("data", metavar="PATH", help="a file or folder, with options, such as FILE,label=activity")
    add_skip_unreadable(part)
    part.add_argument(
        "--federation",
        type=read.federation,
        metavar="NAME",
        help="read it as this federation's devices do (default: as publish does)",
    )
    add_coordinator(part)


def _run(options: argparse.Namespace) -> None:
    info, manifest = _federation(options)
    settings = FederationSettings() if info is None else info.settings
    data = with_skipped(options.data, options)
    given: dict[str, Any] = {"device": DEVICE, "seed": settings.seed, "batch_size": settings.batch_size}
    task = load_task(OWN, data, **given) if manifest is None else load_data_of(manifest, data, **given)
    description = _description(task, manifest)
    found, differences = _statistics(task, description)
    if options.json:
        print(json.dumps(_as_json(task, description, found, differences)))
        return
    lines = [*task.said]
    if description is not None and found is not None:
        lines.append(_table(description, found))
    lines += [f"warning: {here}" for here, _ in differences]
    print("\n".join(printable(line) for text in lines for line in text.splitlines()))


def _federation(options: argparse.Namespace) -> tuple[FederationInfo | None, Manifest | None]:
    if options.federation is None:
        return None, None
    with connected(options, ("enrolment", "observer", "admin")) as transport:
        return transport.federation(options.federation), transport.manifest(options.federation)


def _description(task: Task, manifest: Manifest | None) -> Preparation | None:
    if manifest is not None:
        return manifest.preparation
    found: Preparation = task.preparation.description
    return found


def _statistics(task: Task, description: Preparation | None) -> tuple[Statistics | None, list[tuple[str, str]]]:
    if description is None or description.reader == "images" or description.axes == "T":
        # Means of pixels and of sound pressures are not informative.
        return None, []
    from edge_sdk.tasks.prepared import differences, raw_statistics

    found = raw_statistics(task.train, description)
    return found, differences(found, description) if description.mean else []


def _table(description: Preparation, found: Statistics) -> str:
    """Return a table of the training samples' columns or channels."""
    from edge_sdk.tasks.prepared import entry_name

    rows = []
    for place, (mean, deviation) in enumerate(zip(found.mean, found.deviation, strict=True)):
        column = description.columns[place] if description.columns else None
        if column is not None and column.categories:
            rows.append((column.name, "one of", ", ".join(column.categories)))
            continue
        name = entry_name(description, place)
        spread = "constant" if found.flat[place] else f"standard deviation {deviation:.4g}"
        rows.append((name, "number", f"mean {mean:.4g}, {spread}"))
    head = "column" if description.columns else "channel" if description.axes else "feature"
    return table((head, "kind", "training samples"), rows)


def _as_json(
    task: Task, description: Preparation | None, found: Statistics | None, differences: list[tuple[str, str]]
) -> dict[str, Any]:
    held = task.validation if task.test is None else task.test
    counts = {"train": count_examples(task.train), "check": count_examples(task.validation)}
    counts["test"] = count_examples(held)
    classes = None
    if task.classification:
        parts = [task.train, task.validation, *([] if task.test is None else [task.test])]
        labels, numbers = np.unique(np.concatenate([collect_targets(each) for each in parts]), return_counts=True)
        names = task.class_names or [str(label) for label in range(int(labels.max()) + 1)]
        classes = {names[label]: int(number) for label, number in zip(labels, numbers, strict=True)}
    return {
        "said": list(task.said),
        "samples": counts,
        "classes": classes,
        "preparation": None if description is None else description.model_dump(mode="json"),
        "mean": None if found is None else found.mean.tolist(),
        "deviation": None if found is None else found.deviation.tolist(),
        "warnings": [here for here, _ in differences],
    }


COMMAND = Command("sparrow data", "Check a file or folder of samples.", _options, _run)
