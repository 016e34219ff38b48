"""Narrow networks whose layers scale what they pass on, and their running statistics (HeteroFL, federated dropout)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from edge_sdk.publishing.modes import evaluating
from edge_sdk.tasks import Batches
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import as_tensor, device_of


@contextmanager
def inputs_scaled(model: nn.Module, factors: Mapping[str, Sequence[float]]) -> Iterator[Callable[[], int]]:
    """Multiply what layers take: name -> one factor for each input. Yields how many values training has scaled."""
    scaled = 0

    def scale(by: Tensor, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal scaled
        taken, *others = inputs
        if module.training:
            scaled += taken.numel()
        return (taken * (by if isinstance(module, nn.Linear) else by.view(-1, *(1,) * (taken.dim() - 2))), *others)

    with ExitStack() as hooks:
        for name, each in factors.items():
            by = torch.tensor(each, device=device_of(model))
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(partial(scale, by)).remove)
        yield lambda: scaled


@contextmanager
def outputs_divided(model: nn.Module, names: Collection[str], ratio: float) -> Iterator[None]:
    """Divide what layers answer by ``ratio``."""
    with ExitStack() as hooks:
        for name in names:
            hooks.callback(model.get_submodule(name).register_forward_hook(partial(_divided, ratio)).remove)
        yield


def _divided(ratio: float, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output / ratio


def blind_to(engine: TorchEngine, seen: NDArray[np.int64]) -> TorchEngine:
    """Return the same engine with a loss that does not see the scores of other classes than those ``seen``."""
    task, classes = engine.task, torch.from_numpy(seen)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        absent = torch.ones(outputs.shape[1], dtype=torch.bool, device=outputs.device)
        absent[classes.to(outputs.device)] = False
        loss: Tensor = task.loss(outputs.masked_fill(absent.view(-1, *(1,) * (outputs.dim() - 2)), 0.0), targets)
        return loss

    return TorchEngine(replace(task, loss=loss), engine.manifest)


def take_statistics(engine: TorchEngine, batches: Batches) -> int:
    """Give batch norms the means of the batches' statistics; return how many samples that took.

    The model is run as it is, hooks included, and learns nothing. 0 where there is no batch norm that tracks any.
    """
    model = engine.model
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    passed, device = 0, device_of(model)
    with evaluating(model), torch.no_grad(), engine.task.compute.precision():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all, in PyTorch's words
            norm.train()
        for inputs, targets in batches if norms else ():
            model(as_tensor(inputs).to(device))
            passed += len(targets)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return passed
