"""Updates in int8: what a device sends is rounded, and what rounding takes is sent with its next update."""

from __future__ import annotations

import numpy as np

from edge_sdk.methods import Job, Update
from edge_sdk.protocol.blocks import BlockMask
from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.masks import NeuronMask, merge_in_place, pack
from edge_sdk.protocol.quantization import Quantised, quantise, row_lengths
from edge_sdk.training.merging import sent_values


def round_update(job: Job, update: Update, feedback: Tensors) -> tuple[Quantised, Tensors]:
    """An update as whole numbers, and what rounding takes from it, to be added to the next (``quantization``).

    feedback: what it took before; name -> float32, nothing where there was none.
    """
    manifest, mask = job.manifest, update.mask
    base = sent_values(manifest, job.received, mask) if update.base is None else pack(manifest, update.base, mask)
    change = np.asarray(update.values, dtype=np.float32) - base
    if feedback:
        change += pack(manifest, feedback, mask)
    lengths = row_lengths(manifest, mask)
    numbers = quantise(change, lengths, job.seed("quantise"))
    # What neurons or blocks of other rounds are owed stays; an element that no longer exists is owed nothing.
    keeps = isinstance(mask, NeuronMask | BlockMask) and feedback
    left = {
        spec.name: np.array(feedback[spec.name]) if keeps else np.zeros(spec.shape, np.float32)
        for spec in manifest.shared
    }
    merge_in_place(manifest, left, change - numbers.values(lengths), mask)
    return numbers, left
