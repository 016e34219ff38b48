"""The method ``auto``: a method with its settings, for people who do not want to choose one.

The choice is made once, when a federation is created, by what its model allows. What depends on devices and data is
left to them: under FedSPU a device of a budget of 1 trains the whole model; outputs are adjusted by class frequencies
if devices differ in these (``protocol.skew``); and at the end each device takes the model that all devices' validation
data and its own speak for (``protocol.evidence``). docs/choosing.md has the measurements.
"""

from __future__ import annotations

from typing import Any

from .manifest import Manifest
from .settings import AUTO, FederationSettings

FOR_NEURONS, FOR_ANY_MODEL = "fedspu", "fedavg"
FINETUNE_EPOCHS = 3
LOGIT_ADJUSTMENT = 1.0
LEAST_SKEW = 0.06
"""Label skew from which outputs are adjusted: that of a Dirichlet partition of ten classes with concentration 1.6."""
AVERAGED_PART, AVERAGED_FROM = 3, 60
"""FedSPU finishes with the mean of the last rounds' models, one in so many, but not of shorter runs, which still
improve."""


def chosen(settings: FederationSettings, manifest: Manifest, *, classes: bool) -> FederationSettings:
    """Return settings whose method is not ``auto``; those of another method as they are.

    It is FedSPU if the manifest says which neurons feed which weights, otherwise FedAvg; with updates in int8, except
    in secure rounds. classes: whether outputs are scores of classes that follow its last bias, and may be adjusted.
    Settings that were given stay, even those that equal a default.
    """
    if settings.method != AUTO:
        return settings
    method = FOR_NEURONS if manifest.coupling else FOR_ANY_MODEL
    ours: dict[str, Any] = {"finetune_epochs": FINETUNE_EPOCHS, "early_stopping": "off"}
    if not settings.secure:
        ours["precision"] = "int8"
    adjusts = classes and manifest.output_bias is not None and settings.noise_multiplier is None
    if adjusts and "logit_adjustment" not in settings.model_fields_set:
        ours |= {"logit_adjustment": LOGIT_ADJUSTMENT, "logit_adjustment_from": LEAST_SKEW}
    if method == FOR_NEURONS:
        ours["personal_model"] = "fleet"
    unset = {name: value for name, value in ours.items() if name not in settings.model_fields_set}
    own = dict(settings.method_settings)
    if method == FOR_NEURONS:
        long = settings.rounds >= AVERAGED_FROM
        own.setdefault("averaged_rounds", settings.rounds // AVERAGED_PART if long else 0)
        own.setdefault("alone", True)
    return settings.model_copy(update={"method": method, "method_settings": own, **unset})
