"""FedRep, server half: FedPer's.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, arXiv:2102.07078, Algorithm 1: φ is the mean of the devices' bodies. How they train is all that differs.
"""

from __future__ import annotations

from sparrow.coordinator.methods.fedper import FedPer


class FedRep(FedPer):
    """Server half of FedRep."""
