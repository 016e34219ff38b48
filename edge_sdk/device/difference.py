"""A personal model stored as its difference from a shared model, for fleets of simulated devices.

Per tensor, it stores a bitmap of the positions whose bits differ, and their values, as uint8 and float32 vectors
``<tensor>:where`` and ``<tensor>:values``. A tensor that changed nearly everywhere is stored in full under its own
name; an unchanged one is omitted.
"""

from __future__ import annotations

import numpy as np

from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Array, Tensors

# Above this share of changed values, the bitmap (one bit per value) costs more than it saves.
WHOLE = 31 / 32


def subtract(tensors: Tensors, reference: Tensors) -> Tensors:
    """Return the difference of ``tensors`` from ``reference``."""
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
    """Restore the tensors from their difference, as new arrays.

    Raises BundleError if positions and values do not match.
    """
    tensors = {name: np.array(tensor, order="C") for name, tensor in reference.items()}
    for name, stored in difference.items():
        base, _, part = name.rpartition(":")
        if part not in ("where", "values") or base not in tensors:
            tensors[name] = stored
        elif part == "values":
            size = tensors[base].size
            where = difference.get(f"{base}:where")
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
    # Bits distinguish 0.0 from -0.0, and NaN equals itself.
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint32)
