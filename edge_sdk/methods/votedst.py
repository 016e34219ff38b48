"""VoteDST, the device half: train the existing weights, and at times vote for new ones.

Dynamic sparse training as in FedDST (Bibikar et al., AAAI 2022, arXiv:2112.09824), but the cohort decides together, and
no device replaces weights by itself. In a round with votes a device passes over its training data once at the received
model, and sends with its update a vote for each of the round's candidates, empty positions drawn from the
federation's seed:

    g_c = (1/B) Σ_b ∂F_b/∂θ      over all B batches of its training data
    v_c = sign(g_c) at the q_l largest |g_c| of a layer's candidates, 0 elsewhere

A vote takes at most two bits per candidate and counts by the device's examples (compare Bernstein et al., ICLR 2019,
arXiv:1810.05291).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.flops import growth_flops
from sparrow.protocol.sparsity import ballot, draw_candidates, elections

from . import DeviceMethod, Job, Trained
from .gradients import check_finite, pass_over
from .merging import whole_model
from .whole import PullSettings, adapt_global, evaluate_global, sparse_mask, train_pulled


class Settings(PullSettings):
    """VoteDST's own settings."""

    candidates: float


def train(job: Job) -> Trained:
    """Train one round, and vote if planned. Raises ProtocolError for a plan that does not fit."""
    if not job.assignment.plan.get("votes"):
        return train_pulled(job)
    job.engine.load(whole_model(job.manifest, job.received))
    votes, samples = _votes(job)
    trained = train_pulled(job)
    assert trained.update is not None
    return replace(
        trained,
        update=replace(trained.update, parts={"signs": votes}),
        flops=trained.flops + growth_flops(job.manifest, samples, sparse_mask(job)),
        counts={**trained.counts, "votes": int(np.count_nonzero(votes))},
    )


def _votes(job: Job) -> tuple[NDArray[np.int8], int]:
    """Return the loaded model's votes, layer by layer, int8 [n], and the number of samples."""
    mask = sparse_mask(job)
    settings = job.assignment.settings
    share = job.planned("share", 1)
    votes = elections(job.manifest, mask.counts, share, job.own(Settings).candidates)
    candidates = draw_candidates(mask, votes, settings.seed, job.assignment.round)
    wanted = sum(map(len, candidates.values()))
    if wanted != job.planned("votes", mask.size):
        raise ProtocolError(
            f"plan.votes is {job.assignment.plan['votes']!r}, but share and mask give {wanted}; update the SDK"
        )
    sums = {name: np.zeros(len(places), np.float32) for name, places in candidates.items()}

    def add(name: str, gradient: NDArray[np.float32]) -> None:
        sums[name] += np.take(gradient, candidates[name])

    samples = pass_over(job, list(sums), add, purpose="votes")
    check_finite(sums, "a gradient")
    return np.concatenate([ballot(sums[name], vote.seats) for name, vote in votes.items()]), samples


VOTEDST = DeviceMethod(
    train=train, evaluate=evaluate_global, adapt=adapt_global, acts=("votes", "positions_replaced"), sums=True
)
"""Between rounds a device keeps nothing except the mask."""
