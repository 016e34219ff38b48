"""FedPer, server half: the mean of the devices' bodies; heads stay where they are.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818. The last
linear layer is each device's own: its tensors are ``personal`` in the manifest that
the federation is created with, and so never on a wire. What is averaged is no model by itself. Other personal layers
are named by the setting ``private``: a device's own adapter beside a shared one, for instance.
"""

from __future__ import annotations

from . import CoordinatorMethod, needs_sums_alone
from .parts import PrivateSettings, private_part

FEDPER = CoordinatorMethod(
    settings_type=PrivateSettings,
    usable_global_model=False,
    personal_models=True,
    manifest=private_part,
    pages=True,
    why_not_secure=needs_sums_alone,
)
