"""Normalisations and their backward passes, in few operators: what ``step`` takes apart before it is exported.

torch's own decompositions are of twice as many, and the exporter's translation of batch norm while it trains is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def _normalised(x: Tensor, axes: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x - mean) / deviation, the mean, the biased variance and 1 / deviation, over ``axes``, which stay."""
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    variance = (centred * centred).mean(axes, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    return centred * inverse, mean, variance, inverse


def _spread(vector: Tensor, x: Tensor) -> Tensor:
    """Return a value for each channel, as it meets x [N, C, ...]."""
    return vector.reshape(1, -1, *[1] * (x.dim() - 2))


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


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
    weight, bias = (None if each is None else _spread(each, x) for each in (weight, bias))
    if not training:
        assert running_mean is not None and running_variance is not None
        inverse = torch.rsqrt(running_variance + eps)
        normalised = (x - _spread(running_mean, x)) * _spread(inverse, x)
        return _scaled(normalised, weight, bias), running_mean, inverse, running_mean, running_variance
    axes = _over_channels(x)
    normalised, mean, variance, inverse = _normalised(x, axes, eps)
    mean, variance, inverse = (each.reshape(-1) for each in (mean, variance, inverse))
    if running_mean is not None and running_variance is not None:
        count = _count(x, axes)
        running_mean = running_mean * (1 - momentum) + mean * momentum
        running_variance = running_variance * (1 - momentum) + variance * momentum * (count / (count - 1))
    return _scaled(normalised, weight, bias), mean, inverse, running_mean, running_variance


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
        assert running_mean is not None and running_variance is not None
        mean, inverse = running_mean, torch.rsqrt(running_variance + eps)
    inverse = _spread(inverse, x)
    normalised = (x - _spread(mean, x)) * inverse
    bias_error = error.sum(axes, keepdim=True)
    weight_error = (error * normalised).sum(axes, keepdim=True)
    scale = inverse if weight is None else inverse * _spread(weight, x)
    rest = error - (bias_error + normalised * weight_error) / _count(x, axes) if training else error
    return rest * scale, weight_error.reshape(-1), bias_error.reshape(-1)


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
    normalised, mean, _, inverse = _normalised(x.reshape(samples, groups, -1), [2], eps)
    weight, bias = (None if each is None else _spread(each, x) for each in (weight, bias))
    return _scaled(normalised.reshape(x.shape), weight, bias), mean.reshape(-1, groups), inverse.reshape(-1, groups)


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
    axes, split = _over_channels(x), (samples, groups, -1)
    inverse = inverse.reshape(samples, groups, 1)
    normalised = (x.reshape(split) - mean.reshape(samples, groups, 1)) * inverse
    whole = normalised.reshape(x.shape)
    inner = (error if weight is None else error * _spread(weight, x)).reshape(split)
    return _inner_error(inner, normalised, inverse, [2]).reshape(x.shape), (error * whole).sum(axes), error.sum(axes)


def _inner_error(inner: Tensor, normalised: Tensor, inverse: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the error of what was normalised, from that of (x - mean) / deviation."""
    pulled = normalised * (inner * normalised).mean(axes, keepdim=True)
    return (inner - inner.mean(axes, keepdim=True) - pulled) * inverse


def _layer_norm(x: Tensor, shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    axes = list(range(x.dim() - len(shape), x.dim()))
    normalised, mean, _, inverse = _normalised(x, axes, eps)
    return _scaled(normalised, weight, bias), mean, inverse


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
    found = _inner_error(inner, normalised, inverse, axes)
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
