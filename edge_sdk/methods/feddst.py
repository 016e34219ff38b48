"""FedDST, the device half: train the weights that exist, and now and then replace the smallest by the steepest.

Bibikar, Vikalo, Wang, Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022, arXiv:2112.09824. FedSGC's device half without a direction map: of its four rules (Eq. 1-4) the
second and the fourth are left, which are RigL's. The cosine is of the device's own epochs, as in FedSGC; its paper
anneals over rounds, its released code not at all.
"""

from __future__ import annotations

from edge_sdk.methods.fedsgc import FedSGC


class FedDST(FedSGC):
    """Device half of FedDST: nothing is guided, because its settings have no share for it."""
