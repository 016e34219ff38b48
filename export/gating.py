"""pFedGate's gating layer in evaluation mode as ONNX nodes.

The batch norm is folded into the linear map, so gates differ from PyTorch's by rounding, about 1e-7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from sparrow.graphs.building import Building
from sparrow.graphs.skeleton import INPUT
from sparrow.protocol.manifest import Manifest, Tensors

from .errors import ExportError

_EPSILON = 1e-5
_POOLED = (2, 3, 4)
"""Numbers of input dimensions (channels first) that a gate can pool."""


@dataclass(frozen=True)
class Gate:
    """The tensors and settings of ``edge_sdk.training.gates.gating``, for inputs of ``shape``."""

    tensors: Tensors
    shape: tuple[int, ...]
    length: int
    pool: int
    squashes: bool
    window: int

    @classmethod
    def of(cls, manifest: Manifest, own: Tensors, settings: Mapping[str, Any]) -> Gate:
        """Return the gate of a device's state. Raises ExportError if it does not fit the manifest."""
        tensors = {name.removeprefix("gate:"): value for name, value in own.items() if name.startswith("gate:")}
        shape = manifest.input_shape
        length = len(manifest.block_table.sizes)
        map_ = tensors.get("linear.weight")
        outputs = len(tensors.get("logits", np.zeros(0)) if map_ is None else map_)
        if outputs not in (length, 2 * length):
            raise ExportError(
                f"the state's gate has {outputs} outputs, the model {length} blocks; use the state and the manifest of "
                f"one federation"
            )
        pool = int(settings.get("gate_pool", 0))
        if map_ is not None:
            pools = [pool] if pool and len(shape) in _POOLED else range(1, max(shape) + 1)
            fitting = [each for each in pools if _width(shape, each) == map_.shape[1]]
            if not fitting:
                raise ExportError(
                    f"the state's gate takes {map_.shape[1]} values, but no pooling of inputs of {shape} has as many; "
                    f"give the federation's settings"
                )
            # as the gate does if the settings leave the pool open
            pool = fitting[0]
        return cls(
            tensors, shape, length, pool, bool(settings.get("gate_sigmoid", True)), int(settings.get("gate_window", 1))
        )

    @property
    def constant(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Return scales [L] and importances [L] of a gate that does not depend on the input; None for other gates."""
        # "settled": logits of the device's mean input
        settled = self.tensors.get("logits", self.tensors.get("settled"))
        if settled is None:
            return None
        logits = np.asarray(settled, dtype=np.float64)
        gates: NDArray[np.float32] = (1 / (1 + np.exp(-logits)) if self.squashes else logits).astype(np.float32)
        return gates[: self.length], gates[-self.length :]

    def build(self, to: Building, input_type: int) -> tuple[str, str]:
        """Add the gate. Return the names of importances [N, L] and scales [N, L]."""
        seen = INPUT if input_type == TensorProto.FLOAT else to.add("Cast", INPUT, to=TensorProto.FLOAT)
        weight, bias = self._map()
        gates = to.add("Gemm", self._normalised(to, seen), to.constant(weight), to.constant(bias), transB=1)
        if self.squashes:
            gates = to.add("Sigmoid", gates)
        # a moving average over previous samples: pooling along the batch, [1, outputs, N]
        if self.window > 1:
            along = to.add("Unsqueeze", to.add("Transpose", gates, perm=[1, 0]), to.whole(0))
            mean = to.add("AveragePool", along, kernel_shape=[self.window], pads=[self.window - 1, 0])
            gates = to.add("Transpose", to.add("Squeeze", mean, to.whole(0)), perm=[1, 0])
        outputs = len(weight)
        if outputs == self.length:
            return gates, gates
        return to.slice(gates, 1, self.length, outputs), to.slice(gates, 1, 0, self.length)

    def _map(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        weight, bias = (self.tensors[f"linear.{part}"].astype(np.float64) for part in ("weight", "bias"))
        if "batch_norm.weight" in self.tensors:
            mean, variance, scale, shift = (
                self.tensors[f"batch_norm.{part}"].astype(np.float64)
                for part in ("running_mean", "running_var", "weight", "bias")
            )
            scale = scale / np.sqrt(variance + _EPSILON)
            weight = weight * scale[:, None]
            bias = (bias - mean) * scale + shift
        return weight.astype(np.float32), bias.astype(np.float32)

    def _normalised(self, to: Building, seen: str) -> str:
        """Add nodes for SN(x), pooled and flattened, [N, d_X]."""
        flat = len(self.shape) == 1 or math.prod(self.shape[1:]) < 2
        count = math.prod(self.shape) if flat else math.prod(self.shape[1:])
        channels = to.reshape(seen, (0, -1) if flat else (0, self.shape[0], -1))
        pooled = channels
        if self.pool > 1 and not flat:
            sides = [min(self.pool, side) for side in self.shape[1:]]
            mean = to.add("AveragePool", seen, kernel_shape=sides, strides=sides, ceil_mode=1)
            pooled = to.reshape(mean, (0, self.shape[0], -1))
        if "norm.weight" in self.tensors:
            factor, summand = self._switch_norm(to, channels, count, flat)
            pooled = to.add("Add", to.add("Mul", pooled, factor), summand)
        return pooled if flat else to.reshape(pooled, (0, -1))

    def _switch_norm(self, to: Building, channels: str, count: int, flat: bool) -> tuple[str, str]:
        """Add nodes for the scale and the shift of ``gating.SwitchNorm``."""
        weight, bias, running_mean, running_var = (
            self.tensors[f"norm.{part}"].astype(np.float32).reshape((1, -1) if flat else (1, -1, 1))
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        of_mean, of_var = (_softmax(self.tensors[f"norm.{part}_logits"]) for part in ("mean", "var"))

        def times(values: str, factor: float) -> str:
            return to.add("Mul", values, to.constant(np.array(factor, np.float32)))

        axis = 1 if flat else 2
        mean = times(to.sum(channels, axis), 1 / count)
        centred = to.add("Sub", channels, mean)
        spread = times(to.sum(to.add("Mul", centred, centred), axis), 1 / (count - 1))
        means = [mean]
        variances = [spread]
        if not flat:
            share = 1 / self.shape[0]
            layer = times(to.sum(mean, 1), share)
            squares = to.add("Add", spread, to.add("Mul", mean, mean))
            means.append(layer)
            variances.append(to.add("Sub", times(to.sum(squares, 1), share), to.add("Mul", layer, layer)))
        blended = to.constant(np.float32(of_mean[-1]) * running_mean)
        variance = to.constant(np.float32(of_var[-1]) * running_var + np.float32(_EPSILON))
        for each, share in zip(means, of_mean, strict=False):
            blended = to.add("Add", times(each, share), blended)
        for each, share in zip(variances, of_var, strict=False):
            variance = to.add("Add", times(each, share), variance)
        factor = to.add("Div", to.constant(weight), to.add("Sqrt", variance))
        return factor, to.add("Sub", to.constant(bias), to.add("Mul", blended, factor))


def _softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(powers / powers.sum())


def _width(shape: tuple[int, ...], pool: int) -> int:
    """Return the number of a gate's inputs for samples of ``shape``."""
    if len(shape) not in _POOLED:
        return math.prod(shape)
    return math.prod([shape[0], *(math.ceil(side / pool) for side in shape[1:])])
