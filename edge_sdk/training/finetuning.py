"""Turning a global model into a personal one: a few more passes over the device's own data.

What is not the device's to change stays bit for bit, whatever the optimiser: neurons outside the assignment's mask, and
the zeros of an element-sparse global model, whose pattern is what makes it small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks import Task
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import LocalResult, train_locally


def fine_tune(
    model: nn.Module,
    manifest: Manifest,
    task: Task,
    settings: FederationSettings,
    *,
    epochs: int | None,
    learning_rate: float,
    seed: int,
    mask: NeuronMask | None = None,
    elements: Mapping[str, torch.Tensor] | None = None,
    trained: Mapping[str, torch.Tensor] | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None,
) -> LocalResult:
    """Train ``model``, loaded with the global weights, in place for ``epochs`` >= 1; None: as long as in one round.

    mask: the neurons that may change; None lets all. elements and trained: what exists of the model, and what of it may
    change, as ``Freezing`` takes them.
    Raises what ``train_locally`` does.
    """
    if epochs is not None:
        settings = settings.model_copy(update={"local_epochs": epochs, "local_steps": None})
    return train_locally(
        model,
        task,
        settings,
        learning_rate=learning_rate,
        freezing=Freezing(model, manifest, mask, elements, trained),
        seed=seed,
        progress=progress,
    )
