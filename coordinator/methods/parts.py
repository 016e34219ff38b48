"""Helpers of methods that share a part of the model: they separate body and head."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pydantic import Field

from sparrow.protocol.manifest import Layer, Manifest
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from . import MethodSettings, own_settings


class PrivateSettings(MethodSettings):
    """Setting of methods with a part that stays on devices."""

    private: str = Field(
        default="",
        max_length=1000,
        description="Parameters that stay on devices, as name patterns separated by commas, such as *.lora_?.own.*; "
        "empty: those of the last linear layer",
    )


def private_part(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest with the parameters of ``private``, or else the last linear layer, made private. Raises
    BadContent."""
    patterns = [each.strip() for each in own_settings(settings, PrivateSettings).private.split(",") if each.strip()]
    trained = {spec.name for spec in published.shared if spec.trainable}
    if not patterns:
        names = check_apart(published, linear_layers(published)[-1:])
        if not names & trained:
            raise BadContent(
                f"{min(names)}: the last linear layer is frozen, so it cannot be personal; train it, or name the "
                "parameters that stay on devices (method_settings.private)"
            )
        return published.with_private(names & trained)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in trained):
            raise BadContent(
                f"method_settings.private: {pattern!r} matches no trained parameter; examples of names: "
                f"{', '.join(sorted(trained)[:3])}"
            )
    names = {name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if names == trained:
        raise BadContent("method_settings.private: every trained parameter would stay on devices; leave some out")
    return published.with_private(names)


def check_apart(manifest: Manifest, part: Sequence[Layer]) -> set[str]:
    """Return the tensors of some layers. Raises BadContent if another layer uses one, too (tied weights)."""
    names = {name for layer in part for name in layer.tensors}
    for layer in manifest.layers:
        shared = names.intersection(layer.tensors) if layer not in part else ()
        if shared:
            raise BadContent(
                f"the model cannot be split into a body and a head: {min(shared)} is also used by {layer.name} (tied "
                f"weights); choose a method that shares the whole model, such as fedavg, ditto or apfl"
            )
    return names


def linear_layers(manifest: Manifest) -> list[Layer]:
    """Return the linear layers, in forward order. Raises BadContent if the model has fewer than two layers."""
    layers = [layer for layer in manifest.layers if layer.kind == "linear"]
    if not layers or len(manifest.layers) < 2:
        raise BadContent(
            "the model cannot be split into a body and a head: it needs a linear layer and another layer; choose a "
            "method that shares the whole model, such as fedavg, ditto or apfl"
        )
    return layers
