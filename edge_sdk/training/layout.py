"""The memory format of convolutions: channels last, [N, H, W, C], is fastest on most CPUs.

The choice depends only on model and data, so that equal seeds give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..publishing.modes import evaluating
from ..tasks import Task

# Time of a training step in channels last relative to PyTorch's default, measured on one core: 0.57 to 0.65 on the
# small MNIST networks, 0.73 to 0.80 on the CIFAR networks of DM-PFL, FedSGC and pFedGate, 0.70 to 0.87 on residual
# networks with batch norm, about 1 on FedSPU's CIFAR network. Evaluation gained at least as much, mostly in
# max-pooling. Group norm took 0.84 to 1.16 and instance norm 1.28. Results differ in their last bits.
_SLOWER = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

FEWEST_CHANNELS = 8
"""Fewest input channels of a strided 1 x 1 convolution in channels last (``runs_safely``)."""

_runs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Tried models, and whether they run in channels last."""


class Layout:
    """Context manager: choose the convolutions' memory format at the first batch, restore it on exit."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._model = model
        self._task = task
        self._chosen: bool | None = None
        self._changed: list[tuple[nn.Parameter, tuple[int, ...]]] = []

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` in the model's memory format."""
        if self._chosen is None:
            self._chosen = self._choose(inputs, targets)
        return _channels_last(inputs) if self._chosen else inputs

    def _choose(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        wanted = self._task.compute.channels_last
        if wanted is None:
            wanted = inputs.device.type == "cpu" and gains(self._model)
        elif inputs.device.type == "cpu":
            wanted = wanted and runs_safely(self._model)
        if not wanted:
            return False
        for parameter in self._model.parameters():
            if parameter.dim() == 4:
                strides = parameter.stride()
                with _outside_inference():
                    parameter.data = _channels_last(parameter.data)
                self._changed.append((parameter, strides))
        if self._model not in _runs:
            _runs[self._model] = self._tried(inputs[:2], targets[:2])
        if not _runs[self._model]:
            self._restore()
        return _runs[self._model]

    def _tried(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        # ``x.view(n, -1)`` in place of ``flatten`` fails in channels last.
        try:
            # In evaluation mode running statistics do not move.
            with evaluating(self._model), torch.random.fork_rng(devices=[]), torch.no_grad():
                self._task.loss(self._model(_channels_last(inputs)), targets)
        except RuntimeError:
            return False
        return True

    def _restore(self) -> None:
        while self._changed:
            parameter, strides = self._changed.pop()
            if parameter.stride() != strides:
                with _outside_inference():
                    parameter.data = parameter.data.new_empty_strided(parameter.shape, strides).copy_(parameter.data)


def gains(model: nn.Module) -> bool:
    """Return whether ``model`` runs in channels last on a CPU by default."""
    modules = list(model.modules())
    gaining = any(isinstance(module, nn.Conv2d) for module in modules)
    return gaining and runs_safely(model) and not any(isinstance(module, _SLOWER) for module in modules)


def runs_safely(model: nn.Module) -> bool:
    """Return whether ``model`` can run in channels last on a CPU."""
    # oneDNN in PyTorch 2.13 writes beyond its memory on processors without AVX-512 if a strided 1 x 1 convolution has
    # fewer than eight input channels.
    return not any(
        isinstance(each, nn.Conv2d)
        and each.kernel_size == (1, 1)
        and max(each.stride) > 1
        and each.in_channels // each.groups < FEWEST_CHANNELS
        for each in model.modules()
    )


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    # ``contiguous`` would leave the strides of a single channel, by which kernels are chosen.
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Leave inference mode, whose parameters cannot be trained."""
    with torch.inference_mode(False), torch.no_grad():
        yield
