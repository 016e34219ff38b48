"""FedMask, server half: the mean of the devices' mask bits, for weights that at least two devices keep.

Li et al., SenSys 2021, as compared in pFedGate's section 7.1: the server averages a bit only if the masks of at least
two devices overlap, and returns it to them; other positions stay on the device.

The weights of the last ``masked_layers`` maskable layers are shared and never change: each tensor is one block, so a
device with the model of any round gets only bits. The rest of the model is personal and starts equal on all devices.
Updates are signs; the mean is sent as a sign, 1 if it is at least 1/2.

Departures: bits are weighted by training samples; devices that were not drawn also get averaged bits; a bit with fewer
than two devices in a round keeps its last mean.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask
from sparrow.protocol.parts import Numbers, Signs, all_maskable
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from . import (
    Aggregation,
    CoordinatorMethod,
    DeviceMasks,
    GlobalModel,
    MethodSettings,
    Situation,
    UpdatePart,
    own_settings,
)

FEWEST = 2
"""Smallest number of devices to average a bit."""

OF_VALUES = ("update_clip", "update_norm_limit", "outlier_mads")
"""Settings that limit changes of values, and do not apply to FedMask."""


class BitSums:
    """Sums of signs of every maskable weight. positive and weights: total weight of devices whose sign is 1, and is not
    0; senders: the number of the latter."""

    def __init__(self, manifest: Manifest) -> None:
        size = manifest.maskable_values
        self.positive, self.weights = np.zeros((2, size), dtype=np.float64)
        self.senders = np.zeros(size, dtype=np.int64)
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Count one update; its values are empty."""
        self.updates += 1

    def fold_signs_in_place(self, signs: Signs, num_examples: int) -> None:
        """Add the signs of one update, int8 [maskable weights]."""
        self.positive[signs > 0] += num_examples
        self.weights[signs != 0] += num_examples
        self.senders += signs != 0


class FedMaskSettings(MethodSettings):
    """FedMask's settings beyond a federation's."""

    masked_layers: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Number of last layers whose weights are masked; all if there are fewer",
    )
    density: float = Field(
        default=0.5, gt=0, le=1, description="Share of each masked layer's weights that a device keeps after pruning"
    )
    first_score: float = Field(
        default=0.0001,
        gt=0,
        le=100,
        description="Initial scores; the smaller they are relative to the learning rate, the sooner bits change",
    )


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest that shares only the masked weights, each as one block. Raises BadContent without any."""
    maskable = {spec.name for spec in published.maskable}
    layers = [layer for layer in published.layers if maskable.intersection(layer.tensors)]
    chosen = layers[-own_settings(settings, FedMaskSettings).masked_layers :]
    masked = maskable.intersection(name for layer in chosen for name in layer.tensors)
    if not masked:
        raise BadContent(
            "no layer of the model can be masked: FedMask needs trained weights of linear layers or convolutions that "
            "no other layer uses; choose a method for any model, such as fedavg, ditto or apfl"
        )
    private = published.with_blocks({}).with_private(
        [each.name for each in published.shared if each.name not in masked]
    )
    return private.with_blocks({spec.name: (spec.size,) for spec in private.shared})


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return the first model, without mean bits. Raises BadContent for settings that limit values."""
    for name in OF_VALUES:
        if getattr(situation.settings, name) is not None:
            raise BadContent(f"{name}: it limits changes of values, but FedMask's updates are bits; leave it out")
    count = situation.manifest.maskable_values
    return GlobalModel(tensors, own={"bits": np.zeros(count, np.int8)})


def changed(model: GlobalModel, since: int, situation: Situation) -> BlockMask:
    """Return no block: weights are fixed."""
    return BlockMask(np.zeros(len(situation.manifest.block_table.sizes), bool))


def check_mask(model: GlobalModel, mask: BlockMask, situation: Situation) -> None:
    """Raise BadContent if weights are sent."""
    if mask.on.any():
        raise BadContent("mask: weights are fixed in this method; send only signs")


def mean_bits(model: GlobalModel, situation: Situation) -> dict[str, Numbers]:
    """Return the mean bits as signs; 0 for weights without a mean."""
    return {"signs": model.own["bits"].astype(np.int8)}


def sums_of(model: GlobalModel, situation: Situation) -> BitSums:
    """Return Σ n_i b_i and Σ n_i of each weight, over the devices that keep it."""
    return BitSums(situation.manifest)


def close(model: GlobalModel, sums: BitSums, situation: Situation) -> GlobalModel:
    """Return the same weights with this round's mean bits."""
    overlap = sums.senders >= FEWEST
    mean = np.where(2 * sums.positive >= sums.weights, 1, -1)
    bits = np.where(overlap, mean, model.own["bits"]).astype(np.int8)
    return GlobalModel(model.tensors, own={"bits": bits}, notes={"overlapping": int(np.count_nonzero(overlap))})


FEDMASK = CoordinatorMethod(
    settings_type=FedMaskSettings,
    usable_global_model=False,
    personal_models=True,
    manifest=manifest,
    start=start,
    masks=DeviceMasks(check=check_mask, type=BlockMask),
    changes=changed,
    payload_parts=mean_bits,
    parts=(UpdatePart(name="signs", dtype="sign", count=all_maskable, fold=BitSums.fold_signs_in_place),),
    aggregation=Aggregation(
        sums=sums_of,
        close=close,
        why_mean_only="its updates are bits, whose mean is already a vote",
        why_not_private="bits that at least two devices keep are sent without noise",
        why_not_buffered="updates answer the bits of one round",
    ),
    why_not_secure=lambda settings: "its updates are signs, which secure aggregation does not cover",
)
