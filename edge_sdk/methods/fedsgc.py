"""FedSGC, the device half: train the existing weights, and at times replace some of them.

Tian, Liu, Li, Cheung, Wang, arXiv:2405.01189. In re-adjusting rounds, after a number of its own epochs, a device first
reduces each layer to D_l weights, then revives weights until it has K_l:

    drop    those that moved against the direction map, sign(θ_c - θ_c0) = -d, smallest |θ_c| first          (Eq. 1)
            and the smallest |θ_c| of the others                                                              (Eq. 2)
    revive  those whose descent agrees with it, sign(-G) = d, largest |G| first                               (Eq. 3)
            and the largest |G| of the others                                                                 (Eq. 4)

λ is the share guided by directions, σ(t) = α/2·(1 + cos(πt/T_c)) the share dropped beyond sparsity, and G the gradient
of the whole layer before dropping. ``protocol.sparsity`` has the rules.

Choices beyond the paper:

- Eq. 3 compares the map with a movement, which missing weights do not have: -G replaces it.
- Replacements due after a round's last epoch happen one epoch earlier: untrained new weights would be zero, and the
  server's pruning would remove them first.
- Full local epochs; a new optimiser each round; G of the plain loss on the last batch.
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
    """Train one round, applying Eq. 1-4 at the due steps."""
    return train_replacing(job, replacing(job), job.own(Settings).proximal_weight)


def replacing(job: Job) -> Replacing:
    """Return this round's adjustment by Eq. 1-4."""
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
"""The coordinator keeps some of the weights that devices replaced."""
