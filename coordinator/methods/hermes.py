"""Hermes, server half: every device chooses its neurons once, and exchanges their weights alone from then on.

Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom
2021, as FedSPU's method card (section 5) compares it. The server averages weight by weight over those who held it.
"""

from __future__ import annotations

from sparrow.coordinator.methods import ActiveNeurons, CoordinatorMethod, any_budget

HERMES = CoordinatorMethod(
    smallest_budget=any_budget, active=ActiveNeurons(narrow=True, devices_choose=True), personal_models=True
)
