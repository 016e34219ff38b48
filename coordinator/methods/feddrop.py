"""Random federated dropout, server half: each round every device is sent another narrow network of the one model.

Caldas, Konečný, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", arXiv:1812.07210; Wen, Jeon, Huang, "Federated Dropout", arXiv:2109.15258; after FedSPU's method card,
section 5. The neurons are drawn as FedSPU's are, the server averages weight by weight over those who held it, weighted
with their training samples, and the whole global model is what is judged.
"""

from __future__ import annotations

from sparrow.coordinator.methods import ActiveNeurons, CoordinatorMethod, any_budget

FEDDROP = CoordinatorMethod(smallest_budget=any_budget, active=ActiveNeurons(narrow=True))
"""A masked weighted mean; a weight that nobody held keeps its value."""
