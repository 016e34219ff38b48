"""Average the last rounds' models into the finished one, for methods with FedAvg's mean.

Izmailov et al., UAI 2018, arXiv:1803.05407; on the server of a federation: Caldarola et al., ECCV 2022,
arXiv:2203.11834. With w_r the model of round r, of T rounds, and n ``averaged_rounds``, the finished model is

    (w_{T-n+1} + ... + w_T) / n

A federation that ends earlier ends with its last model. Running statistics of batch norm are averaged like weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from . import Aggregation, GlobalModel, MethodSettings, Situation

COUNT = "count"
"""Key of the number of rounds in the mean."""
MEAN = "mean."
"""Prefix of the mean's tensors."""


class LastRoundsSettings(MethodSettings):
    """Settings of methods whose finished model may be a mean over rounds."""

    averaged_rounds: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Average the models of this many last rounds into the finished one; 0: the last model",
    )


def close(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return the weighted mean; in the last round, the mean of the last rounds' models."""
    tensors = sums.mean(model.tensors)
    rounds = situation.settings.rounds
    # Not by ``own``, because methods have more settings than this one.
    averaged = int(situation.settings.method_settings.get("averaged_rounds", 0))
    if situation.round <= rounds - averaged:
        return GlobalModel(tensors, model.mask)
    before = int(model.own[COUNT][0]) if COUNT in model.own else 0
    mean: dict[str, Any] = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    for name, tensor in mean.items() if before else ():
        kept = np.asarray(model.own[MEAN + name], np.float32)
        mean[name] = kept + (tensor - kept) / np.float32(before + 1)
    if situation.round >= rounds:
        return GlobalModel(mean, model.mask, notes={"averaged_rounds": before + 1})
    own = {MEAN + name: tensor for name, tensor in mean.items()}
    return GlobalModel(tensors, model.mask, {**own, COUNT: np.array([before + 1], dtype=np.int64)})


LAST_ROUNDS = Aggregation(close=close, why_mean_only=None, why_not_private=None, why_not_buffered=None)
