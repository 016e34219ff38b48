"""A user's own arrays: ``--data path.npz``, a file of each device, written by ``numpy.savez``.

    x_train [N, ...]  y_train [N]      required
    x_val, y_val, x_test, y_test       optional, in pairs
    x_public, y_public                 optional: samples that every device has alike (``Task.public``)
    classes                            optional: their number, or their names in order

Without validation and test arrays the training samples are split into 0.595, 0.105 and 0.3; with test arrays alone,
validation is split off; with validation arrays alone, they serve for reports too. Images are [N,H,W] or [N,C,H,W], of
unsigned bytes (scaled to [0,1]) or floats (taken as they are); [N,F] are features, best standardised to mean 0 and
deviation 1 beforehand, alike on all devices. Labels are whole numbers from 0.

Or one file with the samples of all devices, an npz or a table: ``--data path.npz,index=2,of=5`` (see ``dealing``).

    x [N, ...]  y [N]                  or x_train, y_train and what else there is of these pairs: all are dealt
    person [N]                         optional: who made each sample (``formats.PEOPLE``); then devices are people
    run [N]                            optional: the unbroken recording that a sample is of; no split divides one

Numbers that are no bytes are put on one scale: the training samples of all devices have mean 0 and deviation 1 in each
feature [N,F], or channel of images. That can only be computed where all samples are in one place.

The model follows from the input's shape and the number of classes alone, so that every device builds the same. A device
that has not met every class must therefore say how many there are: that is what ``classes`` is for.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks import Seeded, Task
from edge_sdk.tasks.datasets import Dataset
from edge_sdk.tasks.dealing import Dealing, all_training_samples, deal, public_samples, read_dealing
from edge_sdk.tasks.formats import TABLES, Part, archived, number_classes, read_table, whose
from edge_sdk.tasks.loading import Arrays, BadOption, Chosen, DataError, NoData, Scale, classification, label_names
from edge_sdk.tasks.partition import split

if TYPE_CHECKING:
    from torch import nn

SAME_CLASSES = (
    "every device's file must agree on the number of classes: add the entry 'classes' to it, their number or their "
    "names in order, as in numpy.savez(path, x_train=x, y_train=y, classes=10)"
)
"""What to do where a file's model does not fit the federation's."""


def load(data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """Return the task over the arrays of the file ``data``, or this device's part of them, the model made by
    ``models.build_model``.

    Raises DataError.
    """
    if not data:
        raise BadOption(
            "the task npz needs arrays: add --data path.npz, the device's own file, or path.npz,index=0,of=5"
        )
    if "," in data:
        return _load_part(data, device=device, seed=seed, batch_size=batch_size)
    if Path(data).suffix in TABLES:
        raise DataError(
            f"{data}: a table holds the samples of all devices; say which part is meant, as in {data},index=0,of=5, or "
            "give the device an npz file of its own"
        )
    arrays = _read(data)
    train = _pair(arrays, "train")
    validation = _pair(arrays, "val") if _has_pair(arrays, "val") else None
    test = _pair(arrays, "test") if _has_pair(arrays, "test") else None
    public = _pair(arrays, "public") if _has_pair(arrays, "public") else None
    for name, pair in (("val", validation), ("test", test), ("public", public)):
        if pair is not None and pair.inputs.shape[1:] != train.inputs.shape[1:]:
            raise DataError(
                f"x_{name}: samples have shape {_shape(pair)}, those of x_train {_shape(train)}; they must be alike"
            )
    pairs = {"y_train": train, "y_val": validation, "y_test": test, "y_public": public}
    classes = _classes(arrays, {key: pair.targets for key, pair in pairs.items() if pair is not None})
    shape = _shape(train)
    if validation is None:
        parts = split(len(train.inputs), seed)
        if test is None:
            test = _choose(train, parts.test)
        else:  # reports have their own samples: those that the split would have held out are trained on
            parts = replace(parts, train=np.union1d(parts.train, parts.test))
        train, validation = _choose(train, parts.train), _choose(train, parts.validation)
    model = Seeded(partial(_build, shape, classes))
    return classification("npz", model, train, validation, test, batch_size=batch_size, public=public)


def _load_part(data: str, *, device: str, seed: int, batch_size: int) -> Task:
    """Return the task over this device's part of a file with all samples, dealt by person where it says
    who they are."""
    dataset = read_whole(data.partition(",")[0])
    usual = "dirichlet" if dataset.people is None else "person"
    dealing = read_dealing(data, task="npz", seed=seed, partition=usual)
    parts, public = deal(dataset, dealing, device=device), public_samples(dataset, dealing)
    scale = _scale(dataset, dealing, device)
    shared = None if public is None else Chosen(dataset.inputs, dataset.targets, public, scale)
    train, validation, test = (
        Chosen(dataset.inputs, dataset.targets, index, scale) for index in (parts.train, parts.validation, parts.test)
    )
    model = Seeded(partial(_build, dataset.inputs.shape[1:], dataset.classes))
    return classification("npz", model, train, validation, test, batch_size=batch_size, public=shared)


def _scale(dataset: Dataset, dealing: Dealing, device: str) -> Scale:
    """Return bytes to [0,1]; other numbers to mean 0 and deviation 1 over the training samples of all devices."""
    width = dataset.inputs.shape[1]
    if dataset.inputs.dtype == np.uint8:
        return Scale((0.0,) * width, (255.0,) * width)
    return _standard(dataset, all_training_samples(dataset, dealing, device=device).tobytes())


@lru_cache(maxsize=8)
def _standard(dataset: Dataset, samples: bytes) -> Scale:
    """Kept, for a process that simulates many devices. samples: indices, which as an array could not be looked up."""
    values = dataset.inputs[np.frombuffer(samples, np.intp)].astype(np.float64)
    axes = (0, *range(2, values.ndim))
    deviation = values.std(axis=axes)
    return Scale(tuple(values.mean(axis=axes).tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist()))


def read_whole(path: str) -> Dataset:
    """Return all samples of an npz file or table; a process reads it once, until its time stamp changes. Raises
    DataError.
    """
    place = Path(path).expanduser().resolve()
    if not place.exists():
        raise NoData(f"{path}: there is no such file; check --data")
    if place.is_dir():
        raise DataError(f"{path}: is a folder; name one file in it")
    return _read_whole(place, place.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read_whole(place: Path, stamp: int) -> Dataset:
    arrays: dict[str, Array] = {}
    if place.suffix in TABLES:
        parts = [read_table(place)]
    else:
        arrays = _read(str(place))
        uses = [use for use in ("_train", "_val", "_test") if f"x{use}" in arrays or f"y{use}" in arrays]
        for key in (f"{letter}{use}" for use in uses or [""] for letter in "xy"):
            _wanted(arrays, key)
        parts = [archived(place, arrays, use) for use in uses or [""]]
    inputs, labels = _joined(parts)
    targets, names = number_classes(str(place), labels)
    if targets.min() < 0 or targets.max() >= max(len(targets), 2):
        raise DataError(
            f"{place}: labels go from {targets.min()} to {targets.max()}, and there are {len(targets)} samples; number "
            "the classes from 0"
        )
    classes = _classes(arrays, {str(place): targets}, names or 0)
    people, people_names, runs = whose(parts, len(targets))
    return Dataset(inputs, targets, people, classes, published=len(targets), names=people_names, runs=runs)


def _joined(parts: list[Part]) -> tuple[Array, Array]:
    """Check and return inputs and labels of all parts one after another."""
    for part in parts:
        counts = [len(each) for each in (part.inputs, part.labels, part.people) if each is not None]
        if part.labels.ndim != 1 or min(counts) < max(counts) or not part.labels.size:
            raise DataError(
                f"{part.source}: {counts[0]} samples have labels of shape {part.labels.shape}"
                f"{f' and {counts[2]} people' if len(counts) > 2 else ''}; give one of each per sample, and at least "
                "one sample"
            )
    inputs = [_inputs(part.inputs, part.source) for part in parts]
    if len({(each.shape[1:], each.dtype) for each in inputs}) > 1:
        raise DataError(
            f"{parts[0].source}: samples of {' and '.join(f'{each.shape[1:]} {each.dtype}' for each in inputs)}; they "
            "must be alike"
        )
    return np.concatenate(inputs), np.concatenate([part.labels for part in parts])


def _build(shape: tuple[int, ...], classes: int) -> nn.Module:
    from edge_sdk.tasks.models import build_model

    return build_model(shape, classes)


def _read(path: str) -> dict[str, Array]:
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                return dict(loaded)
    except FileNotFoundError:
        raise NoData(f"{path}: there is no such file; check --data") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an npz file ({error}); write it with numpy.savez") from None
    except ValueError:  # numpy takes whatever is neither zip nor npy for a pickle
        raise DataError(
            f"{path}: holds pickled objects or is not an npz file; write plain arrays of numbers with numpy.savez"
        ) from None
    raise DataError(f"{path}: holds one array; name several in one file with numpy.savez(path, x_train=x, y_train=y)")


def _has_pair(arrays: Mapping[str, Array], name: str) -> bool:
    """Return whether the optional pair is there; half a pair is refused by ``_pair``."""
    return f"x_{name}" in arrays or f"y_{name}" in arrays


def _pair(arrays: Mapping[str, Array], name: str) -> Arrays:
    """Return the samples and labels of one use, checked and converted: float32 inputs, int64 targets."""
    inputs, labels = _wanted(arrays, f"x_{name}"), _wanted(arrays, f"y_{name}")
    if labels.shape != inputs.shape[:1] or len(labels) == 0:
        raise DataError(
            f"y_{name}: has shape {labels.shape} beside x_{name} of {inputs.shape}; give one whole number per sample "
            f"(for one-hot rows: y.argmax(axis=1)), and at least one sample"
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"y_{name}: is of {labels.dtype}; number the classes from 0 and store them as int64")
    below = labels < 0  # type: ignore[operator]
    if below.any():
        raise DataError(f"y_{name}: has {label_names(labels[below])}; number the classes from 0")
    values = _inputs(inputs, f"x_{name}")
    if values.dtype == np.uint8:
        values = values.astype(np.float32) / 255
    return Arrays(values, labels.astype(np.int64))


def _wanted(arrays: Mapping[str, Array], key: str) -> Array:
    if key not in arrays:
        raise DataError(f"the file holds {', '.join(sorted(arrays)) or 'nothing'}, but no {key}; add it")
    return arrays[key]


def _inputs(array: Array, key: str) -> Array:
    """Return samples with a channel axis where they are images: bytes as they are, everything else in float32."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"{key}: is of {array.dtype}; store numbers, best float32 or, for images, uint8")
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise DataError(f"{key}: has shape {array.shape}; give features [N,F] or images [N,H,W] or [N,C,H,W]")
    if array.ndim == 4 and array.shape[3] in (1, 3) and min(array.shape[1:3]) >= 8:
        raise DataError(
            f"{key}: has shape {array.shape}, it seems with the channels last; store {key}.transpose(0, 3, 1, 2)"
        )
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
        values = array if array.dtype == np.uint8 else array.astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{key}: a value is missing or not finite in float32; replace or remove such samples")
    return values[:, None] if array.ndim == 3 else values


def _classes(arrays: Mapping[str, Array], labels: Mapping[str, Array], named: int = 0) -> int:
    """Return how many classes there are: what the file says, or else one more than the largest label, or as many as
    were ``named``."""
    if "classes" not in arrays:
        return max(2, named, 1 + max(int(each.max()) for each in labels.values()))
    entry = arrays["classes"]
    if entry.ndim == 0 and entry.dtype.kind in "iu":
        classes = int(entry)
    elif entry.ndim == 1:
        classes = len(entry)
    else:
        raise DataError(
            f"classes: has shape {entry.shape} of {entry.dtype}; give their number, or a list of their names"
        )
    if classes < 2:
        raise DataError(f"classes: there are {classes}, at least 2 are needed; {SAME_CLASSES}")
    for key, each in labels.items():
        beyond = each[each >= classes]  # type: ignore[operator]
        if len(beyond):
            raise DataError(
                f"{key}: has {label_names(beyond)}, but there are {classes} classes, 0 to {classes - 1}; {SAME_CLASSES}"
            )
    return classes


def _choose(pair: Arrays, index: Array) -> Arrays:
    return Arrays(pair.inputs[index], pair.targets[index])


def _shape(pair: Arrays) -> tuple[int, ...]:
    """Shape of one sample."""
    return tuple(pair.inputs.shape[1:])
