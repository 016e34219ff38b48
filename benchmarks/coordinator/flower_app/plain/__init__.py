"""The Flower app of the contest: Flower's own FedAvg, and clients that do not train."""
