"""HetLoRA, the device half: the first ranks of each adapter, trained as in FedAvg.

Cho, Liu, Xu, Fahrezi, Joshi, EMNLP 2024, arXiv:2401.06432. A device of budget p receives, trains and sends the first
ceil(p r) of an adapter's r ranks; the server half has the rest. The global model with all ranks is evaluated, and
fine-tuned after the end.
"""

from __future__ import annotations

from dataclasses import replace

from sparrow.protocol.neurons import first_neurons_up

from . import ActiveNeurons, DeviceMethod, Job, Trained
from .narrow import drawn, train_narrow
from .whole import adapt_global, evaluate_global


def train(job: Job) -> Trained:
    """Train one round."""
    trained = train_narrow(job, first_neurons_up(job.manifest, drawn(job).ratio))
    return replace(trained, state=replace(trained.state, personal=None))


HETLORA = DeviceMethod(
    train=train,
    evaluate=evaluate_global,
    adapt=adapt_global,
    active=ActiveNeurons(sample=first_neurons_up, narrow=True),
    acts=("neurons_left_out",),
)
