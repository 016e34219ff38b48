"""FedSGC, the device half: train the weights that exist, and now and then replace some of them.

Tian, Liu, Li, Cheung, Wang, "Gradient-Congruity Guided Federated Sparse Training", arXiv:2405.01189. In re-adjusting
rounds, when as many of its own epochs have passed, a device drops from each layer, for a moment, all but D_l of its
weights, and revives as many as are missing to K_l:

    drop    those that moved against the direction map, sign(θ_c - θ_c0) = -d, smallest |θ_c| first          (Eq. 1)
            and the smallest |θ_c| of the others                                                              (Eq. 2)
    revive  those whose descent agrees with it, sign(-G) = d, largest |G| first                               (Eq. 3)
            and the largest |G| of the others                                                                 (Eq. 4)

where λ is the share that directions guide, σ(t) = α/2·(1 + cos(πt/T_c)) how many are dropped beyond sparsity, and G the
gradient of the whole layer, taken before. The rules are in ``protocol.sparsity``, the server half keeps the map.

Where the paper is silent or errs:

- Eq. 3 compares the map with a movement that positions without a weight do not have: -G takes its place.
- What is due after a round's last epoch is done one epoch earlier: new weights that nobody trains are zeros, which the
  server's prune removes first, and the mask would stay as it is.
- Full local epochs; a new optimiser each round, without memory of what is new; G of the plain loss on the last batch.
"""

from __future__ import annotations

from typing import Literal

from sparrow.protocol.parts import Part, all_maskable

from . import DeviceMethod, Job, Trained
from .replacing import Replacing
from .sparse import SparseTrainingSettings, replacing_of, train_replacing
from .whole import adapt_global, evaluate_global


class Settings(SparseTrainingSettings):
    """FedSGC's own settings."""

    guided_share: float
    guided_basis: Literal["total", "moved"]


def train(job: Job) -> Trained:
    """Train one round, with Eq. 1-4 where they are due."""
    return train_replacing(job, replacing(job), job.own(Settings).proximal_weight)


def replacing(job: Job) -> Replacing:
    """Return what replaces weights in this round, by Eq. 1-4."""
    own = job.own(Settings)
    return replacing_of(job, own, own.guided_share, own.guided_basis)


FEDSGC = DeviceMethod(
    train=train,
    evaluate=evaluate_global,
    adapt=adapt_global,
    payload_parts=(Part(name="signs", dtype="sign", count=all_maskable),),
    acts=("replaced", "dropped_guided", "positions_replaced"),
    act_on={"dropped_guided": "dropped"},
    sums=True,
)
"""Weights replaced by devices, some of them guided, of which the coordinator keeps some."""
