"""Models under block gates: what is off in a batch is not computed in it (pFedGate, arXiv:2305.02776).

``GatedModel`` runs any model that torch.fx can trace on adapted weights θ' = θ ⊛ M', where a block's scale M'_b is 0
when the block is off. The next batch may have other gates; nothing is rebuilt for that. Output rows and channels of
linear layers and convolutions that lie in off blocks are left out, and so are the next layer's columns:

    conv, 3 of 10 rows on        computes 3 channels; the other 7 are their bias, everywhere
    max-pool, ReLU, flatten      on 3 channels, and on 7 numbers
    linear, 12 of 40 rows on     12 rows, the columns of 3 channels; the 7 numbers times their columns go into the bias

Chains of linear layers, convolutions in one group, batch norm, activations, pooling, dropout and flatten work like
that. Before any other operation (additions, concatenations, group norm, ...) all channels are written out, and the
weights of any other layer are made whole, with zeros: that is as exact, and saves nothing there.

The gate of an off block learns, too, by the straight-through rule (method card, 4.5): e_b = Σ_j ∂f/∂θ'_j·θ_j. That
takes the signal at rows that nobody computed, and what they would have given. Where a ReLU stands behind a constant
that is not above zero no signal passes, and nothing is computed.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from edge_sdk.protocol.blocks import BlockTable, Selection
from edge_sdk.training import gates_layers
from edge_sdk.training.gates_tensors import Batch, BlockedTensor, Vectors
from edge_sdk.training.gates_values import Partial, like


class GatedModel:
    """``model``, to be run and trained under gates of the blocks of ``table``.

    ``leaves`` are the trainable tensors, one for each block in the table's order: views into the parameters' storage.
    An optimiser over them moves the model in place; a block that was off has no gradient, and standard optimisers pass
    it over, with its momentum and weight decay. Parameters must keep their storage while the gated model is in use.

    ``probe`` says how gates of off blocks learn. 1: exactly. Between 0 and 1: rows that are not computed learn from the
    first ``probe`` of the batch's samples (rounded up) alone, as if they were the batch, scaled up to its size; off
    parts of rows that are computed, and blocks of all but the weights of linear layers and convolutions, still learn
    exactly. 0: not at all.

    Raises ValueError where the table is not of this model's parameters, or one of them is not contiguous.
    """

    def __init__(self, model: nn.Module, table: BlockTable, *, probe: float = 1.0) -> None:
        if not 0 <= probe <= 1:
            raise ValueError(f"probe is {probe}; the share of a batch that off blocks' gates learn from lies in [0, 1]")
        parameters = dict(model.named_parameters())
        if {name: sum(sizes) for name, sizes in table.tensors.items()} != {
            name: parameter.numel() for name, parameter in parameters.items()
        }:
            raise ValueError("the block table is not of this model's parameters; make it from their names and shapes")
        self._model = model
        self._probe = probe
        self._length = len(table.sizes)
        self._tensors: dict[int, BlockedTensor] = {}
        self._runs: dict[bool, _Run] = {}
        self.leaves: list[torch.Tensor] = []
        for name, sizes in table.tensors.items():
            tensor = BlockedTensor(name, parameters[name], len(self.leaves), sizes)
            self._tensors[id(parameters[name])] = tensor
            self.leaves += tensor.leaves
        self._vectors = Vectors([tensor for tensor in self._tensors.values() if tensor.parameter.dim() == 1])

    def __call__(self, inputs: torch.Tensor, gates: torch.Tensor, selected: Selection) -> torch.Tensor:
        """The model's output for ``inputs`` [N, ...], in the mode (training or not) that the model is in.

        ``gates``: float [L], M' of the card, 0 at blocks that are off, differentiable; to train both paths of a gating
        layer give M * (I - G.detach() + G). ``selected``: bool [L], the blocks that are on, I. Running statistics move
        as those of the masked whole model would. Raises ValueError for gates that do not fit.
        """
        scales = gates.tolist()
        if len(scales) != self._length or len(selected) != self._length:
            raise ValueError(f"{len(scales)} gates and {len(selected)} choices for {self._length} blocks")
        if any(scale and not on for scale, on in zip(scales, selected, strict=True)):
            raise ValueError("the gate of a block that is off must be 0; multiply gates by what is selected")
        heard = math.ceil(self._probe * len(inputs) - 1e-9)
        batch = Batch(gates, scales, selected, heard, len(inputs) / max(1, heard))
        training = self._model.training
        if training not in self._runs:  # forward may ask which mode it is in; tracing writes the answer down
            self._runs[training] = _Run(self._model, self._tensors)
        return self._runs[training].batch(inputs, batch, self._vectors.adapted(batch))


_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_EACH_MODULES = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid),
    *(nn.Tanh, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink),
    *(nn.Softshrink, nn.Tanhshrink, nn.Threshold),
)
_EACH = {
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "logsigmoid"),
    *("softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink"),
    *("threshold", "clamp", "abs", "neg", "exp", "square", "contiguous", "add", "sub", "mul", "truediv", "div"),
}
_POOLS = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d), 1),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d), 2),
}
_POOL_FUNCTIONS = {
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_max_pool1d", "adaptive_avg_pool1d"), 1),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d"), 2),
}


class _Run(fx.Interpreter):
    """Runs the traced model, batch after batch, on whole and partial values."""

    def __init__(self, model: nn.Module, tensors: dict[int, BlockedTensor]) -> None:
        super().__init__(fx.GraphModule(model, fx.Tracer().trace(model)))
        self.extra_traceback = False  # it would rewrite the text of errors
        self._tensors = tensors
        self._batch: Batch
        self._adapted: dict[str, torch.Tensor]

    def batch(self, inputs: torch.Tensor, batch: Batch, adapted: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's output for one batch; ``adapted`` are those θ' that are there already, by name."""
        self._batch, self._adapted = batch, adapted
        output: torch.Tensor = self.run(inputs)
        return output

    def run_node(self, n: fx.Node) -> Any:
        """Execute one node, on partial values where that is known to be right."""
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        source = n.args[0] if n.args and isinstance(n.args[0], fx.Node) else None
        if source is not None and isinstance(module, _MATRICES) and type(module) in _MATRICES:
            result = self._matrix(module, self.env[source])
            if result is not None:
                return result
        partial = [node for node in n.all_input_nodes if isinstance(self.env[node], Partial)]
        if source is not None and partial == [source] == n.all_input_nodes[:1]:
            result = self._partial(n, module, self.env[source])
            if result is not None:
                if _in_place(n, module):
                    self.env[source] = result
                return result
        for node in partial:
            self.env[node] = self.env[node].whole()
        if n.op == "get_attr":
            value = super().run_node(n)
            return self._whole(value) if id(value) in self._tensors else value
        if module is not None and next(module.parameters(), None) is not None:
            adapted = {name: self._whole(parameter) for name, parameter in module.named_parameters()}
            arguments, named = self.fetch_args_kwargs_from_env(n)
            return torch.func.functional_call(module, adapted, arguments, named)
        return super().run_node(n)

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        tensor = self._tensors[id(parameter)]
        return self._adapted[tensor.name] if tensor.name in self._adapted else tensor.whole(self._batch)

    def _matrix(self, module: Any, value: torch.Tensor | Partial) -> torch.Tensor | Partial | None:
        """A linear layer or convolution; None where it cannot be cut."""
        how = gates_layers.Matrix() if isinstance(module, nn.Linear) else gates_layers.Convolution.of(module)
        if how is None:
            return None
        dims = 2 if isinstance(module, nn.Linear) else len(module.kernel_size) + 2
        if isinstance(value, Partial):
            if value.axis != how.axis(value.computed):
                value = value.whole()
        elif value.dim() < dims:
            return None
        bias = None if module.bias is None else self._whole(module.bias)
        return gates_layers.apply(how, self._tensors[id(module.weight)], bias, value, self._batch)

    def _partial(self, node: fx.Node, module: nn.Module | None, value: Partial) -> Any:
        """What ``node`` gives for a partial value, its only tensor; None where all channels are needed."""
        (_, *others), named = self.fetch_args_kwargs_from_env(node)
        if any(isinstance(other, torch.Tensor) for other in [*others, *named.values()]):
            return None
        operation, name = _operation(node, module, others, named)
        kind = type(module)
        if kind in _EACH_MODULES or name in _EACH:
            return value.each(operation, rectifies=kind is nn.ReLU or name == "relu")
        if name in ("size", "getattr"):
            return operation(torch.empty(value.shape, device="meta", dtype=value.computed.dtype))
        if value.axis != 1:
            return None
        if kind in _NORMS:
            assert isinstance(module, nn.modules.batchnorm._BatchNorm)
            weight, bias = (self._whole(module.weight), self._whole(module.bias)) if module.affine else (None, None)
            return gates_layers.normalise(module, weight, bias, value)
        if value.computed.dim() - 2 in (_POOLS.get(kind), _POOL_FUNCTIONS.get(name)):
            return value.pooled(operation) if _keeps_constants(module, name, others, named) else None
        if kind is nn.Dropout or name == "dropout":
            return _dropped(value, operation)
        if _flattens(module, name, others, named, value):
            return value.flattened()
        return None


def _operation(
    node: fx.Node, module: nn.Module | None, others: list[Any], named: dict[str, Any]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    """What ``node`` does to its first argument, never in place, and the function's name in torch; "" for a module."""
    copies = _in_place(node, module)
    function: Callable[..., Any]
    if module is not None:
        function, name = module, ""
    elif node.op == "call_method":
        target = name = str(node.target)

        def function(tensor: torch.Tensor, *rest: Any, **more: Any) -> Any:
            return getattr(tensor, target)(*rest, **more)

    else:
        function = node.target  # type: ignore[assignment]
        name = getattr(function, "__name__", "")
        if function is not getattr and not any(
            getattr(space, name, None) is function for space in (torch, F, operator)
        ):
            name = ""
    return lambda tensor: function(tensor.clone() if copies else tensor, *others, **named), name.strip("_")


def _in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether ``node`` writes its result over its input, which later nodes may read."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    known = list(inspect.signature(node.target).parameters) if isinstance(node.target, FunctionType) else []
    return name.endswith("_") or bool({**dict(zip(known, node.args, strict=False)), **node.kwargs}.get("inplace"))


def _keeps_constants(module: nn.Module | None, name: str, others: list[Any], named: dict[str, Any]) -> bool:
    """Whether a pooling gives a constant for a constant, and nothing beside it."""
    if module is None:
        return not named.keys() - {"kernel_size", "stride", "output_size"} and len(others) <= (
            3 if "max" in name else 2
        )
    if isinstance(module, (nn.MaxPool1d, nn.MaxPool2d)):
        return module.dilation in (1, (1,), (1, 1)) and not module.return_indices
    if isinstance(module, (nn.AvgPool1d, nn.AvgPool2d)):
        return (
            module.padding in (0, (0,), (0, 0))
            and not module.ceil_mode
            and getattr(module, "divisor_override", None) is None
        )
    return not getattr(module, "return_indices", False)


def _flattens(module: nn.Module | None, name: str, others: list[Any], named: dict[str, Any], value: Partial) -> bool:
    """Whether a node makes [N, everything else] of its input."""
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    if name == "flatten":
        return others == [1] and not named
    if name in ("view", "reshape"):
        shape = list(others[0]) if len(others) == 1 and isinstance(others[0], (tuple, list)) else others
        samples = len(value.computed)
        return shape in ([samples, -1], [samples, math.prod(value.shape[1:])])
    return False


def _dropped(value: Partial, operation: Callable[[torch.Tensor], torch.Tensor]) -> Partial:
    """Dropout, drawn as for the whole value. Channels that are not 0 for good are no longer constant: written out."""
    value = value.widened(value.matters)
    drawn = like(value.computed, value.shape).fill_(1)
    kept = value.spans.take(operation(drawn), 1)
    return replace(value, computed=value.computed * kept)
