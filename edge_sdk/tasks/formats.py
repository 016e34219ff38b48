"""File formats of a task's samples; in a folder, the format follows from its files.

    npz          x_train, y_train and optionally x_test, y_test; or x, y and optionally test (true: published test
                 part). Optional: person, watch (true: recorded with a watch, false: with a phone) and run (number of
                 the unbroken recording). Instead of x, concatenated image files: jpeg and offset (image i is
                 jpeg[offset[i]:offset[i+1]]). For a text: text, start and the speakers (``text``)
    IDX          train-images-idx3-ubyte, train-labels-idx1-ubyte, optionally t10k-..., each optionally with .gz
    binary       data_batch_1.bin .. 5 and test_batch.bin: a class byte and 3 x 1024 bytes per image (CIFAR-10)
    table        train.csv or .parquet, optionally test.csv or .parquet; or one such file: a column label, y, target or
                 class, optionally person, all other columns the values of a sample in order
    images       [train/ and test/]CLASS/*.png or .jpg

``PEOPLE`` lists other names for ``person``; if it holds numbers, ``persons`` (``writers``, ...) may name them.
MNIST_writers.npz beside MNIST.npz may hold writer_train and writer_test. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparrow.places import expanded
from sparrow.protocol.manifest import Array
from sparrow.reading import Decoded, ReadOptions, read_file
from sparrow.reading.archives import opened
from sparrow.reading.errors import VALUES, BadOption, DataError, NoData
from sparrow.reading.roles import PEOPLE

from .datasets import Dataset
from .decoding import IMAGES, decode_images
from .loading import label_names
from .text import windows

# The entry that marks samples of a watch; the others are a phone's.
WATCH = "watch"


@dataclass(frozen=True)
class SampleFormat:
    """The shape and labels of a task's samples, independent of the file format."""

    task: str
    # Shape of one sample.
    shape: tuple[int, ...]
    classes: int
    # Where to get the public set.
    described: str
    # Kept as bytes, otherwise as float16.
    pixels: bool = True
    # Names of npz files to look for in a folder, by default the task's.
    archives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "archives", self.archives or (f"{self.task}.npz",))

    @property
    def advice(self) -> str:
        """Advice for messages: the accepted kinds of data, and the public set."""
        return (
            f"give a folder or file with {' or '.join(self.archives)}, IDX files, train.csv, train.parquet or folders "
            f"of images by class; the public set is {self.described}"
        )


@dataclass(frozen=True)
class _Part:
    """Unchecked samples of a file; ``source`` is its name in messages."""

    source: str
    inputs: Array
    labels: Array
    people: Array | None = None
    watch: Array | None = None
    run: Array | None = None
    # Marks the published test part.
    test: Array | None = None
    # Names of people numbered from 0.
    names: Array | None = None


def read_dataset(path: str | None, wanted: SampleFormat) -> Dataset:
    """Return the data set at ``path``, cached until its time stamp changes. Raises DataError if it cannot be read."""
    if not path:
        raise BadOption(f"the task {wanted.task} needs data: add --data PATH; {wanted.advice}")
    place = expanded(path).resolve()
    try:
        stamp = place.stat().st_mtime_ns
    except OSError as error:
        kind = NoData if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"{path}: {error.strerror}; {wanted.advice}") from None
    return _read(place, stamp, wanted)


@lru_cache(maxsize=8)
def _read(place: Path, stamp: int, wanted: SampleFormat) -> Dataset:
    for reader in (_npz, _idx, _binary, _table, _images):
        parts = reader(place, wanted)
        if parts is not None:
            return parts
    if place.is_dir():
        met = sorted(entry.name for entry in place.iterdir())
        listed = ", ".join(met[:6]) + (", ..." if len(met) > 6 else "")
        raise DataError(
            f"{place}: the folder contains {listed or 'no files'}, but no samples of {wanted.task}; {wanted.advice}"
        )
    raise DataError(f"{place}: unknown file format; {wanted.advice}")


# --- npz ---------------------------------------------------------------------------------------------------------


def _npz(place: Path, wanted: SampleFormat) -> Dataset | None:
    path = place if place.suffix == ".npz" else _first(place, wanted.archives)
    if path is None:
        return None
    with _arrays(path) as archive:
        try:
            entries: Mapping[str, Array] = ChainMap(archive, _people_beside(path, archive))  # type: ignore[arg-type]
            if "text" in archive:
                return _join([_text(path, entries, wanted)], wanted)
            content = "jpeg" if any(name in archive for name in ("jpeg", "jpeg_train")) else "x"
            uses = ["_train", *(["_test"] if f"{content}_test" in archive else [])]
            uses = [""] if content in archive else uses
            if content == "jpeg":
                return _jpegs(path, entries, uses, wanted)
            return _join([_archived(path, entries, use) for use in uses], wanted)
        except KeyError as error:
            held = ", ".join(sorted(archive)) or "no arrays"
            raise DataError(f"{path}: contains {held}, but {error.args[0]}; add it, or {wanted.advice}") from None


@contextmanager
def _arrays(path: Path) -> Iterator[Mapping[str, Array]]:
    with opened(path, str(path)) as archive:
        if isinstance(archive, np.ndarray):
            raise DataError(f"{path}: holds one array, so it is not an npz file; write one with numpy.savez")
        yield archive


def _archived(path: Path, archive: Mapping[str, Array], use: str, inputs: Array | None = None) -> _Part:
    """Return the samples of one ``use``, _train, _test or "", with their further entries.

    inputs: the samples, if they are not the entry x.
    """
    person = _only(path, [name for name in PEOPLE if name + use in archive])
    return _Part(
        f"{path} (x{use})",
        _entry(archive, f"x{use}") if inputs is None else inputs,
        _entry(archive, f"y{use}"),
        None if person is None else archive[person + use],
        archive.get(WATCH + use),
        archive.get(f"run{use}"),
        None if use else archive.get("test"),
        archive.get(f"{person}s"),
    )


def _people_beside(path: Path, archive: Mapping[str, Array]) -> dict[str, Array]:
    for kind in PEOPLE:
        beside = path.with_name(f"{path.stem}_{kind}s.npz")
        if not beside.is_file():
            continue
        with _arrays(beside) as found:
            for labels in ("y", "y_train", "y_test"):
                if labels in found and labels in archive and not np.array_equal(found[labels], archive[labels]):
                    raise DataError(
                        f"{beside}: its {labels} differs from that of {path.name}; give the same samples in order"
                    )
            return {name: found[name] for name in found if name.startswith(kind)}
    return {}


def _text(path: Path, archive: Mapping[str, Array], wanted: SampleFormat) -> _Part:
    person = _only(path, [name for name in PEOPLE if name in archive])
    if person is None:
        raise KeyError(f"no entry names the speakers ({', '.join(PEOPLE)})")
    speeches = {name: _entry(archive, name) for name in ("text", "start")}
    inputs, targets, people, runs = windows(
        **speeches, people=archive[person], place=archive.get("place"), length=wanted.shape[0]
    )
    return _Part(str(path), inputs, targets, people, run=runs, names=archive.get(f"{person}s"))


def _only(path: Path, names: Sequence[str]) -> str | None:
    if len(names) > 1:
        raise DataError(f"{path}: both {names[0]} and {names[1]} say who made a sample; keep one of them")
    return names[0] if names else None


def _entry(archive: Mapping[str, Array], name: str) -> Array:
    if name not in archive:
        raise KeyError(f"no {name}")
    return archive[name]


def _jpegs(path: Path, archive: Mapping[str, Array], uses: Sequence[str], wanted: SampleFormat) -> Dataset:
    offsets = [_entry(archive, f"offset{use}") for use in uses]
    ends = np.cumsum([len(offset) - 1 for offset in offsets])

    def images() -> Iterator[tuple[str, bytes]]:
        for content, offset in zip([_entry(archive, f"jpeg{use}") for use in uses], offsets, strict=True):
            for number, (start, stop) in enumerate(pairwise(offset)):
                yield f"{path}, image {number}", content[start:stop].tobytes()

    inputs = decode_images([path], images, int(ends[-1]), wanted.shape, name=wanted.task)
    own = zip(uses, np.split(inputs, ends[:-1]), strict=True)
    return _join([_archived(path, archive, use, each) for use, each in own], wanted, inputs=inputs)


# --- IDX and CIFAR-10's binary version ---------------------------------------------------------------------------


def _idx(place: Path, wanted: SampleFormat) -> Dataset | None:
    if not place.is_dir() and not re.search(r"[-.]idx[13]-ubyte", place.name):
        return None
    folder = place if place.is_dir() else place.parent
    parts = []
    for use in ("train", "t10k"):
        content = {kind: _first(folder, _idx_names(use, kind)) for kind in ("images-idx3", "labels-idx1")}
        found = [path for path in content.values() if path is not None]
        if not found:
            continue
        for kind, path in content.items():
            if path is None:
                lost = " or ".join(_idx_names(use, kind)[:2])
                raise NoData(f"{folder}: {lost} is missing beside {found[0].name}; put both files there")
        images, labels = found
        parts.append(_Part(str(images), _read_idx(images), _read_idx(labels)))
        if len(parts) == 1 and use == "t10k":
            raise NoData(f"{folder}: train-images-idx3-ubyte is missing beside {images.name}; put all files there")
    return _join(parts, wanted) if parts else None


def _idx_names(use: str, content: str) -> list[str]:
    names = (f"{use}-{content}-ubyte", f"{use}-{content.replace('-', '.')}-ubyte")
    return [name + ending for name in names for ending in ("", ".gz")]


def _read_idx(path: Path) -> Array:
    # Two zero bytes, 8 for unsigned bytes, the number of axes, big-endian uint32 lengths, the values.
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); download it again") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path}: begins with {content[:4].hex()}, so it is not an IDX file of unsigned bytes")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path}: ends within its header; download it again")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path}: contains {values.size} values, its header says {shape}; download it again")
    return values.reshape(shape)


def _binary(place: Path, wanted: SampleFormat) -> Dataset | None:
    if len(wanted.shape) != 3 or not (place / "data_batch_1.bin").is_file():
        return None
    size = 1 + int(np.prod(wanted.shape))
    parts = []
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        path = place / name
        if not path.is_file():
            raise NoData(f"{place}: {name} is missing beside data_batch_1.bin; {wanted.advice}")
        values = np.fromfile(path, np.uint8)
        if values.size % size:
            raise DataError(
                f"{path}: {values.size} bytes are not a multiple of {size}, a class and an image; download it again"
            )
        rows = values.reshape(-1, size)
        parts.append(_Part(str(path), rows[:, 1:].reshape(-1, *wanted.shape), rows[:, 0]))
    return _join(parts, wanted, training=5)


# --- tables ------------------------------------------------------------------------------------------------------

TABLES = (".csv", ".parquet")

# A column of these values holds the numbers 0 and 1.
TRUTHS = ("false", "true")


def _table(place: Path, wanted: SampleFormat) -> Dataset | None:
    if place.is_dir():
        train = _first(place, [f"train{ending}" for ending in TABLES])
        if train is None:
            return None
        paths = [train, _first(place, [f"test{ending}" for ending in TABLES])]
    elif place.suffix in TABLES:
        paths = [place]
    else:
        return None
    return _join([_read_table(path) for path in paths if path is not None], wanted)


def _read_table(path: Path) -> _Part:
    raw = read_file(path, ReadOptions(target="class"))[""]
    assert raw.labels is not None
    assert not isinstance(raw.inputs, Decoded), "rows of a table"
    names = next((column for column in raw.columns if column.categories not in ((), TRUTHS)), None)
    if names is not None:
        raise DataError(
            f"{path}: the column {names.name} is not numeric ({', '.join(names.categories[:3])}); replace its values "
            "by numbers, or remove it"
        )
    people = None if raw.people is None else _as_integers(raw.people)
    return _Part(str(path), raw.inputs, _as_integers(raw.labels), people, run=raw.runs)


def _as_integers(names: Array) -> Array:
    try:
        integers = names.astype(np.int64)
    except (ValueError, OverflowError):
        return names
    return integers if np.array_equal(integers.astype(str), names) else names


# --- folders of images -------------------------------------------------------------------------------------------


def _images(place: Path, wanted: SampleFormat) -> Dataset | None:
    if not place.is_dir() or not wanted.pixels:
        return None
    folders = [place / "train", place / "test"] if (place / "train").is_dir() else [place]
    found = [_by_class(folder) for folder in folders if folder.is_dir()]
    if not found[0]:
        return None
    names = sorted({path.parent.name for files in found for path in files})
    paths = [path for files in found for path in files]
    labels = np.array([path.parent.name for path in paths])

    def images() -> Iterator[tuple[str, bytes]]:
        return ((str(path), path.read_bytes()) for path in paths)

    inputs = decode_images([place, *paths], images, len(paths), wanted.shape, name=wanted.task)
    if len(names) != wanted.classes and not all(name.isdecimal() for name in names):
        raise DataError(
            f"{place}: has {len(names)} folders of images, {wanted.task} has {wanted.classes} classes; add the missing "
            f"ones or name the folders by number, 0 to {wanted.classes - 1}"
        )
    inputs, targets = _checked(str(place), inputs, labels, wanted)
    return Dataset(inputs, targets, people=None, classes=wanted.classes, published=len(found[0]))


def _by_class(folder: Path) -> list[Path]:
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return [path for entry in classes for path in sorted(entry.iterdir()) if path.suffix.lower() in IMAGES]


# --- common to all formats ---------------------------------------------------------------------------------------


def _first(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _join(parts: Sequence[_Part], wanted: SampleFormat, training: int = 1, inputs: Array | None = None) -> Dataset:
    """Concatenate parts; the first ``training`` samples, or the samples outside ``test``, are training data."""
    source = parts[0].source
    for part in parts:
        if len(part.inputs) != len(part.labels):
            raise DataError(
                f"{part.source}: {len(part.inputs)} samples have {len(part.labels)} labels; provide one per sample"
            )
    if inputs is None:
        inputs = _together([_values(part.inputs, part.source, wanted) for part in parts])
    inputs, targets = _checked(source, inputs, _together([part.labels for part in parts]), wanted)
    watch = _of_each(parts, WATCH, "b", "true or false")
    sources = None if watch is None else np.where(watch, "watch", "phone")
    published = sum(len(part.inputs) for part in parts[:training])
    order: slice | Array = slice(None)
    if (test := _of_each(parts, "test", "b", "true or false")) is not None:
        order = np.argsort(test, kind="stable")
        published = len(test) - int(np.count_nonzero(test))
        if published == 0:
            raise DataError(
                f"{source}: test is true for all samples, so no training samples are left; correct it or leave it out"
            )
        inputs = inputs[order]
        targets = targets[order]
        sources = None if sources is None else sources[order]
    codes, names, runs = _whose(parts, published, order)
    return Dataset(inputs, targets, codes, wanted.classes, published, sources, names, runs)


def _whose(
    parts: Sequence[_Part], published: int, order: slice | Array = slice(None)
) -> tuple[NDArray[np.intp] | None, tuple[str, ...], NDArray[np.intp] | None]:
    """Return the people of all samples in this ``order``, their names, and the recordings, as far as known.

    People without any of the first ``published`` samples come last, so that their devices can be new ones. Raises
    DataError.
    """
    source = parts[0].source
    given = [part.people for part in parts if part.people is not None]
    if given and (len(given) < len(parts) or any(len(part.inputs) != len(part.people) for part in parts)):  # type: ignore[arg-type]
        raise DataError(f"{source}: only some samples have a person; give one for each, or for none")
    runs = _of_each(parts, "run", "iu", "an integer")
    codes = None
    names = np.array([], str)
    if given:
        found, codes = np.unique(_together(given)[order], return_inverse=True)
        last = ~np.isin(np.arange(len(found)), codes[:published])
        ranked = np.argsort(last, kind="stable")
        codes = np.argsort(ranked)[codes]
        names = _names_of(found[ranked], parts[0].names, source)
    if runs is not None:
        pairs = np.stack([np.zeros(len(runs), np.intp) if codes is None else codes, runs[order]])
        runs = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
    return codes, tuple(map(str, names)), runs


def _names_of(people: Array, names: Array | None, source: str) -> Array:
    if names is None or people.dtype.kind not in "iu":
        return people
    if people.min() < 0 or people.max() >= len(names):
        raise DataError(
            f"{source}: people are {people.min()} to {people.max()}, but there are {len(names)} names; add the missing "
            "names"
        )
    named: Array = names[people]
    return named


def _of_each(parts: Sequence[_Part], name: str, kinds: str, wanted: str) -> Array | None:
    given = [getattr(part, name) for part in parts]
    if all(each is None for each in given):
        return None
    for part, each in zip(parts, given, strict=True):
        if each is None or each.dtype.kind not in kinds or each.shape != (len(part.inputs),):
            raise DataError(f"{part.source}: {name} must be {wanted} for each sample, or left out")
    return _together(given)


def _together(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _values(array: Array, source: str, wanted: SampleFormat) -> Array:
    """Return samples in the task's shape and type; [N,H,W] gets a channel, [N,H,W,C] and flat rows are rearranged."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"{source}: contains values of {array.dtype}; provide numbers")
    shape = wanted.shape
    size = int(np.prod(shape))
    if array.shape[1:] == (*shape[1:], shape[0]) and len(shape) == 3:
        array = np.moveaxis(array, 3, 1)
    elif (array.shape[1:] == shape[1:] and shape[0] == 1) or array.shape[1:] == (size,):
        array = array.reshape(-1, *shape)
    if array.shape[1:] != shape:
        raise DataError(
            f"{source}: samples have shape {array.shape[1:]}, {wanted.task} wants {shape} or {size} values in order"
        )
    if not wanted.pixels:
        # Values that do not fit become infinite, and are refused.
        with np.errstate(over="ignore"):
            values = array.astype(np.float16)
        if not np.isfinite(values).all():
            raise DataError(
                f"{source}: a value is not finite, or too large for float16; remove such samples", failure=VALUES
            )
        return values
    if array.dtype != np.uint8 and not np.array_equal(array, np.clip(np.floor(array), 0, 255)):
        raise DataError(
            f"{source}: images need integer grey levels from 0 to 255; multiply brightness between 0 and 1 by 255"
        )
    # torch warns of arrays that cannot be written.
    return np.require(array, np.uint8, ["C", "W"])


def _checked(source: str, inputs: Array, labels: Array, wanted: SampleFormat) -> tuple[Array, NDArray[np.int64]]:
    if len(inputs) != len(labels) or len(labels) == 0:
        raise DataError(
            f"{source}: {len(inputs)} samples have {len(labels)} labels; provide one per sample, at least one in all"
        )
    targets = _numbered(source, labels, wanted)
    beyond = targets[(targets < 0) | (targets >= wanted.classes)]
    if len(beyond):
        raise DataError(
            f"{source}: has {label_names(beyond)} in {len(beyond)} of {len(targets)} samples, but {wanted.task} has "
            f"{wanted.classes} classes, 0 to {wanted.classes - 1}; correct them or leave these samples out"
        )
    return inputs, targets


def _numbered(source: str, labels: Array, wanted: SampleFormat) -> NDArray[np.int64]:
    """Return class indices; names are numbered in sorted order. Raises DataError."""
    if labels.dtype.kind in "iub":
        return labels.astype(np.int64)
    # pandas stores integers as floats if one is missing.
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all() or (labels != np.floor(labels)).any():
            raise DataError(f"{source}: a label is missing or not an integer; number the classes from 0")
        return labels.astype(np.int64)
    texts = np.array([str(label) for label in labels])
    names = np.unique(texts)
    if all(name.isdecimal() for name in names):
        return texts.astype(np.int64)
    if len(names) != wanted.classes:
        raise DataError(
            f"{source}: has {len(names)} class names, {wanted.task} has {wanted.classes}; number them from 0"
        )
    return np.searchsorted(names, texts).astype(np.int64)
