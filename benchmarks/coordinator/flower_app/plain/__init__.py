"""The Flower app of the comparison: Flower's own FedAvg, and clients that do not train."""
