"""A file with the samples of all devices, which each device partitions identically (``tasks.dealing``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sparrow.command_line.nearest import nearest
from sparrow.places import expanded
from sparrow.protocol.manifest import Array
from sparrow.protocol.preparation import Preparation, Targets
from sparrow.reading import Decoded, Raw, ReadOptions, class_order, join, read_file
from sparrow.reading.errors import BadOption, DataError, NoData

from .. import OWN, Task
from ..datasets import Dataset
from ..dealing import Dealing, all_training_samples, check_keys, deal, public_samples, read_dealing
from ..loading import Chosen
from ..partition import people_of
from ..preparing import BuiltPreparation
from .labels import Known, Labelled, Publishing, check_alike, check_as_taken, labels_of, some
from .making import build_preparation, describe, make_task

# Partitions by class, which need class labels.
LABEL_SKEWS = ("dirichlet", "grouped", "shards", "classes")


def load_part(
    path: str,
    options: ReadOptions,
    dealt: str,
    known: Known,
    publishing: Publishing,
    *,
    device: str,
    seed: int,
    batch_size: int,
) -> Task:
    """Return the task over this device's part of a file with all samples."""
    check_keys(dealt, ("person", *(field.name for field in fields(ReadOptions))))
    whole = read_whole(path, options, known.preparation, known.targets, known.as_taken)
    check_as_taken(whole.raw, known)
    dataset = _numbered(whole, known, publishing)
    person, dealt = _person_in(dealt)
    usual = "dirichlet" if whole.kind == "classes" else "iid"
    usual = usual if dataset.people is None else "person"
    dealing = read_dealing(dealt, task=OWN, seed=seed, needs_path=False, partition=usual)
    if whole.kind == "numbers" and dealing.partition in LABEL_SKEWS:
        raise BadOption(
            f"--data: partition={dealing.partition} needs classes, and {whole.raw.label or 'y'} holds numbers; "
            "choose iid, quantity or person"
        )
    if person is not None:
        dealing = _of_person(dataset, dealing, person, path)
    parts = deal(dataset, dealing, device=device)
    public = public_samples(dataset, dealing)
    read = Labelled.of(whole.path, [whole.raw], known, publishing)
    indices = {"train": parts.train, "validation": parts.validation, "test": parts.test, "public": public}
    chosen = {
        use: Chosen(dataset.inputs, dataset.targets, index) for use, index in indices.items() if index is not None
    }
    preparation = None
    if known.outputs is None:
        training = all_training_samples(dataset, dealing, device=device)
        preparation = _whole_preparation(whole, training.tobytes(), publishing)
    counts = {"train": len(parts.train), "check": len(parts.validation), "test": len(parts.test)}
    labels = [labels_of(whole.raw)[index] for index in (parts.train, parts.validation, parts.test)]
    steps = () if preparation is None else preparation.description.steps
    dealt_by = f"this device's part of {len(dataset.targets):,}, dealt by partition={dealing.partition}"
    said = describe(path, whole.raw, read, counts, labels, steps or known.steps, [dealt_by])
    return make_task(chosen, preparation, read, known, said, batch_size=batch_size)


def _person_in(dealt: str) -> tuple[str | None, str]:
    # Take `person=NAME` out of the text.
    entries = [entry.strip() for entry in dealt.split(",")]
    people = [entry.partition("=")[2].strip() for entry in entries if entry.partition("=")[0].strip() == "person"]
    rest = ",".join(entry for entry in entries if entry.partition("=")[0].strip() != "person")
    return (people[0] if people else None), rest


def _of_person(dataset: Dataset, dealing: Dealing, person: str, path: str) -> Dealing:
    if dataset.people is None or person not in dataset.names:
        known = f"its people are {some(dataset.names)}" if dataset.names else "it does not name who made a sample"
        raise DataError(f"{path}: person={person}{nearest(person, dataset.names)}, but {known}")
    found = people_of(dataset.people, **dict(dealing.options)) if dealing.partition == "person" else ()
    number = dataset.names.index(person)
    if dealing.partition != "person" or dealing.index is not None or number not in found:
        raise BadOption(f"--data: person={person} is this device's part; leave index and partition out")
    return replace(dealing, index=int(np.flatnonzero(np.asarray(found) == number)[0]))


@dataclass(frozen=True, eq=False)
class Whole:
    """All samples of a file, read once in a process."""

    path: str
    # All parts joined.
    raw: Raw
    # Index into ``names`` per sample.
    people: Array | None
    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind of the labels: ``classes`` or ``numbers``."""
        return str(self.raw.kind)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that occur or that the file declares; () for a regression."""
        if self.kind != "classes":
            return ()
        return self.raw.classes or class_order(map(str, np.unique(labels_of(self.raw))))


# Cached, because results for a data set are cached by its identity.
@lru_cache(maxsize=8)
def _numbered(whole: Whole, known: Known, publishing: Publishing) -> Dataset:
    read = Labelled.of(whole.path, [whole.raw], known, publishing)
    count = len(labels_of(whole.raw))
    return Dataset(
        whole.raw.inputs,
        read.targets_of(whole.raw),
        whole.people,
        len(read.class_names),
        published=count,
        names=whole.names,
        runs=whole.raw.runs,
    )


# Cached for a process that simulates many devices. samples: bytes of the indices, since arrays are not hashable.
@lru_cache(maxsize=8)
def _whole_preparation(whole: Whole, samples: bytes, publishing: Publishing) -> BuiltPreparation:
    chosen = np.frombuffer(samples, np.intp)
    inputs = whole.raw.inputs
    training = inputs.take(chosen) if isinstance(inputs, Decoded) else inputs[chosen]
    return build_preparation(whole.raw, training, whole.kind, publishing)


def read_whole(
    path: str,
    options: ReadOptions | None = None,
    preparation: Preparation | None = None,
    targets: Targets | None = None,
    shape: tuple[int, ...] | None = None,
) -> Whole:
    """Return all samples of a file, cached by its time stamp. Raises DataError if it cannot be read."""
    options = options or ReadOptions()
    place = expanded(path)
    if not place.exists():
        raise NoData(f"{path}: there is no such file; check --data")
    stamp = place.stat().st_mtime_ns
    return _read_whole(path, str(place.resolve()), stamp, options, preparation, targets, shape)


@lru_cache(maxsize=8)
def _read_whole(
    path: str,
    place: str,
    stamp: int,
    options: ReadOptions,
    preparation: Preparation | None,
    targets: Targets | None,
    shape: tuple[int, ...] | None,
) -> Whole:
    found = read_file(path, options, preparation=preparation, targets=targets, shape=shape)
    parts = [each for use, each in found.items() if use != "public"]
    first = parts[0]
    check_alike(path, parts)
    raw = first
    if len(parts) > 1:
        raw = replace(
            first,
            inputs=join([each.inputs for each in parts]),
            labels=np.concatenate([labels_of(each) for each in parts]),
            people=_joined(path, [each.people for each in parts], "a person"),
            runs=_joined(path, [each.runs for each in parts], "a run"),
        )
    if raw.people is None:
        return Whole(path, raw, None, ())
    names, codes = np.unique(raw.people, return_inverse=True)
    order = class_order(map(str, names))
    place_of = {name: place for place, name in enumerate(order)}
    people = np.array([place_of[str(name)] for name in names], np.intp)[codes.reshape(-1)]
    if raw.runs is not None:
        pairs = np.stack([people, raw.runs])
        raw = replace(raw, runs=np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1))
    return Whole(path, raw, people, order)


def _joined(path: str, given: Sequence[Any], entry: str) -> Any:
    known = [each for each in given if each is not None]
    if known and len(known) < len(given):
        raise DataError(f"{path}: only some samples have {entry}; give one for each, or for none")
    return np.concatenate(known) if known else None
