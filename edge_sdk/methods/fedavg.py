"""FedAvg, the device half: train the whole global model for some epochs, send it back, keep nothing.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017, arXiv:1602.05629, Algorithm 1, ClientUpdate(k, w):

    w_k ← w^t;   w_k ← w_k - η ∇F_k(w_k; b) for each batch b of E epochs;   send w_k and n_k

With ``finetune_epochs`` this is FedAvg-FT (pFedGate, section 7.1): each evaluation also trains a copy of the global
model on the device's data and discards it. After the last round ``adapt`` makes the copy that the device keeps.
"""

from __future__ import annotations

from . import DeviceMethod
from .whole import adapt_global, evaluate_global, train_whole

FEDAVG = DeviceMethod(train=train_whole, evaluate=evaluate_global, adapt=adapt_global, adds_local_noise=True, sums=True)
"""A device that stops early no longer trains, but gets the last global model."""
