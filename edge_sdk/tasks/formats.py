"""The file formats in which a task's samples may come; what is met in a folder decides which is read.

    npz          x_train, y_train and perhaps x_test, y_test; or x, y; perhaps person beside them, and watch
                 (true: of a watch, false: of a phone). Images as files end to end: jpeg_train, offset_train (image i is
                 jpeg[offset[i]:offset[i+1]]), y_train; _test
    IDX          train-images-idx3-ubyte, train-labels-idx1-ubyte, perhaps t10k-..., each perhaps with .gz
    binary       data_batch_1.bin .. 5 and test_batch.bin: a byte of class and 3 x 1024 of an image each (CIFAR-10)
    table        train.csv or .parquet, perhaps test.csv or .parquet; or one such file: a column label, y or target,
                 perhaps person, all other columns the values of a sample in order
    images       [train/ and test/]CLASS/*.png or .jpg

Instead of ``person`` it may be called ``subject``, ``people`` or ``device``. Bytes stay bytes; nothing is ever
unpickled.
"""

from __future__ import annotations

import gzip
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks.decoding import IMAGES, decode_files, decode_jpegs
from edge_sdk.tasks.loading import DataError, NoData, label_names

PEOPLE = ("person", "subject", "people", "device")
"""What the entry or column is called that says who made a sample, or on which device."""

WATCH = "watch"
"""The entry that says whether a sample is of a watch; those that are not are a phone's."""

LABELS = ("label", "y", "target")
"""What the column with the classes is called."""


@dataclass(frozen=True)
class SampleFormat:
    """The shape and labels of a task's samples, in any file format.

    shape: of one sample. pixels: kept as bytes, otherwise as float16. archives: names of npz files looked for in a
    folder. described: the public set, for those who do not have it.
    """

    task: str
    shape: tuple[int, ...]
    classes: int
    pixels: bool
    archives: tuple[str, ...]
    described: str

    @property
    def advice(self) -> str:
        """The kinds of data that may be given, and the public set."""
        return (
            f"give a folder or file with {' or '.join(self.archives)}, IDX files, train.csv, train.parquet or folders "
            f"of images by class; the public set is {self.described}"
        )


@dataclass(frozen=True)
class Parts:
    """A set as read: inputs [N, *shape], targets [N] int64, people [N] or None, sources [N] (names) or None.

    The first ``published`` samples are its training part.
    """

    inputs: Array
    targets: Array
    people: Array | None
    published: int
    sources: Array | None = None


@dataclass(frozen=True)
class Part:
    """One file's samples before they are checked; ``source`` is how a message calls them."""

    source: str
    inputs: Array
    labels: Array
    people: Array | None = None
    watch: Array | None = None


def read(place: Path, wanted: SampleFormat) -> Parts:
    """Return the set at ``place``, an existing file or folder. Raises DataError."""
    for reader in (_npz, _idx, _binary, _table, _images):
        parts = reader(place, wanted)
        if parts is not None:
            return parts
    if place.is_dir():
        met = sorted(entry.name for entry in place.iterdir())
        listed = ", ".join(met[:6]) + (", ..." if len(met) > 6 else "")
        raise DataError(
            f"{place}: the folder holds {listed or 'nothing'}, no samples of {wanted.task}; {wanted.advice}"
        )
    raise DataError(f"{place}: a file of an unknown format; {wanted.advice}")


# --- npz ---------------------------------------------------------------------------------------------------------


def _npz(place: Path, wanted: SampleFormat) -> Parts | None:
    path = place if place.suffix == ".npz" else _first(place, wanted.archives)
    if path is None:
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            names = set(archive.files)
            if "jpeg_train" in names:
                return _jpegs(path, archive, wanted)
            if "x" in names:
                return _join([archived(path, archive, "")], wanted)
            uses = ["_train", *(["_test"] if "x_test" in names else [])]
            return _join([archived(path, archive, use) for use in uses], wanted)
    except KeyError as error:
        raise DataError(
            f"{path}: holds {', '.join(sorted(names)) or 'nothing'}, but {error.args[0]}; add it, or {wanted.advice}"
        ) from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an npz file ({error}); write it with numpy.savez") from None
    except DataError:
        raise
    except (ValueError, TypeError):  # what is neither zip nor npy numpy takes for a pickle; npy is one bare array
        raise DataError(f"{path}: holds pickled objects or is not an npz file; write plain arrays of numbers") from None


def archived(path: Path, archive: Mapping[str, Array], use: str) -> Part:
    """Return the samples x, y and, where they have any, people and watches of ``use``: _train, _test, or nothing."""
    people = _only(path, [name + use for name in PEOPLE if name + use in archive])
    inputs, labels = _entry(archive, f"x{use}"), _entry(archive, f"y{use}")
    return Part(
        f"{path} (x{use})", inputs, labels, None if people is None else archive[people], archive.get(WATCH + use)
    )


def _only(path: Path, names: Sequence[str]) -> str | None:
    """Return the one name of ``names``, None for none. Raises DataError for more: it is not known which counts."""
    if len(names) > 1:
        raise DataError(f"{path}: both {names[0]} and {names[1]} say who made a sample; keep one of them")
    return names[0] if names else None


def _entry(archive: Mapping[str, Array], name: str) -> Array:
    if name not in archive:
        raise KeyError(f"no {name}")
    return archive[name]


def _jpegs(path: Path, archive: Mapping[str, Array], wanted: SampleFormat) -> Parts:
    uses = ["_train", *(["_test"] if "jpeg_test" in archive else [])]
    offsets = [_entry(archive, f"offset{use}") for use in uses]
    labels = [_entry(archive, f"y{use}") for use in uses]
    inputs = decode_jpegs(
        path, lambda: [_entry(archive, f"jpeg{use}") for use in uses], offsets, wanted.shape, name=wanted.task
    )
    return _checked(str(path), inputs, np.concatenate(labels), None, len(labels[0]), wanted)


# --- IDX and CIFAR-10's binary version ---------------------------------------------------------------------------


def _idx(place: Path, wanted: SampleFormat) -> Parts | None:
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
                raise NoData(f"{folder}: there is no {lost} beside {found[0].name}; put both files there")
        images, labels = found
        parts.append(Part(str(images), _read_idx(images), _read_idx(labels)))
        if len(parts) == 1 and use == "t10k":
            raise NoData(f"{folder}: there is no train-images-idx3-ubyte beside {images.name}; put all files there")
    return _join(parts, wanted) if parts else None


def _idx_names(use: str, content: str) -> list[str]:
    names = (f"{use}-{content}-ubyte", f"{use}-{content.replace('-', '.')}-ubyte")
    return [name + ending for name in names for ending in ("", ".gz")]


def _read_idx(path: Path) -> Array:
    """Two zero bytes, 8 for unsigned bytes, the number of axes, each one's length as big-endian uint32, the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); fetch it anew") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path}: begins with {content[:4].hex()}, so it is not an IDX file of unsigned bytes")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path}: ends within its header; fetch it anew")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path}: holds {values.size} values, its header says {shape}; fetch it anew")
    return values.reshape(shape)


def _binary(place: Path, wanted: SampleFormat) -> Parts | None:
    if len(wanted.shape) != 3 or not (place / "data_batch_1.bin").is_file():
        return None
    size = 1 + int(np.prod(wanted.shape))
    parts = []
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        path = place / name
        if not path.is_file():
            raise NoData(f"{place}: there is no {name} beside data_batch_1.bin; {wanted.advice}")
        values = np.fromfile(path, np.uint8)
        if values.size % size:
            raise DataError(
                f"{path}: {values.size} bytes are no multiple of {size}, a class and an image; fetch it anew"
            )
        rows = values.reshape(-1, size)
        parts.append(Part(str(path), rows[:, 1:].reshape(-1, *wanted.shape), rows[:, 0]))
    return _join(parts, wanted, training=5)


# --- tables ------------------------------------------------------------------------------------------------------

TABLES = (".csv", ".parquet")


def _table(place: Path, wanted: SampleFormat) -> Parts | None:
    if place.is_dir():
        train = _first(place, [f"train{ending}" for ending in TABLES])
        if train is None:
            return None
        paths = [train, _first(place, [f"test{ending}" for ending in TABLES])]
    elif place.suffix in TABLES:
        paths = [place]
    else:
        return None
    return _join([read_table(path) for path in paths if path is not None], wanted)


def read_table(path: Path) -> Part:
    """Return the samples of a table, a row each: inputs [N, columns] as numbers. Raises DataError."""
    try:
        import pandas
    except ImportError:
        raise DataError(f"{path}: reading tables needs pandas: pip install 'sparrow-fl[data]'") from None
    try:
        table = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
    except (OSError, ValueError, ImportError) as error:  # pandas' and pyarrow's own errors are ValueErrors
        raise DataError(f"{path}: cannot be read as a table ({error})") from None
    columns = [str(name) for name in table.columns]
    label = next((name for name in LABELS if name in columns), None)
    if label is None:
        raise DataError(
            f"{path}: has the columns {', '.join(columns[:4])}, ..., but none called {' or '.join(LABELS)}; name the "
            "column with the classes so"
        )
    person = _only(path, [name for name in PEOPLE if name in columns])
    values = table.drop(columns=[name for name in (label, person) if name is not None])
    if "Unnamed: 0" in columns:
        raise DataError(
            f"{path}: its first column has no name, as an index has none; write it with to_csv(index=False)"
        )
    text = [name for name in values.columns if not pandas.api.types.is_numeric_dtype(values[name])]
    if text:
        raise DataError(f"{path}: the column {text[0]} holds no numbers; replace its values by numbers, or remove it")
    for name in (label, person):
        if name is not None and table[name].isna().any():
            raise DataError(f"{path}: the column {name} lacks a value; remove such rows")
    inputs = values.to_numpy(np.float64) if values.dtypes.nunique() > 1 else values.to_numpy()
    return Part(str(path), inputs, table[label].to_numpy(), None if person is None else table[person].to_numpy())


# --- folders of images -------------------------------------------------------------------------------------------


def _images(place: Path, wanted: SampleFormat) -> Parts | None:
    if not place.is_dir() or not wanted.pixels:
        return None
    folders = [place / "train", place / "test"] if (place / "train").is_dir() else [place]
    found = [_by_class(folder) for folder in folders if folder.is_dir()]
    if not found[0]:
        return None
    names = sorted({path.parent.name for files in found for path in files})
    labels = np.array([path.parent.name for files in found for path in files])
    inputs = decode_files(place, [path for files in found for path in files], wanted.shape, name=wanted.task)
    if len(names) != wanted.classes and not all(name.isdecimal() for name in names):
        raise DataError(
            f"{place}: has {len(names)} folders of images, {wanted.task} has {wanted.classes} classes; add the others "
            f"or name the folders by number, 0 to {wanted.classes - 1}"
        )
    return _checked(str(place), inputs, labels, None, len(found[0]), wanted)


def _by_class(folder: Path) -> list[Path]:
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return [path for entry in classes for path in sorted(entry.iterdir()) if path.suffix.lower() in IMAGES]


# --- what all have in common -------------------------------------------------------------------------------------


def _first(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _join(parts: Sequence[Part], wanted: SampleFormat, training: int = 1) -> Parts:
    """Return the parts one after another; the first ``training`` are those to train on."""
    for part in parts:
        if len(part.inputs) != len(part.labels):
            raise DataError(f"{part.source}: {len(part.inputs)} samples have {len(part.labels)} labels; give one each")
    with_people = [part.people for part in parts if part.people is not None]
    if with_people and (len(with_people) < len(parts) or any(len(p.inputs) != len(p.people) for p in parts)):  # type: ignore[arg-type]
        raise DataError(f"{parts[0].source}: some samples have a person and others none; give one each, or none at all")
    checked = _checked(
        parts[0].source,
        _together([_values(part.inputs, part.source, wanted) for part in parts]),
        _together([part.labels for part in parts]),
        _together(with_people) if with_people else None,
        sum(len(part.inputs) for part in parts[:training]),
        wanted,
    )
    return replace(checked, sources=_sources(parts))


def _sources(parts: Sequence[Part]) -> Array | None:
    """Return the recorder of each sample, ``phone`` or ``watch``; None if the data set does not say."""
    flags = [part.watch for part in parts if part.watch is not None]
    if not flags:
        return None
    if len(flags) < len(parts) or any(
        part.watch is not None and (part.watch.dtype != np.bool_ or part.watch.shape != (len(part.inputs),))
        for part in parts
    ):
        raise DataError(f"{parts[0].source}: {WATCH} must be true or false for each sample, or left out")
    return np.where(_together(flags), "watch", "phone")


def _together(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _values(array: Array, source: str, wanted: SampleFormat) -> Array:
    """Return samples in the task's shape and type: [N,H,W] gets its channel, [N,H,W,C] and rows of values are
    rearranged.
    """
    if array.dtype.kind not in "fiub":
        raise DataError(f"{source}: holds values of {array.dtype}; give numbers")
    shape, size = wanted.shape, int(np.prod(wanted.shape))
    if array.shape[1:] == (*shape[1:], shape[0]) and len(shape) == 3:
        array = np.moveaxis(array, 3, 1)
    elif (array.shape[1:] == shape[1:] and shape[0] == 1) or array.shape[1:] == (size,):
        array = array.reshape(-1, *shape)
    if array.shape[1:] != shape:
        raise DataError(
            f"{source}: samples have shape {array.shape[1:]}, {wanted.task} wants {shape} or {size} values in order"
        )
    if not wanted.pixels:
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
            values = array.astype(np.float16)
        if not np.isfinite(values).all():
            raise DataError(f"{source}: a value is not finite, or too large for float16; remove such samples")
        return values
    if array.dtype != np.uint8 and not np.array_equal(array, np.clip(np.floor(array), 0, 255)):
        raise DataError(
            f"{source}: images must be whole grey levels from 0 to 255; multiply shares of brightness by 255"
        )
    return np.require(array, np.uint8, ["C", "W"])  # torch warns of arrays that cannot be written


def _checked(
    source: str, inputs: Array, labels: Array, people: Array | None, published: int, wanted: SampleFormat
) -> Parts:
    """Classes numbered, people numbered, and nothing missing."""
    if len(inputs) != len(labels) or len(labels) == 0:
        raise DataError(f"{source}: {len(inputs)} samples have {len(labels)} labels; give one each, and at least one")
    targets = _numbered(source, labels, wanted)
    beyond = targets[(targets < 0) | (targets >= wanted.classes)]
    if len(beyond):
        raise DataError(
            f"{source}: has {label_names(beyond)} in {len(beyond)} of {len(targets)} samples, but {wanted.task} has "
            f"{wanted.classes} classes, 0 to {wanted.classes - 1}; correct them or leave these samples out"
        )
    codes = None if people is None else np.unique(people, return_inverse=True)[1]
    return Parts(inputs, targets, codes, published)


def _numbered(source: str, labels: Array, wanted: SampleFormat) -> NDArray[np.int64]:
    targets, names = number_classes(source, labels)
    if names not in (None, wanted.classes):
        raise DataError(
            f"{source}: has {names} names of classes, {wanted.task} has {wanted.classes}; number them from 0"
        )
    return targets


def number_classes(source: str, labels: Array) -> tuple[NDArray[np.int64], int | None]:
    """Return classes as int64, numbers as they are and names by their order; and how many names there are, None for
    numbers.

    Raises DataError.
    """
    if labels.dtype.kind in "iub":
        return labels.astype(np.int64), None
    if labels.dtype.kind == "f":  # as pandas makes them of whole numbers where one is missing
        if not np.isfinite(labels).all() or (labels != np.floor(labels)).any():
            raise DataError(f"{source}: a label is missing or no whole number; number the classes from 0")
        return labels.astype(np.int64), None
    texts = np.array([str(label) for label in labels])
    names = np.unique(texts)
    if all(name.isdecimal() for name in names):
        return texts.astype(np.int64), None
    return np.searchsorted(names, texts).astype(np.int64), len(names)
