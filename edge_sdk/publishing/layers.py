"""The layers of a model for its manifest: tensors, positions, input errors and default initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from sparrow.protocol.manifest import Constant, Layer, Recipe, Uniform

from .graph import place_of
from .neurons import Axis
from .operations import State, Value, widest

PARAMETER = "parameter"
"""Kind of layer for a parameter that ``forward`` uses directly."""

_COUNTED_BY_INPUT = (nn.MultiheadAttention, nn.RNNBase, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Layers:
    """The layers with weights of a graph, in forward order. samples: the number in the traced example."""

    def __init__(self, model: nn.Module, state: State, samples: int) -> None:
        self._modules = dict(model.named_modules())
        self._state = state
        self._samples = samples
        self._found: dict[str, tuple[Layer, list[Axis]]] = {}

    def note(self, node: fx.Node) -> None:
        """Add the layer of a node that reads parameters, or extend a known layer."""
        named = {source: self._state.named(source) for source in node.all_input_nodes}
        mine = [name for name in named.values() if name is not None]
        if not mine:
            return
        below = [value for source, name in named.items() if name is None if (value := self._state.of(source))]
        weight = next((name for name in mine if self._state.tensors[name].dim() > 1), mine[0])
        # A parameter without axes, such as a temperature, has no columns.
        columns = (self._state.axes[weight][:2] or ((),))[-1]
        path = place_of(node)
        module = self._modules.get(path)
        base = None if module is None else _base(module)
        error = widest(value.error for value in below)
        if module is None or base is None:
            positions = self._positions(node, None, weight, below)
            for name in mine:
                layer = Layer(name=name, kind=PARAMETER, tensors=(name,), positions=positions, input_error=error)
                self._add(f"{name}:", layer, columns)
            return
        kind = base.__name__.lower()
        positions = self._positions(node, module, weight, below)
        tensors = tuple(dict.fromkeys(self._state.names[id(parameter)] for parameter in module.parameters()))
        layer = Layer(name=path or kind, kind=kind, tensors=tensors, positions=positions, input_error=error)
        self._add(path, layer, columns, again=not isinstance(module, nn.MultiheadAttention))

    def _positions(self, node: fx.Node, module: nn.Module | None, weight: str, below: Sequence[Value]) -> int:
        inputs = [value for value in below if not value.fixed]
        result = self._state.values[node]
        counted = result[0] if isinstance(result, tuple) else result
        if inputs and isinstance(module, _COUNTED_BY_INPUT):
            counted = inputs[0]
        entries = math.prod(counted.shape) if isinstance(counted, Value) else 0
        samples = self._samples if inputs else 1
        return max(1, entries // channels_of(module, self._state.tensors[weight]) // samples)

    def _add(self, key: str, layer: Layer, columns: Axis, *, again: bool = False) -> None:
        """Add a layer, or extend a known one."""
        if key not in self._found:
            self._found[key] = layer, [columns]
            return
        known, all_columns = self._found[key]
        both = known.positions + layer.positions if again else known.positions
        update = {"input_error": widest([known.input_error, layer.input_error]), "positions": both}
        self._found[key] = known.model_copy(update=update), [*all_columns, columns]

    def all(self) -> Iterator[Layer]:
        """Yield the layers in forward order."""
        for layer, columns in self._found.values():
            vague = layer.input_error == "active" and not any(map(self._state.neurons.resolve, columns))
            yield layer.model_copy(update={"input_error": "all"}) if vague else layer

    def recipes(self) -> dict[str, Recipe]:
        """Return the default initialisation of the tensors of layers that run: name -> initialisation."""
        return {
            f"{path}.{name}".lstrip("."): recipe
            for path in self._found
            if path in self._modules
            for name, recipe in _defaults(self._modules[path]).items()
        }


def _base(module: nn.Module) -> type[nn.Module] | None:
    if next(module.parameters(), None) is None:
        return None
    for each in type(module).__mro__:
        if each.__module__.startswith("torch.nn.modules.") and each is not nn.Module:
            return None if each.__module__.endswith((".container", ".transformer")) else each
    return None


def channels_of(module: nn.Module | None, weight: torch.Tensor) -> int:
    """Return the number of entries per position of the counted tensor."""
    if isinstance(module, nn.RNNBase):
        return module.input_size
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    if isinstance(module, nn.LayerNorm):
        return math.prod(module.normalized_shape)
    return int(weight.shape[0]) if weight.dim() else 1


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CHANNEL_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
)


def _defaults(module: nn.Module) -> Mapping[str, Recipe]:
    """Return the recipes of PyTorch's default initialisation of a layer."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        # kaiming_uniform_ with a = sqrt(5) has the bound sqrt(6 / ((1 + 5) * fan_in)).
        bound = Uniform(bound=1 / math.sqrt(module.weight[0].numel()))
        return {"weight": bound, "bias": bound}
    if isinstance(module, (*_CHANNEL_NORMS, nn.LayerNorm)):
        one = Constant(value=1.0)
        zero = Constant(value=0.0)
        return {"weight": one, "bias": zero, "running_mean": zero, "running_var": one}
    if isinstance(module, nn.MultiheadAttention):
        # xavier_uniform_ has the bound sqrt(6 / (fan_in + fan_out)); out_proj.weight is a linear layer's.
        parameters = dict(module.named_parameters())
        bounds = {name: math.sqrt(6 / sum(p.shape)) for name, p in parameters.items() if name.endswith("proj_weight")}
        bounds["out_proj.weight"] = module.embed_dim**-0.5
        zero = Constant(value=0.0)
        uniform = {name: Uniform(bound=bound) for name, bound in bounds.items()}
        return {**uniform, "in_proj_bias": zero, "out_proj.bias": zero}
    if isinstance(module, nn.PReLU):
        return {"weight": Constant(value=module.init)}
    return {}
