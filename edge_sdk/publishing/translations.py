"""ONNX translations of backward operators that torch's exporter lacks or translates inefficiently.

``TABLE``: functions with the operator's arguments, with values of the ONNX graph instead of tensors. Spatial sizes are
fixed; the batch is free. ``DECOMPOSITIONS``: normalisations and their backward passes; torch's own need twice the
operators, and the exporter's batch norm in training mode is wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sparrow.protocol.errors import ManifestError

_ATEN = torch.ops.aten

Matrix = NDArray[np.float64]


class CannotCompile(ManifestError):
    """The training step cannot be written as a graph; PyTorch can still train it."""


def _op() -> Any:
    # Imported late: only publishing needs onnxscript, and the import takes a second.
    from onnxscript import opset21

    return opset21


def _ints(values: Sequence[int]) -> Any:
    return _op().Constant(value_ints=list(values))


def convolution_backward(
    error: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the errors of input, weight and bias."""
    # Input: a transposed convolution (for a transposed one, a convolution). Weight: a convolution of the input, batch
    # and channels exchanged, with the error as kernel, strides and dilations exchanged (for a transposed one, of the
    # error with the input). Bias: a sum.
    op = _op()
    spatial = [*range(2, 2 + len(stride))]
    pads = [*padding, *padding]
    kernel, size, out = ([int(each.shape[axis]) for axis in spatial] for each in (weight, x, error))
    how = {"strides": list(stride), "pads": pads, "dilations": list(dilation), "group": groups}
    found: list[Any] = [None, None, None]
    if output_mask[0] and transposed:
        found[0] = op.Conv(error, weight, kernel_shape=kernel, **how)
    elif output_mask[0]:
        reach = zip(size, out, kernel, stride, padding, dilation, strict=True)
        rest = [size - ((out - 1) * step - 2 * pad + apart * (k - 1) + 1) for size, out, k, step, pad, apart in reach]
        # Entries beyond the last window have no error; if there are more of them than a stride, they are padded.
        inside = [min(left, step - 1) for left, step in zip(rest, stride, strict=True)]
        found[0] = op.ConvTranspose(error, weight, output_padding=inside, **how)
        if rest != inside:
            more = [left - done for left, done in zip(rest, inside, strict=True)]
            found[0] = op.Pad(found[0], _ints([0] * (4 + len(stride)) + more))
    if output_mask[1]:
        pair = (x, error) if transposed else (error, x)
        sizes = (out, size) if transposed else (size, out)
        found[1] = _weight_error(op, *pair, kernel, *sizes, stride, pads, dilation, groups)
    if output_mask[2]:
        found[2] = op.ReduceSum(error, _ints([0, *spatial]), keepdims=0)
    some = next(each for each in found if each is not None)
    return tuple(some if each is None else each for each in found)


def _weight_error(
    op: Any,
    error: Any,
    x: Any,
    kernel: Sequence[int],
    size: Sequence[int],
    out: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    axes = len(stride)
    spatial = [*range(2, 2 + axes)]
    turned = [1, 0, *spatial]
    full = [(size[i] + 2 * pads[i] - stride[i] * (out[i] - 1) - 1) // dilation[i] + 1 for i in range(axes)]
    # [Co, N, out]
    kernels = op.Transpose(error, perm=turned)
    if groups == 1:
        # [Ci, N, size]: channels are samples, samples channels.
        images = op.Transpose(x, perm=turned)
    else:
        # [Ci/G, G N, size], in G groups of N channels: the channels of a group meet only the errors of that group.
        share = int(x.shape[1]) // groups
        images = op.Reshape(x, _ints([0, groups, share, *size]))
        images = op.Transpose(images, perm=[2, 1, 0, *[axis + 1 for axis in spatial]])
        images = op.Reshape(images, _ints([share, -1, *size]))
    # [Ci/G, Co, full]
    answer = op.Conv(images, kernels, strides=list(dilation), dilations=list(stride), pads=list(pads), group=groups)
    if full != list(kernel):
        answer = op.Slice(answer, _ints([0] * axes), _ints(kernel), _ints(spatial))
    return op.Transpose(answer, perm=turned)


def max_pool(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Any:
    """Return maxima and their positions in the whole tensor, in ONNX's numbering."""
    op = _op()
    padding = _pair(padding)
    dilation = _pair(dilation)
    return op.MaxPool(
        x,
        kernel_shape=_pair(kernel_size),
        strides=_pair(stride or kernel_size),
        pads=[*padding, *padding],
        dilations=dilation,
        ceil_mode=int(ceil_mode),
    )


def max_pool_backward(
    error: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Return the error at the positions of the maxima, summed for overlapping windows."""
    op = _op()
    kernel = _pair(kernel_size)
    stride = _pair(stride or kernel_size)
    shape = op.Shape(x)
    if all(step >= width for step, width in zip(stride, kernel, strict=True)) and set(_pair(dilation)) == {1}:
        return op.MaxUnpool(error, indices, shape, kernel_shape=kernel, strides=stride, pads=[0] * 2 * len(kernel))
    flat = op.Expand(op.Constant(value_float=0.0), op.Reshape(op.Size(x), _ints([1])))
    line = _ints([-1])
    return op.Reshape(
        op.ScatterElements(flat, op.Reshape(indices, line), op.Reshape(error, line), axis=0, reduction="add"), shape
    )


def relu_backward(error: Any, x: Any, threshold: float) -> Any:
    """Return the error at entries above the threshold."""
    op = _op()
    return op.Where(op.Greater(x, op.Constant(value_float=float(threshold))), error, op.Constant(value_float=0.0))


def adaptive_average_pool(x: Any, output_size: Sequence[int]) -> Any:
    """Return means over windows of unequal size, by a product with a constant matrix per axis."""
    matrices = [_windows(int(x.shape[axis]), int(length)) for axis, length in zip((-2, -1), output_size, strict=True)]
    return _averaged(x, *matrices)


def adaptive_average_pool_backward(error: Any, x: Any) -> Any:
    """Return the error, spread evenly over each window."""
    return _averaged(error, *(_windows(int(x.shape[axis]), int(error.shape[axis])).T for axis in (-2, -1)))


def _windows(size: int, length: int) -> Matrix:
    """Return the matrix [length, size] of the means over ``length`` windows."""
    bounds = [(place * size // length, -(-(place + 1) * size // length)) for place in range(length)]
    return _rows(size, [(range(start, stop), 1 / (stop - start)) for start, stop in bounds])


def _rows(size: int, windows: Sequence[tuple[range, float]]) -> Matrix:
    """Return a matrix with one row of length ``size`` per window: the window's weights, 0 elsewhere."""
    matrix = np.zeros((len(windows), size))
    for row, (inside, share) in zip(matrix, windows, strict=True):
        row[inside.start : inside.stop] = share
    return matrix


def _averaged(x: Any, rows: Matrix, columns: Matrix) -> Any:
    """Return rows · x · columnsᵀ over the last two axes of x."""
    op = _op()
    before, after = (
        op.Reshape(op.Constant(value_floats=matrix.ravel().tolist()), _ints(matrix.shape))
        for matrix in (rows, columns.T)
    )
    return op.MatMul(op.MatMul(before, x), after)


def _pair(value: Any) -> list[int]:
    values = [int(each) for each in value] if isinstance(value, (list, tuple)) else [int(value)]
    return values * 2 if len(values) == 1 else values


def average_pool_backward(
    error: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Return the error, spread evenly over each window."""
    kernel = _pair(kernel_size)
    padding = _pair(padding)
    stride = _pair(stride or kernel)
    if divisor_override is not None or (ceil_mode and count_include_pad and any(padding)):
        raise CannotCompile(
            "aten.avg_pool2d_backward with divisor_override, or with ceil_mode over padding, is not supported"
        )
    matrices = []
    for place, axis in enumerate((-2, -1)):
        size = int(x.shape[axis])
        width = kernel[place]
        starts = [window * stride[place] - padding[place] for window in range(int(error.shape[axis]))]
        inside = [range(max(0, start), min(size, start + width)) for start in starts]
        counts = [width if count_include_pad and not ceil_mode else len(each) for each in inside]
        matrices.append(_rows(size, [(each, 1 / count) for each, count in zip(inside, counts, strict=True)]).T)
    return _averaged(error, *matrices)


def log_softmax_backward(error: Any, output: Any, dim: int, dtype: Any) -> Any:
    """Return error - softmax · Σ error."""
    op = _op()
    return op.Sub(error, op.Mul(op.Exp(output), op.ReduceSum(error, _ints([dim]), keepdims=1)))


def softmax_backward(error: Any, output: Any, dim: int, dtype: Any) -> Any:
    """Return softmax · (error - Σ error · softmax)."""
    op = _op()
    inner = op.Mul(error, output)
    return op.Sub(inner, op.Mul(output, op.ReduceSum(inner, _ints([dim]), keepdims=1)))


def likelihood(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """Return the negative log likelihood of classes, x [N, C], and the total weight of the samples."""
    op = _op()
    picked = _picked(x, target, weight, ignore_index)
    each = op.Neg(op.Mul(picked, x))
    total = op.ReduceSum(picked, keepdims=0)
    if reduction == 0:
        return op.ReduceSum(each, _ints([1]), keepdims=0), total
    loss = op.ReduceSum(each, keepdims=0)
    return op.Div(loss, total) if reduction == 1 else loss, total


def likelihood_backward(
    error: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any
) -> Any:
    """Return the error of x [N, C]."""
    op = _op()
    picked = _picked(x, target, weight, ignore_index)
    if reduction == 0:
        error = op.Unsqueeze(error, _ints([1]))
    return op.Mul(picked, op.Neg(op.Div(error, total) if reduction == 1 else error))


def _picked(x: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    """Return each sample's weight at its class, 0 elsewhere, [N, C]."""
    op = _op()
    classes = int(x.shape[1])
    if -classes <= ignore_index < classes:
        ignored = op.Equal(target, op.Constant(value_int=ignore_index))
        target = op.Where(ignored, op.Constant(value_int=classes), target)
    picked = op.OneHot(target, op.Constant(value_int=classes), op.Constant(value_floats=[0.0, 1.0]))
    return picked if weight is None else op.Mul(picked, weight)


TABLE: dict[Any, Callable[..., Any]] = {
    _ATEN.convolution_backward.default: convolution_backward,
    _ATEN.max_pool2d_with_indices.default: max_pool,
    _ATEN.max_pool2d_with_indices_backward.default: max_pool_backward,
    _ATEN.threshold_backward.default: relu_backward,
    _ATEN.nll_loss_forward.default: likelihood,
    _ATEN.nll_loss_backward.default: likelihood_backward,
    _ATEN._adaptive_avg_pool2d.default: adaptive_average_pool,
    _ATEN._adaptive_avg_pool2d_backward.default: adaptive_average_pool_backward,
    _ATEN.avg_pool2d_backward.default: average_pool_backward,
    _ATEN._log_softmax_backward_data.default: log_softmax_backward,
    _ATEN._softmax_backward_data.default: softmax_backward,
}


def _spread(vector: Tensor, x: Tensor) -> Tensor:
    """Return a value per channel, [C] or [N, C], in a shape that broadcasts with x [N, C, ...]."""
    return vector.reshape(*([1] if vector.dim() == 1 else [vector.shape[0]]), -1, *[1] * (x.dim() - 2))


def _count(x: Tensor, axes: Sequence[int]) -> Any:
    """Return the number of entries over axes; a tensor if the batch is among them."""
    rest = math.prod(x.shape[axis] for axis in axes if axis != 0)
    return x.new_ones(x.shape[0]).sum() * rest if 0 in axes else rest


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
        mean = running_mean
        variance = running_variance
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
        mean = running_mean
        inverse = torch.rsqrt(running_variance + eps)
    centred = x - _spread(mean, x)
    bias_error = error.sum(axes)
    together = (error * centred).sum(axes)
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
    """Return 1 / deviation of each channel's group times the channel's weight, [N, C]."""
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
    # [N, C]
    errors = error.sum(places)
    together = (error * centred).sum(places)
    spread = _of_channels(inverse, None, channels)
    weighed = [each if weight is None else each * weight for each in (errors, together)]
    count = _count(x, [1, *places]) // groups
    # [N, G]
    first, second = (each.reshape(samples, groups, -1).sum(2) / count for each in weighed)
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


def _slice_backward(error: Tensor, sizes: Sequence[Any], dim: int, start: int, end: int, step: int) -> Any:
    """Pad the error of a slice with zeros; PyTorch's own decomposition scatters it, which needs a range of indices."""
    if step != 1:
        return torch.slice_scatter(error.new_zeros(sizes), error, dim, start, end, step)
    dim %= len(sizes)
    length = sizes[dim]
    start = max(0, start + length if start < 0 else start)
    before = start
    after = length - start - error.shape[dim]

    def zeros(count: Any) -> list[Tensor]:
        return [error.new_zeros([*sizes[:dim], count, *sizes[dim + 1 :]])] if count != 0 else []

    found = [*zeros(before), error, *zeros(after)]
    return torch.cat(found, dim) if len(found) > 1 else error.clone()


def _norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Return the L2 norm, composed of operators that a step accepts."""
    if ord != 2 or dtype is not None:
        return NotImplemented
    return torch.sqrt((x * x).sum(dim, keepdim=keepdim) if dim else (x * x).sum())


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Return the weight with the direction of v and the norms g, and the norms of v."""
    norms = torch.sqrt((v * v).sum(_others(v, dim), keepdim=True))
    return v * (g / norms), norms


def _weight_norm_backward(error: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    lengths = norms.reshape(g.shape)
    along = (error * v).sum(_others(v, dim), keepdim=True) / lengths
    return (error - v * (along / lengths)) * (g / lengths), along


def _others(x: Tensor, dim: int) -> list[int]:
    """Return all axes except ``dim``."""
    return [axis for axis in range(x.dim()) if axis != dim % x.dim()]


def _arange(start: Any, end: Any, step: Any = 1, **kind: Any) -> Any:
    """Return a range as a cumulative sum of ones, because a step accepts no range whose length depends on a value."""
    dtype = kind.get("dtype") or torch.int64
    if step != 1 or any(isinstance(each, float | torch.SymFloat) for each in (start, end)) or dtype.is_floating_point:
        return NotImplemented
    return torch.ones((end - start,), dtype=dtype).cumsum(0, dtype=dtype) + (start - 1)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.arange.default: lambda end, **kind: _arange(0, end, **kind),
    _ATEN.arange.start: _arange,
    _ATEN.arange.start_step: _arange,
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.slice_backward.default: _slice_backward,
    _ATEN._weight_norm_interface.default: _weight_norm,
    _ATEN._weight_norm_interface_backward.default: _weight_norm_backward,
    _ATEN.native_batch_norm.default: _batch_norm_in_place,
    _ATEN._native_batch_norm_legit.default: _batch_norm_in_place,
    _ATEN._native_batch_norm_legit.no_stats: lambda x, weight, bias, *rest: _batch_norm(
        x, weight, bias, None, None, *rest
    )[:3],
    _ATEN._native_batch_norm_legit_functional.default: _batch_norm,
    _ATEN._batch_norm_with_update.default: lambda x, weight, bias, mean, variance, *rest: (
        *_batch_norm_in_place(x, weight, bias, mean, variance, True, *rest),
        torch.zeros(0, dtype=torch.uint8),
    ),
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN.batch_norm_backward.default: _batch_norm_backward,
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
}


# --- Fourier transforms ----------------------------------------------------------------------------------------------

WHOLE = 256
"""Longest transform that is one product."""
LARGEST_FACTOR = 512
"""Longer transforms are two products, by matrices of the length's factors; 512 x 512 is a step's largest constant."""


class Fourier(TorchFunctionMode):
    """Mode that writes ``torch.stft``, ``torch.fft.rfft`` and ``torch.fft.fft`` of real tensors as matrix products.

    They return ``Complex``. So their gradients are products too, and the graph has no complex values. ONNX Runtime's
    own transforms have no gradient, and are off by 1e-3 if a length is not a power of two. Raises CannotCompile for
    other transforms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or its replacement."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "istft" or (name.startswith("fft_") and not name.endswith(("freq", "shift"))):
            self.used = True
            how = _TRANSFORMS.get(name)
            given = args[0] if args else kwargs.get("input")
            if how is None or not (isinstance(given, Tensor) and given.is_floating_point()):
                raise CannotCompile(
                    f"torch.{name.replace('fft_', 'fft.')} cannot be compiled: use torch.stft, torch.fft.rfft or "
                    "torch.fft.fft of real values"
                )
            return how(*args, **kwargs)
        if name == "stft" and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.used = True
            return short_time_transform(*args, **kwargs)
        return func(*args, **kwargs)


def _part(which: str, value: Any) -> Any:
    return getattr(value, which) if isinstance(value, Complex) else value


def _both(value: Any) -> tuple[Any, Any]:
    return (value.real, value.imag) if isinstance(value, Complex | complex) else (value, 0.0)


def _sum(one: Any, other: Any, *, alpha: float = 1) -> Complex:
    real, imag = _both(one)
    more, turned = _both(other)
    found = real + alpha * more
    # Broadcasting may make the sum larger than both, and the imaginary part of a real value is a number.
    return Complex(found, imag + alpha * turned + torch.zeros_like(found))


def _difference(one: Any, other: Any, *, alpha: float = 1) -> Complex:
    return _sum(one, other, alpha=-alpha)


def _product(one: Any, other: Any) -> Complex:
    if not isinstance(other, Complex | complex):
        return Complex(one.real * other, one.imag * other)
    if not isinstance(one, Complex | complex):
        return Complex(other.real * one, other.imag * one)
    real: Any = one.real * other.real - one.imag * other.imag
    imag: Any = one.real * other.imag + one.imag * other.real
    return Complex(real, imag)


def _quotient(one: Any, other: Any) -> Complex:
    if isinstance(other, Complex):
        squares = other.real * other.real + other.imag * other.imag
        return _product(one, Complex(other.real / squares, -other.imag / squares))
    return Complex(one.real / other, one.imag / other)


def _magnitude(value: Any) -> Tensor:
    """Return absolute values; their gradient at 0 is 0, as in PyTorch."""
    squares = value.real * value.real + value.imag * value.imag
    nothing = squares == 0
    return torch.where(nothing, 0.0, torch.sqrt(torch.where(nothing, 1.0, squares)))


class Complex:
    """Complex numbers as two real tensors of one shape.

    Unsupported operators raise CannotCompile.
    """

    dtype = torch.complex64

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real = real
        self.imag = imag

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute ``func`` if one of its arguments is complex."""
        name = func.__name__.strip("_")
        kwargs = kwargs or {}
        if name in _MOVES:
            real, imag = (
                func(*tree_map(functools.partial(_part, which), args), **kwargs) for which in ("real", "imag")
            )
            return cls(real, imag)
        if name not in _COMPLEX:
            raise CannotCompile(
                f"torch.{name} of complex numbers cannot be compiled: take their abs(), real, imag or "
                "torch.view_as_real first"
            )
        return _COMPLEX[name](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or method of tensors."""
        if name in ("shape", "ndim", "device", "size", "dim", "numel"):
            return getattr(self.real, name)
        found = getattr(Tensor, name)
        return lambda *args, **kwargs: self.__torch_function__(found, (), (self, *args), kwargs)

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: Any) -> Complex:
        return Complex(self.real[index], self.imag[index])

    def __neg__(self) -> Complex:
        return Complex(-self.real, -self.imag)

    def __rsub__(self, other: Any) -> Complex:
        return _difference(other, self)

    __abs__ = _magnitude
    __add__ = __radd__ = _sum
    __sub__ = _difference
    __mul__ = __rmul__ = _product
    __truediv__ = _quotient


_MOVES = {
    "cat",
    "clone",
    "concat",
    "contiguous",
    "expand",
    "flatten",
    "flip",
    "mean",
    "movedim",
    "narrow",
    "neg",
    "permute",
    "repeat",
    "reshape",
    "roll",
    "select",
    "squeeze",
    "stack",
    "sum",
    "swapaxes",
    "swapdims",
    "transpose",
    "unflatten",
    "unsqueeze",
    "view",
}
"""Functions that apply to the real and the imaginary part separately."""

_COMPLEX: dict[str, Callable[..., Any]] = {
    "abs": _magnitude,
    "absolute": _magnitude,
    "add": _sum,
    "conj": lambda value: Complex(value.real, -value.imag),
    "div": _quotient,
    "imag": lambda value: value.imag,
    "is_complex": lambda value: True,
    "is_floating_point": lambda value: False,
    "mul": _product,
    "multiply": _product,
    "real": lambda value: value.real,
    "resolve_conj": lambda value: value,
    "rmul": _product,
    "square": lambda value: _product(value, value),
    "sub": _difference,
    "subtract": _difference,
    "truediv": _quotient,
    "view_as_real": lambda value: torch.stack([value.real, value.imag], -1),
}
"""Other functions of complex numbers."""


def short_time_transform(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Return ``torch.stft`` of real x [T] or [N, T]: complex [..., n_fft // 2 + 1, frames]."""
    hop = hop_length or n_fft // 4
    if align_to_window:
        raise CannotCompile("torch.stft with align_to_window cannot be compiled: leave it out")
    if center:
        x = _padded(x, n_fft // 2, pad_mode)
    cut = _frames(x, n_fft, hop)
    if window is not None or win_length not in (None, n_fft):
        width = win_length or n_fft
        window = x.new_ones(width) if window is None else window
        before = (n_fft - width) // 2
        cut = cut * (F.pad(window, [before, n_fft - width - before]) if width != n_fft else window)
    bins = n_fft if onesided is False else n_fft // 2 + 1
    found = _spectrum(cut, bins, n_fft**-0.5 if normalized else 1.0).transpose(-1, -2)
    return found if return_complex else torch.view_as_real(found)


def _padded(x: Tensor, width: int, mode: str) -> Tensor:
    if mode == "constant":
        return F.pad(x, [width, width])
    if mode != "reflect":
        raise CannotCompile(f"torch.stft with pad_mode={mode!r} cannot be compiled: use reflect or constant")
    before = x[..., 1 : width + 1]
    after = x[..., x.shape[-1] - width - 1 : x.shape[-1] - 1]
    return torch.cat([before.flip(-1), x, after.flip(-1)], -1)


def _frames(x: Tensor, length: int, hop: int) -> Tensor:
    """Return x [..., T] in frames [..., frames, length], composed of pieces of gcd(length, hop) values."""
    count = 1 + (x.shape[-1] - length) // hop
    piece = math.gcd(length, hop)
    pieces = x[..., : x.shape[-1] // piece * piece].reshape(*x.shape[:-1], -1, piece)
    places = np.arange(count)[:, None] * (hop // piece) + np.arange(length // piece)
    chosen: Tensor = pieces.index_select(-2, torch.from_numpy(places.reshape(-1)))
    return chosen.reshape(*x.shape[:-1], count, length)


def _along(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, *, whole: bool) -> Complex:
    """Return n frequencies along ``dim``, as ``torch.fft.fft`` of real values; unless ``whole``, rfft's n // 2 + 1."""
    x = input.movedim(dim, -1)
    length = x.shape[-1] if n is None else n
    if length < x.shape[-1]:
        x = x[..., :length]
    elif length > x.shape[-1]:
        x = F.pad(x, [0, length - x.shape[-1]])
    scale = {"ortho": length**-0.5, "forward": 1 / length}.get(norm or "", 1.0)
    found: Complex = _spectrum(x, length if whole else length // 2 + 1, scale).movedim(-1, dim)
    return found


_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "fft_rfft": functools.partial(_along, whole=False),
    "fft_fft": functools.partial(_along, whole=True),
}


def _spectrum(x: Tensor, bins: int, scale: float) -> Complex:
    """Return the first ``bins`` frequencies of real x [..., length], times ``scale``."""
    # Long transforms are factorised (Cooley and Tukey): with ``length`` = a b, t = b t1 + t2 and k = k1 + a k2, first
    # over t1, then over t2.
    length = int(x.shape[-1])
    first = next(each for each in range(math.isqrt(length), 0, -1) if length % each == 0)
    second = length // first
    if length <= WHOLE or (first == 1 and length <= LARGEST_FACTOR):
        cosine, sine = _turns(length, length, bins, scale)
        return Complex(x @ cosine, x @ sine)
    if second > LARGEST_FACTOR:
        raise CannotCompile(
            f"a Fourier transform of {length} values cannot be compiled: take a length that is a product of two "
            f"numbers up to {LARGEST_FACTOR}, such as a power of two up to {LARGEST_FACTOR**2}"
        )
    columns = x.reshape(*x.shape[:-1], first, second).transpose(-1, -2)
    cosine, sine = _turns(first, first, first, scale)
    rows = Complex(columns @ cosine, columns @ sine)
    turned = (rows * Complex(*_turns(length, second, first))).transpose(-1, -2)
    cosine, sine = _turns(second, second, second)
    real = turned.real @ cosine - turned.imag @ sine
    imag = turned.real @ sine + turned.imag @ cosine
    return Complex(*(each.transpose(-1, -2).flatten(-2)[..., :bins] for each in (real, imag)))


def _turns(length: int, rows: int, columns: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the real and imaginary part of scale · exp(-2πi r c / length), [rows, columns] each."""
    angles: NDArray[Any] = np.arange(rows)[:, None] * np.arange(columns) % length * (2 * np.pi / length)
    parts = (scale * np.cos(angles), -scale * np.sin(angles))
    cosine, sine = (torch.from_numpy(each.astype(np.float32)) for each in parts)
    return cosine, sine
