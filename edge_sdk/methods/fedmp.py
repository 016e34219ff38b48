"""FedMP, the device half: Hermes that scores neurons by the l1 norm of their weights.

Jiang, Xu, Xu, Wang, Qiao, Qian, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022, as FedSPU's method card (section 5) compares it: neuron i of layer l has the score

    ‖(w - 0.005 ∇F(w; B))_l[i, ...]‖₁

and the share that is kept is the device's budget, where the paper's server learns it with a bandit.
"""

from __future__ import annotations

import torch

from edge_sdk.methods.choosing import STEP, choosing_method


def score(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return what each weight adds to the score of its neuron."""
    return (weight - STEP * gradient).abs()


FEDMP = choosing_method(score)
