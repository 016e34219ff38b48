"""FedPer, the device half: a shared body and a head of one's own, trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818. Of its
Algorithm 2: (W_B, W_Pj) ← SGD on both for some epochs, from the body received and one's own personal layers; send W_B.

Which layers are personal the server half says: their tensors are ``personal`` in the federation's manifest, so that
nothing that packs a payload or an update ever sees them. A device's personal part starts as its task initialises it,
from the federation's seed. A device is judged by its model as a round has left it.
"""

from __future__ import annotations

from . import DeviceMethod
from .parts import adapt_own_part, evaluate_tuned, train_together

FEDPER = DeviceMethod(
    train=train_together, evaluate=evaluate_tuned, adapt=adapt_own_part, acts=("private_values",), sums=True
)
