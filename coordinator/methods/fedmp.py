"""FedMP, server half: Hermes'.

Jiang, Xu, Xu, Wang, Qiao, Qian, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022, as FedSPU's method card (section 5) compares it: devices prune themselves, once, to their budget.
"""

from __future__ import annotations

from sparrow.coordinator.methods import ActiveNeurons, CoordinatorMethod, any_budget

FEDMP = CoordinatorMethod(
    smallest_budget=any_budget, active=ActiveNeurons(narrow=True, devices_choose=True), personal_models=True
)
