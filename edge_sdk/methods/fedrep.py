"""FedRep, the device half: train the head with a fixed body, then the body under that head.

Collins, Hassani, Mokhtari, Shakkottai, ICML 2021, arXiv:2102.07078. Algorithm 1: h_i ← the head trained for the given
body, φ ← the body trained for that head; send φ. Each phase takes the federation's local epochs with its own optimiser,
so that a round costs up to twice FedPer's.
"""

from __future__ import annotations

from dataclasses import replace

from . import DeviceMethod, Job, Trained
from .parts import adapt_own_part, evaluate_tuned, joined, send_shared, train_part


def train(job: Job) -> Trained:
    """Train head, then body; the reported loss is the body's."""
    job.engine.load(joined(job))
    head = train_part(job, shared=False)
    body = train_part(job, shared=True)
    return send_shared(job, replace(body, samples=head.samples + body.samples, steps=head.steps + body.steps))


FEDREP = DeviceMethod(train=train, evaluate=evaluate_tuned, adapt=adapt_own_part, acts=("private_values",), sums=True)
