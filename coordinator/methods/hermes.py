"""Hermes, server half: every device chooses its neurons once, and exchanges their weights alone from then on.

Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom
2021, as FedSPU's method card (section 5) compares it. The server averages weight by weight over those who held it.
"""

from __future__ import annotations

from sparrow.coordinator.methods.feddrop import FedDrop


class Hermes(FedDrop):
    """Server half of Hermes: what devices choose their neurons by is their half's."""

    personal_models = True
    devices_choose = True
