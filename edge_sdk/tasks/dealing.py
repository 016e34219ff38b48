"""Assign parts of a shared data set to devices, from the options of ``--data``.

    PATH,partition=dirichlet,alpha=0.1,index=3,of=100,seed=0

Every device deals the whole set identically and keeps part ``index`` of ``of``, the number of all devices.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol, cast, get_type_hints

import numpy as np

from sparrow.command_line.installed import installed, load
from sparrow.command_line.nearest import nearest
from sparrow.protocol.manifest import Array
from sparrow.reading.errors import BadOption, DataError
from sparrow.reading.samples import some

from .corruption import check_corruption, check_severity
from .datasets import Dataset
from .partition import Index, Split, drawn, people_of, shifted, split

__all__ = ["Dealing", "Partition", "deal", "read_dealing"]

# Devices that share a set by default.
DEVICES = 10


class Partition(Protocol):
    """Protocol of partitions, with the entry point ``sparrow.partitions``."""

    def __call__(self, labels: Array, people: Array | None, *, of: int, seed: int, **options: float) -> list[Index]:
        """Return each device's indices, sorted, without repeats, identical on every machine.

        Raises DataError if samples are too few.
        """


@dataclass(frozen=True)
class Dealing:
    """The options of a device's data."""

    path: str | None
    seed: int
    # The part; by default it follows from the device's name.
    index: int | None = None
    of: int | None = None
    partition: str = "dirichlet"
    options: tuple[tuple[str, float], ...] = ()
    # Test share of each part, and validation share of the rest.
    held_out: float = 0.3
    validation: float = 0.15
    # Deal only the published training part, or the test part too.
    part: Literal["train", "all"] = "train"
    # Share of the device's test samples that test samples of all devices replace.
    shift: float = 0.0
    # Test on a share of the device's own part, or on its slice of the published test part.
    test: Literal["own", "published"] = "own"
    # Of the device's test images.
    corruption: str | None = None
    severity: int = 0
    # Recording devices of the training and test samples; by default all.
    train_on: str | None = None
    test_on: str | None = None
    # Share of the samples that every device gets instead, for methods that compare models on them.
    public: float = 0.0
    # Person or domain that is not dealt and whose samples are the published test part.
    leave_out: str | None = None

    def __post_init__(self) -> None:
        if self.of is not None and self.of < 1:
            raise BadOption(f"--data: of={self.of}; give at least 1 device")
        if self.index is not None and self.index < 0:
            raise BadOption(f"--data: index={self.index}; parts are counted from 0")
        if self.part not in ("train", "all"):
            raise BadOption(f"--data: part={self.part}; choose train or all")
        if not 0 <= self.public < 1:
            raise BadOption(f"--data: public={self.public:g}; give a share from 0 to below 1")
        if self.test not in ("own", "published"):
            raise BadOption(f"--data: test={self.test}; choose own or published")
        if not 0 <= self.shift <= 1:
            raise BadOption(f"--data: shift={self.shift:g}; give a share from 0 to 1")
        if self.test == "published" and self.part == "all" and self.leave_out is None:
            raise BadOption(
                "--data: part=all trains on the published test part, and test=published tests on it; leave one of "
                "them out"
            )
        if self.test == "published" and self.shift:
            raise BadOption(
                f"--data: shift={self.shift:g} replaces the devices' own test samples, which test=published does not "
                "have; leave one of them out"
            )
        if (self.corruption is None) != (self.severity == 0):
            raise BadOption("--data: give corruption and severity together, as in corruption=contrast,severity=3")
        if self.corruption is not None:
            check_corruption(self.corruption, published=self.test == "published")
            check_severity(self.severity)
            if self.shift:
                raise BadOption(
                    f"--data: corruption={self.corruption} changes a device's own test images, and shift="
                    f"{self.shift:g} replaces them; leave one of them out"
                )

    def place(self, device: str, of: int) -> int:
        """Return the part of ``of`` for a device: ``index``, else the number that its name ends in, else its hash.

        ``pi-7`` holds part 7. Without such a number, two devices may hold the same part.
        """
        if self.index is not None:
            if self.index >= of:
                raise BadOption(f"--data: index={self.index} of {of} parts; choose 0 to {of - 1}, or set of=")
            return self.index
        numbered = re.search(r"-([0-9]{1,9})$", device)
        if numbered and int(numbered[1]) < of:
            return int(numbered[1])
        return int.from_bytes(hashlib.sha256(device.encode()).digest()[:8], "big") % of


def read_dealing(
    data: str | None,
    *,
    task: str,
    seed: int,
    needs_path: bool = True,
    partition: str = "dirichlet",
    corruptible: bool = False,
) -> Dealing:
    """Read ``[PATH,]key=value,...``.

    Raises BadOption for an unknown key or an invalid value. seed, partition: defaults.
    """
    entries = _entries(data or "")
    path = None
    if needs_path and entries and not _KEY.match(entries[0]):
        path = entries.pop(0)
    texts = _texts(entries, f"{task} takes {_grammar(needs_path)}")
    name = texts.pop("partition", partition)
    fields, options = _values(texts, name, f"{task} takes {_grammar(needs_path)}")
    if "leave_out" in fields:
        fields.setdefault("test", "published")
    if "held_out" in fields and fields.get("test") == "published":
        raise BadOption("--data: held_out has no effect with test=published; leave it out")
    if "corruption" in fields and not corruptible:
        raise BadOption(f"--data: corruption={fields['corruption']} needs images of bytes, which {task} does not have")
    return Dealing(**{"path": path, "seed": seed, **fields, "partition": name, "options": tuple(sorted(options))})  # type: ignore[arg-type]


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _texts(entries: Sequence[str], advice: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for entry in entries:
        key, equals, text = (word.strip() for word in entry.partition("="))
        if not equals:
            raise BadOption(f"--data: unknown entry {entry!r}; {advice}")
        if key in texts:
            raise BadOption(f"--data: {key} is set twice; set it once")
        texts[key] = text
    return texts


def _values(texts: Mapping[str, str], partition: str, advice: str) -> tuple[dict[str, object], list[tuple[str, float]]]:
    option_types = _option_types(find_partition(partition))
    fields: dict[str, object] = {}
    options: list[tuple[str, float]] = []
    for key, text in texts.items():
        if key in _FIELDS:
            fields[key] = _number(key, text, _FIELDS[key])
        elif key in option_types:
            options.append((key, _number(key, text, option_types[key])))
        elif key in _TEXTS:
            fields[key] = text
        else:
            close = nearest(key, (*_FIELDS, *option_types, *_TEXTS, "partition"))
            raise BadOption(
                f"--data: unknown entry {key + '=' + text!r}{close}; {advice}, and partition={partition} takes "
                f"{', '.join(option_types) or 'no options'}"
            )
    return fields, options


def check_keys(text: str, more: Sequence[str]) -> None:
    """Raise BadOption for unknown keys. more: additional valid keys."""
    entries = _entries(text)
    given = dict(entry.partition("=")[::2] for entry in entries)
    named = [name.strip() for key, name in given.items() if key.strip() == "partition"]
    rules = named or list(installed("sparrow.partitions"))
    options = {name for rule in rules for name in _option_types(find_partition(rule))}
    known = (*_FIELDS, *_TEXTS, "partition", *sorted(options), *more)
    for entry in entries:
        key = entry.partition("=")[0].strip()
        if "=" not in entry or key not in known:
            raise BadOption(
                f"--data: unknown entry {entry!r}{nearest(key, known)}; a file takes {', '.join(more)}, and a file "
                f"of all devices also {', '.join((*_FIELDS, *_TEXTS, 'partition'))}"
            )


_KEY = re.compile(r"\s*[A-Za-z_]+\s*=")

_FIELDS: Mapping[str, type] = {
    "index": int,
    "of": int,
    "seed": int,
    "held_out": float,
    "validation": float,
    "shift": float,
    "public": float,
    "severity": int,
}

_TEXTS = ("part", "test", "corruption", "train_on", "test_on", "leave_out")


def _grammar(needs_path: bool) -> str:
    return (
        f"{'PATH, ' if needs_path else ''}{', '.join((*_FIELDS, *_TEXTS))} and partition, as in index=2,of=5,alpha=0.3"
    )


def _number(key: str, text: str, kind: type) -> float:
    try:
        value = cast(float, kind(text))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        wanted = "an integer" if kind is int else "a number"
        raise BadOption(f"--data: {key}={text}; {key} must be {wanted}, as in index=2,of=5,alpha=0.3")
    return value


# Searching the installed packages takes longer than loading a device's part.
@lru_cache
def find_partition(name: str) -> Partition:
    """Return the partition registered as ``name``. Raises BadOption if there is none."""
    found = installed("sparrow.partitions")
    if name not in found:
        raise BadOption(f"--data: unknown partition {name!r}{nearest(name, found)}; choose from {', '.join(found)}")
    return cast(Partition, load(found[name], BadOption, what="--data: partition"))


def _option_types(rule: Callable[..., object]) -> dict[str, type]:
    hints = get_type_hints(rule)
    return {
        name: int if hints.get(name) is int else float
        for name, parameter in inspect.signature(rule).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("of", "seed")
    }


def deal(dataset: Dataset, dealing: Dealing, *, device: str) -> Split:
    """Return this device's samples by use, as indices into ``dataset``.

    Raises DataError if there are too few samples.
    """
    index, of = place(dataset, dealing, device=device)
    all_devices = replace(dealing, index=None)
    own = _split(dataset, _deal(dataset, all_devices, of)[index], dealing)
    if dealing.test == "published":
        own = replace(own, test=_published(dataset, all_devices, index=index, of=of))
    own = Split(
        _recorded_with(dataset, own.train, dealing.train_on, "training"),
        _recorded_with(dataset, own.validation, dealing.train_on, "validation"),
        _recorded_with(dataset, own.test, dealing.test_on, "test"),
    )
    if dealing.shift == 0:
        return own
    union = _recorded_with(dataset, _union(dataset, all_devices, of, "test"), dealing.test_on, "test")
    return replace(own, test=shifted(own.test, union, seed=dealing.seed, device=index, degree=dealing.shift))


def place(dataset: Dataset, dealing: Dealing, *, device: str) -> tuple[int, int]:
    """Return (index, of): the part of the device, and the number of parts. Raises DataError."""
    of = dealing.of
    if of is None:
        of = DEVICES
        if dealing.partition == "person" and dataset.people is not None:
            training, _ = _parts(dataset, replace(dealing, index=None))
            of = len(people_of(dataset.people[training], **dict(dealing.options)))
    return dealing.place(device, of), of


@lru_cache(maxsize=8)
def _parts(dataset: Dataset, dealing: Dealing) -> tuple[Index, Index]:
    """Return the samples to deal, and the test part: the published part, or all samples of ``leave_out``."""
    every = np.arange(len(dataset.targets))
    name = dealing.leave_out
    training = every[: dataset.published] if dealing.part == "train" else every
    if name is None:
        return training, every[dataset.published :]
    if dataset.people is None:
        raise BadOption(f"--data: leave_out={name}, but the data do not name who made a sample; leave it out")
    if name not in dataset.names:
        raise BadOption(f"--data: leave_out={name}{nearest(name, dataset.names)}; choose from {some(dataset.names)}")
    out = dataset.people == dataset.names.index(name)
    return training[~out[training]], np.flatnonzero(out)


def _recorded_with(dataset: Dataset, samples: Index, source: str | None, use: str) -> Index:
    # Applied after the split, so that `test_on` does not change the training samples.
    if source is None:
        return samples
    option = f"{'test_on' if use == 'test' else 'train_on'}={source}"
    if dataset.sources is None:
        raise BadOption(f"--data: {option}, but the data do not name the recording device of a sample; leave it out")
    known = np.unique(dataset.sources)
    if source not in known:
        raise BadOption(f"--data: {option}; choose from {', '.join(known)}")
    kept: Index = samples[dataset.sources[samples] == source]
    if len(kept) == 0:
        raise BadOption(f"--data: {option}, but this device has no {use} sample of a {source}; leave it out")
    return kept


@lru_cache(maxsize=8)
def _deal(dataset: Dataset, dealing: Dealing, of: int) -> list[Index]:
    left = np.setdiff1d(*_dealt_samples(dataset, dealing), assume_unique=True)
    people = None if dataset.people is None else dataset.people[left]
    rule = find_partition(dealing.partition)
    dealt = rule(dataset.targets[left], people, of=of, seed=dealing.seed, **dict(dealing.options))
    together = np.sort(np.concatenate(dealt))
    if len(dealt) != of or (together[1:] == together[:-1]).any() or together[0] < 0 or together[-1] >= len(left):
        raise DataError(
            f"partition={dealing.partition} made {len(dealt)} parts for {of} devices, or dealt a sample twice or an "
            "unknown one; correct the function"
        )
    return [left[samples] for samples in dealt]


def public_samples(dataset: Dataset, dealing: Dealing) -> Index | None:
    """Return the public samples of every device, as ordered indices into ``dataset``; they are not dealt."""
    _, public = _dealt_samples(dataset, replace(dealing, index=None))
    return public if len(public) else None


def _dealt_samples(dataset: Dataset, dealing: Dealing) -> tuple[Index, Index]:
    training, _ = _parts(dataset, dealing)
    return training, training[drawn(len(training), dealing.seed, dealing.public)]


def all_training_samples(dataset: Dataset, dealing: Dealing, *, device: str) -> Index:
    """Return the training samples of all devices without repeats, identical on every device."""
    _, of = place(dataset, dealing, device=device)
    return _union(dataset, replace(dealing, index=None), of, "train")


@lru_cache(maxsize=8)
def _union(dataset: Dataset, dealing: Dealing, of: int, use: Literal["train", "test"]) -> Index:
    split = [_split(dataset, samples, dealing) for samples in _deal(dataset, dealing, of)]
    return np.sort(np.concatenate([each.train if use == "train" else each.test for each in split]))


def _split(dataset: Dataset, samples: Index, dealing: Dealing) -> Split:
    held_out = None if dealing.test == "published" else dealing.held_out
    runs = None if dataset.runs is None else dataset.runs[samples]
    parts = split(len(samples), dealing.seed, held_out, dealing.validation, runs)
    return Split(samples[parts.train], samples[parts.validation], samples[parts.test])


def _published(dataset: Dataset, dealing: Dealing, *, index: int, of: int) -> Index:
    # Together the devices test on that part, each sample once, so that the mean of their accuracies, weighted by test
    # samples, is the accuracy on all of it.
    _, testing = _parts(dataset, dealing)
    if len(testing) == 0:
        raise BadOption("--data: test=published, but the data have no published test part; add one, or leave it out")
    if len(testing) < of:
        raise BadOption(
            f"--data: test=published, but {len(testing)} published test samples are too few for {of} devices; use "
            "fewer devices, or leave it out"
        )
    return testing[index::of]
