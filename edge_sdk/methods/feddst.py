"""FedDST, the device half: train the existing weights; at times replace the smallest by those of steepest gradient.

Bibikar, Vikalo, Wang, Chen, AAAI 2022, arXiv:2112.09824. This is FedSGC's device half without a direction map: Eq. 2
and 4, as in RigL. The cosine anneals over the device's own epochs, as in FedSGC; the paper anneals over rounds, its
released code not at all.
"""

from __future__ import annotations

from . import DeviceMethod, Job, Trained
from .sparse import SparseTrainingSettings, replacing_of, train_replacing
from .whole import adapt_global, evaluate_global


def train(job: Job) -> Trained:
    """Train one round without guided replacements."""
    own = job.own(SparseTrainingSettings)
    return train_replacing(job, replacing_of(job, own), own.proximal_weight)


FEDDST = DeviceMethod(
    train=train, evaluate=evaluate_global, adapt=adapt_global, acts=("replaced", "positions_replaced"), sums=True
)
"""The coordinator keeps some of the weights that devices replaced."""
