"""The method ``auto``, which chooses a method and its settings.

The choice is made once, when a federation is created. Decisions at run time are in ``protocol.skew`` and
``protocol.evidence``. docs/choosing.md has the measurements.
"""

from __future__ import annotations

from typing import Any

from .manifest import Manifest
from .settings import AUTO, FederationSettings

FOR_NEURONS = "fedspu"
FOR_ANY_MODEL = "fedavg"
FINETUNE_EPOCHS = 3
LOGIT_ADJUSTMENT = 1.0
LEAST_SKEW = 0.06
"""Label skew from which outputs are adjusted: that of a Dirichlet partition of ten classes with concentration 1.6."""
AVERAGED_PART = 3
AVERAGED_FROM = 60
"""FedSPU averages the last 1 / AVERAGED_PART of the rounds' models, in runs of at least AVERAGED_FROM rounds. Shorter
runs still improve at the end."""


def chosen(settings: FederationSettings, manifest: Manifest, *, classes: bool) -> FederationSettings:
    """Return the settings with a chosen method, unless they name one already.

    FedSPU if the manifest says which neurons feed which weights, otherwise FedAvg; with int8 updates, except in secure
    rounds. classes: outputs are class scores after the last bias, and may be adjusted. Given settings stay.
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
