"""A task over a user's own samples: the preparation to publish, the model, and a summary line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparrow.protocol.manifest import Array
from sparrow.reading import Decoded, Raw, class_order
from sparrow.reading.errors import BadOption

from .. import OWN, Seeded, Task
from ..loading import Samples, ScaledError, batched, cross_entropy
from ..preparing import (
    BuiltPreparation,
    Hearing,
    prepare_array,
    prepare_pictures,
    prepare_rows,
    prepare_sounds,
    statistics_of,
)
from .labels import Known, Labelled, Publishing, some

if TYPE_CHECKING:
    from torch import nn

METRICS_OF_NUMBERS = ("rmse", "mae", "r2")

# Up to this many distinct integers may have been meant as classes.
FEW = 20

Inputs = Array | Decoded
"""Raw samples, in memory or decoded when they are read."""

# Sides of pictures, in pixels.
LARGEST_OWN = 96
USUAL = 64
LARGEST_PICTURE = 4096

LONGEST_SOUND = 30
"""Longest sound of a preparation, seconds."""


def build_preparation(raw: Raw, training: Inputs, kind: str, publishing: Publishing) -> BuiltPreparation:
    """Return the preparation to publish, built from raw training samples."""
    if raw.axes == "HWC" and isinstance(raw.inputs, Decoded):
        return _prepare_pictures(raw.inputs, publishing)
    if raw.axes == "T":
        return _prepare_sounds(raw, training, publishing)
    assert not isinstance(raw.inputs, Decoded), "only pictures and sounds are decoded late"
    assert not isinstance(training, Decoded), "as all samples"
    if raw.columns:
        return prepare_rows(raw.columns, statistics_of([training], 0, raw.columns), own=publishing.own)
    dtype = raw.inputs.dtype.name
    shape = tuple(raw.inputs.shape[1:])
    axes = raw.axes
    if raw.inputs.dtype == np.uint8 and axes in ("HW", "CHW", "HWC"):
        return prepare_array(dtype, shape, axes, None)
    if axes == "HW":
        if publishing.own:
            raise BadOption("--standardise device: grey images use only the publisher's statistics; leave it out")
        return prepare_array(dtype, shape, axes, statistics_of([training[..., None]], 2))
    channel = max(axes.find("C"), 0)
    built = prepare_array(dtype, shape, axes, statistics_of([training], channel), own=publishing.own)
    if raw.step is None:
        return built
    windows = {"reader": "recordings", "rate": raw.rate, "step": raw.step, "channels": raw.channels}
    return replace(built, description=built.description.model_copy(update=windows))


def _prepare_pictures(pictures: Decoded, publishing: Publishing) -> BuiltPreparation:
    side = publishing.size
    height, width = pictures.shape[:2]
    if side is not None:
        size = (side, side)
    elif not pictures.free and max(height, width) <= LARGEST_OWN:
        size = (height, width)
    else:
        size = (USUAL, USUAL)
    # Devices may have pictures of other sizes than the publisher.
    return prepare_pictures(size, (LARGEST_PICTURE, LARGEST_PICTURE, 3), (0, 1))


def _prepare_sounds(raw: Raw, training: Inputs, publishing: Publishing) -> BuiltPreparation:
    """Return the preparation of sounds, standardised by band."""
    # Imported here, because it imports ONNX Runtime.
    from sparrow.export.preparation import Preparer
    from sparrow.export.running import batches_of

    assert raw.rate is not None, "sounds have a rate"
    if publishing.own:
        raise BadOption("--standardise device: sounds use only the publisher's statistics; leave it out")
    rate = round(raw.rate)
    windows = raw.step is not None
    length = raw.inputs.shape[0] if isinstance(raw.inputs, Decoded) else raw.inputs.shape[1]
    longest = length if windows else LONGEST_SOUND * rate
    hearing = Hearing.of(rate, length)
    plain = Preparer(prepare_sounds(hearing, longest, None, step=raw.step).graph)
    bands = (plain(each[None] if each.ndim == 1 else each)[:, 0] for each in batches_of(training, 1))
    return prepare_sounds(hearing, longest, statistics_of(bands, 0), step=raw.step)


def make_task(
    parts: Mapping[str, Samples],
    preparation: BuiltPreparation | None,
    read: Labelled,
    known: Known,
    said: str,
    *,
    batch_size: int,
) -> Task:
    """Return the task; a joining device takes its model's shapes from the manifest."""
    shape = known.shape
    outputs = known.outputs
    if shape is None or not outputs:
        assert preparation is not None, "made to publish"
        shape = prepared_shape(preparation)
        outputs = (len(read.class_names) or 1,)
    numbers = read.kind == "numbers"
    scale = (read.targets.mean, read.targets.deviation)
    return Task(
        name=known.task or OWN,
        model=Seeded(partial(_build, shape, outputs[0], scale if numbers else None, _hears(preparation, known))),
        loss=ScaledError(read.targets.deviation) if numbers else cross_entropy,
        **batched(parts, batch_size),
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


def _hears(preparation: BuiltPreparation | None, known: Known) -> bool:
    # Sounds have a network of their own.
    description = known.preparation if preparation is None else preparation.description
    return description is not None and description.axes == "T"


def _build(shape: tuple[int, ...], outputs: int, scale: tuple[float, float] | None, sounds: bool) -> nn.Module:
    from ..models import build_model

    return build_model(shape, outputs, scale, sounds=sounds)


def _label_of(raw: Raw) -> str:
    # Folders name classes, npz files have an entry y.
    return raw.label or ("class" if isinstance(raw.inputs, Decoded) else "y")


def _shape_of(inputs: Inputs) -> str:
    shape, free = (inputs.shape, inputs.free) if isinstance(inputs, Decoded) else (inputs.shape[1:], ())
    return f"{'up to' if free else 'each'} {inputs.dtype} {'x'.join(map(str, shape))}"


def describe(
    path: str,
    raw: Raw,
    read: Labelled,
    counts: Mapping[str, int],
    labels: Sequence[Array | None],
    steps: Sequence[str],
    more: Sequence[str] = (),
) -> str:
    """Return one line about a file."""
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
        text += f"; {_label_of(raw)}: {some(listed)}"
    if raw.columns:
        text += f"; columns {some([column.name for column in raw.columns])}"
    else:
        text += f"; {_shape_of(raw.inputs)}"
    spare = [name for name in read.class_names[len(read.targets.names) :] if name]
    if spare and read.targets.names:
        text += f"; spare outputs are used for {some(spare)}, which the federation does not name"
    prepared = [f"prepared by: {', '.join(steps)}"] if steps else []
    return "; ".join([text, *prepared, *more, *raw.said])
