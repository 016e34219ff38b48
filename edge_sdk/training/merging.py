"""From a payload to the weights a round starts from."""

from __future__ import annotations

import numpy as np

from edge_sdk.protocol.bundle import Bundle
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import NeuronMask, merge_in_place, pack, same_mask, unpack


def whole_model(manifest: Manifest, received: Bundle | None) -> Tensors:
    """A full payload as tensors by name, views into it. Raises BundleError for one that is partial or missing.

    Tensors that never travel (running statistics that stay local) are not among them.
    """
    if received is None:
        raise BundleError("the assignment came without its payload; fetch the payload and try again")
    if not is_whole(manifest, received):
        wanted = "hand the assignment back, so that the coordinator sends the whole model"
        raise BundleError(f"the payload holds a part of the model, with nothing here to merge it into; {wanted}")
    return {spec.name: values.reshape(spec.shape) for spec, _, values in unpack(manifest, received.values, None)}


def merge(manifest: Manifest, personal: Tensors, received: Bundle | None, mask: NeuronMask | None) -> Tensors:
    """ŵ = where(m, w^t, w_k^t): a copy of ``personal`` with the values received under ``mask`` (FedSPU, Algorithm 1).

    A payload of the whole model, sent again to a device that was thought to have lost its own, counts under ``mask``
    only: the rest is not this round's business. Raises BundleError for a payload that is missing or of another mask.
    """
    if received is None or is_whole(manifest, received):
        values: Array = pack(manifest, whole_model(manifest, received), mask)
    elif same_mask(received.mask, mask):
        values = received.values
    else:
        raise BundleError("the payload's mask is not the assignment's; fetch the assignment and its payload again")
    merged = {name: np.array(tensor) for name, tensor in personal.items()}
    merge_in_place(manifest, merged, values, mask)
    return merged


def is_whole(manifest: Manifest, received: Bundle) -> bool:
    """Whether nothing is left out: no mask, or one whose neurons are all active."""
    return received.values.size == manifest.shared_values
