"""A user's own arrays: ``--data path.npz``, written by ``numpy.savez``.

    x_train [N, ...]  y_train [N]      required
    x_val, y_val, x_test, y_test       optional, in pairs
    classes                            optional: their number, or their names in order

Without validation and test arrays the training samples are split into 0.595, 0.105 and 0.3; with test arrays alone,
validation is split off; with validation arrays alone, they serve for reports too. Images are [N,H,W] or [N,C,H,W], of
unsigned bytes (scaled to [0,1]) or floats (taken as they are); [N,F] are features, best standardised to mean 0 and
deviation 1 beforehand, alike on all devices. Labels are whole numbers from 0.

The model follows from the input's shape and the number of classes alone, so that every device builds the same. A device
that has not met every class must therefore say how many there are: that is what ``classes`` is for.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, BadOption, DataError, NoData, build_seeded, classification, label_names
from edge_sdk.tasks.partition import split

SAME_CLASSES = (
    "every device's file must agree on the number of classes: add the entry 'classes' to it, their number or their "
    "names in order, as in numpy.savez(path, x_train=x, y_train=y, classes=10)"
)
"""What to do where a file's model does not fit the federation's."""

WIDTHS = (16, 32, 64)
"""Channels of the first convolutions; further ones keep the last width."""


def load(data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """The task over the arrays of the file ``data``, the model made by ``build_model``. Raises DataError."""
    if not data:
        raise BadOption("the task npz needs the device's own arrays: add --data path.npz")
    arrays = _read(data)
    train = _pair(arrays, "train")
    validation = _pair(arrays, "val") if _has_pair(arrays, "val") else None
    test = _pair(arrays, "test") if _has_pair(arrays, "test") else None
    for name, pair in (("val", validation), ("test", test)):
        if pair is not None and pair.inputs.shape[1:] != train.inputs.shape[1:]:
            raise DataError(
                f"x_{name}: samples have shape {_shape(pair)}, those of x_train {_shape(train)}; they must be alike"
            )
    pairs = {"y_train": train, "y_val": validation, "y_test": test}
    classes = _classes(arrays, {key: pair for key, pair in pairs.items() if pair is not None})
    shape = _shape(train)
    if validation is None:
        parts = split(len(train.inputs), seed)
        if test is None:
            test = _choose(train, parts.test)
        else:  # reports have their own samples: those that the split would have held out are trained on
            parts = replace(parts, train=np.union1d(parts.train, parts.test))
        train, validation = _choose(train, parts.train), _choose(train, parts.validation)
    model = build_seeded(lambda: build_model(shape, classes), seed)
    return classification("npz", model, train, validation, test, batch_size=batch_size)


def build_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small network for samples of ``shape``: a pure function of its arguments, initial weights apart.

    [C,H,W] with H and W of at least 8: convolutions of 3 x 3 with group norm, ReLU and 2 x 2 pooling until a side is
    shorter than 4, then 64 hidden units. Anything else: two hidden layers of 64. Group norm because batch norm's
    running statistics suit no device when the devices' data differ.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    features = math.prod(shape)
    if len(shape) == 3 and min(shape[1:]) >= 8:
        channels, height, width = shape
        stage = 0
        while min(height, width) >= 4:
            wide = WIDTHS[min(stage, len(WIDTHS) - 1)]
            stage += 1
            layers[f"conv{stage}"] = nn.Conv2d(channels, wide, kernel_size=3, padding=1)
            layers[f"norm{stage}"] = nn.GroupNorm(4, wide)
            layers[f"relu{stage}"] = nn.ReLU()
            layers[f"pool{stage}"] = nn.MaxPool2d(2)
            channels, height, width = wide, height // 2, width // 2
        features = channels * height * width
        layers["flatten"] = nn.Flatten()
    else:
        layers["flatten"] = nn.Flatten()
        layers["fc0"] = nn.Linear(features, 64)
        layers["act0"] = nn.ReLU()
        features = 64
    layers["fc1"] = nn.Linear(features, 64)
    layers["act1"] = nn.ReLU()
    layers["out"] = nn.Linear(64, classes)
    return nn.Sequential(layers)


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
            f"{path}: holds pickled objects or is no npz file; write plain arrays of numbers with numpy.savez"
        ) from None
    raise DataError(f"{path}: holds one array; name several in one file with numpy.savez(path, x_train=x, y_train=y)")


def _has_pair(arrays: Mapping[str, Array], name: str) -> bool:
    """Whether the optional pair is there; half a pair is refused by ``_pair``."""
    return f"x_{name}" in arrays or f"y_{name}" in arrays


def _pair(arrays: Mapping[str, Array], name: str) -> Arrays:
    """The samples and labels of one use, checked and converted: float32 inputs, int64 targets."""
    for key in (f"x_{name}", f"y_{name}"):
        if key not in arrays:
            raise DataError(f"the file holds {', '.join(sorted(arrays)) or 'nothing'}, but no {key}; add it")
    inputs, labels = arrays[f"x_{name}"], arrays[f"y_{name}"]
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
    return Arrays(_inputs(inputs, f"x_{name}"), torch.from_numpy(labels.astype(np.int64)))


def _inputs(array: Array, key: str) -> torch.Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"{key}: is of {array.dtype}; store numbers, best float32 or, for images, uint8")
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise DataError(f"{key}: has shape {array.shape}; give features [N,F] or images [N,H,W] or [N,C,H,W]")
    if array.ndim == 4 and array.shape[3] in (1, 3) and min(array.shape[1:3]) >= 8:
        raise DataError(
            f"{key}: has shape {array.shape}, it seems with the channels last; store {key}.transpose(0, 3, 1, 2)"
        )
    values = array.astype(np.float32)
    if array.dtype == np.uint8:
        values /= 255
    if not np.isfinite(values).all():
        raise DataError(f"{key}: a value is not finite in float32; replace or remove such samples")
    return torch.from_numpy(values[:, None] if array.ndim == 3 else values)


def _classes(arrays: Mapping[str, Array], pairs: Mapping[str, Arrays]) -> int:
    """How many classes there are: what the file says, or else one more than the largest label."""
    if "classes" not in arrays:
        return max(2, 1 + max(int(pair.targets.max()) for pair in pairs.values()))
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
    for key, pair in pairs.items():
        beyond = pair.targets[pair.targets >= classes]
        if len(beyond):
            raise DataError(
                f"{key}: has {label_names(beyond.numpy())}, but there are {classes} classes, 0 to {classes - 1}; "
                f"{SAME_CLASSES}"
            )
    return classes


def _choose(pair: Arrays, index: Array) -> Arrays:
    chosen = torch.from_numpy(index)
    return Arrays(pair.inputs[chosen], pair.targets[chosen])


def _shape(pair: Arrays) -> tuple[int, ...]:
    """Shape of one sample."""
    return tuple(pair.inputs.shape[1:])
