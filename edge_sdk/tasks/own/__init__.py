"""A user's own files: ``--data FILE``, a table or an npz file, of one device or of all (see ``sparrow.reading``).

    kitchen.csv,label=activity         this device's own file
    all.csv,index=2,of=5               part 2 (from 0) of a file with the samples of all devices (see ``dealing``)
    all.csv,person=alice               the samples of one person in such a file

The publisher defines columns, class names and the preparation, whose constants come from its training samples. A
joining device matches columns and classes by name. Validation arrays without test arrays serve for both.

Float labels make a regression, whose loss is the squared error in units of the variance of the publisher's targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Manifest
from sparrow.reading import Raw, class_order, read_file, read_options, take
from sparrow.reading.errors import BadOption

from .. import Task
from ..loading import Arrays
from ..partition import Split, split
from .labels import PLAIN, Known, Labelled, Publishing, check_alike, check_as_taken, labels_of, some
from .making import build_preparation, describe, make_task
from .whole import load_part

# Training, validation and test.
SETS = 3

# Share of all recordings for tests, and of the others for validation.
HELD_OUT = 0.3
VALIDATION = 0.15

__all__ = ["Publishing", "classes_of", "load"]


def load(
    data: str | None,
    *,
    device: str,
    seed: int,
    batch_size: int,
    manifest: Manifest | None = None,
    publishing: Publishing = PLAIN,
) -> Task:
    """Return the task over raw samples of the file ``data``, or of this device's part of it.

    manifest: the federation's; None to publish. Raises DataError if the file cannot be read or does not fit the
    federation.
    """
    if not data:
        raise BadOption("this task needs samples: add --data FILE, a table or an npz file, or FILE,index=0,of=5")
    path, options, dealt = read_options(data)
    known = Known.of(manifest)
    if dealt:
        return load_part(path, options, dealt, known, publishing, device=device, seed=seed, batch_size=batch_size)
    parts = read_file(path, options, preparation=known.preparation, targets=known.targets, shape=known.as_taken)
    check_alike(path, list(parts.values()))
    for part in parts.values():
        check_as_taken(part, known)
    uses = _split_own(parts, seed)
    training = parts.get("train", parts.get("", None))
    assert training is not None, "a file has all samples, or training samples"
    read = Labelled.of(path, list(parts.values()), known, publishing)
    numbered = {use: Arrays(each.inputs, read.targets_of(each)) for use, each in uses.items()}
    preparation = None
    if known.outputs is None:
        preparation = build_preparation(training, uses["train"].inputs, read.kind, publishing)
    raw_test = uses.get("test")
    counts = {"train": len(uses["train"].inputs), "check": len(uses["validation"].inputs)}
    counts["test"] = len(uses["validation" if raw_test is None else "test"].inputs)
    steps = () if preparation is None else preparation.description.steps
    more = [*_people(training), *_recordings(uses)]
    said = describe(path, training, read, counts, [each.labels for each in uses.values()], steps or known.steps, more)
    return make_task(numbered, preparation, read, known, said, batch_size=batch_size)


def _split_own(parts: Mapping[str, Raw], seed: int) -> dict[str, Raw]:
    """Return a device's samples by use, splitting off missing parts."""
    given = {"validation": parts.get("val"), "test": parts.get("test"), "public": parts.get("public")}
    uses = {use: each for use, each in given.items() if each is not None}
    every = parts.get("train", parts.get(""))
    assert every is not None, "a file has all samples, or training samples"
    if "validation" in uses:
        return {"train": every, **uses}
    found = _split_recordings(every, seed) if every.reader == "recordings" else None
    found = found or split(len(every.inputs), seed, runs=every.runs)
    if "test" in uses:
        # Samples that the split would have held out are trained on.
        found = replace(found, train=np.union1d(found.train, found.test))
        own = {"train": take(every, found.train), "validation": take(every, found.validation)}
    else:
        own = {use: take(every, getattr(found, use)) for use in ("train", "validation", "test")}
    return {**own, **uses}


def _split_recordings(every: Raw, seed: int) -> Split | None:
    """Return a split of recordings by class."""
    # Of n recordings of a class 0.3 n are for tests and 0.15 of the others for validation, at least one each. Smaller
    # classes are only trained on. None if all classes are smaller, or labels are not classes.
    if every.runs is None or every.kind != "classes":
        return None
    labels = labels_of(every)
    chance = np.random.default_rng(seed)
    held: dict[str, list[NDArray[np.int64]]] = {"test": [], "validation": []}
    for label in np.unique(labels):
        runs = chance.permutation(np.unique(every.runs[labels == label]))
        if len(runs) < SETS:
            continue
        tests = max(1, round(HELD_OUT * len(runs)))
        checks = max(1, round(VALIDATION * (len(runs) - tests)))
        held["test"].append(runs[:tests])
        held["validation"].append(runs[tests : tests + checks])
    if not held["test"]:
        return None
    is_test, is_check = (np.isin(every.runs, np.concatenate(held[use])) for use in ("test", "validation"))
    return Split(*(np.flatnonzero(chosen) for chosen in (~(is_test | is_check), is_check, is_test)))


def _people(raw: Raw) -> list[str]:
    names = [] if raw.people is None else sorted(map(str, np.unique(raw.people)))
    if len(names) < 2:
        return []
    return [f"it has {len(names)} people, all used as this device's; person=NAME selects one of {some(names)}"]


def _recordings(uses: Mapping[str, Raw]) -> list[str]:
    names = {"train": "train", "validation": "check", "test": "test"}
    held = {name: uses[use].runs for use, name in names.items() if use in uses and uses[use].reader == "recordings"}
    counts = [f"{len(np.unique(runs))} {name}" for name, runs in held.items() if runs is not None]
    return [f"recordings: {', '.join(counts)}"] if counts else []


def classes_of(files: Sequence[str]) -> tuple[str, ...]:
    """Return the classes that occur in these files or that they declare; () for a regression.

    files: texts of ``--data``. Raises DataError if one cannot be read.
    """
    found: list[str] = []
    for data in files:
        path, options, _ = read_options(data)
        for raw in read_file(path, options).values():
            if raw.kind == "numbers":
                return ()
            found += raw.classes or [str(name) for name in np.unique(labels_of(raw))]
    return class_order(found)
