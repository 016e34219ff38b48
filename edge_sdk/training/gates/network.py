"""Models under block gates that skip inactive blocks in every batch (pFedGate, arXiv:2305.02776).

``GatedModel`` runs any model that torch.fx can trace on weights θ' = θ ⊛ M', with scales M'_b = 0 for inactive blocks.
Output rows and channels in inactive blocks are skipped, and so are the next layer's columns:

    conv, 3 of 10 rows on        computes 3 channels; the other 7 are their bias, everywhere
    max-pool, ReLU, flatten      on 3 channels, and on 7 numbers
    linear, 12 of 40 rows on     12 rows, the columns of 3 channels; the 7 numbers times their columns go into the bias

Other operations get whole values, and other layers whole weights. Gates of inactive blocks learn by the
straight-through rule e_b = Σ_j ∂f/∂θ'_j·θ_j, from the output that skipped rows would have.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F

from sparrow.protocol.blocks import BlockTable, Selection
from sparrow.protocol.errors import ManifestError

from . import layers as gates_layers
from .tensors import Batch, BlockedTensor, Needed, Vectors, adapt
from .values import Partial, like

_TRACING = threading.Lock()
"""Held while a model is traced, because two concurrent tracers would not restore fx's patched module calls."""


class _Tracer(fx.Tracer):
    """Tracer of ``forward`` with only its first argument, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        # fx's patches also affect models that train in other threads.
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a module's node in the graph."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        # The first two arguments are the module and the batch.
        for place, argument in enumerate(arguments[2:], start=2):
            if isinstance(argument, fx.Proxy) and argument.node.args:
                arguments[place] = argument.node.args[0]
                self.graph.erase_node(argument.node)
        return function, arguments


class CannotGate(ManifestError):
    """The model cannot run under block gates."""


class GatedModel:
    """``model``, to run and train under gates of the blocks of ``table``.

    probe: below 1, gates of skipped rows learn from the first ``probe`` of the batch, scaled up. Raises ValueError if
    the table does not match the parameters, or if one is not contiguous.
    """

    def __init__(self, model: nn.Module, table: BlockTable, *, probe: float = 1.0) -> None:
        parameters = dict(model.named_parameters())
        if {name: sum(sizes) for name, sizes in table.tensors.items()} != {
            name: parameter.numel() for name, parameter in parameters.items()
        }:
            raise ValueError("the block table does not match the model; make it from its parameters' names and shapes")
        self._model = model
        self._probe = probe
        self._tensors: dict[int, BlockedTensor] = {}
        self._runs: dict[bool, _Run] = {}
        self.leaves: list[torch.Tensor] = []
        for name, sizes in table.tensors.items():
            tensor = BlockedTensor(name, parameters[name], len(self.leaves), sizes)
            self._tensors[id(parameters[name])] = tensor
            self.leaves += tensor.leaves
        self._vectors = Vectors([tensor for tensor in self._tensors.values() if tensor.parameter.dim() == 1])

    def __call__(self, inputs: torch.Tensor, gates: torch.Tensor, selected: Selection) -> torch.Tensor:
        """Return the model's output for ``inputs`` [N, ...], in its present mode.

        ``gates``: float [L], M', 0 for off blocks. ``selected``: bool [L], I.
        """
        heard = math.ceil(self._probe * len(inputs) - 1e-9)
        batch = Batch(gates, gates.detach().cpu().numpy(), selected, heard, len(inputs) / heard)
        training = self._model.training
        # A trace holds for one mode, because forward may depend on it.
        if training not in self._runs:
            self._runs[training] = _Run(self._model, self._tensors, self._vectors)
        return self._runs[training].batch(inputs, batch)


def check_gated(model: nn.Module, example: torch.Tensor) -> None:
    """Raise CannotGate if ``model``'s outputs on ``example`` [N, ...] differ from those with all blocks active."""
    model = copy.deepcopy(model).eval()
    table = BlockTable({name: (parameter.numel(),) for name, parameter in model.named_parameters()})
    try:
        with torch.no_grad():
            needed = model(example)
            found = GatedModel(model, table)(example, torch.ones(len(table.sizes)), np.ones(len(table.sizes), bool))
    # Tracing runs the user's forward on stand-ins; a failure there may be any exception.
    except Exception as error:
        raise CannotGate(f"the model cannot be run with only some of its blocks ({error})") from error
    if found.shape != needed.shape or not torch.allclose(found, needed, rtol=1e-3, atol=1e-4):
        raise CannotGate("the model gives other outputs when it runs block by block")


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_EACH_MODULES = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.LogSigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Tanhshrink,
    nn.Threshold,
)
_EACH = {
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "sigmoid",
    "tanh",
    "logsigmoid",
    "softplus",
    "softsign",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "hardshrink",
    "softshrink",
    "tanhshrink",
    "threshold",
    "clamp",
    "abs",
    "neg",
    "exp",
    "square",
    "contiguous",
    "add",
    "sub",
    "mul",
    "truediv",
    "div",
}
_POOLS = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d), 1),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d), 2),
}
_POOL_FUNCTIONS = {
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_max_pool1d", "adaptive_avg_pool1d"), 1),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d"), 2),
}


Rule = Callable[["_Call", Partial], Any]
"""Rule of a node for a partial value, its only tensor: returns the result, or None if all channels are needed."""


@dataclass(frozen=True)
class _Call:
    """A node that may run on a partial value; ``fixed`` if its other arguments never change."""

    node: fx.Node
    module: nn.Module | None
    name: str
    function: Callable[..., Any]
    others: tuple[Any, ...]
    named: dict[str, Any]
    fixed: bool

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.function(tensor, *self.others, **self.named)


class _Run(fx.Interpreter):
    """Interpreter of the traced model on whole and partial values."""

    def __init__(self, model: nn.Module, tensors: dict[int, BlockedTensor], vectors: Vectors) -> None:
        with _TRACING:
            graph = _Tracer().trace(model)
        super().__init__(fx.GraphModule(model, graph))
        self._tensors = tensors
        self._vectors = vectors
        # Node -> weight and name of the bias.
        self._layers: dict[str, tuple[BlockedTensor, str | None]] = {}
        # Node -> source of the channels of its input in the last batch.
        self._sources: dict[str, tuple[str, int]] = {}
        self._batch: Batch
        self._matrices: dict[str, gates_layers.Adapted]
        self._adapted: dict[str, torch.Tensor]
        # Nodes are planned once, because planning takes longer than a small network's batch.
        self._steps = [(node, self._planned(node), self.user_to_last_uses.get(node, [])) for node in self.graph.nodes]

    def batch(self, inputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the model's output for one batch."""
        self._batch = batch
        self.args_iter = iter([inputs])
        self._prepare(batch)
        self.env = {}
        result: Any = None
        for node, step, spent in self._steps:
            result = self.env[node] = step()
            for used in spent:
                del self.env[used]
        self.env = {}
        self._adapted = {}
        self._matrices = {}
        return cast(torch.Tensor, result)

    def _prepare(self, batch: Batch) -> None:
        # Weights are cut for the input channels of the last batch, which are likely to recur.
        cuts = {name: tensor.cut(batch) for name, (tensor, _) in self._layers.items()}
        rows = {cut.tensor.name: cut.rows for cut in cuts.values()}
        columns = {name: rows[of].repeated(times) for name, (of, times) in self._sources.items()}
        foreseen = [columns[name] if name in columns and len(columns[name].off) else None for name in cuts]
        biases = {name: bias for name, (_, bias) in self._layers.items() if bias is not None}
        needed = Needed(list(cuts.values()), foreseen)
        if self._vectors.sizes:
            order = self._vectors.order([(bias, cuts[name].rows) for name, bias in biases.items()])
            needed = replace(needed, vectors=self._vectors, order=order)
        made = iter(adapt(batch, needed))
        weights = [next(made) for _ in cuts]
        of_columns = [None if channels is None else next(made) for channels in foreseen]
        parts: dict[str, Sequence[torch.Tensor]] = {}
        if self._vectors.sizes:
            vectors, in_order = made
            split = torch.split(vectors, list(self._vectors.sizes.values()))
            self._adapted = dict(zip(self._vectors.sizes, split, strict=True))
            sizes = [len(part) for name in biases for part in (cuts[name].rows.on, cuts[name].rows.off)]
            split = torch.split(in_order, sizes)
            parts = dict(zip(biases, zip(split[::2], split[1::2], strict=True), strict=True))
        self._matrices = {
            name: gates_layers.Adapted(cut, weight, channels, part, *parts.get(name, (None, None)))
            for (name, cut), weight, channels, part in zip(cuts.items(), weights, foreseen, of_columns, strict=True)
        }

    def _planned(self, node: fx.Node) -> Callable[[], Any]:
        module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is not None:
            operator = gates_layers.operator_of(module)
            if operator is not None:
                layer = cast(Any, module)
                bias = None if layer.bias is None else self._tensors[id(layer.bias)].name
                self._layers[node.name] = self._tensors[id(layer.weight)], bias
                return partial(self._matrix, node, module, source, operator)
            if type(module) in _NORMS:
                return partial(self._norm, module, source)
            name, function = _function(node, module)
            rule = _rule(module, name)
            if rule is not None and node.all_input_nodes[0] is source:
                fixed = node.all_input_nodes == [source]
                call = _Call(node, module, name, function, node.args[1:], dict(node.kwargs), fixed)
                return partial(self._partial, call, source, rule, _in_place(node, module))
        return partial(self._any, node, module)

    def _any(self, node: fx.Node, module: nn.Module | None) -> Any:
        for source in node.all_input_nodes:
            if isinstance(self.env[source], Partial):
                self.env[source] = self.env[source].whole()
        if node.op == "get_attr":
            value = self.fetch_attr(str(node.target))
            return self._whole(value) if id(value) in self._tensors else value
        if module is not None and next(module.parameters(), None) is not None:
            adapted = {name: self._whole(parameter) for name, parameter in module.named_parameters()}
            arguments, named = self.fetch_args_kwargs_from_env(node)
            return torch.func.functional_call(module, adapted, arguments, named)
        return self.run_node(node)

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        tensor = self._tensors[id(parameter)]
        return self._adapted[tensor.name] if tensor.name in self._vectors.sizes else tensor.whole(self._batch)

    def _matrix(self, node: fx.Node, module: Any, source: fx.Node, operator: gates_layers.Operator) -> Any:
        value = self.env[source]
        if isinstance(value, Partial):
            if value.axis != operator.axis(value.computed):
                value = value.whole()
        elif value.dim() < operator.dims:
            return self._any(node, module)
        if isinstance(value, Partial) and value.channels.source is not None:
            self._sources[node.name] = value.channels.source
        return gates_layers.apply(operator, self._matrices[node.name], value, self._batch)

    def _partial(self, call: _Call, source: fx.Node, rule: Rule, in_place: bool) -> Any:
        value = self.env[source]
        if not isinstance(value, Partial):
            return self._any(call.node, call.module)
        if not call.fixed:
            if any(isinstance(self.env[other], (Partial, torch.Tensor)) for other in call.node.all_input_nodes[1:]):
                return self._any(call.node, call.module)
            (_, *others), named = self.fetch_args_kwargs_from_env(call.node)
            call = replace(call, others=tuple(others), named=named)
        result = rule(call, value)
        if result is None:
            return self._any(call.node, call.module)
        if in_place:
            self.env[source] = result
        return result

    def _norm(self, module: Any, source: fx.Node) -> Any:
        value = self.env[source]
        if isinstance(value, Partial) and value.axis != 1:
            value = value.whole()
        weight, bias = (self._whole(module.weight), self._whole(module.bias)) if module.affine else (None, None)
        return gates_layers.normalise(module, weight, bias, value)


def _rule(module: nn.Module | None, name: str) -> Rule | None:
    """Return the rule for partial values, if any."""
    kind = type(module)
    if kind in _EACH_MODULES or name in _EACH:
        rectifies = kind is nn.ReLU or name == "relu"
        return lambda call, value: value.each(call, rectifies=rectifies)
    if name in ("size", "getattr"):
        return lambda call, value: call(torch.empty(value.shape, device="meta", dtype=value.computed.dtype))
    if kind in _POOLS or name in _POOL_FUNCTIONS:
        return _pooled
    if kind is nn.Dropout or name == "dropout":
        return _dropped
    return _flattened if kind is nn.Flatten or name in ("flatten", "view", "reshape") else None


def _function(node: fx.Node, module: nn.Module | None) -> tuple[str, Callable[..., Any]]:
    """Return a node's function, in its out-of-place form, and its name in torch ("" for a module)."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    function: Callable[..., Any]
    if module is not None:
        name = ""
        function = module
        if type(module) in _EACH_MODULES and _in_place(node, module):
            function = copy.copy(module)
            function.inplace = False  # type: ignore[assignment]
            return name, function
    elif node.op == "call_method":
        target = name

        def function(tensor: torch.Tensor, *others: Any, **named: Any) -> Any:
            return getattr(tensor, target)(*others, **named)

    else:
        function = cast(Callable[..., Any], node.target)
        if function is not getattr and not any(
            getattr(space, name, None) is function for space in (torch, F, operator)
        ):
            name = ""
    if _in_place(node, module):
        return name.strip("_"), lambda tensor, *others, **named: function(tensor.clone(), *others, **named)
    return name.strip("_"), function


def _in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether ``node`` overwrites its input."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    known = list(inspect.signature(node.target).parameters) if isinstance(node.target, FunctionType) else []
    return name.endswith("_") or bool({**dict(zip(known, node.args, strict=False)), **node.kwargs}.get("inplace"))


def _pooled(call: _Call, value: Partial) -> Partial | None:
    """Apply pooling that maps constants to constants."""
    module = call.module
    dims = value.computed.dim() - 2
    if value.axis != 1 or dims not in (_POOLS.get(type(module)), _POOL_FUNCTIONS.get(call.name)):
        return None
    if module is None:
        most = 3 if "max" in call.name else 2
        keeps = not call.named.keys() - {"kernel_size", "stride", "output_size"} and len(call.others) <= most
    elif isinstance(module, (nn.MaxPool1d, nn.MaxPool2d)):
        keeps = module.dilation in (1, (1,), (1, 1)) and not module.return_indices
    elif isinstance(module, (nn.AvgPool1d, nn.AvgPool2d)):
        keeps = module.padding in (0, (0,), (0, 0)) and not module.ceil_mode
        keeps = keeps and getattr(module, "divisor_override", None) is None
    else:
        keeps = not getattr(module, "return_indices", False)
    return value.pooled(call) if keeps else None


def _flattened(call: _Call, value: Partial) -> Partial | None:
    samples = len(value.computed)
    others = list(call.others)
    if isinstance(call.module, nn.Flatten):
        flattens = (call.module.start_dim, call.module.end_dim) == (1, -1)
    elif call.name == "flatten":
        flattens = others == [1] and not call.named
    else:
        shape = list(others[0]) if len(others) == 1 and isinstance(others[0], (tuple, list)) else others
        flattens = shape in ([samples, -1], [samples, math.prod(value.shape[1:])])
    return value.flattened() if flattens and value.axis == 1 else None


def _dropped(call: _Call, value: Partial) -> Partial | None:
    if value.axis != 1:
        return None
    # Channels that may be other than 0 are no longer constant.
    value = value.widened(value.matters)
    drawn = like(value.computed, value.shape).fill_(1)
    kept = value.channels.computed(call(drawn), 1)
    return replace(value, computed=value.computed * kept)
