"""FedAvg, server half: the mean of what the devices trained, weighted with their training samples.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv:1602.05629, Algorithm 1. A device trains the whole model or none of it, so one whose budget
does not reach is not drawn. There is one global model and no personal one: when the federation has ended every device
is given the last global model, which it may fine-tune (``finetune_epochs``).
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
"""w <- sum of n_k w_k / sum of n_k, over the cohort. ``averaged_rounds`` is not of the paper."""
