"""LG-FedAvg, the device half: features of one's own, and a shared head on top of them.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", arXiv:2001.01523. FedPer the other way round: the device keeps its representation,
both parts are trained together, and the server averages the head.
"""

from __future__ import annotations

from edge_sdk.methods import DeviceMethod
from edge_sdk.methods.parts import adapt_own_part, evaluate_tuned, train_together

LGFEDAVG = DeviceMethod(train=train_together, evaluate=evaluate_tuned, adapt=adapt_own_part, acts=("private_values",))
