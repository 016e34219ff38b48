"""Random federated dropout, the device half: each round another narrow network of the one global model.

Caldas, Konečný, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", arXiv:1812.07210; Wen, Jeon, Huang, "Federated Dropout", arXiv:2109.15258, with a width for each device.
FedSPU's method card, section 5: neurons are drawn anew in each round as FedSPU draws them, but inactive ones are
dropped and not frozen, and there is no personal model:

    w_k ← w^t[A, A];   w_k ← w_k - η ∇F_k(w_k; b) on the network of A alone;   send w_k and n_k

The values that are left are not scaled up, which neither the card nor FedSPU's code does. What is judged, and adapted
after the end, is the whole global model, as in FedAvg.
"""

from __future__ import annotations

from dataclasses import replace

from edge_sdk.methods import ActiveNeurons, DeviceMethod, Job, Trained
from edge_sdk.methods.narrow import drawn, sample_drawn, train_narrow
from edge_sdk.methods.whole import adapt_global, evaluate_global
from edge_sdk.protocol.masks import draw_neurons


def train(job: Job) -> Trained:
    """Train one round; a device keeps nothing but its notes for early stopping. Raises BundleError for a payload that
    does not fit, CannotNarrow for a model that does not run with fewer neurons, TrainingDiverged."""
    draw = drawn(job)
    trained = train_narrow(job, draw_neurons(job.manifest, draw), draw=draw)
    return replace(trained, state=replace(trained.state, personal=None))


FEDDROP = DeviceMethod(
    train=train,
    evaluate=evaluate_global,
    adapt=adapt_global,
    active=ActiveNeurons(sample=sample_drawn, narrow=True),
)
