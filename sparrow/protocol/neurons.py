"""Narrow networks: masks of the first or best neurons, manifests, and stored masks of devices, identified by digest."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .elements import ElementMask, from_bits, unpack_flags
from .errors import ManifestError
from .manifest import MULTIPLYING, Array, Manifest, NeuronGroup, Segment, Tensors, TensorSpec
from .masks import FULL_RATIO, Block, Mask, NeuronMask, active_count, check_mask, neuron_block

CLASSES = "classes of the output"
"""The group of the output layer's rows, if devices may send some of them (HeteroFL)."""

_NEURONS = b"neurons\n"
"""Prefix of a file of neurons. A file of elements has no prefix; the chance that it starts like this is 2^-64."""


def first_neurons(manifest: Manifest, ratio: float, count: Callable[[int, float], int] = active_count) -> NeuronMask:
    """Return the first ``count(size, ratio)`` neurons of every hidden group."""
    return NeuronMask({name: np.arange(count(size, ratio)) for name, size in manifest.group_sizes.items()})


def first_neurons_up(manifest: Manifest, ratio: float) -> NeuronMask:
    """Return HeteroFL's mask: the first neurons of every hidden group, rounded up, and all ``CLASSES``."""
    first = first_neurons(manifest, ratio, active_count_up).active
    return NeuronMask(
        {name: np.arange(manifest.group_sizes[name]) if name == CLASSES else first[name] for name in first}
    )


def active_count_up(size: int, ratio: float) -> int:
    """Return ceil(ratio * size), HeteroFL's rule; see ``active_count`` for the 1e-9."""
    return size if ratio >= FULL_RATIO else math.ceil(ratio * size - 1e-9)


def with_classes(manifest: Manifest) -> Manifest:
    """Return the manifest with the output layer's rows as neurons of the group ``CLASSES``. The output layer is the
    last linear layer or convolution, if it has a row per output and shares no tensor."""
    specs = {spec.name: spec for spec in manifest.tensors}
    uses = Counter(name for layer in manifest.layers for name in layer.tensors)
    last = next((layer for layer in reversed(manifest.layers) if layer.kind in MULTIPLYING), None)
    rows = {} if last is None else {name: specs[name] for name in last.tensors}
    outputs = manifest.output_shape[:1]
    if not rows or any(
        spec.shape[:1] != outputs or any(spec.axes[:1]) or uses[spec.name] > 1 for spec in rows.values()
    ):
        return manifest
    each = (Segment(group=CLASSES).model_dump(),)
    tensors = [
        {**spec.model_dump(), "axes": (each, *(spec.axes[1:] or ((),) * (len(spec.shape) - 1)))}
        if spec.name in rows
        else spec.model_dump()
        for spec in manifest.tensors
    ]
    groups = [*manifest.groups, NeuronGroup(name=CLASSES, size=outputs[0])]
    return Manifest.model_validate({**manifest.model_dump(), "tensors": tensors, "groups": groups})


def fits_ratio(manifest: Manifest, mask: Mask | None, ratio: float) -> bool:
    """Return whether the mask has exactly the number of neurons of ``ratio`` in each group."""
    return isinstance(mask, NeuronMask) and all(
        len(mask.active[name]) == active_count(size, ratio) for name, size in manifest.group_sizes.items()
    )


def reaches_ratio(manifest: Manifest, mask: Mask | None, ratio: float) -> bool:
    """Return whether the mask has at least the number of neurons of ``ratio`` in each group."""
    return isinstance(mask, NeuronMask) and all(
        len(mask.active[name]) >= active_count(size, ratio) for name, size in manifest.group_sizes.items()
    )


def is_within(mask: NeuronMask, other: NeuronMask) -> bool:
    """Return whether all neurons of ``mask`` are active in ``other``."""
    return all(np.isin(index, other.active[name]).all() for name, index in mask.active.items())


def count_neurons(manifest: Manifest, mask: NeuronMask | None) -> int:
    """Return the number of active hidden neurons; None: all."""
    sizes = manifest.group_sizes.values() if mask is None else map(len, mask.active.values())
    return sum(sizes)


Scores = dict[str, NDArray[np.float64]]
"""Scores of the hidden neurons: group name -> [size]."""


def incoming(manifest: Manifest) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the weights that score neurons, with the neurons' axis: rows, or columns of embeddings."""
    embeddings = {name for layer in manifest.layers if layer.kind == "embedding" for name in layer.tensors}
    for spec in manifest.tensors:
        axis = 1 if spec.name in embeddings else 0
        if spec.trainable and len(spec.shape) > 1 and spec.axes and spec.axes[axis]:
            yield spec, axis


def no_scores(manifest: Manifest) -> Scores:
    """Return scores of 0."""
    return {name: np.zeros(size) for name, size in manifest.group_sizes.items()}


def add_scores_in_place(scores: Scores, spec: TensorSpec, axis: int, rows: Array) -> None:
    """Add ``rows`` [spec.shape[axis]], one per entry of the neurons' axis, to the neurons' scores."""
    start = 0
    for segment in spec.axes[axis]:
        end = start + len(scores[segment.group]) * segment.repeat
        scores[segment.group] += rows[start:end].reshape(-1, segment.repeat).sum(1, dtype=np.float64)
        start = end


def norm_scores(manifest: Manifest, tensors: Tensors, order: int) -> Scores:
    """Return the sums of |w|^``order`` over each neuron's incoming weights, in all layers that share the neuron."""
    scores = no_scores(manifest)
    for spec, axis in incoming(manifest):
        rows = np.moveaxis(np.abs(tensors[spec.name]) ** order, axis, 0)
        add_scores_in_place(scores, spec, axis, rows.reshape(len(rows), -1).sum(1, dtype=np.float64))
    return scores


def best_neurons(scores: Scores, counts: Mapping[str, int], among: NeuronMask | None = None) -> NeuronMask:
    """Return the ``counts`` best neurons of each group, optionally ``among`` some; ties take the first."""
    best = {}
    for name, each in scores.items():
        index = np.arange(len(each)) if among is None else np.asarray(among.active[name])
        best[name] = np.sort(index[np.argsort(-each[index], kind="stable")[: counts[name]]])
    return NeuronMask(best)


def counts_at(manifest: Manifest, ratio: float) -> dict[str, int]:
    """Return the number of active neurons of each group at ``ratio``."""
    return {name: active_count(size, ratio) for name, size in manifest.group_sizes.items()}


class CannotNarrow(ManifestError):
    """The model does not support fewer neurons."""


@dataclass(frozen=True)
class Narrowing:
    """The part of each tensor in a narrow network."""

    # The narrow network's.
    manifest: Manifest
    blocks: Mapping[str, Block]

    @classmethod
    def of(cls, manifest: Manifest, mask: NeuronMask) -> Narrowing:
        """Return the narrow network of ``mask``; of all neurons, the model's own manifest."""
        blocks = {spec.name: neuron_block(manifest, spec, mask) for spec in manifest.tensors}
        whole = all(len(mask.active[group]) == size for group, size in manifest.group_sizes.items())
        return cls(manifest if whole else narrowed(manifest, mask), blocks)

    def take(self, spec: TensorSpec, tensor: Array) -> Array:
        """Return a tensor's active values, C-contiguous, in the shape of the narrow manifest's ``spec``."""
        return self.blocks[spec.name].take(tensor).reshape(spec.shape)


def narrowed(manifest: Manifest, mask: NeuronMask) -> Manifest:
    """Return the manifest of the active neurons' network. Packed without a mask, it has the same values as the full
    model packed under ``mask``."""
    sizes = {name: len(index) for name, index in mask.active.items()}
    tensors = [{**spec.model_dump(), "shape": _narrow_shape(spec, sizes)} for spec in manifest.tensors]
    groups = [{"name": name, "size": size} for name, size in sizes.items()]
    return Manifest.model_validate({**manifest.model_dump(), "tensors": tensors, "groups": groups})


def _narrow_shape(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    axes = spec.axes or ((),) * len(spec.shape)
    return tuple(
        sum(sizes[segment.group] * segment.repeat for segment in segments) if segments else length
        for segments, length in zip(axes, spec.shape, strict=True)
    )


def neuron_bits(manifest: Manifest, mask: NeuronMask) -> bytes:
    """Return one bit per hidden neuron, in manifest order, most significant bit first."""
    flags = np.zeros(sum(manifest.group_sizes.values()), dtype=bool)
    start = 0
    for group, size in manifest.group_sizes.items():
        flags[start + mask.active[group]] = True
        start += size
    return np.packbits(flags).tobytes()


def neurons_from_bits(manifest: Manifest, data: bytes | memoryview) -> NeuronMask:
    """Return the mask of these bits. Raises ManifestError unless they fit this model."""
    flags = unpack_flags(data, sum(manifest.group_sizes.values()), "neurons")
    active = {}
    start = 0
    for group, size in manifest.group_sizes.items():
        active[group] = np.flatnonzero(flags[start : start + size])
        start += size
    mask = NeuronMask(active)
    check_mask(manifest, mask)
    return mask


def mask_to_file(manifest: Manifest, mask: ElementMask | NeuronMask) -> bytes:
    """Return the file of a mask."""
    return mask.bits if isinstance(mask, ElementMask) else _NEURONS + neuron_bits(manifest, mask)


def mask_from_file(manifest: Manifest, data: bytes) -> ElementMask | NeuronMask:
    """Return the inverse of ``mask_to_file``. Raises ManifestError for bytes that are not a mask of this model."""
    if data.startswith(_NEURONS):
        return neurons_from_bits(manifest, data[len(_NEURONS) :])
    return from_bits(manifest, data)


def mask_digest(manifest: Manifest, mask: ElementMask | NeuronMask) -> str:
    """Return the SHA-256 of a mask's file, which identifies the mask."""
    if isinstance(mask, ElementMask):
        return mask.digest
    return hashlib.sha256(mask_to_file(manifest, mask)).hexdigest()
