"""Hermes, server half: every device prunes its own network, and exchanges the remaining weights.

Li et al., MobiCom 2021. The server averages each weight over the devices that share it. An update may have fewer
neurons than its device was sent, but no others, and not fewer than its budget allows. A device that is sent the full
model may start with any such network.

``pruning = once`` is the form that FedSPU's paper compares (section 5.1).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparrow.protocol.masks import Mask, NeuronMask
from sparrow.protocol.neurons import is_within, reaches_ratio
from sparrow.protocol.settings import FederationSettings

from . import ActiveNeurons, CoordinatorMethod, DeviceChoice, MethodSettings, Situation, any_budget, own_settings


class HermesSettings(MethodSettings):
    """Hermes' settings."""

    pruning: Literal["gradual", "once"] = Field(
        default="gradual", description="Let devices prune gradually while accuracy holds, or once to their budget"
    )
    prune_rate: float = Field(default=0.2, gt=0, lt=1, description="Share of a layer's neurons pruned per step")
    accuracy_threshold: float = Field(
        default=0.5, ge=0, le=1, description="Validation accuracy from which a device prunes"
    )


def reaches(mask: NeuronMask, ratio: float, situation: Situation) -> bool:
    """Return True if a device has not pruned below its budget."""
    return reaches_ratio(situation.manifest, mask, ratio)


def fault(held: NeuronMask | None, mask: Mask | None, ratio: float, situation: Situation) -> str | None:
    """Return the fault of an update's neurons, or None."""
    if not isinstance(mask, NeuronMask) or not reaches_ratio(situation.manifest, mask, ratio):
        return (
            f"at a budget of p = {ratio:g} a device must keep at least max(1, floor(p n)) of the n neurons of each "
            f"group, and this mask has fewer"
        )
    if held is not None and not is_within(mask, held):
        return "it has neurons that the device pruned before"
    return None


GRADUAL = DeviceChoice(keeps=reaches, fault=fault)


def choice(settings: FederationSettings) -> DeviceChoice:
    """Return how devices choose their neurons."""
    return GRADUAL if own_settings(settings, HermesSettings).pruning == "gradual" else DeviceChoice()


HERMES = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=HermesSettings,
    active=ActiveNeurons(narrow=True, choice=choice),
    personal_models=True,
    adjusts_logits=True,
)
