"""pFedMe, server half: a step towards the mean of the devices' local models, or beyond it.

T. Dinh, Tran, Nguyen, NeurIPS 2020, arXiv:2006.08848, Algorithm 1: w ← (1 - β)w + β·mean(w_i), with β =
``server_mixing``, 1 to 4 in the paper's experiments.

Departures: devices are weighted by training samples, as in the released code. Running statistics never move beyond
their mean, as a variance could become negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from sparrow.protocol.manifest import Tensors

from . import Aggregation, CoordinatorMethod, GlobalModel, MethodSettings, Situation, needs_sums_alone


class PFedMeSettings(MethodSettings):
    """pFedMe's settings beyond FedAvg's. The defaults are the paper's on MNIST."""

    proximal_weight: float = Field(
        default=15.0, gt=0, le=1e6, description="Weight λ of the pull from the personal to the local model"
    )
    inner_steps: int = Field(
        default=5, ge=1, le=1000, description="Steps K of the personal model per batch, at learning_rate"
    )
    outer_rate: float = Field(
        default=0.005,
        gt=0,
        le=100,
        description="Learning rate η of the local model: each step covers η λ of its distance to the personal one",
    )
    server_mixing: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="Length β of the server's step to the mean of local models; 1 is the mean",
    )


def close(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return (1 - β) of the last model plus β of the mean; β is at most 1 for running statistics."""
    mixing = situation.own(PFedMeSettings).server_mixing
    mean = sums.mean(model.tensors)
    trained = {spec.name for spec in situation.manifest.shared if spec.trainable}
    tensors: Tensors = {}
    for name, tensor in model.tensors.items():
        share = mixing if name in trained else min(1.0, mixing)
        tensors[name] = (1 - share) * tensor.astype(np.float32) + share * mean[name].astype(np.float32)
    return GlobalModel(tensors)


def warning(model: GlobalModel, situation: Situation) -> str | None:
    """Return a warning if outer or inner steps will diverge, or None."""
    settings = situation.settings
    own = situation.own(PFedMeSettings)
    outer = own.outer_rate * own.proximal_weight
    if outer >= 2:
        return (
            f"method_settings.outer_rate: outer_rate x proximal_weight is {outer:g}; local models diverge from 2. "
            f"Lower one of them"
        )
    inner = settings.learning_rate * own.proximal_weight
    if settings.optimizer == "sgd" and settings.clip is None and inner >= 2 * (1 + settings.momentum):
        return (
            f"learning_rate: learning_rate x method_settings.proximal_weight is {inner:g}; personal models diverge "
            f"from {2 * (1 + settings.momentum):g}. Lower one of them"
        )
    return None


PFEDME = CoordinatorMethod(
    settings_type=PFedMeSettings,
    personal_models=True,
    mixes_global=True,
    aggregation=Aggregation(close=close, why_mean_only=None, why_not_private=None, why_not_buffered=None),
    warning=warning,
    why_not_secure=needs_sums_alone,
)
