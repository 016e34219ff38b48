"""LG-FedAvg, server half: the mean of the devices' heads; what makes their features stays where it is.

Liang and others, "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
arXiv:2001.01523. Shared are the linear layers; convolutions and whatever else lies below are each device's own. In a
network of linear layers alone the first one is.

The paper's experiments begin with a model that FedAvg has trained. With a ``fedavg_share`` the first rounds are
FedAvg's, of the whole model; in those after it each device keeps the body that FedAvg has left as its own, and the
global model keeps it as it was. The tensors of the body are blocks, one each, so that only the head travels then.
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
        default=0.0, ge=0, lt=1, description="Share of the rounds, the first, in which the whole model is averaged"
    )


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest in which the body, all but the linear layers or the first of them, is private or, if FedAvg
    comes first, its trainable tensors are blocks."""
    linear = linear_layers(published)
    head = check_apart(published, linear)
    body = {spec.name for spec in published.shared} - head or check_apart(published, linear[:1])
    uncut = published.with_blocks({})
    if _from_first(settings):
        return uncut.with_private(body)
    return uncut.with_blocks({spec.name: (spec.size,) for spec in uncut.shared if spec.trainable and spec.name in body})


def _from_first(settings: FederationSettings) -> bool:
    """Return whether body and head are apart from the first round on."""
    return own_settings(settings, LGFedAvgSettings).fedavg_share == 0


def apart(situation: Situation) -> bool:
    """Return whether the round comes after FedAvg's."""
    return situation.round > situation.own(LGFedAvgSettings).fedavg_share * situation.settings.rounds


def work(situation: Situation) -> Work:
    """Return what the round asks for: the whole model, or the head alone."""
    return Work(plan={"apart": 1}) if situation.manifest.blocks and apart(situation) else Work()


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return the first model; ``own`` holds in which round each tensor of a shared body last changed."""
    blocks = len(situation.manifest.blocks)
    return GlobalModel(tensors, own={"changed": np.zeros(blocks, np.int64)} if blocks else {})


def changed(model: GlobalModel, since: int, situation: Situation) -> BlockMask:
    """Return the tensors of the body that a later round has changed."""
    return BlockMask(model.own["changed"].astype(np.int64) > since)


def check_mask(model: GlobalModel, mask: BlockMask, situation: Situation) -> None:
    """Raise BadContent unless nothing of a body of one's own is sent."""
    if not situation.plan.get("apart"):
        refuse_mask()
    if mask.on.any():
        raise BadContent("mask: the body is each device's own in this round; send the head alone")


def sums_of(model: GlobalModel, situation: Situation) -> Sums:
    """Return Σ n_i θ_i and Σ n_i, of each part."""
    return BlockSums(situation.manifest) if situation.manifest.blocks else MaskedSums(situation.manifest)


def close(model: GlobalModel, sums: BlockSums | MaskedSums, situation: Situation) -> GlobalModel:
    """Return the weighted mean; of the head alone where bodies are apart."""
    mean, blocks = sums.mean(model.tensors), situation.manifest.blocks
    if not blocks:
        return GlobalModel(mean, model.mask, model.own)
    if not work(situation).plan:
        return GlobalModel(mean, own={"changed": np.full(len(blocks), situation.round, np.int64)})
    # Neither running statistics nor a body that a device has sent all the same: FedAvg's stays, whole.
    head = {name: mean[name] for name in situation.manifest.uncut}
    return GlobalModel({**model.tensors, **head}, own=model.own)


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return that updates of two kinds follow one another, unless body and head are apart from the first round on."""
    return None if _from_first(settings) else "its updates change their form; give method_settings.fedavg_share = 0"


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
