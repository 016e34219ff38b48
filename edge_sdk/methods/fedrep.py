"""FedRep, the device half: first the head on a body that stands still, then the body under that head.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, arXiv:2102.07078. Of its Algorithm 1: h_i ← the head trained for the given body, φ ← the body trained for that
head; send φ. Here each takes the federation's local epochs, with an optimiser of its own, so that a round costs up to
twice FedPer's (DM-PFL's method card, section 5).
"""

from __future__ import annotations

from dataclasses import replace

from edge_sdk.methods import Job, train_loaded
from edge_sdk.methods.fedper import FedPer
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import LocalResult
from edge_sdk.training.parts import only


class FedRep(FedPer):
    """FedPer whose parts are trained one after the other."""

    def train_parts(self, job: Job) -> LocalResult:
        """Head, then body; the loss reported is the latter's."""
        head = self._train_part(job, shared=False)
        body = self._train_part(job, shared=True)
        return replace(body, samples=head.samples + body.samples, steps=head.steps + body.steps)

    def _train_part(self, job: Job, *, shared: bool) -> LocalResult:
        freezing = Freezing(job.model, job.manifest, None, trained=only(job.manifest, shared=shared))
        return train_loaded(job, freezing, purpose="body" if shared else "head")
