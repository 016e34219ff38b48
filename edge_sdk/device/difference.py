"""A personal model as its difference from a model that many devices share.

Simulated devices begin with the same weights, and under sparse methods most of a device's values never move. Stored is,
per tensor, what is not bit for bit the reference's: a bitmap of the positions and their values, as uint8 and float32
vectors named ``<tensor>:where`` and ``<tensor>:values``; a tensor that has changed nearly everywhere is stored whole,
under its own name, and one that has not changed not at all.
"""

from __future__ import annotations

import numpy as np

from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Array, Tensors

WHOLE = 31 / 32
"""Share of changed values from which the bitmap (one bit a value) costs more than it saves."""


def subtract(tensors: Tensors, reference: Tensors) -> Tensors:
    """Return what is needed, beside ``reference``, to restore ``tensors``; both by name, alike in shape and type."""
    difference: Tensors = {}
    for name, tensor in tensors.items():
        if name not in reference or tensor.dtype != np.float32:
            difference[name] = tensor
            continue
        changed = _bits(tensor) != _bits(reference[name])
        count = int(np.count_nonzero(changed))
        if count > WHOLE * tensor.size:
            difference[name] = tensor
        elif count:
            difference[f"{name}:where"] = np.packbits(changed)
            difference[f"{name}:values"] = tensor.reshape(-1)[np.flatnonzero(changed)]
    return difference


def add(difference: Tensors, reference: Tensors) -> Tensors:
    """Return the tensors that ``subtract`` was given; new arrays. Raises BundleError for a difference from another
    model.
    """
    tensors = {name: np.array(tensor, order="C") for name, tensor in reference.items()}
    for name, stored in difference.items():
        base, _, part = name.rpartition(":")
        if part not in ("where", "values") or base not in tensors:
            tensors[name] = stored
        elif part == "values":
            size, where = tensors[base].size, difference.get(f"{base}:where")
            if where is None or where.dtype != np.uint8 or where.shape != (-(-size // 8),):
                raise BundleError(f"{base}: values stored without a bitmap of its {size} positions")
            positions = np.flatnonzero(np.unpackbits(where.astype(np.uint8, copy=False), count=size))
            if len(positions) != len(stored):
                raise BundleError(f"{base}: {len(stored)} values stored for {len(positions)} positions")
            tensors[base].reshape(-1)[positions] = stored
        elif f"{base}:values" not in difference:
            raise BundleError(f"{base}: a bitmap stored without values")
    return tensors


def _bits(tensor: Array) -> Array:
    """Return the values' bits: unlike the values, they tell 0.0 from -0.0 and are equal to themselves where NaN."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint32)
