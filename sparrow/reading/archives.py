"""Numpy files to raw samples: npz with x and y, or pairs x_train, y_train, x_val, ...; npy without labels.

    x [N, ...]  y [N]       samples and labels; integers and text are classes, floats are numbers
    person [N]              person of each sample (``roles.PEOPLE``); ``persons`` may name numbered people
    run [N]                 unbroken recording of each sample
    classes                 number of classes, or their names in order; integer labels are then positions in it

With pairs, ``person_train`` and ``run_train`` belong to x_train. Samples keep their type, except that floats become
float32, bool uint8, and large unsigned integers int64. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import Preparation, RawType, Targets
from .axes import axes_of
from .errors import VALUES, DataError
from .labels import Decided, Labels, Question, decide
from .options import ReadOptions, Wanted
from .roles import RUN, folded, is_person
from .samples import Raw, plural, some

USES = ("train", "val", "test", "public")

Array = NDArray[Any]


def read_archive(path: Path, source: str, options: ReadOptions, wanted: Wanted) -> dict[str, Raw]:
    """Return an npz file's samples by use, or those of an npy file."""
    with opened(path, source) as loaded:
        if isinstance(loaded, np.ndarray):
            entries: Mapping[str, Array] = {"x": loaded}
            if wanted.labelled:
                raise DataError(f"{source}: holds one array and no labels; write both with numpy.savez(path, x=x, y=y)")
            return {"": _read(_File(source, entries, "", bare=True), options, wanted)}
        uses = _uses(source, loaded, wanted.labelled)
        found: dict[str, Raw] = {}
        for use in uses:
            found[use] = _read(_File(source, loaded, use), options, wanted)
            if found[use].kind is not None and wanted.targets is None:
                # All parts have labels of the kind of the training labels.
                options = replace(options, target="class" if found[use].kind == "classes" else "number")
        return found


@contextmanager
def opened(path: Path, source: str) -> Iterator[Mapping[str, Array] | Array]:
    """Context manager: the arrays of an npz file, read when they are used, or the array of an npy file.

    source: its name in messages. Raises DataError for a damaged file, also while arrays are read.
    """
    try:
        with path.open("rb") as file:
            yield np.load(file, allow_pickle=False)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, MemoryError) as error:
        raise DataError(f"{source}: cannot be read as an npz file ({error}); write it with numpy.savez") from None
    # numpy takes a file that is neither zip nor npy for a pickle.
    except ValueError:
        raise DataError(
            f"{source}: holds pickled objects or is not an npz file; write plain arrays with numpy.savez"
        ) from None


def _uses(source: str, entries: Mapping[str, Array], labelled: bool) -> list[str]:
    letters = "xy" if labelled else "x"
    uses = [use for use in USES if any(f"{letter}_{use}" in entries for letter in letters)] or [""]
    if uses != [""] and "train" not in uses and labelled:
        uses.insert(0, "train")
    for key in (f"{letter}{'_' if use else ''}{use}" for use in uses for letter in letters):
        if key not in entries:
            wanted = f"{key}; add it" if uses != [""] else f"{' and '.join(letters)} or x_train; name them so"
            raise DataError(f"{source}: holds {some(entries) or 'nothing'}, but no {wanted}")
    return uses


@dataclass(frozen=True)
class _File:
    """The entries of one use."""

    source: str
    entries: Mapping[str, Array]
    use: str
    # An npy file, whose array has no name.
    bare: bool = False

    def key(self, name: str) -> str:
        """Return the entry's name for this use."""
        return f"{name}_{self.use}" if self.use else name

    def called(self, name: str) -> str:
        """Return the entry's name for messages."""
        return self.source if self.bare else f"{self.source}: {self.key(name)}"

    def get(self, name: str) -> Array | None:
        """Return the entry, None if the file has none."""
        return self.entries.get(self.key(name))

    def find(self, wanted: str) -> list[str]:
        """Return this use's entries of this name in any case; ``person`` means any of ``PEOPLE``."""
        ending = f"_{self.use}" if self.use else ""
        stems = {key: key.removesuffix(ending) for key in self.entries if key.endswith(ending)}
        return [
            key for key, stem in stems.items() if (is_person(stem) if wanted == "person" else folded(stem) == wanted)
        ]


def _read(file: _File, options: ReadOptions, wanted: Wanted) -> Raw:
    preparation = wanted.preparation
    said: list[str] = []
    stored = file.get("x")
    assert stored is not None
    called = file.called("x")
    if stored.ndim == 0 or 0 in stored.shape:
        raise DataError(f"{called} has shape {stored.shape}; give at least one sample")
    axes = axes_of(called, stored, options.axes, preparation, said, shape=wanted.shape)
    inputs = _converted(called, stored, preparation)
    out = _not_finite(called, inputs, options)
    classes = _classes(file)
    decided = None
    if wanted.labelled:
        decided = _labels(file, len(inputs), classes, options, wanted.targets, said)
        if decided.missing is not None:
            out |= decided.missing
    elif file.get("y") is not None:
        said.append(f"the entry {file.key('y')} holds labels and was left out")
    people = _people(file, len(inputs))
    runs = _runs(file, len(inputs))
    count = int(np.count_nonzero(out))
    if count == len(out):
        raise DataError(f"{called}: every sample lacks a value, so missing=drop leaves none; correct the file")
    kept: Any = slice(None)
    if count:
        kept = ~out
        said.append(f"{plural(count, 'sample')} of {len(out):,} without a value left out")
    return Raw(
        source=called,
        inputs=np.ascontiguousarray(inputs[kept]),
        labels=None if decided is None else decided.labels[kept],
        kind=None if decided is None else decided.kind,
        axes=axes,
        people=None if people is None else people[kept],
        runs=None if runs is None else runs[kept],
        classes=classes or (),
        said=(*said, *(decided.said if decided else ())),
    )


# --- samples


def _converted(called: str, stored: Array, preparation: Preparation | None) -> Array:
    kind = stored.dtype.kind
    if kind not in "fiub":
        raise DataError(f"{called} is of {stored.dtype}; store numbers, such as float32, or uint8 for images")
    wanted = preparation.dtype if preparation else _raw_type(stored.dtype)
    if kind == "f" and wanted != "float32":
        raise DataError(
            f"{called} is of {stored.dtype}, the federation's samples are {wanted}; give them as they were recorded, "
            "not scaled"
        )
    if wanted == "float32":
        # Values beyond float32 become infinite, and are refused below.
        with np.errstate(over="ignore"):
            values = stored.astype(np.float32)
        beyond = np.isinf(values) & ~np.isinf(stored) if stored.dtype.itemsize > 4 else np.zeros(1, np.bool_)
    else:
        limits = np.iinfo(wanted)
        values = stored if kind == "b" else stored.astype(stored.dtype.newbyteorder("="))
        beyond = np.zeros(1, np.bool_)
        if kind != "b" and (int(values.min()) < limits.min or int(values.max()) > limits.max):
            beyond = (values < limits.min) | (values > limits.max)
        values = values.astype(wanted, copy=False)
    if beyond.any():
        place = tuple(int(index[0]) for index in np.nonzero(beyond))
        at = ", ".join(map(str, place))
        raise DataError(f"{called}[{at}] is {stored[place]}, beyond {wanted}; correct it or leave out the sample")
    return values


def _raw_type(dtype: np.dtype[Any]) -> RawType:
    if dtype.kind == "f":
        return "float32"
    if dtype.kind == "b":
        return "uint8"
    name = dtype.newbyteorder("=").name
    return name if name in get_args(RawType) else "int64"  # type: ignore[return-value]


def _not_finite(called: str, inputs: Array, options: ReadOptions) -> NDArray[np.bool_]:
    """Return the samples to omit. Raises DataError for missing values without an option."""
    out = np.zeros(len(inputs), np.bool_)
    if inputs.dtype.kind != "f":
        return out
    axes = tuple(range(1, inputs.ndim))
    lost: NDArray[np.bool_] = np.asarray(np.isnan(inputs).any(axis=axes))
    infinite: NDArray[np.bool_] = np.asarray(np.isinf(inputs).any(axis=axes))
    refused = infinite if options.missing == "mean" else lost | infinite
    if not refused.any():
        return out
    if options.missing == "drop":
        return refused
    places = some(np.flatnonzero(refused), 3)
    fault = "an infinite value" if infinite.any() else "a missing value (NaN)"
    mean = "" if infinite.any() else ", missing=mean replaces them by the mean"
    raise DataError(
        f"{called} has {fault} in {plural(int(refused.sum()), 'sample')}: {places}; missing=drop leaves them out{mean}",
        failure=VALUES,
    )


# --- labels


def _classes(file: _File) -> tuple[str, ...] | None:
    """Return the classes that the file declares, if any."""
    if "classes" not in file.entries:
        return None
    entry = file.entries["classes"]
    if entry.ndim == 0 and entry.dtype.kind in "iu":
        if not 2 <= int(entry) <= 10_000:
            raise DataError(f"{file.source}: classes is {entry}; give the number of classes, 2 to 10,000")
        return tuple(map(str, range(int(entry))))
    if entry.ndim != 1 or entry.dtype.kind not in "iuUS" or len(entry) < 2:
        raise DataError(
            f"{file.source}: classes has shape {entry.shape} of {entry.dtype}; give the number of classes, or a list "
            "of two or more names"
        )
    names = tuple(name.strip() for name in _texts(f"{file.source}: classes", entry))
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{file.source}: classes repeats a name or has an empty one ({some(names)}); correct it")
    return names


def _labels(
    file: _File,
    samples: int,
    declared: tuple[str, ...] | None,
    options: ReadOptions,
    targets: Targets | None,
    said: list[str],
) -> Decided:
    stored = file.get("y")
    assert stored is not None
    called = file.called("y")
    entry = file.key("y")
    if stored.ndim == 2 and stored.shape[1] == 1:
        said.append(f"{entry} of shape {stored.shape} was read as {stored.shape[:1]}")
        stored = stored[:, 0]
    if stored.shape[:1] != (samples,):
        raise DataError(f"{called} has shape {stored.shape} for {samples:,} samples; give one label per sample")
    if stored.ndim == 2:
        said.append(f"the one-hot rows of {entry} were read as classes 0 to {stored.shape[1] - 1}")
        stored = _from_one_hot(called, stored, declared)
    if stored.ndim != 1:
        raise DataError(
            f"{called} has shape {stored.shape}; a file's labels are one per sample, publish such targets from Python"
        )
    if stored.dtype.kind not in "iubfUS":
        raise DataError(f"{called} is of {stored.dtype}; store integers, text or, for a regression, floats")
    question = Question(
        file.source,
        lambda place: f"{entry}[{place}]",
        options.target,
        targets,
        declared or (),
        drop=options.missing == "drop",
    )
    if stored.dtype.kind == "f":
        return _check_declared(called, decide(_of_floats(stored), question), declared)
    if declared and stored.dtype.kind in "iu" and question.wanted() != "numbers":
        stored = _named(called, stored, declared, file.entries["classes"])
    found = Labels()
    found.add(_texts(called, stored))
    return _check_declared(called, decide(found, question), declared)


def _from_one_hot(called: str, rows: Array, declared: tuple[str, ...] | None) -> NDArray[np.int64]:
    """Return the position of the 1 in each row."""
    numeric = rows.dtype.kind in "iubf"
    if not numeric or not ((rows == 0) | (rows == 1)).all() or (np.count_nonzero(rows, axis=1) != 1).any():
        raise DataError(
            f"{called} has shape {rows.shape}, and its rows are not one-hot; give one label per sample, or publish "
            "models with several outputs from Python"
        )
    if declared and len(declared) != rows.shape[1]:
        raise DataError(
            f"{called} has rows of {rows.shape[1]}, but classes lists {len(declared)}; provide one name per column"
        )
    return np.asarray(rows.argmax(axis=1), np.int64)


def _of_floats(stored: Array) -> Labels:
    """Return labels of a float type, which count as decimals in any notation."""
    found = Labels()
    values = stored.astype(np.float64)
    found.add(["" if value != value else repr(value) for value in values.tolist()])
    found.decimals = True
    return found


def _named(called: str, labels: Array, declared: tuple[str, ...], entry: Array) -> Array:
    """Return the names of integer labels: positions in the declared classes, unless these are integers too."""
    if entry.dtype.kind in "iu" and entry.ndim == 1 and np.isin(labels, entry).all():
        return labels
    beyond = (labels < 0) | (labels >= len(declared))
    if beyond.any():
        place = int(beyond.argmax())
        raise DataError(
            f"{called}[{place}] is {labels[place]}, but classes declares {len(declared)}, 0 to {len(declared) - 1} "
            f"({some(declared)}); correct the label, or add its class to the entry classes"
        )
    return np.array(declared, np.str_)[labels.astype(np.int64)]


def _check_declared(called: str, decided: Decided, declared: tuple[str, ...] | None) -> Decided:
    if declared and decided.kind == "classes":
        known = np.isin(decided.labels, np.array(declared, np.str_))
        if decided.missing is not None:
            known |= decided.missing
        if not known.all():
            place = int(known.argmin())
            raise DataError(
                f"{called}[{place}] is {str(decided.labels[place])!r}, which the entry classes does not name "
                f"({some(declared)}); correct the label, or add its class"
            )
    return decided


def _texts(called: str, entry: Array) -> list[str]:
    if entry.dtype.kind != "S":
        return list(map(str, entry.tolist()))
    try:
        return [text.decode() for text in entry.tolist()]
    except UnicodeDecodeError as error:
        raise DataError(f"{called} holds bytes that are not UTF-8 ({error}); store text") from None


# --- people and runs


def _people(file: _File, samples: int) -> NDArray[np.str_] | None:
    found = file.find("person")
    if len(found) > 1:
        raise DataError(f"{file.source}: both {found[0]} and {found[1]} say who made a sample; keep one of them")
    if not found:
        return None
    entry = _one_each(file, found[0], samples, "iuUSb", "one name or integer")
    stem = found[0].removesuffix(f"_{file.use}") if file.use else found[0]
    names = file.entries.get(f"{stem}s")
    if names is not None and entry.dtype.kind in "iu":
        if names.ndim != 1 or entry.min() < 0 or entry.max() >= len(names):
            raise DataError(
                f"{file.source}: {found[0]} is {entry.min()} to {entry.max()}, but {stem}s has shape {names.shape}; "
                f"make {stem}s a list with one name for each value"
            )
        entry = np.array(_texts(f"{file.source}: {stem}s", names))[entry]
    texts = [text.strip() for text in _texts(f"{file.source}: {found[0]}", entry)]
    if "" in texts:
        raise DataError(
            f"{file.source}: {found[0]}[{texts.index('')}] is empty; say who made each sample, or remove the entry"
        )
    return np.array(texts, np.str_)


def _runs(file: _File, samples: int) -> NDArray[np.int64] | None:
    found = file.find(RUN)
    if not found:
        return None
    return _one_each(file, found[0], samples, "iu", "an integer").astype(np.int64)


def _one_each(file: _File, name: str, samples: int, kinds: str, wanted: str) -> Array:
    """Return an entry with one value per sample, of these type kinds. Raises DataError for others."""
    entry = file.entries[name]
    if entry.shape != (samples,) or entry.dtype.kind not in kinds:
        raise DataError(
            f"{file.source}: {name} has shape {entry.shape} of {entry.dtype}; give {wanted} for each of "
            f"{samples:,} samples"
        )
    return entry
