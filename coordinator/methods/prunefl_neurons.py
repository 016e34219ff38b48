"""Neuron-wise PruneFL, server half: Hermes'.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model Pruning Enables Efficient Federated Learning on Edge Devices",
arXiv:1909.12326, in the form in which FedSPU's method card (section 5) compares it: devices prune themselves, once.
"""

from __future__ import annotations

from sparrow.coordinator.methods.hermes import Hermes


class PruneFLNeurons(Hermes):
    """Server half of neuron-wise PruneFL."""
