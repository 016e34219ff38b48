"""FedAvg, server half: the mean of the devices' models, weighted by training samples.

McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1. A device whose budget is too small for the full model is
not drawn. After the last round every device gets the global model, which it may fine-tune (``finetune_epochs``).
"""

from __future__ import annotations

from . import CoordinatorMethod, needs_sums_alone
from .last_rounds import LAST_ROUNDS, LastRoundsSettings

FEDAVG = CoordinatorMethod(
    settings_type=LastRoundsSettings,
    aggregation=LAST_ROUNDS,
    pages=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
"""w <- sum of n_k w_k / sum of n_k, over the cohort. ``averaged_rounds`` is an addition to the paper."""
