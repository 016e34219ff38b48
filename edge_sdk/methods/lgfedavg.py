"""LG-FedAvg, the device half: features of one's own, and a shared head on top of them.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", arXiv:2001.01523. FedPer the other way round: the device keeps its representation,
both parts are trained together, and the server averages the head.
"""

from __future__ import annotations

from edge_sdk.methods.fedper import FedPer


class LGFedAvg(FedPer):
    """Device half of LG-FedAvg: which part is whose the manifest says."""
