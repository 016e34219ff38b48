"""Neuron-wise PruneFL, server half: devices choose neurons again in rounds that ``adjust_interval`` divides.

Jiang et al., IEEE TNNLS 2022, arXiv:1909.12326, applied to neurons, with a network for each device. In these rounds,
and in their first, devices get the full model; in others they get the values of the neurons chosen last. The server
averages each weight over the devices that have it.

``importance = once`` is the form that FedSPU's paper compares (section 5.1): devices choose once.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparrow.protocol.masks import FULL_RATIO, NeuronMask
from sparrow.protocol.settings import FederationSettings

from . import (
    ActiveNeurons,
    CoordinatorMethod,
    DeviceChoice,
    MethodSettings,
    Situation,
    any_budget,
    fits_choice,
    own_settings,
)


class PruneFLNeuronsSettings(MethodSettings):
    """Neuron-wise PruneFL's settings."""

    importance: Literal["gathered", "once"] = Field(
        default="gathered", description="Accumulate importance over rounds and choose again, or choose once"
    )
    adjust_interval: int = Field(
        default=5, ge=1, description="Rounds between those in which devices get the whole model and choose again"
    )


def keeps(mask: NeuronMask, ratio: float, situation: Situation) -> bool:
    """Return True if a device keeps its neurons in this round."""
    due = situation.round % situation.own(PruneFLNeuronsSettings).adjust_interval == 0 and ratio < FULL_RATIO
    return not due and fits_choice(mask, ratio, situation)


def choice(settings: FederationSettings) -> DeviceChoice:
    """Return how devices choose their neurons."""
    gathered = own_settings(settings, PruneFLNeuronsSettings).importance == "gathered"
    return DeviceChoice(keeps=keeps) if gathered else DeviceChoice()


PRUNEFL_NEURONS = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=PruneFLNeuronsSettings,
    active=ActiveNeurons(narrow=True, choice=choice),
    personal_models=True,
)
