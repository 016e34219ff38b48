"""Check and convert an application's data, for all engines, before a device enrols.

``take_in`` checks all data in memory and the first batch of any other loader. Later batches of a loader are checked
when training reads them, and raise the same BadArgument.

    list of pairs                     unchanged, or batches converted once, without empty ones
    generator, zip, map, iterator     read once into a list
    ArrayBatches                      unchanged, or converted once
    DataLoader, any other iterable    wrapped in a ``Fitted``, which converts each batch
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.preparation import Preparation
from sparrow.reading import Decoded
from sparrow.reading.errors import VALUES, DataError

from ..errors import BadArgument
from . import Batches, Task
from .loading import ArrayBatches, Arrays, Chosen, Reshaped, label_names

LOADERS = ("train", "validation", "test", "public")
MOST_NAMED = 12
PAIR = "(inputs, targets), two arrays with the batch first"
# Values that are checked at a time.
CHUNK = 2**22
# Types that some versions of PyTorch lack.
WIDER: dict[str, type[np.generic]] = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}

Pair = tuple[Any, Any]


def take_in(task: Task, manifest: Manifest) -> Task:
    """Return the task with data converted for engines, or for the federation's preparation.

    Raises BadArgument, naming the loader.
    """
    _check_names(task, manifest)
    raw = manifest.preparation if task.prepared is None else None
    if task.classification and task.model is None and not _has_labels(manifest):
        task = replace(task, classification=False)
    found: dict[str, Any] = {}
    with random_state_kept(*(getattr(task, name) for name in LOADERS)):
        for name in LOADERS:
            batches = getattr(task, name)
            if batches is not None or name in ("train", "validation"):
                loader = _Loader(name, manifest, raw, classifies=task.classification, models=task.model)
                found[name] = loader.take(batches)
    return replace(task, **found)


def _check_names(task: Task, manifest: Manifest) -> None:
    names = () if manifest.targets is None else manifest.targets.names
    given = tuple(map(str, task.class_names))
    if names and given and given[: len(names)] != names:
        raise BadArgument(
            f"class_names: the task's classes are {', '.join(given[:MOST_NAMED])}; the federation's are "
            f"{', '.join(names[:MOST_NAMED])}, in this order: number labels by them, or leave class_names out"
        )


@dataclass(frozen=True)
class Taken:
    """The types of a training step."""

    inputs: np.dtype[Any]
    targets: np.dtype[Any] | None = None
    # Shape of one sample's target; None: any.
    shape: tuple[int, ...] | None = None


def suited(task: Task, taken: Taken) -> Task:
    """Return the task with inputs and targets of these types. Raises BadArgument if they cannot be converted."""
    found: dict[str, Any] = {}
    with random_state_kept(*(getattr(task, name) for name in LOADERS)):
        for name in LOADERS:
            batches = getattr(task, name)
            if batches is not None:
                found[name] = _Suit(name, taken).take(batches)
    return replace(task, **found)


class Fit(Protocol):
    """Conversion of a batch; returns the same batch if no change is needed, None if no sample remains."""

    def pair(self, batch: Any, where: str) -> Pair | None:
        """Return the converted batch; ``where`` names it in messages.

        Raises BadArgument if it does not fit the model.
        """

    def labels(self, targets: Array) -> Array:
        """Return the converted targets of all samples."""


class Fitted:
    """Batches of ``source``, each converted when it is read.

    length: batches in a pass, if ``source`` has no length.
    """

    def __init__(self, source: Any, fit: Fit, length: int | None = None) -> None:
        self.source = source
        self._fit = fit
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return self._fitted(self.source)

    def __len__(self) -> int:
        return len(self.source) if self._length is None else self._length

    def converted(self, pair: Pair) -> Pair | None:
        """Convert a batch from the user's loader; None if it is empty. Raises BadArgument if it does not fit."""
        found = self.source.converted(pair) if isinstance(self.source, Fitted) else pair
        return None if found is None else self._fit.pair(found, "")

    def _fitted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            found = self._fit.pair(batch, f", batch {number}")
            if found is not None:
                yield found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        found = getattr(self.source, name)
        if name == "shuffled":
            return lambda generator: self._fitted(found(generator))
        if name == "targets" and isinstance(found, np.ndarray):
            return self._fit.labels(found)
        return found


def unwrapped(batches: Any) -> Any:
    """Return the user's own loader."""
    while isinstance(batches, Fitted):
        batches = batches.source
    return batches


# --- loaders ---------------------------------------------------------------------------------------------------------


class _Loader:
    """The check of one loader, a field ``name`` of Task. raw: the preparation of raw samples. models: the task's model;
    None on a device that trains without PyTorch."""

    def __init__(
        self, name: str, manifest: Manifest, raw: Preparation | None, *, classifies: bool, models: Any
    ) -> None:
        self._name = name
        self._models = models
        self._shape = tuple(manifest.input_shape if raw is None else raw.shape)
        self._may_miss = raw is not None and raw.missing
        self._classifies = classifies
        self._classes = manifest.output_shape[0] if classifies and len(manifest.output_shape) == 1 else 0
        described = manifest.targets
        self._numbers = described is not None and described.kind == "numbers"
        self._ignored = None if described is None else described.ignored
        self._outputs = tuple(manifest.output_shape) if described is not None and not self._numbers else ()

    def take(self, batches: Any) -> Batches:
        """Return the loader, or a wrapped one. Raises BadArgument."""
        self._check_kind(batches)
        if isinstance(batches, ArrayBatches):
            return self._take_arrays(batches)
        try:
            iterator = iter(batches)
        except TypeError:
            raise self.wrong(f"a {_kind(batches)} cannot be iterated over; give a list of {PAIR}") from None
        if isinstance(batches, list | tuple):
            return self._take_list(batches)
        if iterator is batches:
            return self._take_list(list(self._reading(iterator)))
        return self._take_loader(batches)

    def wrong(self, text: str, where: str = "", failure: Failure = DataError.failure) -> BadArgument:
        return BadArgument(f"the task's {self._name} data{where}: {text}", failure=failure)

    def _check_kind(self, batches: Any) -> None:
        if isinstance(batches, Mapping):
            keys = ", ".join(map(repr, list(batches)[:5]))
            raise self.wrong(f"got a {_kind(batches)} of {keys}; give a list of {PAIR}")
        if isinstance(batches, str | bytes):
            raise self.wrong(f"got a {_kind(batches)}; give a list of {PAIR}")
        if _is_array(batches):
            raise self.wrong(f"got one array {_form(batches)}; give a list of {PAIR}, such as [(x, y)]")
        if isinstance(batches, list | tuple) and len(batches) == 2 and all(map(_is_array, batches)):
            inputs, targets = batches
            if np.ndim(inputs) and np.ndim(targets) and np.shape(targets) != self._shape:
                raise self.wrong(
                    f"got two whole arrays, {_form(inputs)} and {_form(targets)}, instead of batches; give "
                    f"edge_sdk.tasks.loading.ArrayBatches(Arrays(x, y), batch_size=32), or [(x, y)] for one batch"
                )

    def _reading(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches; raise BadArgument for errors of the user's code."""
        try:
            yield from batches
        except BadArgument:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:300]
            raise self.wrong(f"a batch cannot be read: {first} ({type(error).__name__}); repair the loader") from error

    def _empty(self, batches: Any) -> BadArgument:
        if getattr(batches, "drop_last", False) is True:
            return self.wrong("there is no batch in it; drop_last=True drops the only one, so leave it out")
        if self._ignored is not None and any(len(targets) for _, targets in batches):
            return self.wrong(f"every label is {self._ignored}, which the loss ignores; add samples of a class")
        return self.wrong("there is no batch in it; give it at least one sample")

    def _take_list(self, batches: list[Any] | tuple[Any, ...]) -> Batches:
        found = [self.pair(batch, f", batch {number}") for number, batch in enumerate(batches)]
        kept = [pair for pair in found if pair is not None]
        if not kept:
            raise self._empty(batches)
        same = len(kept) == len(batches) and all(one is other for one, other in zip(kept, batches, strict=True))
        return batches if same else kept

    def _take_arrays(self, batches: ArrayBatches) -> Batches:
        arrays = batches.arrays
        if isinstance(arrays, Arrays | Chosen) and isinstance(arrays.inputs, Decoded):
            # Files, which are read by the federation's description, are checked when they are decoded.
            self.labels(arrays.all_targets())
            return batches
        if isinstance(arrays, Arrays):
            whole = (arrays.inputs, arrays.targets)
            found = self.pair(whole, "")
            if found is None:
                raise self._empty(batches)
            return batches if found is whole else replace(batches, arrays=Arrays(*found))
        self.labels(arrays.all_targets())
        whole_known = isinstance(arrays, Reshaped) and isinstance(arrays.samples, Arrays)
        changed = False
        for number, batch in enumerate(batches):
            changed |= self.pair(batch, f", batch {number}") is not batch
            if not whole_known:
                break
        return Fitted(batches, self) if changed else batches

    def _take_loader(self, batches: Any) -> Batches:
        length: int | None = None
        try:
            if len(batches) == 0:
                raise self._empty(batches)
        except TypeError:
            # A data set of torch that may have no end.
            if hasattr(batches, "dataset"):
                raise self.wrong(
                    f"a {_kind(batches)} over a {_kind(batches.dataset)} has no length; give a data set that has a "
                    f"__len__ and can be read repeatedly"
                ) from None
            length = sum(1 for each in self._reading(batches) if self.pair(each, "") is not None)
        fitted = Fitted(batches, self, length)
        if next(self._reading(fitted), None) is None:
            raise self._empty(batches)
        return fitted

    # --- batches ---------------------------------------------------------------------------------------------------

    def pair(self, batch: Any, where: str) -> Any:
        """Convert a batch for the engines; returns the same object if possible, None for an empty batch."""
        if isinstance(batch, Mapping):
            keys = ", ".join(map(repr, list(batch)[:5]))
            raise self.wrong(
                f"a batch is a {_kind(batch)} of {keys}; give {PAIR}: have the data set's __getitem__ return them, or "
                f"give the loader a collate_fn that does",
                where,
            )
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            of = f" of {len(batch)}" if isinstance(batch, list | tuple) else f" {_form(batch)}" * _is_array(batch)
            raise self.wrong(f"a batch is a {_kind(batch)}{of}; give {PAIR}", where)
        given, wanted = batch
        inputs = self._array(given, "inputs", where)
        targets = self._array(wanted, "targets", where)
        same = inputs, targets
        inputs, targets = self._shaped(inputs, targets, where)
        if not len(inputs):
            return None
        if not self._may_miss:
            self._check_finite(inputs, "inputs", where)
        elif np.isinf(inputs).any():
            raise self.wrong("a value of the inputs is infinite; replace it, or leave such samples out", where)
        targets = self._labels(targets, where) if self._classes else self._values(targets, where)
        known = self._known(targets)
        if not known.all():
            inputs = inputs[known]
            targets = targets[known]
            if not len(inputs):
                return None
        left = self._kept(given, inputs, inputs is same[0]), self._kept(wanted, targets, targets is same[1])
        return batch if left[0] is given and left[1] is wanted else left

    def labels(self, targets: Array) -> Array:
        """Return the checked targets of all samples."""
        if not self._classes:
            return targets
        found = self._labels(self._array(targets, "targets", ""), "")
        return found[self._known(found)]

    def _known(self, targets: Array) -> NDArray[np.bool_]:
        """Return the samples with at least one target that the loss does not ignore, bool [N]; a batch of ignored
        samples would give a loss of 0 / 0.
        """
        if self._ignored is None or self._name == "public" or targets.dtype.kind not in "iu":
            return np.ones(len(targets), np.bool_)
        counts: NDArray[np.bool_] = np.any(targets.reshape(len(targets), -1) != self._ignored, axis=1)
        return counts

    def _kept(self, given: Any, array: Array, same: bool) -> Any:
        """Return the original value if engines can read it, else ``array``."""
        torch = sys.modules.get("torch")
        if not same or torch is None or not isinstance(given, torch.Tensor) or given.requires_grad:
            return array
        on_processor = given.device.type == "cpu"
        return given if _type(given) == array.dtype.name and (on_processor or self._models is not None) else array

    def _array(self, value: Any, part: str, where: str) -> Array:
        array = self._plain_array(value, part, where)
        if array.dtype.kind not in "biuf":
            raise self.wrong(f"the {part} are {_form(array)}; convert each value to a number", where)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.kind == "f" and array.dtype != np.float32:
            with np.errstate(over="ignore"):
                return array.astype(np.float32)
        wider = WIDER.get(array.dtype.name)
        if wider is None:
            return array
        if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise self.wrong(f"the {part} have the value {int(array.max())}; use values below 2**63", where)
        return array.astype(wider)

    def _plain_array(self, value: Any, part: str, where: str) -> Array:
        if isinstance(value, np.ma.MaskedArray):
            masked = int(np.ma.getmaskarray(value).sum())
            if masked:
                raise self.wrong(
                    f"{masked} values of the {part} are masked; replace them (array.filled(value)), or leave such "
                    f"samples out",
                    where,
                )
            return np.asarray(value.data)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            tensor = value.detach().cpu()
            plain: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            return plain
        if not isinstance(value, list | tuple) and not hasattr(value, "__array__"):
            raise self.wrong(f"the {part} must be an array, not a {_kind(value)}; give {PAIR}", where)
        try:
            array = np.asarray(value)
            # pandas' nullable columns.
            if array.dtype == object and hasattr(value, "to_numpy"):
                array = value.to_numpy(dtype=np.float64, na_value=np.nan)
        # Errors of nested lists, or of a foreign class.
        except Exception as error:
            raise self.wrong(
                f"the {part} cannot be made one array ({str(error).splitlines()[0][:200]}); give every sample the "
                f"same shape, and numbers only",
                where,
            ) from None
        return array

    def _shaped(self, inputs: Array, targets: Array, where: str) -> tuple[Array, Array]:
        """Return both, with samples in the model's shape: axes of length 1 may differ."""
        shape = inputs.shape[1:]
        if not inputs.ndim or (not targets.ndim and inputs.shape == self._shape):
            raise self.wrong(
                f"got one sample, inputs {_form(inputs)} and target {_form(targets)}; give batches: "
                f"{PAIR}, such as (x[0:32], y[0:32]), or put a DataLoader around the data set",
                where,
            )
        if not targets.ndim or len(inputs) != len(targets):
            many = len(targets) if targets.ndim else 1
            raise self.wrong(
                f"{len(inputs)} inputs have {many} targets; provide one target per input, batch first", where
            )
        if shape == self._shape or not len(inputs):
            return inputs, targets
        if long_axes(shape) == long_axes(self._shape):
            return inputs.reshape(len(inputs), *self._shape), targets
        raise self.wrong(
            f"samples have the shape {shape}, but the federation's model takes {self._shape}; give samples of that "
            f"shape, or join another federation",
            where,
        )

    def _check_finite(self, values: Array, part: str, where: str) -> None:
        sample = _first_not_finite(values)
        if sample is not None:
            raise self.wrong(
                f"a value of the {part} is NaN or infinite in sample {sample}, counted from 0; replace such values, or "
                f"leave such samples out",
                where,
                VALUES,
            )

    def _labels(self, targets: Array, where: str) -> Array:
        """Return labels as int64 [N]."""
        classes = self._classes
        labels = targets
        if labels.ndim > 1 and labels.size == len(labels):
            labels = labels.reshape(-1)
        if labels.ndim != 1:
            rows = labels.ndim == 2 and labels.shape[1] == classes
            advice = "one-hot? give targets.argmax(1)" if rows else "provide one label per sample"
            raise self.wrong(
                f"the targets are {_form(targets)}, a classification takes labels [batch] from 0 to {classes - 1}: "
                f"{advice}, or set Task(..., classification=False)",
                where,
            )
        if labels.dtype.kind == "f":
            self._check_finite(labels, "targets", where)
            broken = labels != np.floor(labels)
            if broken.any():
                raise self.wrong(
                    f"a label is {labels[broken][0]:g}, a classification takes integers from 0 to {classes - 1}: give "
                    f"class indices, or set Task(..., classification=False)",
                    where,
                )
        labels = labels.astype(np.int64, copy=False)
        self._check_classes(labels, classes, where)
        return labels

    def _check_classes(self, labels: Array, classes: int, where: str) -> None:
        wrong = np.less(labels, 0) | np.greater_equal(labels, classes)
        if self._ignored is not None:
            wrong &= labels != self._ignored
        if not wrong.any():
            return
        outside = np.unique(labels[wrong])
        advice = "join with the labels that it was published for"
        if outside.tolist() == [classes] and int(labels.min()) == 1:
            advice = "the labels count from 1: subtract 1"
        elif int(outside[0]) < 0:
            advice = "leave samples without a class out" + (
                "" if self._ignored is None else f", or give them the label {self._ignored}, which the loss ignores"
            )
        raise self.wrong(
            f"{label_names(outside)} {'lies' if len(outside) == 1 else 'lie'} outside 0 to {classes - 1}, because the "
            f"federation's model has {classes} classes; {advice}",
            where,
        )

    def _values(self, targets: Array, where: str) -> Array:
        """Return targets other than labels of whole samples."""
        if targets.dtype.kind == "f":
            self._check_finite(targets, "targets", where)
        elif self._numbers:
            return targets.astype(np.float32)
        else:
            classes = self._classes_of_parts(targets.shape[1:])
            if classes:
                self._check_classes(targets, classes, where)
                return targets.astype(np.int64, copy=False)
        return targets

    def _classes_of_parts(self, shape: tuple[int, ...]) -> int:
        """Return the number of classes of pixels or characters; 0 for other targets."""
        outputs = self._outputs
        if len(outputs) < 2 or not shape:
            return 0
        classes = outputs[0] if outputs[1:] == shape else outputs[-1] if outputs[:-1] == shape else 0
        return classes if classes > 1 else 0


class _Suit:
    """Conversion of one loader to the types of a training step."""

    def __init__(self, name: str, taken: Taken) -> None:
        self._name = name
        self._taken = taken

    def take(self, batches: Any) -> Batches:
        """Return the loader, or a wrapped one. Raises BadArgument."""
        looked = batches if isinstance(batches, list | tuple) else [next(iter(batches))]
        changed = [self.pair(batch, f", batch {number}") is not batch for number, batch in enumerate(looked)]
        return Fitted(batches, self) if any(changed) else batches

    def pair(self, batch: Any, where: str) -> Pair | None:
        given, wanted = batch
        inputs = self._converted(given, self._taken.inputs, "inputs", where)
        targets = self._target(wanted, where)
        return batch if inputs is given and targets is wanted else (inputs, targets)

    def labels(self, targets: Array) -> Array:
        """Return all targets, converted."""
        found: Array = self._target(targets, "")
        return found

    def _target(self, targets: Any, where: str) -> Any:
        if self._taken.targets is not None:
            targets = self._converted(targets, self._taken.targets, "targets", where)
        wanted = self._taken.shape
        shape = tuple(targets.shape[1:])
        if wanted is None or shape == wanted:
            return targets
        if long_axes(shape) == long_axes(wanted):
            return targets.reshape(len(targets), *wanted)
        raise BadArgument(
            f"the task's {self._name} data{where}: targets have the shape {shape}, the federation's loss takes "
            f"{wanted}; give targets of that shape, or join another federation"
        )

    def _converted(self, values: Any, dtype: np.dtype[Any], part: str, where: str) -> Any:
        if _type(values) == dtype.name:
            return values
        array = np.asarray(values)
        if dtype.kind in "iu" and array.dtype.kind == "f" and (array != np.floor(array)).any():
            broken = float(array[array != np.floor(array)][0])
            raise BadArgument(
                f"the task's {self._name} data{where}: a value of the {part} is {broken:g}, the federation's model "
                f"takes integers; provide indices"
            )
        return array.astype(dtype)


def _has_labels(manifest: Manifest) -> bool:
    """Return True if targets can be one class index per sample."""
    numbers = manifest.targets is not None and manifest.targets.kind == "numbers"
    return not numbers and len(manifest.output_shape) == 1 and manifest.output_shape[0] > 1


def _is_array(value: Any) -> bool:
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or hasattr(value, "to_numpy")


def _kind(value: Any) -> str:
    return type(value).__name__


def _form(value: Any) -> str:
    return f"{tuple(np.shape(value))}" + (f" {_type(value)}" if hasattr(value, "dtype") else "")


def _type(values: Any) -> str:
    return str(values.dtype).removeprefix("torch.")


def long_axes(shape: tuple[int, ...]) -> list[int]:
    """Return a shape without axes of length 1, which may differ between samples and the model."""
    return [length for length in shape if length != 1]


def _first_not_finite(values: Array) -> int | None:
    """Return the index of the first sample with a NaN or infinite value, if any."""
    if values.dtype.kind != "f" or not values.size:
        return None
    rows = max(1, CHUNK // max(1, values.size // len(values)))
    for start in range(0, len(values), rows):
        finite: NDArray[np.bool_] = np.isfinite(values[start : start + rows])
        if not finite.all():
            return start + int(np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))[0])
    return None


# --- random state ----------------------------------------------------------------------------------------------------


@contextmanager
def random_state_kept(*loaders: Any) -> Iterator[None]:
    """Context manager: restore the random states."""
    torch = sys.modules.get("torch")
    python = random.getstate()
    numpy = np.random.get_state()
    restore: list[Callable[[], object]] = [lambda: random.setstate(python), lambda: np.random.set_state(numpy)]
    if torch is not None:
        generators = [torch.default_generator, *(each for loader in loaders for each in _generators(loader))]
        states = [(generator, generator.get_state()) for generator in generators]
        restore += [partial(generator.set_state, state) for generator, state in states]
    try:
        yield
    finally:
        for each in restore:
            each()


def _generators(loader: Any) -> list[Any]:
    torch = sys.modules["torch"]
    loader = unwrapped(loader)
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
