"""Digest of validation data, by which a device notices that a model was judged on other data than it has now."""

from __future__ import annotations

import hashlib

import numpy as np

from ..tasks import Batches, as_arrays
from ..tasks.intake import random_state_kept

MOST_BYTES = 2**28
"""Of inputs and targets, as many are looked at."""


def digest_of(batches: Batches) -> str:
    """Return the SHA-256 of the samples in their order, whatever the sizes of batches; random numbers stay."""
    inputs, targets, left = hashlib.sha256(), hashlib.sha256(), MOST_BYTES
    with random_state_kept(batches):
        for samples, wanted in map(as_arrays, batches):
            inputs.update(f"{samples.dtype} {samples.shape[1:]}".encode() if left == MOST_BYTES else b"")
            for digest, array in ((inputs, samples), (targets, wanted)):
                digest.update(array.reshape(-1).view(np.uint8).data)
            left -= samples.nbytes + wanted.nbytes
            if left <= 0:
                break
    return hashlib.sha256(inputs.digest() + targets.digest()).hexdigest()
