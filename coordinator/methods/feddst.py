"""FedDST, server half: federated dynamic sparse training.

Bibikar et al., AAAI 2022, arXiv:2112.09824. FedSGC without directions and without a share for absent devices: weights
are dropped by magnitude and revived by gradient; the server averages each over the devices that have it, and keeps the
largest of each layer.

This follows the paper; the released code weights by batches, prunes dense layers, and grows over active weights.
"""

from __future__ import annotations

from ..sums.averages import ElementSums
from . import GlobalModel, Situation
from .sparse import SparseTrainingSettings, average_and_prune, replacing_method


def close(model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
    """Return the mean over the cohort, pruned to K_l."""
    return average_and_prune(model, sums)


FEDDST = replacing_method(SparseTrainingSettings, close)
