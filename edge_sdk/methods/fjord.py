"""FjORD at a fixed width, the device half: a narrow network of each layer's first neurons.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021, arXiv:2102.13451, as FedSPU's method card (section 5) has it:
A_l = {0, .., a_l - 1}, a_l = max(1, floor(p_k n_l)), in all rounds. A device receives, trains and sends w[A, A], and is
judged with the last narrow network that it trained.

The original also samples a width from {p_1, .., p_k} for every local step, and distils from the widest; that is another
method than the one compared, and is not here.
"""

from __future__ import annotations

from edge_sdk.methods import ActiveNeurons, DeviceMethod, DeviceState, Job, Trained
from edge_sdk.methods.narrow import adapt_narrow, drawn, train_narrow
from edge_sdk.methods.rounds import evaluate_both
from edge_sdk.protocol.neurons import first_neurons


def train(job: Job) -> Trained:
    """Train one round; the personal model is narrow, the rest of it zero.

    Raises BundleError for a payload that does not fit, CannotNarrow for a model that does not run with fewer neurons,
    TrainingDiverged.
    """
    return train_narrow(job, first_neurons(job.manifest, drawn(job).ratio))


def adapt(job: Job) -> DeviceState:
    """Train the narrow part of the finished global model that a device of this budget has."""
    return adapt_narrow(job, train)


FJORD = DeviceMethod(
    train=train, evaluate=evaluate_both, adapt=adapt, active=ActiveNeurons(sample=first_neurons, narrow=True)
)
