"""HeteroFL, server half: every device has the first neurons of each layer, and the global model is the widest.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, arXiv:2010.01264, after pFedGate's method card, section 5: a device of width ratio r has the first
ceil(r n_l) neurons, and the server averages every weight over the devices that hold it, weighted with their training
samples. A budget is a width; the share of the weights that it makes is about its square.
"""

from __future__ import annotations

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.protocol.neurons import active_count_up, first_neurons
from sparrow.coordinator.methods import ActiveNeurons, CoordinatorMethod, any_budget


def neurons(manifest: Manifest, ratio: float) -> NeuronMask:
    """Return the first neurons of each group, their number rounded up."""
    return first_neurons(manifest, ratio, active_count_up)


HETEROFL = CoordinatorMethod(smallest_budget=any_budget, active=ActiveNeurons(narrow=True, rule=neurons))
