"""FedPer, the device half: a shared body and a personal head, trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, arXiv:1912.00818. Algorithm 2: (W_B, W_Pj) ← SGD on both for some epochs, from
the received body and the personal layers; send W_B.

The server half chooses the personal layers: the manifest marks their tensors ``personal``, so they are never packed.
"""

from __future__ import annotations

from . import DeviceMethod
from .parts import adapt_own_part, evaluate_tuned, train_together

FEDPER = DeviceMethod(
    train=train_together, evaluate=evaluate_tuned, adapt=adapt_own_part, acts=("private_values",), sums=True
)
