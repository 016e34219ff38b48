"""APFL, server half: FedAvg's mean of the models that devices send; mixtures and their weights stay with them.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, Algorithm 1.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from sparrow.coordinator.methods.fedavg import FedAvg


class APFLSettings(BaseModel):
    """What APFL knows beyond FedAvg."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mixing_weight: float = Field(default=0.5, ge=0, le=1, description="Share α of the personal model at first")


class APFL(FedAvg):
    """Server half of APFL."""

    settings_type: type[BaseModel] = APFLSettings
    personal_models = True
    mixes_global = True
