"""FedProx, the device half: FedAvg whose local training is pulled back to the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv:1812.06127. A device minimises h_k(w) = F_k(w) + μ/2·|w - w^t|² (Eq. 2), here by the federation's optimiser:

    w ← w - η(∇F_k(w) + μ(w - w^t))

The paper lets a device do as many epochs as it can (γ-inexact solutions); here they are the federation's. The pull
counts in a gradient's norm where ``clip`` is set, and not in the losses that are reported. Fine-tuning after the last
round is FedAvg's, without the pull.
"""

from __future__ import annotations

from . import DeviceMethod
from .whole import adapt_global, evaluate_global, train_pulled

FEDPROX = DeviceMethod(
    train=train_pulled, evaluate=evaluate_global, adapt=adapt_global, acts=("pulled_steps",), sums=True
)
"""FedAvg with a proximal term of weight μ = ``method_settings["proximal_weight"]``; 0 is FedAvg bit for bit."""
