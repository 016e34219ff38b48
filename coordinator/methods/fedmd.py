"""FedMD, server half: the mean of the devices' class scores on common public samples.

Li, Wang, NeurIPS workshop 2019, arXiv:1910.03581, Algorithm 1. The full model is personal. One table of scores [public
samples, classes] travels both ways, as an output in the federation's manifest. It starts as zeros, which devices do not
digest, and is averaged like weights. Departure: the mean is weighted by training samples.
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
"""The least range of masked values in secure rounds, since scores of trained networks are of this order."""


class FedMDSettings(MethodSettings):
    """FedMD's settings beyond a federation's."""

    public_samples: int = Field(
        default=100, ge=2, le=1_000_000, description="Number of public samples for comparing models, from the first"
    )
    public_epochs: int = Field(
        default=5, ge=0, le=10_000, description="Epochs over the public samples in a device's first round"
    )
    digest_epochs: int = Field(
        default=1, ge=1, le=1000, description="Epochs per round towards the mean scores on the public samples"
    )
    temperature: float = Field(default=1.0, gt=0, le=1000, description="Temperature T of the digested scores")


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest of private tensors with the table of scores as output. Raises BadContent."""
    if len(published.output_shape) != 1:
        raise BadContent(
            f"the model's output has the shape {list(published.output_shape)}, but FedMD needs one score for each "
            f"class; choose a method that shares weights, such as fedavg, ditto or apfl"
        )
    shape = (own_settings(settings, FedMDSettings).public_samples, *published.output_shape)
    private = published.with_blocks({}).with_private([spec.name for spec in published.shared])
    return private.with_outputs([TensorSpec(name=SCORES, shape=shape, init=Constant(value=0.0))])


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return a reason if the range of masked values would clip scores."""
    if settings.secure_range < SECURE_RANGE:
        return (
            f"scores exceed weights, and secure_range = {settings.secure_range:g} would clip them; set secure_range to "
            f"{SECURE_RANGE:g} or more"
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
        why_not_buffered="scores belong to one round, and cannot be added to another's",
    ),
    why_not_secure=why_not_secure,
)
