"""Neuron-wise PruneFL, the device half: Hermes that scores neurons by their gradients.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model Pruning Enables Efficient Federated Learning on Edge Devices",
arXiv:1909.12326, in the form in which FedSPU's method card (section 5) compares it: neuron i of layer l has the score

    ‖(∇F(w; B))_l[i, ...]‖₂

on one mini-batch B. (The released code takes the norm of what one step changes, the same up to its learning rate.)
PruneFL itself, one model for all of single weights, is the method ``prunefl``.
"""

from __future__ import annotations

import torch

from edge_sdk.methods.choosing import choosing_method


def score(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return what each weight adds to the score of its neuron."""
    return gradient.square()


PRUNEFL_NEURONS = choosing_method(score)
