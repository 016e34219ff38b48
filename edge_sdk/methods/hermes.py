"""Hermes, the device half: each device prunes its own network once, by its neurons' weights, and goes on with the rest.

Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom
2021, as FedSPU's method card (section 5) compares it, and FedMP and neuron-wise PruneFL with it. At its first
participation a device receives the whole model w, makes one step of SGD on one mini-batch B, and scores neuron i of
layer l by

    ‖(w - 0.005 ∇F(w; B))_l[i, ...]‖₂

In each hidden group the max(1, floor(p_k n)) best are kept, for the whole federation; of equal ones the first. From
then on the device receives, trains and sends w[A, A] alone, and is judged with that narrow network.

Choices of the card, or where it is silent:

- The model *received* is scored, not one freshly initialised as in the released code, and counts are rounded as in
  FedSPU (card 7, row 16). The step is for scoring alone: training begins at what was received.
- Where layers share their neurons (residual additions), scores add up over the weights of all of them, before the root.
- A device whose budget changes receives the whole model once more, and chooses again. So does one that has lost its
  state.
"""

from __future__ import annotations

import torch

from edge_sdk.methods.choosing import STEP, choosing_method


def score(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return what each weight adds to the score of its neuron."""
    return (weight - STEP * gradient).square()


HERMES = choosing_method(score)
