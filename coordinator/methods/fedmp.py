"""FedMP, server half: Hermes'.

Jiang, Xu, Xu, Wang, Qiao, Qian, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022, as FedSPU's method card (section 5) compares it: devices prune themselves, once, to their budget.
"""

from __future__ import annotations

from sparrow.coordinator.methods.hermes import Hermes


class FedMP(Hermes):
    """Server half of FedMP."""
