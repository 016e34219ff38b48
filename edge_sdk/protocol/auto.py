"""The method ``auto``: a method with its settings, for people who do not want to choose one.

The choice is made once, when a federation is created, by what its model allows; from then on it is a federation like
any other, and its settings name what was chosen. What depends on the devices is left to them: under FedSPU budgets may
be any, and at the end each device takes, by its validation data, its own model, a mixture with the global one, or one
more training of that mixture. docs/choosing.md has the measurements behind it.
"""

from __future__ import annotations

from typing import Any

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import AUTO, FederationSettings

FOR_NEURONS, FOR_ANY_MODEL = "fedspu", "fedavg"
FINETUNE_EPOCHS = 3
LOGIT_ADJUSTMENT = 1.0
AVERAGED_PART = 3
"""FedSPU finishes with the mean of the last rounds' models: one in so many."""


def chosen(settings: FederationSettings, manifest: Manifest, *, classes: bool) -> FederationSettings:
    """Return settings whose method is not ``auto``; those of another method as they are.

    It is FedSPU where the manifest says which neurons feed which weights, otherwise FedAvg. classes: whether the
    model's outputs are scores of classes that follow its last bias; then outputs are adjusted by class frequencies with
    ``LOGIT_ADJUSTMENT``. The end is ``FINETUNE_EPOCHS`` of training, but not under FedAvg with adjusted outputs: there
    every device takes the trained copy, and it is worse. FedSPU finishes with the mean of the last rounds' models, of
    one in ``AVERAGED_PART``. Settings that differ from their defaults stay.
    """
    if settings.method != AUTO:
        return settings
    method = FOR_NEURONS if manifest.coupling else FOR_ANY_MODEL
    ours: dict[str, Any] = {}
    if classes and manifest.output_bias is not None:
        ours["logit_adjustment"] = LOGIT_ADJUSTMENT
    if method == FOR_NEURONS or not ours:
        ours["finetune_epochs"] = FINETUNE_EPOCHS
    defaults = FederationSettings()
    unset = {name: value for name, value in ours.items() if getattr(settings, name) == getattr(defaults, name)}
    own = dict(settings.method_settings)
    if method == FOR_NEURONS:
        own.setdefault("averaged_rounds", settings.rounds // AVERAGED_PART)
    return settings.model_copy(update={"method": method, "method_settings": own, **unset})
