"""FedProx, the device half: FedAvg with local training pulled towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, arXiv:1812.06127. A device minimises (Eq. 2)
h_k(w) = F_k(w) + μ/2·|w - w^t|², here by the federation's optimiser:

    w ← w - η(∇F_k(w) + μ(w - w^t))

The federation sets the epochs (the paper: γ-inexact solutions). The pull counts in the gradient norm of ``clip``, but
not in reported losses.
"""

from __future__ import annotations

from . import DeviceMethod
from .whole import adapt_global, evaluate_global, train_pulled

FEDPROX = DeviceMethod(
    train=train_pulled, evaluate=evaluate_global, adapt=adapt_global, acts=("pulled_steps",), sums=True
)
"""The weight μ is ``method_settings["proximal_weight"]``; 0 equals FedAvg bit for bit."""
