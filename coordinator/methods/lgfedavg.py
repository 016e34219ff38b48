"""LG-FedAvg, server half: the mean of the devices' heads; representations stay on devices.

Liang et al., arXiv:2001.01523. Linear layers are shared; convolutions and other layers below are personal. In a network
of only linear layers, the first one is personal.

With a ``fedavg_share`` the first rounds are FedAvg's, of the full model, as in the paper's experiments; after them
only heads are sent. So each tensor of the body is a block.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from ..sums.averages import BlockSums, MaskedSums, Sums
from . import (
    Aggregation,
    CoordinatorMethod,
    DeviceMasks,
    GlobalModel,
    MethodSettings,
    Schedule,
    Situation,
    Work,
    own_settings,
    refuse_mask,
)
from .parts import check_apart, linear_layers


class LGFedAvgSettings(MethodSettings):
    """LG-FedAvg's setting beyond a federation's."""

    fedavg_share: float = Field(
        default=0.0, ge=0, lt=1, description="Share of rounds, at the start, that average the whole model"
    )


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest with a private body, or with trainable body tensors as blocks if FedAvg comes first. The body
    is everything except the linear layers, or else the first of them."""
    linear = linear_layers(published)
    head = check_apart(published, linear)
    body = {spec.name for spec in published.shared} - head or check_apart(published, linear[:1])
    uncut = published.with_blocks({})
    if _from_first(settings):
        return uncut.with_private(body)
    return uncut.with_blocks({spec.name: (spec.size,) for spec in uncut.shared if spec.trainable and spec.name in body})


def _from_first(settings: FederationSettings) -> bool:
    """Return True if no FedAvg rounds come first."""
    return own_settings(settings, LGFedAvgSettings).fedavg_share == 0


def apart(situation: Situation) -> bool:
    """Return True if the round is after the FedAvg rounds."""
    return situation.round > situation.own(LGFedAvgSettings).fedavg_share * situation.settings.rounds


def work(situation: Situation) -> Work:
    """Return the round's work: training the full model, or sending only the head."""
    return Work(plan={"apart": 1}) if situation.manifest.blocks and apart(situation) else Work()


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return the first model; ``own`` has the round of each body tensor's last change."""
    blocks = len(situation.manifest.blocks)
    return GlobalModel(tensors, own={"changed": np.zeros(blocks, np.int64)} if blocks else {})


def changed(model: GlobalModel, since: int, situation: Situation) -> BlockMask:
    """Return the body tensors changed in a later round."""
    return BlockMask(model.own["changed"].astype(np.int64) > since)


def check_mask(model: GlobalModel, mask: BlockMask, situation: Situation) -> None:
    """Raise BadContent if a private body is sent."""
    if not situation.plan.get("apart"):
        refuse_mask()
    if mask.on.any():
        raise BadContent("mask: the body stays on each device in this round; send only the head")


def sums_of(model: GlobalModel, situation: Situation) -> Sums:
    """Return Σ n_i θ_i and Σ n_i, of each part."""
    return BlockSums(situation.manifest) if situation.manifest.blocks else MaskedSums(situation.manifest)


def close(model: GlobalModel, sums: BlockSums | MaskedSums, situation: Situation) -> GlobalModel:
    """Return the weighted mean, only of the head if bodies are separate."""
    mean = sums.mean(model.tensors)
    blocks = situation.manifest.blocks
    if not blocks:
        return GlobalModel(mean, model.mask, model.own)
    if not work(situation).plan:
        return GlobalModel(mean, own={"changed": np.full(len(blocks), situation.round, np.int64)})
    # Drop running statistics, and any body that a device sent: FedAvg's body stays.
    head = {name: mean[name] for name in situation.manifest.uncut}
    return GlobalModel({**model.tensors, **head}, own=model.own)


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return a reason if updates change their form between rounds."""
    return None if _from_first(settings) else "its updates change their form; set method_settings.fedavg_share = 0"


LGFEDAVG = CoordinatorMethod(
    settings_type=LGFedAvgSettings,
    usable_global_model=False,
    personal_models=True,
    manifest=manifest,
    start=start,
    masks=DeviceMasks(check=check_mask, type=BlockMask),
    changes=changed,
    schedule=Schedule(work=work),
    aggregation=Aggregation(sums=sums_of, close=close, why_mean_only=None, why_not_private=None, why_not_buffered=None),
    only_means=_from_first,
    why_not_secure=why_not_secure,
)
