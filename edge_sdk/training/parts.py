"""Models of which a part is shared and the rest a device's own: which tensors are which, the manifest says."""

from __future__ import annotations

import torch

from edge_sdk.protocol.manifest import Manifest


def only(manifest: Manifest, *, shared: bool) -> dict[str, torch.Tensor]:
    """What ``Freezing`` takes as ``trained`` to train the shared part alone, or the device's own alone."""
    return {
        spec.name: torch.full(spec.shape, (spec.policy == "shared") == shared)
        for spec in manifest.tensors
        if spec.trainable
    }
