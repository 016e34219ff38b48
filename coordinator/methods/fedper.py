"""FedPer, server half: the mean of the devices' bodies; heads stay on devices.

Arivazhagan et al., arXiv:1912.00818. The last linear layer is personal: its tensors are ``personal`` in the
federation's manifest, and never sent. The averaged part is not a complete model. The setting ``private`` names other
personal layers.
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
