"""Hermes, server half: every device prunes its own network, and exchanges the weights that it has left.

Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom
2021. The server averages weight by weight over those whose networks share it. An update may have fewer neurons than its
device was sent, but none that it was not, and not fewer than its budget allows; a device that is sent the whole model
(its first round, a lost state, a budget that has grown) may begin with any such network.

``pruning = once`` is the form that FedSPU's paper compares (section 5.1): devices prune once, to their budgets.
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
        default="gradual", description="Whether devices prune step by step while accuracy holds, or once, to the budget"
    )
    prune_rate: float = Field(default=0.2, gt=0, lt=1, description="Share of a layer's neurons that a step prunes")
    accuracy_threshold: float = Field(
        default=0.5, ge=0, le=1, description="Accuracy on validation data from which on a device prunes"
    )


def reaches(mask: NeuronMask, ratio: float, situation: Situation) -> bool:
    """Return whether a device has not pruned more than its budget asks for."""
    return reaches_ratio(situation.manifest, mask, ratio)


def fault(held: NeuronMask | None, mask: Mask | None, ratio: float, situation: Situation) -> str | None:
    """Return what is wrong with the neurons of an update, None if nothing is."""
    if not isinstance(mask, NeuronMask) or not reaches_ratio(situation.manifest, mask, ratio):
        return (
            f"of the n neurons of each group a device keeps at least max(1, floor(p n)) at a budget of p = {ratio:g}, "
            f"and these are fewer"
        )
    if held is not None and not is_within(mask, held):
        return "it has neurons that the device had pruned before"
    return None


GRADUAL = DeviceChoice(keeps=reaches, fault=fault)


def choice(settings: FederationSettings) -> DeviceChoice:
    """Return how devices choose."""
    return GRADUAL if own_settings(settings, HermesSettings).pruning == "gradual" else DeviceChoice()


HERMES = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=HermesSettings,
    active=ActiveNeurons(narrow=True, choice=choice),
    personal_models=True,
    adjusts_logits=True,
)
