"""FedDST: federated dynamic sparse training, server half.

Bibikar, Vikalo, Wang, Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022, arXiv:2112.09824. FedSGC without directions, and without a share of the devices that did not answer:
weights are dropped by magnitude and revived by gradient, the server averages each over those who hold it and keeps the
largest of each layer.

The released code differs from the paper: it weighs with batches, cuts layers that its densities keep whole, and grows
over active weights. This is the paper's method.
"""

from __future__ import annotations

from ..sums.averages import ElementSums
from . import GlobalModel, Situation
from .sparse import SparseTrainingSettings, average_and_prune, replacing_method


def close(model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
    """Return the model averaged over those who answered, and pruned to K_l."""
    return average_and_prune(model, sums)


FEDDST = replacing_method(SparseTrainingSettings, close)
