"""Local training alone, the device half: the same data, epochs and stop rule as in a federation, and no exchange.

The baseline "Local" of the methods' papers (pFedGate's card, section 5; DM-PFL's, section 5): every device starts from
the common initial weights and goes on from its own model in each round that it is called for. Nothing that another
device does moves it.
"""

from __future__ import annotations

from edge_sdk.methods import (
    DeviceMethod,
    DeviceState,
    Evaluated,
    Job,
    Trained,
    adapt_as_in_a_round,
    conclude,
    evaluate_both,
    train_loaded,
)
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import get_tensors, set_tensors
from edge_sdk.training.merging import whole_model


class Local(DeviceMethod):
    """A personal model and nothing else; early stopping ends its training."""

    def personalise(self, job: Job) -> Trained:
        """One round on the personal model. Raises BundleError where there is none yet and no whole payload either,
        TrainingDiverged when the round failed."""
        if job.state.personal is None:
            set_tensors(job.model, whole_model(job.manifest, job.received))
        else:
            set_tensors(job.model, job.state.personal)
        result = train_loaded(job, Freezing(job.model, job.manifest, None))
        return conclude(job, result, personal=get_tensors(job.model, job.manifest), update=None)

    def evaluate(self, job: Job) -> Evaluated:
        """The personal model, where there is one."""
        return evaluate_both(job)

    def adapt(self, job: Job) -> DeviceState:
        """A device that came too late trains the initial weights for ``finetune_epochs``, or else as in one round."""
        return adapt_as_in_a_round(job)
