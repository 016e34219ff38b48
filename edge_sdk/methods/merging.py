"""Convert payloads to the weights that a round starts from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.bundle import Bundle
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask, NeuronMask, merge_in_place, pack, same_mask, unpack_whole

__all__ = ["merge", "mixed", "whole_model"]


def whole_model(manifest: Manifest, received: Bundle | None) -> Tensors:
    """Return a full payload as tensors by name; dense ones are views. Missing weights of a sparse model are zero;
    tensors that are never sent are left out. Raises BundleError if the payload is missing or partial."""
    if received is None:
        raise BundleError("the assignment has no payload; fetch the payload and try again")
    if not is_whole(manifest, received):
        wanted = "hand the assignment back, so that the coordinator sends the whole model"
        raise BundleError(f"the payload has only a part of the model, and this device has no base for it; {wanted}")
    if isinstance(received.mask, ElementMask):
        tensors: Tensors = {spec.name: np.zeros(spec.shape, dtype=np.float32) for spec in manifest.shared}
        merge_in_place(manifest, tensors, received.values, received.mask)
        return tensors
    return unpack_whole(manifest, received.values)


def sent_values(manifest: Manifest, received: Bundle | None, mask: Mask | None) -> NDArray[np.float32]:
    """Return the received values under ``mask``, packed, 0 for those not received.

    Raises BundleError if there is no payload.
    """
    if received is not None and same_mask(received.mask, mask):
        return received.values
    return pack(manifest, whole_model(manifest, received), mask)


def merge(manifest: Manifest, personal: Tensors, received: Bundle | None, mask: NeuronMask | None) -> Tensors:
    """Return ŵ = where(m, w^t, w_k^t): a copy of ``personal`` with the values received under ``mask`` (FedSPU,
    Algorithm 1). A payload of the full model counts under ``mask`` only. Raises BundleError if there is no payload."""
    if received is None or is_whole(manifest, received):
        values: Array = pack(manifest, whole_model(manifest, received), mask)
    elif same_mask(received.mask, mask):
        values = received.values
    else:
        raise BundleError(
            "the payload's mask differs from the assignment's; fetch the assignment and its payload again"
        )
    merged = {name: np.array(tensor) for name, tensor in personal.items()}
    merge_in_place(manifest, merged, values, mask)
    return merged


GLOBAL_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the global model to try in a mixture with the personal one; ties take the first."""


def mixed(personal: Tensors, received: Tensors, share: float) -> Tensors:
    """Return personal + share·(received - personal), float32 by name, share in 0..1."""
    mixture = dict(personal)
    for name, tensor in received.items():
        own, shared = personal[name].astype(np.float32), tensor.astype(np.float32)
        mixture[name] = own + np.float32(share) * (shared - own)
    return mixture


def is_whole(manifest: Manifest, received: Bundle) -> bool:
    """Return whether a payload has the full model."""
    return isinstance(received.mask, ElementMask) or received.values.size == manifest.shared_values
