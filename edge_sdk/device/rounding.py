"""Updates in int8: what a device sends is rounded, and what rounding takes is sent with its next update.

What is owed is of updates that counted: the state folder keeps what was owed before, until the coordinator has
acknowledged the update.
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
    """Return an update as whole numbers, and what rounding takes from it, to be added to the next (``quantization``).

    feedback: what it took before; name -> float32, nothing where there was none.
    """
    manifest, mask = job.manifest, update.mask
    base = sent_values(manifest, job.received, mask) if update.base is None else pack(manifest, update.base, mask)
    change = np.asarray(update.values, dtype=np.float32) - base
    if feedback:
        change += pack(manifest, feedback, mask)
    lengths = row_lengths(manifest, mask)
    numbers = quantise(change, lengths, job.seed("quantise"))
    _stay_positive_in_place(job.manifest, update, base, numbers, lengths)
    # What neurons or blocks of other rounds are owed stays; an element that no longer exists is owed nothing.
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
    """Round up what rounding would make negative in buffers that hold nothing negative, as running variances do: those
    of channels that are hardly used are smaller than a vector's rounding, and have no square root below zero."""
    scales = np.repeat(np.where(numbers.scales > 0, numbers.scales, np.float32(1)), lengths)
    new, start = np.asarray(update.values), 0
    for spec, block, old in unpack(manifest, base, update.mask):
        part = slice(start, start + block.size)
        start += block.size
        if spec.trainable or not block.size or old.min() < 0 or new[part].min() < 0:
            continue
        least = np.clip(np.ceil(-base[part].astype(np.float32) / scales[part]), -LARGEST, 0).astype(np.int8)
        np.maximum(numbers.numbers[part], least, out=numbers.numbers[part])
