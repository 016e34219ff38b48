"""Local training, the device half: the same data, epochs and stop rule as in a federation, without exchange.

The baseline "Local" of pFedGate (section 7.1) and DM-PFL (section 4.1.1).
"""

from __future__ import annotations

from . import DeviceMethod, Job, Trained
from .merging import whole_model
from .rounds import adapt_as_in_a_round, conclude, evaluate_both, train_loaded


def personalise(job: Job) -> Trained:
    """Train the personal model for one round."""
    if job.state.personal is None:
        job.engine.load(whole_model(job.manifest, job.received))
    else:
        job.engine.load(job.state.personal)
    result = train_loaded(job)
    return conclude(job, result, personal=job.engine.read(), update=None)


LOCAL = DeviceMethod(personalise=personalise, evaluate=evaluate_both, adapt=adapt_as_in_a_round)
