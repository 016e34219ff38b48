"""pFedMe, server half: a step towards the mean of the devices' local models, or beyond it.

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, arXiv:2006.08848,
Algorithm 1: w ← (1 - β)w + β·mean(w_i), with β = ``server_mixing``, 1 to 4 in the paper's experiments.

Departures: the paper weighs devices equally; here they count with their training samples, as in its released code and
in every method here. Running statistics are never moved beyond their mean, as a variance could become negative.
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
        default=15.0, gt=0, le=1e6, description="Weight λ of the personal model's pull to the local one"
    )
    inner_steps: int = Field(
        default=5, ge=1, le=1000, description="Steps K of the personal model on each batch, at learning_rate"
    )
    outer_rate: float = Field(
        default=0.005,
        gt=0,
        le=100,
        description="Rate η of the local model: in each step it goes η λ of its way to the personal one",
    )
    server_mixing: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="Length β of the server's step to the mean of the local models; 1 is the mean",
    )


def close(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return (1 - β) of the last model and β of the mean; of running statistics at most the mean."""
    mixing, mean = situation.own(PFedMeSettings).server_mixing, sums.mean(model.tensors)
    trained = {spec.name for spec in situation.manifest.shared if spec.trainable}
    tensors: Tensors = {}
    for name, tensor in model.tensors.items():
        share = mixing if name in trained else min(1.0, mixing)
        tensors[name] = (1 - share) * tensor.astype(np.float32) + share * mean[name].astype(np.float32)
    return GlobalModel(tensors)


def warning(model: GlobalModel, situation: Situation) -> str | None:
    """Return which of the two kinds of steps surely diverges; None if neither does."""
    settings, own = situation.settings, situation.own(PFedMeSettings)
    outer = own.outer_rate * own.proximal_weight
    if outer >= 2:
        return (
            f"method_settings.outer_rate: times proximal_weight it is {outer:g}; from 2 on local models diverge. Lower "
            f"one of them"
        )
    inner = settings.learning_rate * own.proximal_weight
    if settings.optimizer == "sgd" and settings.clip is None and inner >= 2 * (1 + settings.momentum):
        return (
            f"learning_rate: times method_settings.proximal_weight it is {inner:g}; from "
            f"{2 * (1 + settings.momentum):g} on personal models diverge. Lower one of them"
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
