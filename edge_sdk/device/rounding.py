"""Updates in int8 with error feedback: the rounding residual is added to the next update.

The state folder keeps the previous residual until the coordinator has acknowledged the update.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import NeuronMask, merge_in_place, pack, unpack
from sparrow.protocol.quantization import LARGEST, Quantised, quantise, row_lengths

from ..methods import Job, Update
from ..methods.merging import sent_values


def round_update(job: Job, update: Update, feedback: Tensors) -> tuple[Quantised, Tensors]:
    """Return a quantised update and its rounding residual (``quantization``).

    feedback: the previous residual, name -> float32.
    """
    manifest = job.manifest
    mask = update.mask
    base = sent_values(manifest, job.received, mask) if update.base is None else pack(manifest, update.base, mask)
    change = np.asarray(update.values, dtype=np.float32) - base
    if feedback:
        change += pack(manifest, feedback, mask)
    lengths = row_lengths(manifest, mask)
    numbers = quantise(change, lengths, job.seed("quantise"))
    _stay_positive_in_place(job.manifest, update, base, numbers, lengths)
    # Keep residuals of neurons or blocks that this round does not send; removed elements have none.
    keeps = isinstance(mask, NeuronMask | BlockMask) and feedback
    left = {
        spec.name: np.array(feedback[spec.name]) if keeps else np.zeros(spec.shape, np.float32)
        for spec in manifest.shared
    }
    merge_in_place(manifest, left, change - numbers.values(lengths), mask)
    return numbers, left


def _stay_positive_in_place(
    manifest: Manifest, update: Update, base: Array, numbers: Quantised, lengths: NDArray[np.intp]
) -> None:
    """Round up where a non-negative buffer would become negative, such as small running variances."""
    scales = np.repeat(np.where(numbers.scales > 0, numbers.scales, np.float32(1)), lengths)
    new = np.asarray(update.values)
    start = 0
    for spec, block, old in unpack(manifest, base, update.mask):
        part = slice(start, start + block.size)
        start += block.size
        if spec.trainable or not block.size or old.min() < 0 or new[part].min() < 0:
            continue
        least = np.clip(np.ceil(-base[part].astype(np.float32) / scales[part]), -LARGEST, 0).astype(np.int8)
        np.maximum(numbers.numbers[part], least, out=numbers.numbers[part])
