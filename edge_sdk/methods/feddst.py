"""FedDST, the device half: train the weights that exist, and now and then replace the smallest by the steepest.

Bibikar, Vikalo, Wang, Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022, arXiv:2112.09824. FedSGC's device half without a direction map: of its four rules (Eq. 1-4) the
second and the fourth are left, which are RigL's. The cosine is of the device's own epochs, as in FedSGC; its paper
anneals over rounds, its released code not at all.
"""

from __future__ import annotations

from . import DeviceMethod, Job, Trained
from .sparse import SparseTrainingSettings, replacing_of, train_replacing
from .whole import adapt_global, evaluate_global


def train(job: Job) -> Trained:
    """Train one round, in which nothing is guided."""
    own = job.own(SparseTrainingSettings)
    return train_replacing(job, replacing_of(job, own), own.proximal_weight)


FEDDST = DeviceMethod(
    train=train, evaluate=evaluate_global, adapt=adapt_global, acts=("replaced", "positions_replaced"), sums=True
)
"""Weights replaced by devices, of which the coordinator keeps some."""
