"""Normalisations and their backward passes, in few operators: what ``step`` takes apart before it is exported.

torch's own decompositions are of twice as many, and the exporter's translation of batch norm while it trains is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def _spread(vector: Tensor, x: Tensor) -> Tensor:
    """Return a value for each channel, [C] or [N, C], as it meets x [N, C, ...]."""
    return vector.reshape(*([1] if vector.dim() == 1 else [vector.shape[0]]), -1, *[1] * (x.dim() - 2))


def _count(x: Tensor, axes: Sequence[int]) -> Any:
    count: Any = 1
    for axis in axes:
        count = count * x.shape[axis]
    return count


def _over_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the output, mean and 1 / deviation [C], and the next running statistics."""
    axes = _over_channels(x)
    if training:
        mean = x.mean(axes)
        centred = x - _spread(mean, x)
        variance = (centred * centred).mean(axes)
        if running_mean is not None and running_variance is not None:
            count = _count(x, axes)
            running_mean = running_mean * (1 - momentum) + mean * momentum
            running_variance = running_variance * (1 - momentum) + variance * (momentum * count / (count - 1))
    else:
        assert running_mean is not None
        assert running_variance is not None
        mean, variance = running_mean, running_variance
        centred = x - _spread(mean, x)
    inverse = torch.rsqrt(variance + eps)
    output = centred * _spread(inverse if weight is None else inverse * weight, x)
    output = output if bias is None else output + _spread(bias, x)
    return output, mean, inverse, running_mean, running_variance


def _batch_norm_in_place(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    output, batch_mean, inverse, next_mean, next_variance = _batch_norm(x, weight, bias, mean, variance, *rest)
    if rest[0] and mean is not None:
        mean.copy_(next_mean)
        variance.copy_(next_variance)
    return output, batch_mean, inverse


def _batch_norm_without(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    return _batch_norm(x, weight, bias, None, None, *rest)[:3]


def _batch_norm_with_update(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    reserve = torch.zeros(0, dtype=torch.uint8)
    return (*_batch_norm_in_place(x, weight, bias, mean, variance, True, *rest), reserve)


def _batch_norm_backward(
    error: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    mask: Sequence[bool],
    *reserve: Any,
) -> Any:
    axes = _over_channels(x)
    if not training:
        assert running_mean is not None
        assert running_variance is not None
        mean, inverse = running_mean, torch.rsqrt(running_variance + eps)
    centred = x - _spread(mean, x)
    bias_error, together = error.sum(axes), (error * centred).sum(axes)
    scale = inverse if weight is None else inverse * weight
    found = error * _spread(scale, x)
    if training:
        count = _count(x, axes)
        found = found - centred * _spread(scale * inverse * inverse * together / count, x)
        found = found - _spread(scale * bias_error / count, x)
    return found, together * inverse, bias_error


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: Any,
    channels: Any,
    positions: Any,
    groups: int,
    eps: float,
) -> Any:
    parts = x.reshape(samples, groups, -1)
    mean = parts.mean(2)
    centred = parts - mean.unsqueeze(2)
    inverse = torch.rsqrt((centred * centred).mean(2) + eps)
    output = centred.reshape(x.shape) * _spread(_of_channels(inverse, weight, channels), x)
    return output if bias is None else output + _spread(bias, x), mean, inverse


def _of_channels(inverse: Tensor, weight: Tensor | None, channels: Any) -> Tensor:
    """Return 1 / deviation of each channel's group, times its weight: [N, C]."""
    samples, groups = inverse.shape
    spread = inverse.unsqueeze(2).expand(samples, groups, channels // groups).reshape(samples, channels)
    return spread if weight is None else spread * weight


def _group_norm_backward(
    error: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    samples: Any,
    channels: Any,
    positions: Any,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    centred = (x.reshape(samples, groups, -1) - mean.unsqueeze(2)).reshape(x.shape)
    places = list(range(2, x.dim()))
    errors, together = error.sum(places), (error * centred).sum(places)  # [N, C]
    spread = _of_channels(inverse, None, channels)
    weighed = [each if weight is None else each * weight for each in (errors, together)]
    count = _count(x, [1, *places]) // groups
    first, second = (each.reshape(samples, groups, -1).sum(2) / count for each in weighed)  # [N, G]
    found = error * _spread(spread if weight is None else spread * weight, x)
    found = found - centred * _spread(_of_channels(inverse * inverse * inverse * second, None, channels), x)
    found = found - _spread(_of_channels(inverse * first, None, channels), x)
    return found, (together * spread).sum(0), errors.sum(0)


def _layer_norm(x: Tensor, shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    axes = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    output = centred * inverse if weight is None else centred * inverse * weight
    return output if bias is None else output + bias, mean, inverse


def _layer_norm_backward(
    error: Tensor,
    x: Tensor,
    shape: Sequence[Any],
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> Any:
    axes = list(range(x.dim() - len(shape), x.dim()))
    others = list(range(x.dim() - len(shape)))
    normalised = (x - mean) * inverse
    inner = error if weight is None else error * weight
    pulled = normalised * (inner * normalised).mean(axes, keepdim=True)
    found = (inner - inner.mean(axes, keepdim=True) - pulled) * inverse
    return found, (error * normalised).sum(others), error.sum(others)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.native_batch_norm.default: _batch_norm_in_place,
    _ATEN._native_batch_norm_legit.default: _batch_norm_in_place,
    _ATEN._native_batch_norm_legit.no_stats: _batch_norm_without,
    _ATEN._native_batch_norm_legit_functional.default: _batch_norm,
    _ATEN._batch_norm_with_update.default: _batch_norm_with_update,
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN.batch_norm_backward.default: _batch_norm_backward,
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
}
