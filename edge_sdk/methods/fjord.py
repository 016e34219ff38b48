"""FjORD at a fixed width, the device half: a narrow network of each layer's first neurons.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021, arXiv:2102.13451, as FedSPU's method card (section 5) has it:
A_l = {0, .., a_l - 1}, a_l = max(1, floor(p_k n_l)), in all rounds. A device receives, trains and sends w[A, A], and is
judged with the last narrow network that it trained.

The original also samples a width from {p_1, .., p_k} for every local step, and distils from the widest; that is another
method than the one compared, and is not here.
"""

from __future__ import annotations

from edge_sdk.methods import DeviceState, Job, Trained
from edge_sdk.methods.fedspu import FedSPU
from edge_sdk.methods.narrow import as_adapted, drawn, train_narrow
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import FULL_RATIO, NeuronMask
from edge_sdk.protocol.neurons import first_neurons


class FjORD(FedSPU):
    """A personal model that is narrow; the rest of it is zero."""

    narrow = True
    mixes_global = False

    def train(self, job: Job) -> Trained:
        """One round. Raises BundleError for a payload that does not fit, CannotNarrow for a model that does not run
        with fewer neurons, TrainingDiverged when the round failed."""
        return train_narrow(job, first_neurons(job.manifest, drawn(job).ratio))

    def adapt(self, job: Job) -> DeviceState:
        """A device that came too late trains its narrow part of the finished global model: as in one more round, unless
        the federation says for how long."""
        return self.train(as_adapted(job)).state

    def sample_mask(self, manifest: Manifest, budget: float) -> NeuronMask | None:
        """The budget is the active ratio."""
        return first_neurons(manifest, budget) if budget < FULL_RATIO else None
