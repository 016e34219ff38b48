"""The two models of the comparison: MNIST's small network, and the one of ``benchmarks.aggregation``."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from benchmarks.aggregation import network
from benchmarks.coordinator.contest import Model
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task
from sparrow.protocol.builtin import load_builtin

SMALL = "small"
LARGE = "large"


@functools.cache
def task_of(name: str) -> Task | str:
    """Return the name of the built-in task, or a task around the network, for publishing."""
    if name == SMALL:
        return "mnist"
    torch.manual_seed(0)
    # Of zeros, batch normalisation would enlarge rounding until no compiled step could be told from a wrong one.
    batch = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    return Task("contest", network(), F.cross_entropy, [batch], [batch])


@functools.cache
def model_of(name: str) -> Model:
    """Return the model of this name."""
    task = task_of(name)
    if isinstance(task, str):
        manifest = load_builtin(task).manifest
    else:
        manifest = describe(task.model, torch.zeros(2, 3, 32, 32), task=task.name)
    return Model(name, manifest.trainable_values, tuple(tuple(spec.shape) for spec in manifest.shared))
