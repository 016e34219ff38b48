"""FjORD at a fixed width, server half: every device has the first neurons of each layer, as many as its budget says.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021, arXiv:2102.13451, as FedSPU's method card (section 5) has it:
max(1, floor(p_k n_l)) neurons, the same in all rounds. The server averages weight by weight over those who held it.
"""

from __future__ import annotations

from edge_sdk.protocol.neurons import first_neurons
from sparrow.coordinator.methods import ActiveNeurons, CoordinatorMethod, any_budget

FJORD = CoordinatorMethod(
    smallest_budget=any_budget, active=ActiveNeurons(narrow=True, rule=first_neurons), personal_models=True
)
