"""A user's own preparation, a torch.nn.Module, compiled to a graph for publication and compared with PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparrow.export.errors import ExportError
from sparrow.export.preparation import Preparer, complete
from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.preparation import MOST_COLUMNS, RAW_TYPES, Preparation

from ..errors import BadArgument
from ..tasks import Task, as_arrays
from ..tasks.prepared import compute_own, prepared
from ..tasks.preparing import BuiltPreparation, statistics_of
from .graph import UnsupportedLayer
from .modes import evaluating
from .skeleton import export_forward, remove_notes

CLOSE = 1e-4
"""Largest difference from PyTorch by rounding, relative to the largest prepared value."""

SAMPLES = 7
"""Raw samples for the comparison of graph and module, one by one and in a batch."""


def prepare_to_publish(task: Task) -> tuple[Task, BuiltPreparation | None]:
    """Return the task over prepared samples, and the preparation to publish, if any.

    Raises BadArgument if the preparation is unusable.
    """
    if task.preparation is None:
        return task, None
    built = task.preparation
    if not isinstance(built, BuiltPreparation):
        first = next(iter(task.train), None)
        if first is None:
            raise BadArgument("the task's train data: there is no batch in it; give it at least one sample")
        every = (as_arrays(batch)[0] for batch in task.train)
        built = compile_preparation(built, as_arrays(first)[0], every)
    graph = built.graph
    if built.description.own:
        graph = complete(graph, compute_own(task.train, built.description))
    return prepared(task, Preparer(graph)), built


def compile_preparation(preparation: Any, raw: Array, every: Iterable[Array]) -> BuiltPreparation:
    """Return a module as the preparation to publish.

    raw: [N, ...], a few raw samples. every: the raw training samples in batches. Raises BadArgument, also for a module
    whose graph gives other values.
    """
    if not isinstance(preparation, nn.Module):
        raise BadArgument(
            f"preparation is a {type(preparation).__name__}; give a torch.nn.Module from a batch of raw samples to a "
            "batch of the model's inputs"
        )
    if raw.dtype.name not in RAW_TYPES:
        raise BadArgument(
            f"raw samples are of {raw.dtype}, which no preparation accepts; store them as one of {', '.join(RAW_TYPES)}"
        )
    few = raw[:SAMPLES]
    try:
        proto = export_forward(preparation, torch.from_numpy(np.array(few)))
    except UnsupportedLayer as error:
        raise BadArgument(f"preparation: {error}") from None
    remove_notes(proto)
    graph = cast(bytes, proto.SerializeToString(deterministic=True))
    _compare(preparation, graph, few)
    shape = tuple(raw.shape[1:])
    # A signal with more values than a table has columns has no entries with a meaning of their own.
    tabular = raw.dtype == np.float32 and len(shape) > 0 and shape[0] <= MOST_COLUMNS
    found = statistics_of(every, 0) if tabular else None
    description = Preparation(
        dtype=cast(Any, raw.dtype.name),
        shape=shape,
        steps=(type(preparation).__name__,),
        mean=() if found is None else tuple(found.mean.tolist()),
        deviation=() if found is None else tuple(found.deviation.tolist()),
    )
    return BuiltPreparation(graph, description)


def _compare(module: nn.Module, graph: bytes, raw: Array) -> None:
    with evaluating(module), torch.no_grad():
        answer = module(torch.from_numpy(np.array(raw)))
    if not isinstance(answer, torch.Tensor) or answer.shape[:1] != (len(raw),):
        given = f"shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else f"a {type(answer).__name__}"
        raise BadArgument(f"preparation: {len(raw)} raw samples give {given}; return one tensor, samples first")
    wanted = answer.numpy()
    try:
        preparer = Preparer(graph)
        together = preparer(raw)
        alone = np.concatenate([preparer(raw[place : place + 1]) for place in range(len(raw))])
    except ExportError as error:
        raise BadArgument(f"preparation: its graph does not run: {error}") from None
    for found, what in ((together, "in a batch"), (alone, "one by one")):
        if found.shape != wanted.shape:
            raise BadArgument(
                f"preparation: the module turns {raw.shape} into {wanted.shape}, its graph into {found.shape} {what}"
            )
        finite = np.isfinite(wanted)
        scale = max(1.0, float(np.abs(wanted[finite]).max(initial=0)))
        if not np.allclose(found[finite], wanted[finite], rtol=0, atol=CLOSE * scale):
            raise BadArgument(
                f"preparation: samples prepared {what} by the graph differ from PyTorch's by "
                f"{float(np.abs(found[finite] - wanted[finite]).max()):.2g}; prepare each sample independently, and "
                "decide by shapes, not values"
            )


def described(manifest: Manifest, built: BuiltPreparation) -> Manifest:
    """Return the manifest of a model that takes prepared samples."""
    digest = hashlib.sha256(built.graph).hexdigest()
    named = {"preparation": built.description.model_dump(), "preparation_sha256": digest}
    return Manifest.model_validate({**manifest.model_dump(), **named})
