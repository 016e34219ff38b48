"""FedMD, server half: the mean of the class scores that devices' models give on samples that all devices have.

Li, Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS workshop 2019, arXiv:1910.03581,
Algorithm 1. All of the model is each device's own. What travels, both ways, is one table of scores [public samples,
classes], an output in the federation's manifest: it begins as zeros, which no device digests, and is averaged as
weights are in other methods, so that precisions, robust rules and secure rounds hold for it. Departure: the mean is
weighted with training samples, as all means here are; the paper's is not.
"""

from __future__ import annotations

from pydantic import Field

from sparrow.protocol.manifest import Constant, Manifest, TensorSpec
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from . import Aggregation, CoordinatorMethod, MethodSettings, own_settings

SCORES = "public.scores"
"""The name of the table of scores."""

SECURE_RANGE = 16.0
"""The least range of masked values in secure rounds: scores of trained networks are of this order."""


class FedMDSettings(MethodSettings):
    """FedMD's settings beyond a federation's."""

    public_samples: int = Field(
        default=100, ge=2, le=1_000_000, description="Public samples on which models are compared, the first of the set"
    )
    public_epochs: int = Field(
        default=5, ge=0, le=10_000, description="Epochs over the public samples with which a device begins"
    )
    digest_epochs: int = Field(
        default=1, ge=1, le=1000, description="Epochs over the public samples towards their mean scores, in each round"
    )
    temperature: float = Field(default=1.0, gt=0, le=1000, description="Temperature T of the scores that are digested")


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest of private tensors whose output is the table of scores. Raises BadContent."""
    if len(published.output_shape) != 1:
        raise BadContent(
            f"the model answers with values of shape {list(published.output_shape)}: FedMD needs one score for each "
            f"class; choose a method that shares weights, such as fedavg, ditto or apfl"
        )
    shape = (own_settings(settings, FedMDSettings).public_samples, *published.output_shape)
    private = published.with_blocks({}).with_private([spec.name for spec in published.shared])
    return private.with_outputs([TensorSpec(name=SCORES, shape=shape, init=Constant(value=0.0))])


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return that scores would be clipped, where the range of masked values is one for weights."""
    if settings.secure_range < SECURE_RANGE:
        return (
            f"scores move farther than weights, and beyond secure_range = {settings.secure_range:g} they would be "
            f"clipped; give secure_range = {SECURE_RANGE:g} or more"
        )
    return None


FEDMD = CoordinatorMethod(
    settings_type=FedMDSettings,
    usable_global_model=False,
    personal_models=True,
    manifest=manifest,
    aggregation=Aggregation(
        why_mean_only=None,
        why_not_private=None,
        why_not_buffered="scores are those of one round, and no change that can be added to another's",
    ),
    why_not_secure=why_not_secure,
)
