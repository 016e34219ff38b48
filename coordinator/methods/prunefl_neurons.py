"""Neuron-wise PruneFL, server half: Hermes'.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model Pruning Enables Efficient Federated Learning on Edge Devices",
arXiv:1909.12326, in the form in which FedSPU's method card (section 5) compares it: devices prune themselves, once.
"""

from __future__ import annotations

from sparrow.coordinator.methods import ActiveNeurons, CoordinatorMethod, any_budget

PRUNEFL_NEURONS = CoordinatorMethod(
    smallest_budget=any_budget, active=ActiveNeurons(narrow=True, devices_choose=True), personal_models=True
)
