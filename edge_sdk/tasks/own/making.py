"""A task over a user's own samples: the preparation to publish, the model, and the line that says what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edge_sdk.protocol.manifest import Array
from edge_sdk.reading import Raw, class_order
from edge_sdk.reading.errors import BadOption
from edge_sdk.tasks import OWN, Seeded, Task
from edge_sdk.tasks.loading import EVALUATION_BATCH, ArrayBatches, Samples, ScaledError, cross_entropy
from edge_sdk.tasks.own.labels import Known, Labelled, Publishing, some
from edge_sdk.tasks.preparing import BuiltPreparation, prepare_array, prepare_rows, statistics_of

if TYPE_CHECKING:
    from torch import nn

METRICS_OF_NUMBERS = ("rmse", "mae", "r2")

FEW = 20
"""Different whole numbers, up to which labels may have been meant as classes."""


def build_preparation(raw: Raw, training: Array, kind: str, publishing: Publishing) -> BuiltPreparation:
    """Return the preparation to publish, from raw training samples."""
    if raw.columns:
        return prepare_rows(raw.columns, statistics_of([training], 0, raw.columns), own=publishing.own)
    dtype, shape, axes = raw.inputs.dtype.name, tuple(raw.inputs.shape[1:]), raw.axes
    if raw.inputs.dtype == np.uint8 and axes in ("HW", "CHW", "HWC"):
        return prepare_array(dtype, shape, axes, None)
    if axes == "HW":
        if publishing.own:
            raise BadOption("--standardise device: grey images are standardised by the publisher's statistics alone")
        return prepare_array(dtype, shape, axes, statistics_of([training[..., None]], 2))
    channel = max(axes.find("C"), 0)
    return prepare_array(dtype, shape, axes, statistics_of([training], channel), own=publishing.own)


def make_task(
    parts: Mapping[str, Samples],
    preparation: BuiltPreparation | None,
    read: Labelled,
    known: Known,
    said: str,
    *,
    batch_size: int,
) -> Task:
    """Return the task; a device that joins gets its model's shapes from the manifest."""
    shape, outputs = known.shape, known.outputs
    if shape is None or not outputs:
        assert preparation is not None, "made to publish"
        shape = prepared_shape(preparation)
        outputs = (len(read.class_names) or 1,)
    numbers = read.kind == "numbers"
    scale = (read.targets.mean, read.targets.deviation)
    test = parts.get("test")
    public = parts.get("public")
    return Task(
        name=known.task or OWN,
        model=Seeded(partial(_build, shape, outputs[0], scale if numbers else None)),
        loss=ScaledError(read.targets.deviation) if numbers else cross_entropy,
        train=ArrayBatches(parts["train"], batch_size),
        validation=ArrayBatches(parts["validation"], EVALUATION_BATCH),
        test=None if test is None else ArrayBatches(test, EVALUATION_BATCH),
        public=None if public is None else ArrayBatches(public, batch_size),
        classification=not numbers,
        metrics=METRICS_OF_NUMBERS if numbers else (),
        preparation=preparation,
        class_names=read.class_names,
        targets=read.targets,
        said=(said,),
    )


def prepared_shape(preparation: BuiltPreparation) -> tuple[int, ...]:
    """Return the shape of one prepared sample."""
    import onnx

    tensor = onnx.ModelProto.FromString(preparation.graph).graph.output[0].type.tensor_type
    return tuple(dim.dim_value for dim in tensor.shape.dim[1:])


def _build(shape: tuple[int, ...], outputs: int, scale: tuple[float, float] | None) -> nn.Module:
    from edge_sdk.tasks.models import build_model

    return build_model(shape, outputs, scale)


def describe(
    path: str,
    raw: Raw,
    read: Labelled,
    counts: Mapping[str, int],
    labels: Sequence[Array | None],
    steps: Sequence[str],
    more: Sequence[str] = (),
) -> str:
    """Return one line about a file: samples, split, classes with counts, columns, preparation, and remarks."""
    known = np.concatenate([each for each in labels if each is not None])
    rows = "rows" if raw.columns else "samples"
    text = f"{path}: {len(known):,} {rows} ({', '.join(f'{count:,} {use}' for use, count in counts.items())})"
    if read.kind == "numbers":
        text += f"; {raw.label or 'y'} from {known.min():g} to {known.max():g}, a regression"
        if np.unique(known).size <= FEW and (known % 1 == 0).all():
            text += " (for classes: target=class)"
    else:
        names, found = np.unique(known, return_counts=True)
        each = dict(zip(map(str, names), found.tolist(), strict=True))
        listed = [f"{name} {each[name]:,}" for name in class_order(each)]
        text += f"; {raw.label or 'y'}: {some(listed)}"
    if raw.columns:
        text += f"; columns {some([column.name for column in raw.columns])}"
    else:
        text += f"; each {raw.inputs.dtype} {'x'.join(map(str, raw.inputs.shape[1:]))}"
    spare = [name for name in read.class_names[len(read.targets.names) :] if name]
    if spare and read.targets.names:
        text += f"; spare outputs were taken for {some(spare)}, which the federation does not name"
    prepared = [f"prepared by: {', '.join(steps)}"] if steps else []
    return "; ".join([text, *prepared, *more, *raw.said])
