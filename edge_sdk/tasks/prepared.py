"""A federation's preparation on this device: raw samples pass its graph once, when data are loaded.

Prepared samples stay in memory if they need at most ``SHARE`` of the available memory; otherwise each batch is prepared
when it is read. Each device's own statistics are computed at its first start and kept, because the model was trained
with them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from sparrow.devices import memory
from sparrow.export.errors import ExportError, SkeletonError
from sparrow.export.preparation import Preparer, check_preparation, complete
from sparrow.protocol.errors import GraphError
from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.preparation import Preparation
from sparrow.reading import Decoded

from ..errors import BadArgument
from . import Batches, Prepared, Task, as_arrays
from .decoding import kept_array
from .intake import Fitted
from .loading import ArrayBatches, Arrays, Chosen, Samples
from .preparing import Statistics, own_constants, statistics_of

# Largest share of the available memory for prepared samples.
SHARE = 0.25

# Arrays whose prepared form a process keeps.
MOST_KEPT = 8

# Raw samples that are prepared singly and in a batch, to check that the results agree.
TRIED = 3

# Ratio of standard deviations, or distance of means in standard deviations, from which data count as different.
SPREAD_RATIO = 5.0

MOST_NAMED = 5


@dataclass(frozen=True)
class Streamed:
    """Raw samples that are prepared when they are read."""

    samples: Samples
    preparer: Preparer

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, chosen: Any) -> tuple[Array, Array]:
        """Return the prepared inputs and the targets of ``chosen``."""
        raw, targets = self.samples.take(chosen)
        return self.preparer(raw), targets

    def all_targets(self) -> Array:
        """Return the targets."""
        return self.samples.all_targets()


@dataclass(frozen=True)
class _Preparing:
    """Preparation of a user's own loader, batch by batch."""

    preparer: Preparer

    def pair(self, batch: Any, where: str) -> tuple[Array, Array]:
        raw, targets = as_arrays(batch)
        return self.preparer(fitting(raw, self.preparer)), targets

    def labels(self, targets: Array) -> Array:
        return targets


class _Kept:
    """Prepared arrays, by the raw array and the digest of the preparation; the last ``MOST_KEPT``."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[int, str], tuple[Array, Array]] = OrderedDict()
        self._lock = Lock()

    def get(self, raw: Any, preparer: Preparer, room: int) -> Array:
        """Return the prepared form of ``raw``, made once. room: bytes of memory; a larger array goes to a file."""
        key = (id(raw), preparer.digest)
        with self._lock:
            if key not in self._arrays:
                made = prepare_decoded(raw, preparer, room) if isinstance(raw, Decoded) else preparer(raw)
                # Keeping the raw array prevents reuse of its id.
                self._arrays[key] = (raw, made)
                if len(self._arrays) > MOST_KEPT:
                    self._arrays.popitem(last=False)
            self._arrays.move_to_end(key)
            return self._arrays[key][1]


_KEPT = _Kept()


def prepare_decoded(samples: Decoded, preparer: Preparer, room: int) -> Array:
    """Return the prepared inputs of ``Decoded`` samples: in memory if they fit ``room``, else in a mapped file.

    The file in the cache folder is named by the digests of samples and preparation. Raises DataError.
    """
    first = preparer([samples[0]])
    shape = (len(samples), *first.shape[1:])
    if first.nbytes * len(samples) <= room:
        made = np.empty(shape, first.dtype)
        _fill(made, samples, preparer)
        return made
    digest = hashlib.sha256(f"{samples.digest} {preparer.digest}".encode()).hexdigest()
    fill = partial(_fill, samples=samples, preparer=preparer)
    return kept_array(f"prepared-{digest}", first.dtype, shape, "prepared samples", fill)


def _fill(made: Array, samples: Decoded, preparer: Preparer) -> None:
    shown = tqdm(range(len(samples)), desc="preparing", unit="sample", delay=2, disable=None, leave=False)
    for place in shown:
        made[place] = preparer([samples[place]])[0]


def load_preparer(manifest: Manifest, graph: bytes, own: Mapping[str, Array]) -> Preparer:
    """Return the preparer of a federation's preparation, after all checks.

    own: the device's own statistics. Raises GraphError for a graph that must not be run.
    """
    try:
        check_preparation(graph, manifest)
        return Preparer(complete(graph, own) if own else graph)
    except (SkeletonError, ExportError) as error:
        raise GraphError(f"the preparation's graph is refused: {error}") from None


# Cached, because a process hosts many devices of one federation. text: the manifest as JSON.
@lru_cache(maxsize=4)
def _hosted(text: str, graph: bytes) -> Preparer:
    return load_preparer(Manifest.model_validate_json(text), graph, {})


def prepared_hosted(task: Task, manifest: Manifest, graph: bytes) -> Task:
    """Return the prepared task of one of this process's many devices. Raises as ``prepared``."""
    assert manifest.preparation is not None, "there is a graph"
    if manifest.preparation.own:
        return prepared(task, load_preparer(manifest, graph, compute_own(task.train, manifest.preparation)))
    return prepared(task, _hosted(manifest.text, graph))


def raw_statistics(batches: Batches, description: Preparation) -> Statistics:
    """Return the statistics of raw samples by column or channel; of grey images [N, H, W] over all pixels."""
    raw = (as_arrays(batch)[0] for batch in batches)
    if description.axes == "HW":
        return statistics_of((each[..., None] for each in raw), 2)
    return statistics_of(raw, description.channel, description.columns)


def compute_own(batches: Batches, description: Preparation) -> dict[str, NDArray[np.float32]]:
    """Return a device's own statistics by the names of the preparation's initialisers."""
    return own_constants(raw_statistics(batches, description), description.columns)


def prepared(task: Task, preparer: Preparer, *, memory_limit: int | None = None) -> Task:
    """Return the task with prepared instead of raw samples; repeated calls have no effect.

    memory_limit: bytes that the process may hold; None: the available memory. Raises BadArgument, and GraphError for a
    preparation that mixes samples of a batch.
    """
    if task.prepared is not None:
        return task
    room = memory.available()
    if memory_limit is not None:
        room = min(room, max(0, memory_limit - memory.resident()))
    parts: dict[str, Any] = {}
    for name in ("train", "validation", "test", "public"):
        batches = getattr(task, name)
        if batches is not None:
            parts[name] = _prepared(batches, preparer, int(room * SHARE), name)
    _check_alone(task.train, preparer)
    return replace(task, **parts, prepared=Prepared(preparer, task.validation), preparation=None)


def _prepared(batches: Batches, preparer: Preparer, room: int, name: str) -> Batches:
    if not isinstance(batches, ArrayBatches):
        return Fitted(batches, _Preparing(preparer))
    samples = batches.arrays
    if isinstance(samples, Arrays | Chosen) and isinstance(samples.inputs, Decoded):
        return replace(batches, arrays=replace(samples, inputs=_KEPT.get(samples.inputs, preparer, room)))
    try:
        if isinstance(samples, Arrays | Chosen):
            samples = replace(samples, inputs=fitting(samples.inputs, preparer))
        first = preparer(samples.take(slice(0, 1))[0])
    except BadArgument as error:
        raise BadArgument(f"the task's {name} data: {error}") from None
    if isinstance(samples, Arrays | Chosen) and first.nbytes * len(samples.inputs) <= room:
        return replace(batches, arrays=replace(samples, inputs=_KEPT.get(samples.inputs, preparer, room)))
    return replace(batches, arrays=Streamed(samples, preparer))


def fitting(raw: Array, preparer: Preparer) -> Array:
    """Return raw samples in the preparation's type. Raises BadArgument if that changes a value."""
    if tuple(raw.shape[1:]) != preparer.shape:
        raise BadArgument(
            f"raw samples have shape {tuple(raw.shape[1:])}, the federation's preparation takes {preparer.shape}; give "
            "unscaled samples of that shape"
        )
    if raw.dtype == preparer.dtype:
        return raw
    with np.errstate(invalid="ignore", over="ignore"):
        converted = raw.astype(preparer.dtype)
    exact = preparer.dtype.kind == "f" or np.array_equal(converted, raw)
    if not exact or raw.dtype.kind not in "fiub":
        raise BadArgument(
            f"raw samples are of {raw.dtype}, the federation's preparation takes {preparer.dtype}; give unscaled "
            "samples of that type"
        )
    return converted


def _check_alone(batches: Batches, preparer: Preparer) -> None:
    """Raise GraphError unless a sample's prepared inputs are the same alone and in a batch."""
    if preparer.at_once == 1:
        return
    first = next(iter(batches), None)
    if first is None:
        return
    raw = fitting(as_arrays(first)[0][:TRIED], preparer)
    together = preparer(raw)
    singly = np.concatenate([preparer(raw[place : place + 1]) for place in range(len(raw))])
    if not np.allclose(together, singly, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise GraphError(
            "the preparation's graph is refused: a sample's inputs depend on the other samples of its batch; publish "
            "one that treats each sample by itself"
        )


def entry_name(description: Preparation, place: int) -> str:
    """Return the name of a statistic's column, feature or channel."""
    if description.columns:
        return description.columns[place].name
    if description.channels:
        return description.channels[place]
    return f"{'channel' if description.axes else 'feature'} {place}"


def differences(found: Statistics, description: Preparation) -> list[tuple[str, str]]:
    """Return (text for the user, text for the operator) per column or channel."""
    # Other units than the publisher's are the usual cause. The operator's text contains no statistic of the device's
    # data.
    remarks = []
    for place, (mean, deviation) in enumerate(zip(description.mean, description.deviation, strict=True)):
        if description.columns and description.columns[place].categories:
            continue
        name = entry_name(description, place)
        here = float(found.deviation[place])
        there = float(deviation)
        ratio = max(here / there, there / here)
        if ratio >= SPREAD_RATIO and not found.flat[place]:
            remarks.append(
                (
                    f"{name}: standard deviation here {here:.3g}, in the federation {there:.3g}; units?",
                    f"{name}: the standard deviation differs by a factor of 5 or more; units?",
                )
            )
        elif abs(float(found.mean[place]) - mean) >= SPREAD_RATIO * max(here, there):
            remarks.append(
                (
                    f"{name}: mean here {found.mean[place]:.3g}, in the federation {mean:.3g}; units?",
                    f"{name}: the mean differs by 5 standard deviations or more; units?",
                )
            )
    return remarks[:MOST_NAMED]
