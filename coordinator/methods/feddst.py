"""FedDST: federated dynamic sparse training, server half.

Bibikar, Vikalo, Wang, Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022, arXiv:2112.09824. FedSGC without directions, and without a share of the devices that did not answer:
weights are dropped by magnitude and revived by gradient, the server averages each over those who hold it and keeps the
largest of each layer.

Where the released code differs from the paper the method card of FedSGC (4.13) has the list: it weighs with batches,
cuts layers that its densities keep whole, and grows over active weights. Here is what both say they do.
"""

from __future__ import annotations

from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.methods.fedsgc import FedSGC, FedSGCSettings
from sparrow.coordinator.methods.sparse import SparseTrainingSettings


class FedDST(FedSGC):
    """Server half of FedDST."""

    settings_type = SparseTrainingSettings

    def rules(self, settings: FederationSettings) -> FedSGCSettings:
        """Nothing is guided, and only those who answer are averaged."""
        return FedSGCSettings(**settings.method_settings, guided_share=0.0, rest="none")
