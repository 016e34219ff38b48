"""The gating layer: a scale and an importance for every block from a batch of inputs (pFedGate, arXiv:2305.02776).

    h = flatten(SN(x))                              switchable normalisation, arXiv:1806.10779
    M = mean of sigmoid(BN(V_M h + c_M))            scales      (section 5.2.1)
    G = mean of sigmoid(BN(V_G h + c_G))            importances

The means are over the batch; ``each`` omits them. A client-wise gate sees the mean of a device's samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import nn
from torch.nn import functional as F

from ..local import seed_generators

LARGEST_SHARE = 0.1
"""Largest size of a gate, as a share of the model's parameters; a larger gate pools its input."""

_EPSILON = 1e-5
_POOLING = {2: F.avg_pool1d, 3: F.avg_pool2d, 4: F.avg_pool3d}
"""Pooling by the number of dimensions of an input, channels first."""


Sees = Literal["batch", "device", "nothing"]
"""Input of a gate: the batch, the mean of the device's training samples (client-wise), or no input (a vector)."""


class SwitchNorm(nn.Module):
    """Switchable normalisation of [N, channels, positions], or of [N, channels] if ``flat``.

    Mean and variance are blends over a sample's channel, over a sample (unless flat), and over the batch.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int, *, flat: bool) -> None:
        super().__init__()
        self._flat = flat
        self._momentum = 0.997 if flat else 0.9
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.mean_logits = nn.Parameter(torch.ones(2 if flat else 3))
        self.var_logits = nn.Parameter(torch.ones(2 if flat else 3))
        # Variances are unbiased, and running ones start at 0, as in the authors' code.
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.zeros(channels))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor and summand that normalise ``inputs``, [N, C, 1] or [N, C]; training updates statistics."""
        mean = inputs.mean(-1, keepdim=True)
        centred = inputs - mean
        # torch.var takes ten times as long.
        spread = (centred * centred).sum(-1, keepdim=True) / (inputs.shape[-1] - 1)
        if self._flat:
            means = [mean]
            variances = [spread]
        else:
            squares = spread + mean * mean
            layer = mean.mean(1, keepdim=True)
            means = [mean, layer]
            variances = [spread, squares.mean(1, keepdim=True) - layer * layer]
        if not self.training:
            shape = (1, -1) if self._flat else (1, -1, 1)
            batch_mean = self.running_mean.view(shape)
            batch_var = self.running_var.view(shape)
        else:
            if self._flat:
                batch_mean = inputs.mean(0, keepdim=True)
                batch_var = inputs.var(0, keepdim=True)
            else:
                batch_mean = mean.mean(0, keepdim=True)
                batch_var = squares.mean(0, keepdim=True) - batch_mean * batch_mean
            self._remember(batch_mean.flatten(), batch_var.flatten())
        of_mean = self.mean_logits.softmax(0)
        of_var = self.var_logits.softmax(0)
        blended = sum(share * part for share, part in zip(of_mean, [*means, batch_mean], strict=True))
        variance = sum(share * part for share, part in zip(of_var, [*variances, batch_var], strict=True))
        weight, bias = (part if self._flat else part.view(-1, 1) for part in (self.weight, self.bias))
        factor = weight * torch.rsqrt(cast(torch.Tensor, variance) + _EPSILON)
        return factor, bias - blended * factor

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.running_mean.lerp_(mean, 1 - self._momentum)
        self.running_var.lerp_(variance, 1 - self._momentum)


class GatingLayer(nn.Module):
    """Scales and importances of ``length`` blocks, from inputs of ``shape`` without the batch axis.

    paths: 1 shares one vector, 2 has a layer for each. bias: initial logits of scales. pool: side of the averaged
    squares or runs. sees: what the gate depends on; for ``device`` the caller sets ``mean`` [*shape]; ``settled``
    [paths L] holds the logits.
    """

    mean: torch.Tensor
    settled: torch.Tensor

    def __init__(
        self,
        shape: Sequence[int],
        length: int,
        *,
        seed: int,
        paths: int = 2,
        bias: float = 3.0,
        pool: int = 1,
        input_norm: bool = True,
        batch_norm: bool = True,
        squashes: bool = True,
        sees: Sees = "batch",
    ) -> None:
        super().__init__()
        self._length = length
        self._paths = paths
        self._squashes = squashes
        self._sees = sees
        self._flat = len(shape) == 1 or math.prod(shape[1:]) < 2
        pools = pool > 1 and len(shape) in _POOLING and not self._flat
        self._pool = tuple(min(pool, side) for side in shape[1:]) if pools else ()
        self._pooling = _POOLING.get(len(shape), F.avg_pool1d)
        # With the authors' bias of 0 every layer of the model would start halved.
        start = torch.cat([torch.full((length,), bias), torch.zeros(length)])[: paths * length]
        channels = math.prod(shape) if self._flat else shape[0]
        normed = input_norm and sees != "nothing" and math.prod(shape) > 1
        self.norm = SwitchNorm(channels, flat=self._flat) if normed else None
        self.batch_norm = nn.BatchNorm1d(paths * length) if batch_norm and sees != "nothing" else None
        self.logits: nn.Parameter | None = None
        if sees == "nothing":
            self.logits = nn.Parameter(start)
            return
        if sees == "device":
            self.register_buffer("mean", torch.zeros(tuple(shape)))
            self.register_buffer("settled", start.clone())
        with torch.random.fork_rng(devices=[]):
            seed_generators(torch.device("cpu"), seed)
            path = nn.Linear(width(shape, pool if pools else 1), length)
        self.linear = nn.Linear(path.in_features, paths * length)
        shift = self.linear if self.batch_norm is None else self.batch_norm
        with torch.no_grad():
            self.linear.weight.copy_(path.weight.repeat(paths, 1))
            self.linear.bias.copy_(path.bias.repeat(paths))
            shift.bias.add_(start)

    def train(self, mode: bool = True) -> GatingLayer:
        """Set the mode; a client-wise gate, with its single sample, stays in evaluation mode."""
        return super().train(mode and self._sees != "device")

    @torch.no_grad()
    def settle(self) -> None:
        """Store the logits of a client-wise gate in ``settled``."""
        if self._sees == "device":
            self.settled.copy_(self._of(self.mean.unsqueeze(0))[0])

    def _of(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self._normalised(inputs.to(self.linear.weight.dtype)))
        return logits if self.batch_norm is None else cast(torch.Tensor, self.batch_norm(logits))

    def each(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return importances and scales per sample, [N, L] both."""
        if self.logits is not None:
            gates = self.logits.expand(len(inputs), -1)
        elif self._sees == "device":
            gates = self._of(self.mean.unsqueeze(0)).expand(len(inputs), -1)
        else:
            gates = self._of(inputs)
        if self._squashes:
            gates = gates.sigmoid()
        scales = gates[:, : self._length]
        importances = gates[:, -self._length :]
        return importances, scales

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return importances and scales of the batch, [L] both."""
        importances, scales = self.each(inputs)
        return importances.mean(0), scales.mean(0)

    def _normalised(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return SN(x), pooled and flat."""
        channels = inputs.flatten(1) if self._flat else inputs.flatten(2)
        pooled = channels
        # The norm is linear per channel, so pooling first saves work.
        if self._pool:
            pooled = self._pooling(inputs, self._pool, ceil_mode=True).flatten(2)
        if self.norm is not None:
            factor, summand = self.norm(channels)
            pooled = torch.addcmul(summand, pooled, factor)
        return pooled.flatten(1)


def over_window(gates: torch.Tensor, window: int) -> torch.Tensor:
    """Return the mean of each row of ``gates`` [N, L] and up to ``window`` - 1 rows before it."""
    if window == 1:
        return gates
    sums = gates.double().cumsum(0)
    sums = torch.cat([sums[:window], sums[window:] - sums[:-window]])
    counts = torch.arange(1, len(gates) + 1, device=gates.device).clamp(max=window)
    return (sums / counts.unsqueeze(1)).to(gates.dtype)


def width(shape: Sequence[int], pool: int) -> int:
    """Return d_X, the number of inputs of the gate's linear layer."""
    return math.prod([shape[0], *(math.ceil(side / pool) for side in shape[1:])]) if len(shape) > 1 else shape[0]


def fitting_pool(shape: Sequence[int], length: int, paths: int, parameters: int) -> int:
    """Return the smallest pool for a gate with at most LARGEST_SHARE of the model's ``parameters``, or the largest."""
    # Flat inputs, and inputs with more than three dimensions besides channels, are never pooled.
    if len(shape) not in _POOLING:
        return 1
    for pool in range(1, max(shape[1:]) + 1):
        if size(width(shape, pool), length, paths) <= LARGEST_SHARE * parameters:
            return pool
    return max(shape[1:])


def size(seen: int, length: int, paths: int) -> int:
    """Return P(d_X L + 3L), a gate's number of parameters without those of the input norm (d_X: ``seen``)."""
    return paths * (seen * length + 3 * length)
