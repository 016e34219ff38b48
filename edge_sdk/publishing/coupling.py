"""From an ``nn.Module`` to its manifest: which values of which tensors belong to which neurons.

The forward pass is traced with torch.fx and run once on an example. Every traced value carries, for each of its axes,
the neurons that lie along it, in the manifest's own terms (``manifest.Segment``); the empty tuple means that the axis
belongs to no hidden neuron and is always complete. So a layer finds on its input which neurons its columns belong to:

    x                 [N,1,4,4]   (), (), (), ()
    conv 1->3         [N,3,4,4]   (), (conv,), (), ()                 conv.weight  [conv], [], [], []
    max-pool, flatten [N,12]      (), (conv x 4,)
    linear 12->5      [N,5]       (), (fc,)                           fc.weight    [fc], [conv x 4]
    linear 5->2       [N,2]       (), ()   <- the model's output      out.weight   [], [fc]

Values that are added share one index set: their groups are united (union-find; the group keeps the name of the first
layer in forward order). What an axis cannot describe is made complete, never left half true: neurons that reach the
model's output, that are added to or concatenated with a complete value such as the input, or that a reshape, a product
of matrices or attention mixes with other neurons. That costs sparsity, not correctness. What we do not know at all is
refused by name (UnsupportedLayer). docs/coupling.md lists what is found, complete and refused.

Beside its axes every value carries which part of its gradient can be of use below it (``manifest.Layer.input_error``).
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import fx, nn

from edge_sdk.protocol.errors import SdkError
from edge_sdk.protocol.manifest import (
    Constant,
    Data,
    InputError,
    Layer,
    Manifest,
    NeuronGroup,
    Recipe,
    Segment,
    TensorSpec,
    Uniform,
)


class UnsupportedLayer(SdkError):
    """The model has a part whose neurons cannot be found; the message names it and says what to do."""


def describe(
    model: nn.Module,
    example: torch.Tensor,
    *,
    task: str,
    running_statistics: Literal["shared", "personal"] = "shared",
    recipes: bool = False,
) -> Manifest:
    """Return the manifest of ``model``, found by running it in evaluation mode on ``example`` [N, ...], N >= 1.

    The model is left as it was: weights, buffers, training flags. ``running_statistics`` is the policy of batch norm's
    running mean and variance (method card FedSPU, section 7, row 19). ``recipes`` True writes PyTorch's default
    initialisation of the layers we know as recipes, so that initial weights need not be published; what those layers
    hold now is then ignored.

    Tensors come in state-dict order. Buffers are not trainable; all but the running statistics stay personal, since
    integers and counters cannot be averaged; ``num_batches_tracked`` is dropped. A frozen parameter
    (``requires_grad`` False) is not trainable but shared: it is how devices receive it, and an average of equal values
    changes nothing. A layer's kind is its class name in lower case; its tensors are its parameters.

    Raises UnsupportedLayer, naming the layer by its module path.
    """
    refuse_types(model)
    _refuse_tied(model)
    if _Tracer().is_leaf_module(model, ""):  # else its own forward would be traced, which is torch's
        raise UnsupportedLayer(f"the model is one {type(model).__name__}; publish it as torch.nn.Sequential(model)")
    model = copy.deepcopy(model).eval()
    graph = _trace(model)
    coupling = _Coupling(fx.GraphModule(model, graph), model)
    with torch.no_grad():
        output = coupling.run(example.clone())
    if output.shape[:1] != example.shape[:1]:
        raise UnsupportedLayer(
            f"the model's output has shape {tuple(output.shape)} for {len(example)} samples; "
            "its first axis must be the batch"
        )
    unused = [name for name, _ in model.named_parameters() if name not in coupling.axes]
    if unused:
        raise UnsupportedLayer(
            f"{unused[0]}: a parameter that no supported layer uses in the forward pass (evaluation mode); "
            "remove it from the model, or use it through a torch.nn layer"
        )
    neurons = coupling.neurons
    neurons.settle(coupling.axes.values())
    return Manifest(
        task=task,
        input_shape=tuple(example.shape[1:]),
        output_shape=tuple(output.shape[1:]),
        tensors=tuple(_specs(model, coupling, running_statistics, recipes)),
        groups=neurons.groups(),
        layers=tuple(coupling.layers()),
    )


def _specs(model: nn.Module, coupling: _Coupling, running_statistics: str, recipes: bool) -> Iterable[TensorSpec]:
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        axes = tuple(coupling.neurons.resolve(axis) for axis in coupling.axes.get(name, ()))
        policy = "shared" if name in parameters else "personal"
        if name.rpartition(".")[2] == "num_batches_tracked":
            policy = "dropped"
        elif name in coupling.statistics:
            policy = running_statistics
        init = coupling.recipes.get(name, Data()) if recipes else Data()
        yield spec_of(name, tensor, policy, parameters.get(name), axes=axes if any(axes) else (), init=init)


def spec_of(name: str, tensor: torch.Tensor, policy: str, parameter: nn.Parameter | None, **more: object) -> TensorSpec:
    """Return how a manifest describes an entry of a state dict; parameter: the model's of this name, if it is one."""
    described = {
        "name": name,
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "policy": policy,
        "trainable": parameter is not None and parameter.requires_grad,
    }
    return TensorSpec.model_validate({**described, **more})


_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


def refuse_types(model: nn.Module) -> None:
    """Raise UnsupportedLayer, naming the tensor, for one that cannot cross the wire or be kept."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UnsupportedLayer(
                f"{name}: a parameter of {parameter.dtype}; convert the model with model.float(). "
                "Half precision is chosen for the wire only, with the setting precision"
            )
    for name, tensor in model.state_dict().items():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedLayer(f"{name}: a buffer of {tensor.dtype}; make it float32 or int64")
        if tensor.numel() == 0:
            raise UnsupportedLayer(f"{name}: a tensor without values; remove it from the model")


def _refuse_tied(model: nn.Module) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise UnsupportedLayer(f"{name}: the same parameter as {other} (tied weights); give each layer its own")


class DefaultsTracer(fx.Tracer):
    """Traces ``forward`` with its first argument alone, as models are called: the others have their defaults."""

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        """Return the function and what it is called with, a proxy only where there is no default."""
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        for place, argument in enumerate(arguments[2:], start=2):  # behind the module and the batch
            if isinstance(argument, fx.Proxy) and argument.node.args:
                arguments[place] = argument.node.args[0]
                self.graph.erase_node(argument.node)
        return function, arguments


class _Tracer(DefaultsTracer):
    """Looks into torch's transformer encoders, whose own forward decides between kernels and cannot be traced."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for all of torch.nn but containers and encoders."""
        return type(m) not in _ENCODERS and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace one call; an encoder's forward is what it computes, without the choice of a kernel."""
        if type(m) in _ENCODERS:
            forward = functools.partial(_ENCODERS[type(m)], m)
        return super().call_module(m, forward, args, kwargs)


def _encoder_layer(
    layer: nn.TransformerEncoderLayer,
    x: torch.Tensor,
    src_mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    def attend(x: torch.Tensor) -> torch.Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        return cast(torch.Tensor, layer.dropout1(layer.self_attn(x, x, x, need_weights=False, **masks)[0]))

    def feed(x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.dropout2(layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + feed(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return cast(torch.Tensor, layer.norm2(x + feed(x)))


def _encoder(
    encoder: nn.TransformerEncoder,
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    for layer in encoder.layers:
        x = layer(x, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return x if encoder.norm is None else cast(torch.Tensor, encoder.norm(x))


_ENCODERS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
}


def _trace(model: nn.Module) -> fx.Graph:
    try:
        return _Tracer().trace(model)
    # Tracing runs the user's forward on stand-ins; what they cannot do surfaces as any exception.
    except Exception as error:
        raise UnsupportedLayer(
            f"the forward pass of {type(model).__name__} cannot be traced: {error}. "
            "Take decisions that depend on the data out of forward; see the limitations of torch.fx"
        ) from error


# --- neurons -----------------------------------------------------------------------------------------------------

_COMPLETE = 0


@dataclass(frozen=True)
class _Run:
    """A ``Segment`` before groups are settled: the neurons of set ``set``, each owning ``repeat`` entries."""

    set: int
    repeat: int = 1


_Axis = tuple[_Run, ...]
_Axes = tuple[_Axis, ...]


class _Neurons:
    """Index sets of neurons, united as they turn out to be coupled (union-find).

    Set 0 stands for everything that is always complete. A root is the smallest number of its union, so it bears the
    name of the first layer in forward order, and whatever is united with set 0 becomes complete.
    """

    def __init__(self) -> None:
        self._parent = [_COMPLETE]
        self._names = [""]
        self._sizes = [0]

    def add(self, name: str, size: int) -> _Axis:
        """Return a new set of ``size`` neurons, as the axis along which they lie."""
        self._parent.append(len(self._parent))
        self._names.append(name)
        self._sizes.append(size)
        return (_Run(len(self._parent) - 1),)

    def find(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def complete(self, *axes: _Axis) -> _Axis:
        """Make every neuron of ``axes`` always active; returns the axis that says so."""
        for axis in axes:
            for run in axis:
                self._parent[self.find(run.set)] = _COMPLETE
        return ()

    def unite(self, first: _Axis, second: _Axis) -> _Axis:
        """Unite the index sets of both axes, which have the same length."""
        if [(self._sizes[run.set], run.repeat) for run in first] != [
            (self._sizes[run.set], run.repeat) for run in second
        ]:
            return self.complete(first, second)
        for one, other in zip(first, second, strict=True):
            low, high = sorted((self.find(one.set), self.find(other.set)))
            self._parent[high] = low
        return first

    def settle(self, axes: Iterable[_Axes]) -> None:
        """Complete every axis of which a part is complete, until none is half described."""
        mixed = [axis for tensor in axes for axis in tensor if len(axis) > 1]
        changed = True
        while changed:
            changed = False
            for axis in mixed:
                roots = {self.find(run.set) for run in axis}
                if _COMPLETE in roots and len(roots) > 1:
                    self.complete(axis)
                    changed = True

    def resolve(self, axis: _Axis) -> tuple[Segment, ...]:
        """Return the axis in the manifest's terms, once settled."""
        runs = [(self.find(run.set), run.repeat) for run in axis]
        return tuple(Segment(group=self._names[root], repeat=repeat) for root, repeat in runs if root != _COMPLETE)

    def groups(self) -> tuple[NeuronGroup, ...]:
        """Return the sets that remain, in forward order."""
        roots = [number for number in range(1, len(self._parent)) if self.find(number) == number]
        return tuple(NeuronGroup(name=self._names[root], size=self._sizes[root]) for root in roots)


# --- what is handled ---------------------------------------------------------------------------------------------

_SAME_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink),
    *(nn.Softshrink, nn.Tanhshrink, nn.Threshold, nn.Softmax, nn.LogSoftmax),
)
"""Neurons stay where they are."""

_SPATIAL_MODULES: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d, nn.LPPool1d), 1),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d, nn.LPPool2d), 2),
    **dict.fromkeys((nn.ConstantPad1d, nn.ZeroPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d), 1),
    **dict.fromkeys((nn.ConstantPad2d, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d), 2),
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool3d), 3),
    **dict.fromkeys((nn.ConstantPad3d, nn.ZeroPad3d, nn.ReflectionPad3d, nn.ReplicationPad3d), 3),
}
"""Layers without weights that mix their last one to three axes."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CHANNEL_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)

_SAME = {
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh"),
    *("logsigmoid", "softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink"),
    *("tanhshrink", "threshold", "softmax", "log_softmax", "clamp", "clip", "abs", "neg", "exp", "log", "sqrt"),
    *("rsqrt", "square", "pow", "contiguous", "clone", "detach", "float", "to"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "masked_fill"),
}
_BINARY = {"add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv", "maximum", "minimum"}
_SPATIAL = {
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_max_pool1d", "adaptive_avg_pool1d", "lp_pool1d"), 1),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d", "lp_pool2d"), 2),
    **dict.fromkeys(("max_pool3d", "avg_pool3d", "adaptive_max_pool3d", "adaptive_avg_pool3d"), 3),
}
_REDUCE = {"mean", "sum", "amax", "amin"}
_RESHAPE = {"flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten"}
_PERMUTE = {"permute", "transpose"}
_CONCATENATE = {"cat", "concat", "concatenate"}
_DIVIDE = {"chunk": 2, "split": 2, "unbind": 1}  # where their argument dim stands
_PRODUCTS = {"matmul", "bmm", "einsum", "scaled_dot_product_attention"}
_SOFTMAX = {"softmax", "log_softmax"}

_ADVICE = (
    "build it from Linear, Conv1d to Conv3d, Embedding, MultiheadAttention and the norms, activations, pooling, "
    "reshapes, additions, concatenations and matrix products of torch, or keep it out of the federated model"
)


class _Coupling(fx.Interpreter):
    """Runs the traced model and carries the axes of every value along.

    Afterwards ``axes`` holds name -> axes of every tensor of a handled layer, ``statistics`` the names of running means
    and variances, ``recipes`` name -> default initialisation; ``layers()`` are those with weights, in forward order.
    """

    def __init__(self, traced: fx.GraphModule, model: nn.Module) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # it would rewrite the text of our errors
        self.neurons = _Neurons()
        self.axes: dict[str, _Axes] = {}
        self.statistics: set[str] = set()
        self.recipes: dict[str, Recipe] = {}
        self._flows: dict[fx.Node, _Axes] = {}  # values that depend on the input or on a layer; the rest are constants
        self._parts: dict[fx.Node, tuple[_Axes, ...]] = {}  # the same, of tuples
        self._errors: dict[fx.Node, InputError] = {}
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}
        self._layers: list[tuple[Layer, _Axis]] = []  # with the neurons that the columns of its weight belong to
        self._samples = 1
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters())
        self._calls = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
        if sum(node.op == "placeholder" for node in traced.graph.nodes) != 1:
            raise UnsupportedLayer("forward takes several arguments; let it take one tensor, the batch of inputs")

    def run_node(self, n: fx.Node) -> Any:
        """Execute one node, and derive the axes of its value."""
        if n.op == "output":
            return self._output(n)
        self._check(n)
        try:
            value = super().run_node(n)
        except Exception as error:  # a layer's own refusal of its input may be any exception
            raise UnsupportedLayer(
                f"{_where(n)}: fails on the example: {error}. Give an example that the model takes, batch first"
            ) from error
        if isinstance(value, torch.Tensor):
            self._shapes[n] = tuple(value.shape)
            if n.op == "placeholder":
                self._samples = len(value)
            axes = self._derive(n, self._shapes[n])
            if axes is not None:
                self._flows[n] = axes
                self._errors[n] = self._error(n, axes)
        elif isinstance(value, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in value):
            self._parts[n] = self._divide(n, value)
            self._errors[n] = self._error(n, self._parts[n][0])
        return value

    def layers(self) -> Iterable[Layer]:
        """Yield the layers with weights in forward order, once the neurons are settled."""
        for layer, columns in self._layers:
            vague = layer.input_error == "active" and not self.neurons.resolve(columns)
            yield layer.model_copy(update={"input_error": "all"}) if vague else layer

    def _output(self, node: fx.Node) -> torch.Tensor:
        (result,) = node.args
        if not isinstance(result, fx.Node) or result not in self._flows:
            raise UnsupportedLayer("the model does not return one tensor; let forward return the class scores alone")
        self.neurons.complete(*self._flows[result])
        return cast(torch.Tensor, self.env[result])

    def _check(self, node: fx.Node) -> None:
        """Refuse what is not handled before it runs, so that the message is ours."""
        if node.op == "get_attr" and node.target in self._parameters:
            raise UnsupportedLayer(
                f"{node.target}: a parameter that forward uses directly; its neurons are unknown. "
                "Use it through a torch.nn layer such as Linear or Conv2d inside the model; learned positions are "
                "an Embedding of torch.arange"
            )
        if node.op == "call_module":
            path, module = str(node.target), self._modules[str(node.target)]
            handled = {*_LAYERS, *_SPATIAL_MODULES, *_SAME_MODULES, nn.Flatten, nn.Unflatten, nn.MultiheadAttention}
            if type(module) not in handled:
                raise UnsupportedLayer(f"{path}: layers of type {type(module).__name__} are not supported; {_ADVICE}")
            if self._calls[path] > 1 and module.state_dict():
                raise UnsupportedLayer(
                    f"{path}: this {type(module).__name__} is called {self._calls[path]} times (shared weights); "
                    "give each call a layer of its own"
                )

    def _derive(self, node: fx.Node, shape: tuple[int, ...]) -> _Axes | None:
        """Return the axes of the value of ``node``; None for a constant."""
        if node.op == "placeholder":
            return ((),) * len(shape)
        if node.op == "call_module":
            return self._module(node, shape)
        divided = [source for source in node.all_input_nodes if source in self._parts]
        flowing = [source for source in node.all_input_nodes if source in self._flows]
        if not flowing and not divided:
            return None
        name = _operation(node)
        if divided:
            return self._pick(node)
        if name in _BINARY:
            return self._binary(flowing, shape)
        if name in _CONCATENATE:
            return self._concatenate(node)
        if name in _PRODUCTS:
            return self._product(node, name)
        (source, *others) = flowing
        if others or source not in (*node.args[:1], node.kwargs.get("input")):
            raise UnsupportedLayer(f"{_where(node)}: this use of {name} is not supported; {_ADVICE}")
        axes = self._flows[source]
        if name in _SAME and shape == self._shapes[source]:
            return axes
        if name in _SPATIAL:
            return self._spatial(axes, _SPATIAL[name])
        if name in _RESHAPE:
            return self._reshape(axes, self._shapes[source], shape)
        if name in _REDUCE:
            return self._reduce(node, axes, keep=len(shape) == len(axes))
        if name in _PERMUTE:
            return _permute(node, axes)
        if name == "getitem":
            return self._index(node, axes, self._shapes[source])
        raise UnsupportedLayer(f"{_where(node)}: the operation {name} is not supported; {_ADVICE}")

    def _input_error(self, node: fx.Node) -> InputError:
        """Return the widest of the node's inputs; constants use none."""
        return max((self._errors.get(source, "none") for source in node.all_input_nodes), key=_WIDTH, default="none")

    def _error(self, node: fx.Node, axes: _Axes) -> InputError:
        """Return the part of the error at a value with these axes that is of use below it
        (``manifest.Layer.input_error``).
        """
        error = self._input_error(node)
        if node.op == "call_module":
            error = _error_behind(self._modules[str(node.target)], error, axes)
        elif error == "active" and _operation(node) in {*_PRODUCTS, *_SOFTMAX}:
            error = "all"
        if error != "active":
            return error
        # Neurons lie along one axis, those of all below among them. Otherwise an active one below gets its error from
        # inactive ones here, as a map of one channel does that was broadcast over the channels of another.
        active = [source for source in node.all_input_nodes if self._errors.get(source) == "active"]
        below = {run.set for source in active for axis in self._flows.get(source, ()) for run in axis}
        here = {self.neurons.find(run.set) for axis in axes for run in axis}
        alone = sum(bool(axis) for axis in axes) == 1
        return "active" if alone and here.issuperset(map(self.neurons.find, below)) else "all"

    # --- operations without weights

    def _binary(self, sources: list[fx.Node], shape: tuple[int, ...]) -> _Axes:
        """Broadcast: an axis of length 1 takes the neurons of the other side, axes of one length are united."""
        result: list[_Axis | None] = [None] * len(shape)
        for source in sources:
            lengths = self._shapes[source]
            offset = len(shape) - len(lengths)
            for position, axis in enumerate(self._flows[source]):
                if lengths[position] == shape[offset + position]:
                    known = result[offset + position]
                    result[offset + position] = axis if known is None else self.neurons.unite(known, axis)
        return tuple(axis or () for axis in result)

    def _concatenate(self, node: fx.Node) -> _Axes:
        """Along the joined axis one after another, on the others united. A constant part has no neurons of its own."""
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        if not isinstance(parts, (tuple, list)) or not isinstance(dim, int):
            raise UnsupportedLayer(f"{_where(node)}: concatenate a list of tensors along an axis that does not change")
        flows = [self._flow(part) for part in parts]
        dim %= len(flows[0])
        result = list(flows[0])
        for position, axes in enumerate(zip(*flows, strict=True)):
            if position == dim:
                # A part without neurons cannot be described beside others: then all are complete.
                result[position] = sum(axes, ()) if all(axes) else self.neurons.complete(*axes)
            else:
                for axis in axes[1:]:
                    result[position] = self.neurons.unite(result[position], axis)
        return tuple(result)

    def _product(self, node: fx.Node, name: str) -> _Axes:
        """Products of matrices: an axis that is summed over mixes its neurons, the others keep them."""
        given = [source for source in node.args if isinstance(source, fx.Node)]
        terms, result = _letters(node, name, [len(self._shapes[source]) for source in given])
        found: dict[str, _Axis] = {}
        for source, term in zip(given, terms, strict=False):
            for letter, axis, length in zip(term, self._flows.get(source, ()), self._shapes[source], strict=False):
                if length > 1:  # a shorter one is broadcast, and an only neuron is always active
                    found[letter] = self.neurons.unite(found[letter], axis) if letter in found else axis
        self.neurons.complete(*(axis for letter, axis in found.items() if letter not in result))
        for mask in set(node.all_input_nodes).difference(given[: len(terms)]):
            self.neurons.complete(*self._flows.get(mask, ()))
        return tuple(found.get(letter, ()) for letter in result)

    def _divide(self, node: fx.Node, values: Sequence[Any]) -> tuple[_Axes, ...]:
        """Return the axes of each tensor of a tuple: attention's, or parts of a tensor, whose neurons are complete."""
        if isinstance(self._modules.get(str(node.target)), nn.MultiheadAttention):
            weights = values[1]  # None where they are not asked for
            return self._attention(node), () if weights is None else ((),) * weights.dim()
        name = "" if node.op == "call_module" else _operation(node)
        (source, *others) = node.all_input_nodes
        if name not in _DIVIDE or others or source not in self._flows:
            raise UnsupportedLayer(f"{_where(node)}: gives a {type(values).__name__} of tensors, not one; {_ADVICE}")
        place = _DIVIDE[name]
        (dim,) = _integers(node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0))
        axes = list(self._flows[source])
        dim %= len(axes)
        axes[dim] = self.neurons.complete(axes[dim])
        if name == "unbind":
            del axes[dim]
        return (tuple(axes),) * len(values)

    def _pick(self, node: fx.Node) -> _Axes:
        if node.target is not operator.getitem or not isinstance(node.args[1], int):
            raise UnsupportedLayer(f"{_where(node)}: takes several tensors at once; pick each by its number")
        return self._parts[cast(fx.Node, node.args[0])][node.args[1]]

    def _flow(self, source: Any) -> _Axes:
        """Return the axes of an operand; those of a constant are complete."""
        return self._flows.get(source) or ((),) * len(self._shapes[source])

    def _spatial(self, axes: _Axes, mixed: int) -> _Axes:
        """Return the last ``mixed`` axes are mixed; neurons that lie there can only be complete."""
        self.neurons.complete(*axes[-mixed:])
        return (*axes[:-mixed], *((),) * mixed)

    def _reduce(self, node: fx.Node, axes: _Axes, *, keep: bool) -> _Axes:
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
        gone = {dim % len(axes) for dim in (range(len(axes)) if dims is None else _integers(dims))}
        self.neurons.complete(*(axes[dim] for dim in gone))
        if keep:
            return tuple(() if dim in gone else axis for dim, axis in enumerate(axes))
        return tuple(axis for dim, axis in enumerate(axes) if dim not in gone)

    def _reshape(self, axes: _Axes, old: Sequence[int], new: Sequence[int]) -> _Axes:
        """Flatten, split, squeeze: axes of the shapes are matched in the smallest blocks of equal size.

        Axes of length 1 are left out, so that a squeeze is as good as a flatten: an only neuron is always active.
        """
        sources = [(length, axis) for length, axis in zip(old, axes, strict=True) if length > 1]
        targets = [position for position, length in enumerate(new) if length > 1]
        result: list[_Axis] = [()] * len(new)
        while sources and targets:
            block, positions = [sources.pop(0)], [targets.pop(0)]
            while (have := math.prod(length for length, _ in block)) != (want := math.prod(new[p] for p in positions)):
                if have < want:
                    block.append(sources.pop(0))
                else:
                    positions.append(targets.pop(0))
            result[positions[0]] = self._join(block, math.prod(new[p] for p in positions[1:]))
        return tuple(result)

    def _join(self, block: list[tuple[int, _Axis]], inner: int) -> _Axis:
        """Return the neurons along several axes flattened into one, each owning ``inner`` entries of what is split off
        again.

        Entry order is row-major: an axis is repeated as a whole by those before it, each entry by those behind it.
        """
        owners = [position for position, (_, axis) in enumerate(block) if axis]
        if len(owners) == 1:
            before = math.prod(length for length, _ in block[: owners[0]])
            behind = math.prod(length for length, _ in block[owners[0] + 1 :])
            runs = block[owners[0]][1]
            if all(run.repeat * behind % inner == 0 for run in runs) and (inner == 1 or before == 1):
                return tuple(_Run(run.set, run.repeat * behind // inner) for run in runs) * before
        return self.neurons.complete(*(axis for _, axis in block))

    def _index(self, node: fx.Node, axes: _Axes, shape: Sequence[int]) -> _Axes:
        """Slices and whole numbers; neurons on an axis that is cut can only be complete."""
        index = node.args[1]
        parts = list(index) if isinstance(index, tuple) else [index]
        if not all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts):
            raise UnsupportedLayer(f"{_where(node)}: only slices and whole numbers can index a tensor; {_ADVICE}")
        if Ellipsis not in parts:
            parts.append(Ellipsis)
        gap = parts.index(Ellipsis)
        named = sum(part is not None for part in parts) - 1
        parts[gap : gap + 1] = [slice(None)] * (len(axes) - named)
        result: list[_Axis] = []
        remaining = list(zip(axes, shape, strict=True))
        for part in parts:
            if part is None:
                result.append(())
                continue
            axis, length = remaining.pop(0)
            if isinstance(part, slice):
                result.append(axis if _is_whole(part, length) else self.neurons.complete(axis))
            else:
                self.neurons.complete(axis)
        return tuple(result)

    # --- layers

    def _module(self, node: fx.Node, shape: tuple[int, ...]) -> _Axes:
        path = str(node.target)
        module = self._modules[path]
        (source,) = node.all_input_nodes
        axes = self._flow(source)
        if isinstance(module, _SAME_MODULES):
            return axes
        if type(module) in _SPATIAL_MODULES:
            return self._spatial(axes, _SPATIAL_MODULES[type(module)])
        if isinstance(module, (nn.Flatten, nn.Unflatten)):
            return self._reshape(axes, self._shapes[source], shape)
        result, tensors, channels = _LAYERS[type(module)](self, path, module, axes)
        self._register(node, module, tensors, math.prod(shape) // channels)
        return result

    def _register(self, node: fx.Node, module: nn.Module, tensors: dict[str, _Axes], positions: int) -> None:
        """Keep what the manifest says of a layer; ``positions`` are those of all samples."""
        path = str(node.target)
        self.axes |= {f"{path}.{name}": tensors[name] for name in module.state_dict() if name in tensors}
        self.statistics |= {f"{path}.running_mean", f"{path}.running_var"}
        self.recipes |= {f"{path}.{name}": recipe for name, recipe in _defaults(module).items()}
        names = tuple(f"{path}.{name}" for name, _ in module.named_parameters())
        if names:
            # The batch need not be the first axis, as in attention. What no sample reaches is computed once.
            samples = self._samples if any(source in self._flows for source in node.all_input_nodes) else 1
            layer = Layer(
                name=path,
                kind=type(module).__name__.lower(),
                tensors=names,
                positions=max(1, positions // samples),
                input_error=self._input_error(node),
            )
            columns = tensors["weight"][:2][-1] if "weight" in tensors else ()
            self._layers.append((layer, columns))

    def linear(self, path: str, module: nn.Linear, axes: _Axes) -> _Handled:
        """Return the last axis: columns are the neurons that lie there, rows are new ones."""
        neurons = self.neurons.add(path, module.out_features)
        return (*axes[:-1], neurons), {"weight": (neurons, axes[-1]), "bias": (neurons,)}, module.out_features

    def convolution(self, path: str, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, axes: _Axes) -> _Handled:
        taps = len(module.kernel_size)
        if len(axes) != taps + 2:
            raise UnsupportedLayer(
                f"{path}: the input of a {type(module).__name__} must have {taps + 2} axes, batch and channels first"
            )
        self.neurons.complete(*axes[2:])
        if _is_depthwise(module):  # a filter lives and dies with its channel
            multiplier = module.out_channels // module.groups
            neurons = tuple(_Run(run.set, run.repeat * multiplier) for run in axes[1])
        else:
            neurons = self.neurons.add(path, module.out_channels)
        # With groups a column is another input channel in each group of rows, so that it belongs to nobody: a weight
        # is active with its row alone.
        columns = axes[1] if module.groups == 1 else ()
        free: _Axes = ((),) * taps
        tensors = {"weight": (neurons, columns, *free), "bias": (neurons,)}
        return (axes[0], neurons, *free), tensors, module.out_channels

    def channel_norm(self, path: str, module: nn.BatchNorm2d | nn.GroupNorm, axes: _Axes) -> _Handled:
        """Batch, group and instance norm: everything they hold follows the channel."""
        names = ("weight", "bias", "running_mean", "running_var")
        channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
        return axes, dict.fromkeys(names, (axes[1],)), channels

    def layer_norm(self, path: str, module: nn.LayerNorm, axes: _Axes) -> _Handled:
        shape = module.normalized_shape
        # Blocks are cut out of the first two axes of a tensor only.
        last: _Axes = tuple(axis if position < 2 else () for position, axis in enumerate(axes[-len(shape) :]))
        self.neurons.complete(*axes[-len(shape) :][2:])
        return (*axes[: -len(shape)], *last), {"weight": last, "bias": last}, math.prod(shape)

    def _attention(self, node: fx.Node) -> _Axes:
        """Multi-head attention: heads and scores mix what is projected, so only inputs and outputs keep their neurons.

        The columns of the projections are the neurons of query, key and value, the rows of out_proj new ones.
        """
        path = str(node.target)
        module = cast(nn.MultiheadAttention, self._modules[path])
        names = ("query", "key", "value")
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        sources = [cast(fx.Node, arguments[name]) for name in names]
        query, key, value = (self._flow(source) for source in sources)
        self.neurons.complete(*query[:-1], *key[:-1], *value[:-1])  # the batch and the sequence
        for mask in set(node.all_input_nodes).difference(sources):
            self.neurons.complete(*self._flows.get(mask, ()))
        neurons = self.neurons.add(path, module.embed_dim)
        columns = {"q_proj_weight": query[-1], "k_proj_weight": key[-1], "v_proj_weight": value[-1]}
        if module.in_proj_weight is not None:
            united = self.neurons.unite(self.neurons.unite(query[-1], key[-1]), value[-1])
            columns = {"in_proj_weight": united}
        tensors: dict[str, _Axes] = {name: ((),) * parameter.dim() for name, parameter in module.named_parameters()}
        tensors |= {name: ((), axis) for name, axis in columns.items()}
        tensors |= {"out_proj.weight": (neurons, ()), "out_proj.bias": (neurons,)}
        self._register(node, module, tensors, math.prod(self._shapes[sources[0]][:-1]))
        return (*((),) * (len(query) - 1), neurons)

    def prelu(self, path: str, module: nn.PReLU, axes: _Axes) -> _Handled:
        return axes, {"weight": (axes[1] if module.num_parameters > 1 else (),)}, module.num_parameters

    def embedding(self, path: str, module: nn.Embedding, axes: _Axes) -> _Handled:
        """Return rows are words, columns are new neurons."""
        neurons = self.neurons.add(path, module.embedding_dim)
        return (*axes, neurons), {"weight": ((), neurons)}, module.embedding_dim


_Handled = tuple[_Axes, dict[str, _Axes], int]
"""What a layer answers: axes of its output, axes of its tensors, and its channels, which positions leave out."""

_LAYERS: dict[type[nn.Module], Callable[[_Coupling, str, Any, _Axes], _Handled]] = {
    nn.Linear: _Coupling.linear,
    **dict.fromkeys(_CONVOLUTIONS, _Coupling.convolution),
    **dict.fromkeys(_CHANNEL_NORMS, _Coupling.channel_norm),
    nn.LayerNorm: _Coupling.layer_norm,
    nn.PReLU: _Coupling.prelu,
    nn.Embedding: _Coupling.embedding,
}


_WIDTH = get_args(InputError).index


def _error_behind(module: nn.Module, error: InputError, axes: _Axes) -> InputError:
    """Return the error of use below a module's output, which has these axes, from that below its input."""
    if error == "none" and next(module.parameters(), None) is not None:
        return "active" if isinstance(module, (nn.Linear, *_CONVOLUTIONS, nn.Embedding)) else "all"
    if error == "active" and isinstance(module, (*_LAYERS, nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax)):
        single = (
            isinstance(module, (*_BATCH_NORMS, *_INSTANCE_NORMS))
            or _is_depthwise(module)
            or (isinstance(module, nn.PReLU) and module.num_parameters > 1)
        )
        return "active" if single and axes[1] else "all"
    return error


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, _CONVOLUTIONS) and module.groups == module.in_channels > 1


def _defaults(module: nn.Module) -> dict[str, Recipe]:
    """Return the recipes by which PyTorch initialises a layer's tensors (its ``reset_parameters``)."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        # kaiming_uniform_ with a = sqrt(5) has the bound sqrt(6 / ((1 + 5) * fan_in)).
        bound = Uniform(bound=1 / math.sqrt(module.weight[0].numel()))
        return {"weight": bound, "bias": bound}
    if isinstance(module, (*_CHANNEL_NORMS, nn.LayerNorm)):
        one, zero = Constant(value=1.0), Constant(value=0.0)
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


# --- reading fx nodes --------------------------------------------------------------------------------------------


def _where(node: fx.Node) -> str:
    """Return the module whose forward holds the node, by its path, and the node's name in the traced graph."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack)[-1] if stack else ""
    return f"{path or 'forward'} ({node.name})"


def _operation(node: fx.Node) -> str:
    """Return the operation of a node, by its name in torch, torch.nn.functional, operator or as a method ("add_" is
    "add").
    """
    if isinstance(node.target, str):
        return node.target.strip("_")
    name = getattr(node.target, "__name__", str(node.target))
    if not any(getattr(namespace, name, None) is node.target for namespace in (torch, F, operator)):
        raise UnsupportedLayer(f"{_where(node)}: the function {name} is not supported; {_ADVICE}")
    return name.strip("_")


def _letters(node: fx.Node, name: str, ranks: list[int]) -> tuple[list[str], str]:
    """Return a product of tensors with these numbers of axes, as einsum writes it: a term for each, and the result."""
    if name == "einsum":
        terms, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
        letters, count = terms.split(","), terms.count(",") + 1
        if not arrow or "." in terms:
            raise UnsupportedLayer(f"{_where(node)}: write einsum with all its axes as letters, as in 'bij,bjk->bik'")
    else:
        count = 3 if name == "scaled_dot_product_attention" else 2
    if len(ranks) < count:
        raise UnsupportedLayer(f"{_where(node)}: pass the {count} tensors of {name} by position, one by one")
    if name == "einsum":
        return letters, result
    batch = ["abcdefgh"[10 - max(rank, 2) :] for rank in ranks[:count]]  # aligned at their ends
    longest = max(batch, key=len)
    if count == 3:
        return [one + term for one, term in zip(batch, ("ls", "ms", "mt"), strict=True)], longest + "lt"
    left, right = "nm"[-ranks[0] :], "mp"[: ranks[1]]
    return [batch[0] + left, batch[1] + right], longest + left[:-1] + right[1:]


def _permute(node: fx.Node, axes: _Axes) -> _Axes:
    order = list(range(len(axes)))
    dims = [*node.args[1:], *(node.kwargs[key] for key in ("dims", "dim0", "dim1") if key in node.kwargs)]
    if _operation(node) == "transpose":
        first, second = _integers(dims)
        order[first], order[second] = order[second], order[first]
    else:
        order = _integers(dims[0] if isinstance(dims[0], (tuple, list)) else dims)
    return tuple(axes[dim] for dim in order)


def _integers(dims: object) -> list[int]:
    """Whole numbers of an argument that may be one or several."""
    numbers = list(dims) if isinstance(dims, (tuple, list, range)) else [dims]
    if not all(isinstance(number, int) for number in numbers):
        raise UnsupportedLayer(f"the axes {dims} are computed while the model runs; write them as numbers")
    return cast(list[int], numbers)


def _is_whole(part: slice, length: int) -> bool:
    bounds = (part.start, part.stop, part.step)
    return all(bound is None or isinstance(bound, int) for bound in bounds) and part.indices(length) == (0, length, 1)
