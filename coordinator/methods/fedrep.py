"""FedRep, server half, equal to FedPer's: φ is the mean of the devices' bodies.

Collins et al., ICML 2021, arXiv:2102.07078, Algorithm 1.
"""

from __future__ import annotations

from . import CoordinatorMethod, needs_sums_alone
from .parts import PrivateSettings, private_part

FEDREP = CoordinatorMethod(
    settings_type=PrivateSettings,
    usable_global_model=False,
    personal_models=True,
    manifest=private_part,
    why_not_secure=needs_sums_alone,
)
