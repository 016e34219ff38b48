"""From an ``nn.Module`` to its manifest: which values of which tensors belong to which neurons.

The forward pass is traced with torch.export into a graph of operators. Every value in it carries, for each of its axes,
the neurons that lie along it (``neurons.Run``); an axis without belongs to no hidden neuron and is always complete. A
parameter is a value like others: its first two axes begin as sets of their own, and what it is multiplied with or added
to says what they are:

    x                 [N,1,4,4]   (), (), (), ()
    conv 1->3         [N,3,4,4]   (), (conv,), (), ()                 conv.weight  [conv], [], [], []
    max-pool, flatten [N,12]      (), (conv x 4,)
    linear 12->5      [N,5]       (), (fc,)                           fc.weight    [fc], [conv x 4]
    linear 5->2       [N,2]       (), ()   <- the model's output      out.weight   [], [fc]

Values that are added share one set, which keeps the name of the first layer in forward order. A reshape into heads
makes a head's rows of query, key, value and columns of what follows one neuron. What an axis cannot describe is made
complete, never left half true: neurons that reach the model's output, that are added to a complete value such as the
input, that attention sums over, or that pass an operator we do not know. That costs sparsity, not correctness.
docs/architecture.md lists what is found and what is complete.

Beside its axes every value carries which part of its gradient can be of use below it (``manifest.Layer.input_error``).
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import fx, nn

from sparrow.protocol.manifest import (
    Constant,
    Data,
    InputError,
    Layer,
    Manifest,
    Recipe,
    TensorSpec,
    Uniform,
)

from . import RunningStatistics
from .graph import Call, Traced, UnsupportedLayer, operation, place_of, shape_of, trace
from .modes import frozen_names
from .neurons import Axes, Axis, Neurons, Run


def describe(
    model: nn.Module,
    example: torch.Tensor,
    *,
    task: str,
    running_statistics: RunningStatistics = "shared",
    recipes: bool = False,
    least: float = 0.0,
) -> Manifest:
    """Return the manifest of ``model``, found by tracing it in evaluation mode on ``example`` [N, ...], N >= 1.

    The model is left as it was: weights, buffers, training flags. ``running_statistics`` is the policy of batch norm's
    running mean and variance. ``recipes`` True writes PyTorch's default
    initialisation of the layers we know as recipes, so that initial weights need not be published; what those layers
    hold now is then ignored. least: the share of the trained weights that must belong to neurons where an operator
    mixes neurons or is not known; a model without hidden layers has none.

    Tensors come in state-dict order, a tied one under its first name; its others are the manifest's aliases. Buffers
    are not trainable; all but the running statistics stay personal, since integers and counters cannot be averaged;
    ``num_batches_tracked`` is dropped, and what training does not change is frozen (``modes.frozen_names``), or dropped
    where nothing reads it. Neurons of frozen parameters are complete: there is nothing to train of them, and a part of
    them answers otherwise. A layer's kind is its class name in lower case; its tensors are its parameters.

    Raises UnsupportedLayer for a model that cannot be traced or sent, and, naming what is complete and why, for one of
    which less than ``least`` belongs to neurons.
    """
    refuse_types(model)
    frozen = frozen_names(model, example)
    model = copy.deepcopy(model).eval()
    names, aliases = names_of(model)
    traced = trace(model, example[:2])
    found = _search(lambda choices: _Coupling(traced, model, names, choices))
    if traced.shape[:1] != example[:2].shape[:1]:
        raise UnsupportedLayer(
            f"the model's output has shape {traced.shape} for {len(example[:2])} samples; "
            "its first axis must be the batch"
        )
    groups, numbered = found.groups
    manifest = Manifest(
        task=task,
        input_shape=tuple(example.shape[1:]),
        output_shape=traced.shape[1:],
        tensors=tuple(_specs(model, found, aliases, numbered, running_statistics, recipes, frozen)),
        groups=groups,
        layers=tuple(found.layers()),
        aliases=aliases,
    )
    if found.lost and found.share < least:
        raise UnsupportedLayer(_too_little(manifest, found, least))
    return manifest


def names_of(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Return the first name of each tensor of the state dict, by identity, and the other names: name -> first name."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
    return names, aliases


def _specs(
    model: nn.Module,
    found: _Coupling,
    aliases: Mapping[str, str],
    numbered: Sequence[str],
    running_statistics: str,
    recipes: bool,
    frozen: Collection[str],
) -> Iterable[TensorSpec]:
    parameters = dict(model.named_parameters())
    known = found.recipes() if recipes else {}
    read = {each for layer in found.layers() for each in layer.tensors}
    for name, tensor in model.state_dict().items():
        if name in aliases:
            continue
        axes = tuple(found.neurons.segments(axis, numbered) for axis in found.axes.get(name, ()))
        policy = "shared" if name in parameters else "personal"
        if name.rpartition(".")[2] == "num_batches_tracked":
            policy = "dropped"
        elif name in frozen:
            policy, axes = "frozen" if name in read or name not in parameters else "dropped", ()
        elif name in found.statistics:
            policy = running_statistics
        yield spec_of(
            name, tensor, policy, parameters.get(name), axes=axes if any(axes) else (), init=known.get(name, Data())
        )


def _too_little(manifest: Manifest, found: _Coupling, least: float) -> str:
    whole = sorted(
        (spec for spec in manifest.tensors if spec.trainable and not any(spec.axes)), key=lambda spec: -spec.size
    )
    reasons = [f"{spec.name} ({spec.size} values{found.why(spec.name)})" for spec in whole[:3]]
    return (
        f"{found.share:.0%} of the weights belong to neurons that can be left out, and at least {least:.0%} must; "
        f"complete are {', '.join(reasons)}. Build these parts from linear layers and convolutions, or choose a method "
        "that trains whole tensors"
    )


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


# --- what neurons there are -------------------------------------------------------------------------------------------


def _search(look: Callable[[dict[Any, int]], _Coupling]) -> _Coupling:
    """Return what is found with the best choices: where a reshape splits neurons, which part keeps them.

    Heads of attention are the outer part, the groups of a shuffle the inner one: each is tried, one kind of reshape
    after another, and what leaves most weights, then most neurons, to choose from is taken.
    """
    best = look({})
    tried: set[Any] = set()
    while open_ := [kind for kind in best.splits if kind not in tried]:
        kind = open_[0]
        tried.add(kind)
        for place in range(best.splits[kind]):
            if place != best.choices.get(kind):
                found = look({**best.choices, kind: place})
                best = max(best, found, key=lambda each: each.worth)
    return best


# --- what is known of a value -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """What is known of a tensor of the graph. axes: of a parameter None where anything may lie along an axis, which is
    then trained whole. error: what is of use of its gradient below it, none for what is frozen. fixed: it follows from
    parameters and constants alone, so that each of its neurons has a place in them; learned: not from constants
    alone."""

    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    error: InputError = "none"
    fixed: bool = False
    learned: bool = False

    @property
    def known(self) -> Axes:
        """The axes, complete where anything may lie."""
        return tuple(axis or () for axis in self.axes)


_WIDTH = get_args(InputError).index

_SAME = {
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "contiguous", "clone"),
    *("detach", "alias", "to", "_to_copy", "lift_fresh_copy", "type_as", "softmax", "_softmax", "log_softmax"),
    *("_log_softmax", "view_as", "lift_fresh", "tril", "triu"),
}
_ELEMENTWISE = {"hardswish", "log_sigmoid", "rsub", "copy", "special_expit", "masked_fill", "where"}
"""Operators of every entry by itself that torch does not mark so."""
_SHAPED = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy", "ravel"}
_FILLED = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
_REDUCED = {"mean", "sum", "amax", "amin", "var", "std", "logsumexp", "prod", "norm", "linalg_vector_norm", "any"}
_PRODUCTS = {"matmul", "mm", "bmm", "einsum", "scaled_dot_product_attention", "addmm", "baddbmm", "linear"}
_POOLS = (
    *("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "lp_pool"),
    *("upsample_nearest", "upsample_bilinear", "upsample_linear", "upsample_bicubic", "upsample_trilinear"),
)
_SOFTMAX = {"softmax", "_softmax", "log_softmax", "_log_softmax"}
_RECURRENT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Rows of weights that a unit has."""


class _Coupling:
    """Goes through the graph once. Afterwards ``axes`` holds name -> axes of every parameter and running statistic,
    ``statistics`` the names of running means and variances; ``layers()`` are those with weights, in forward order.

    choices: kind of reshape -> the part that keeps neurons where it splits them; ``splits``: those there were, and of
    how many parts. lost: whether neurons are complete because an operator mixes them, or is not known.
    """

    def __init__(self, traced: Traced, model: nn.Module, names: Mapping[int, str], choices: Mapping[Any, int]) -> None:
        self.neurons = Neurons()
        self.axes: dict[str, Axes] = {}
        self.statistics: set[str] = set()
        self.choices = dict(choices)
        self.splits: dict[Any, int] = {}
        self.lost = False
        self._values: dict[fx.Node, Any] = {}
        self._modules = dict(model.named_modules())
        self._tensors = model.state_dict(keep_vars=True)
        self._names = names
        self._parameters = {names[id(parameter)] for parameter in model.parameters()}
        self._layers: dict[str, tuple[Layer, list[Axis]]] = {}
        self._inputs = traced.inputs
        self._samples = next(len(node.meta["val"]) for node, name in traced.inputs.items() if name is None)
        self._needed = set(traced.nodes)
        for node in traced.nodes:
            if node in self._inputs and self._inputs[node] is not None:
                continue  # where it is used first: groups bear the name of the first layer
            for source in node.all_input_nodes:
                if source not in self._values:
                    self._values[source] = self._derive(source)
            self.neurons.doing = f"{operation(node)} in {place_of(node) or 'forward'}"
            self._values[node] = self._derive(node)
            if node.op == "call_function":
                self._note(node)
        self.neurons.doing = "the model's output"
        self.neurons.complete(*self._values[traced.output].known)
        self.neurons.settle(self.axes.values())
        self.groups = self.neurons.groups(self.axes.values())
        specs = {name: self._tensors[name] for name in self._parameters if self._tensors[name].requires_grad}
        total = sum(tensor.numel() for tensor in specs.values())
        masked = sum(
            tensor.numel() for name, tensor in specs.items() if any(map(self.neurons.resolve, self.axes.get(name, ())))
        )
        self.share = masked / total if total else 0.0
        both = sum(
            tensor.numel() * sum(bool(self.neurons.resolve(axis)) for axis in self.axes.get(name, ()))
            for name, tensor in specs.items()
        )
        self.worth = (masked, both, sum(group.size for group in self.groups[0]))

    def why(self, name: str) -> str:
        """Return why a tensor is complete."""
        reasons = [self.neurons.why(axis) for axis in self.axes.get(name, ())]
        return next((f", by {reason}" for reason in reasons if reason), "" if name in self.axes else ", used nowhere")

    def layers(self) -> Iterator[Layer]:
        """Yield the layers with weights in forward order."""
        for layer, columns in self._layers.values():
            vague = layer.input_error == "active" and not any(map(self.neurons.resolve, columns))
            yield layer.model_copy(update={"input_error": "all"}) if vague else layer

    def recipes(self) -> dict[str, Recipe]:
        """Return the default initialisation of the tensors of layers that run, by name."""
        return {
            f"{path}.{name}".lstrip("."): recipe
            for path in self._layers
            if path in self._modules
            for name, recipe in _defaults(self._modules[path]).items()
        }

    # --- one node

    def _derive(self, node: fx.Node) -> Any:
        """Return what is known of a node's value: a _Value, a tuple of them, or None of what is no tensor."""
        shape = shape_of(node)
        if node.op == "placeholder":
            return self._placeholder(node, shape)
        if node.target is operator.getitem:
            return self._picked(node)
        if node.op != "call_function":
            return None if shape is None else _Value(shape, (None,) * len(shape), fixed=True)
        values = self._inputs_of(node)
        if not any(value.learned or not value.fixed for value in values) or operation(node) in _FILLED:
            return self._constant(node, shape)
        call = Call(node)
        derived = self._rule(call)(call, values, shape)
        if isinstance(derived, list):
            return tuple(derived)
        return None if derived is None or shape is None else self._value(call, values, shape, derived)

    def _value(
        self, call: Call, values: Sequence[_Value], shape: tuple[int, ...], axes: Sequence[Axis | None]
    ) -> _Value:
        fixed, learned = all(value.fixed for value in values), any(value.learned for value in values)
        error: InputError = max((value.error for value in values), key=_WIDTH, default="none")
        return _Value(shape, tuple(axes), error if fixed else self._error(call, values, axes), fixed, learned)

    def _constant(self, node: fx.Node, shape: tuple[int, ...] | None) -> Any:
        if shape is not None:
            return _Value(shape, (None,) * len(shape), fixed=True)
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return tuple(
                _Value(tuple(each.shape), (None,) * each.dim(), fixed=True) if isinstance(each, torch.Tensor) else None
                for each in value
            )
        return None

    def _placeholder(self, node: fx.Node, shape: tuple[int, ...] | None) -> _Value | None:
        if shape is None:
            return None
        if node not in self._inputs:
            return _Value(shape, (None,) * len(shape), fixed=True)
        name = self._inputs[node]
        if name is None:
            return _Value(shape, ((),) * len(shape))
        name = self._names.get(id(self._tensors[name]), name) if name in self._tensors else name
        if name not in self._parameters:
            return _Value(shape, (None,) * len(shape), fixed=True)
        if name not in self.axes:
            path = name.rpartition(".")[0] or name
            mine = [self.neurons.add(path, length) for length in shape[:2]]
            self.axes[name] = (*mine, *((),) * (len(shape) - len(mine)))
            if not self._tensors[name].requires_grad:
                self.neurons.doing = f"{name}, which is frozen"
                self.neurons.complete(*mine)
        known = [axis if length > 1 else None for axis, length in zip(self.axes[name][:2], shape, strict=False)]
        axes = (*known, *(None,) * (len(shape) - len(known)))
        error: InputError = "all" if self._tensors[name].requires_grad else "none"
        return _Value(shape, axes, error, fixed=True, learned=True)

    def _inputs_of(self, node: fx.Node) -> list[_Value]:
        found: list[_Value] = []
        for source in node.all_input_nodes:
            value = self._values.get(source)
            found += [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, _Value)]
        return found

    def _of(self, argument: Any) -> _Value | None:
        value = self._values.get(argument) if isinstance(argument, fx.Node) else None
        return value if isinstance(value, _Value) else None

    def _picked(self, node: fx.Node) -> Any:
        source, place = cast(tuple[fx.Node, int], node.args)
        value = self._values.get(source)
        return value[place] if isinstance(value, tuple) and place < len(value) else None

    def _rule(self, call: Call) -> Callable[..., Any]:
        """Return what finds the axes of a call's value: (call, values, shape) -> axes; a list of values of several;
        None of no tensor."""
        name = call.name.rstrip("_")
        known = getattr(self, f"_do_{name}", None)
        if known is not None:
            return cast(Callable[..., Any], known)
        if name in _SAME:
            return self._unchanged
        if name in _SHAPED:
            return self._reshaped
        if name in _REDUCED:
            return self._reduce
        if name in _RECURRENT:
            return self._recurrent
        if name.startswith(_POOLS):
            return self._pool
        if name in _ELEMENTWISE or torch.Tag.pointwise in getattr(call.node.target, "tags", ()):
            return self._pointwise
        return self._unknown

    def _unchanged(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        return values[0].axes

    def _reshaped(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        return self._reshape(values[0], shape)

    def _unknown(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...] | None) -> Any:
        """Whatever it does, it does with complete neurons."""
        self._lose(axis for value in values for axis in value.known)
        if shape is not None:
            return ((),) * len(shape)
        given = call.result
        if not isinstance(given, (tuple, list)):
            return None
        return [
            self._value(call, values, tuple(each.shape), ((),) * each.dim()) if isinstance(each, torch.Tensor) else None
            for each in given
        ]

    def _lose(self, axes: Iterable[Axis]) -> None:
        """Complete neurons for want of a rule that follows them."""
        known = [resolved for axis in axes if (resolved := self.neurons.resolve(axis))]
        self.lost |= bool(known)
        self.neurons.complete(*known)

    # --- errors and layers

    def _error(self, call: Call, values: Sequence[_Value], axes: Sequence[Axis | None]) -> InputError:
        """Return the part of the error at a value with these axes that is of use below it
        (``manifest.Layer.input_error``).
        """
        name = call.name.rstrip("_")
        flowing = [value for value in values if not value.fixed]
        error: InputError = max((value.error for value in flowing), key=_WIDTH, default="none")
        weighted = any(value.fixed and value.learned for value in values)
        convolution = name.startswith("conv")
        trained = any(value.fixed and value.error != "none" for value in values)
        if error == "none" and trained:
            layer = convolution or name in {"linear", "embedding", "mm", "addmm", "matmul"}
            error = "active" if layer and self._is_plain(call.node) else "all"
        elif error == "active":
            single = name in {"batch_norm", "instance_norm"} or (convolution and _is_depthwise(values))
            single |= name == "prelu" and math.prod(values[-1].shape) > 1
            if weighted or name in {"group_norm", "layer_norm", "rms_norm"}:
                error = "active" if single and len(axes) > 1 and axes[1] else "all"
            elif name in _PRODUCTS or name in _SOFTMAX:
                error = "all"
        if error != "active":
            return error
        # Neurons lie along one axis, those of all below among them. Otherwise an active one below gets its error from
        # inactive ones here, as a map of one channel does that was broadcast over the channels of another.
        below = {run.set for value in flowing if value.error == "active" for run in self._sets(value.axes)}
        here = {run.set for run in self._sets(axes)}
        alone = sum(bool(axis and self.neurons.resolve(axis)) for axis in axes) == 1
        return "active" if alone and here.issuperset(below) else "all"

    def _is_plain(self, node: fx.Node) -> bool:
        """Return whether what is learned comes to a node as parameters themselves, and not as what is made of them."""
        return all(
            self._named(source) is not None
            for source in node.all_input_nodes
            if (value := self._of(source)) is not None and value.fixed and value.learned
        )

    def _sets(self, axes: Sequence[Axis | None]) -> list[Run]:
        return [run for axis in axes if axis for run in self.neurons.resolve(axis)]

    def _note(self, node: fx.Node) -> None:
        """Keep what the manifest says of the layer that the node is of."""
        named = [self._named(source) for source in node.all_input_nodes]
        mine = [name for name in named if name is not None]
        if not mine:
            return
        path, module = self._module(node)
        below = [self._of(source) for source, name in zip(node.all_input_nodes, named, strict=True) if name is None]
        values = [value for value in below if value is not None and not value.fixed]
        error: InputError = max((value.error for value in below if value is not None), key=_WIDTH, default="none")
        samples = self._samples if values else 1
        weight = next((name for name in mine if self._tensors[name].dim() > 1), mine[0])
        columns = self.axes[weight][:2][-1]
        if module is not None:
            tensors = tuple(dict.fromkeys(self._names[id(parameter)] for parameter in module.parameters()))
            entries = [(path, _kind(module), tensors)]
        else:
            entries = [(f"{name}:", PARAMETER, (name,)) for name in mine]
        for key, kind, tensors in entries:
            channels = _channels(module, self._tensors[weight])
            result = self._values[node]
            made = result[0] if isinstance(result, tuple) else result
            given = values[0] if values and kind in _COUNTED_BY_INPUT else made
            entries_made = math.prod(given.shape) if isinstance(given, _Value) else 0
            positions = max(1, entries_made // channels // samples)
            known = self._layers.get(key)
            if known is None:
                layer = Layer(
                    name=key.rstrip(":") or kind, kind=kind, tensors=tensors, positions=positions, input_error=error
                )
                self._layers[key] = (layer, [columns])
            else:
                layer, all_columns = known
                wider = max(layer.input_error, error, key=_WIDTH)
                again = module is not None and not isinstance(module, nn.MultiheadAttention)
                both = layer.positions + positions if again else layer.positions
                self._layers[key] = (
                    layer.model_copy(update={"input_error": wider, "positions": both}),
                    [*all_columns, columns],
                )

    def _named(self, source: fx.Node) -> str | None:
        name = self._inputs.get(source)
        name = self._names.get(id(self._tensors[name]), name) if name in self._tensors else name
        return name if name in self._parameters else None

    def _module(self, node: fx.Node) -> tuple[str, nn.Module | None]:
        """Return the innermost module that runs the node, if it is one of torch's layers."""
        path = place_of(node)
        module = self._modules.get(path)
        return (path, module) if module is not None and _base(module) is not None else (path, None)

    # --- operations without weights

    def _join(self, first: Axis | None, second: Axis | None) -> Axis | None:
        if first is None or second is None:
            return second if first is None else first
        return self.neurons.unite(first, second)

    def _pointwise(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Broadcast: an axis of length 1 takes the neurons of the other side, axes of one length are united."""
        result: list[Axis | None] = [None] * len(shape)
        for value in values:
            offset = len(shape) - len(value.shape)
            for position, axis in enumerate(value.axes):
                if value.shape[position] == shape[offset + position] and axis is not None:
                    known = result[offset + position]
                    single = value.shape[position] == 1
                    result[offset + position] = axis if known is None or single else self._join(known, axis)
        flows = not all(value.fixed for value in values)
        return tuple(() if axis is None and flows else axis for axis in result)

    def _pool(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...] | None) -> Any:
        """Pool: the last one to three axes are mixed; neurons that lie there can only be complete."""
        value = values[0]
        mixed = min(next((int(each) for each in call.name if each.isdigit()), len(value.shape) - 2), len(value.shape))
        self.neurons.complete(*value.known[len(value.shape) - mixed :])
        axes = (*value.axes[: len(value.shape) - mixed], *((),) * mixed)
        if shape is not None:
            return axes
        return [self._value(call, values, tuple(call.result[0].shape), axes)] * 2

    def _do_pad(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Axes that are padded are complete."""
        changed = [old != new for old, new in zip(values[0].shape, shape, strict=True)]
        self.neurons.complete(*(axis for axis, far in zip(values[0].known, changed, strict=True) if far))
        return tuple(() if far else axis for axis, far in zip(values[0].axes, changed, strict=True))

    _do_constant_pad_nd = _do_reflection_pad1d = _do_reflection_pad2d = _do_replication_pad2d = _do_pad

    def _reduce(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value = values[0]
        dims, rank = call.given.get("dim"), len(value.shape)
        gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
        # A mean that keeps its axis is what norms by hand divide by, which see their neurons as layer norm does.
        if len(shape) != rank or not call.name.startswith(("mean", "var")):
            self.neurons.complete(*(value.known[dim] for dim in gone))
        if len(shape) == rank:
            return tuple(() if dim in gone else axis for dim, axis in enumerate(value.axes))
        return tuple(axis for dim, axis in enumerate(value.axes) if dim not in gone)

    def _do_permute(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        return tuple(values[0].axes[dim] for dim in call.at(1))

    def _do_transpose(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        axes = list(values[0].axes)
        first, second = call.at(1), call.at(2)
        axes[first], axes[second] = axes[second], axes[first]
        return tuple(axes)

    _do_swapaxes = _do_transpose

    def _do_t(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        return tuple(reversed(values[0].axes))

    _do_numpy_T = _do_t  # noqa: N815  the operator's name

    def _do_mT(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:  # noqa: N802
        return (*values[0].axes[:-2], *reversed(values[0].axes[-2:]))

    def _do_movedim(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        order = torch.empty(values[0].shape, device="meta")
        places = torch.arange(len(order.shape))
        strides = [2**place for place in places.tolist()]
        moved = torch.empty_strided([1] * len(strides), strides, device="meta").movedim(call.at(1), call.at(2))
        return tuple(values[0].axes[strides.index(stride)] for stride in moved.stride())

    def _do_expand(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value = values[0]
        front = len(shape) - len(value.shape)
        kept = [
            axis if old == new else None if value.fixed else ()
            for axis, old, new in zip(value.axes, value.shape, shape[front:], strict=True)
        ]
        return (*((None if value.fixed else (),) * front), *kept)

    _do_expand_as = _do_expand

    def _do_repeat(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value = values[0]
        front = len(shape) - len(value.shape)
        kept = [
            axis * (new // old) if axis else axis
            for axis, old, new in zip(value.axes, value.shape, shape[front:], strict=True)
        ]
        return (*((None if value.fixed else (),) * front), *kept)

    _do_tile = _do_repeat

    def _do_roll(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        dims = call.given["dims"]
        return self._mixed(values[0], dims or range(len(shape)))

    def _do_flip(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        return self._mixed(values[0], call.at(1))

    def _mixed(self, value: _Value, dims: Iterable[int]) -> Any:
        """Return the axes of a value whose entries change places along ``dims``."""
        gone = {dim % len(value.shape) for dim in dims}
        self._lose(value.known[dim] for dim in gone)
        return tuple(() if dim in gone else axis for dim, axis in enumerate(value.axes))

    # --- parts

    def _do_cat(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Along the joined axis one after another, on the others united."""
        parts = [part for part in map(self._of, call.at(0)) if part is not None and len(part.shape) == len(shape)]
        dim = call.dim(len(shape))
        result: list[Axis | None] = [None] * len(shape)
        joined: Axis = ()
        for part in parts:
            for position, axis in enumerate(part.axes):
                if position != dim:
                    result[position] = self._join(result[position], axis)
            lies = self.neurons.resolve(part.axes[dim] or ())
            joined += lies or (Run(0, part.shape[dim]),)
        result[dim] = self.neurons.resolve(joined)
        return tuple(axis or () for axis in result)

    def _do_stack(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        parts = [part for part in map(self._of, call.at(0)) if part is not None]
        dim = call.dim(len(shape))
        result: list[Axis | None] = [None] * (len(shape) - 1)
        for part in parts:
            for position, axis in enumerate(part.axes):
                result[position] = self._join(result[position], axis)
        result.insert(dim, ())
        return tuple(axis or () for axis in result)

    def _part(self, value: _Value, dim: int, start: int, stop: int) -> tuple[Axis | None, ...]:
        """Return the axes of entries ``start`` to ``stop`` along ``dim``."""
        axes = list(value.axes)
        axis = axes[dim]
        if axis:
            length = self.neurons.length(axis)
            _, behind = self.neurons.cut(axis, start) if start else ((), axis)
            mine, _ = self.neurons.cut(behind, stop - start) if stop < length else (behind, ())
            axes[dim] = self.neurons.resolve(mine)
        return tuple(axes)

    def _do_slice(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value = values[0]
        dim = call.dim(len(value.shape))
        start, stop, step = (call.given[name] for name in ("start", "end", "step"))
        if shape == value.shape:
            return value.axes
        if step != 1 or not isinstance(start or 0, int) or not isinstance(stop or 0, int):
            return self._mixed(value, [dim])
        start, stop, _ = slice(start, stop).indices(value.shape[dim])
        return self._part(value, dim, start, stop)

    def _do_narrow(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        start = call.given["start"]
        return self._part(values[0], call.dim(len(shape)), start, start + call.given["length"])

    def _do_select(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value = values[0]
        dim = call.dim(len(value.shape))
        index = call.given["index"] % value.shape[dim]
        part = list(self._part(value, dim, index, index + 1))
        self.neurons.complete(part.pop(dim) or ())
        return tuple(part)

    def _do_unbind(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...] | None) -> Any:
        value = values[0]
        dim = call.dim(len(value.shape))
        self.neurons.complete(value.known[dim])
        axes = tuple(axis for place, axis in enumerate(value.axes) if place != dim)
        kept = tuple(length for place, length in enumerate(value.shape) if place != dim)
        return [self._value(call, values, kept, axes)] * value.shape[dim]

    def _do_split(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...] | None) -> Any:
        value, parts, start = values[0], [], 0
        dim = call.dim(len(value.shape))
        for each in call.result:
            stop = start + each.shape[dim]
            parts.append(self._value(call, values, tuple(each.shape), self._part(value, dim, start, stop)))
            start = stop
        return parts

    _do_chunk = _do_split_with_sizes = _do_tensor_split = _do_split

    def _do_glu(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Unite both halves: one gates the other."""
        value, dim = values[0], call.dim(len(shape))
        first, second = (self._part(value, dim, place * shape[dim], (place + 1) * shape[dim]) for place in range(2))
        return tuple(self._join(one, other) for one, other in zip(first, second, strict=True))

    def _do_index(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Rows picked by an index: the axes that are not indexed keep their neurons."""
        value = self._of(call.at(0))
        indices = list(call.at(1))
        picked = [place for place, index in enumerate(indices) if index is not None]
        if value is None or picked != list(range(picked[0], picked[-1] + 1)):
            return self._unknown(call, values, shape)
        self.neurons.complete(*(value.known[place] for place in picked))
        left, right = value.axes[: picked[0]], value.axes[picked[-1] + 1 :]
        middle = len(shape) - len(left) - len(right)
        return (*left, *((None if value.fixed else (),) * middle), *right)

    def _do_index_select(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        return self._mixed(values[0], [call.at(1)])

    _do_cumsum = _do_index_select

    def _reshape(self, value: _Value, new: tuple[int, ...]) -> Any:
        """Flatten, split, squeeze: axes of the shapes are matched in the smallest blocks of equal size.

        Axes of length 1 are left out, so that a squeeze is as good as a flatten: an only neuron is always active.
        """
        sources = [(length, axis) for length, axis in zip(value.shape, value.axes, strict=True) if length > 1]
        targets = [position for position, length in enumerate(new) if length > 1]
        blank: Axis | None = None if value.fixed else ()
        result: list[Axis | None] = [blank] * len(new)
        while sources and targets:
            block, places = [sources.pop(0)], [targets.pop(0)]
            while (have := math.prod(length for length, _ in block)) != (want := math.prod(new[p] for p in places)):
                if have < want:
                    block.append(sources.pop(0))
                else:
                    places.append(targets.pop(0))
            if len(block) == len(places) == 1:
                result[places[0]] = block[0][1]
                continue
            flat = self._flattened(block)
            if flat:
                place, axis = self._kept(flat, [new[p] for p in places])
                result[places[place]] = axis
        return tuple(result)

    def _flattened(self, block: list[tuple[int, Axis | None]]) -> Axis:
        """Return the neurons along several axes flattened into one.

        Entry order is row-major: an axis is repeated as a whole by those before it, each entry by those behind it.
        """
        owners = [place for place, (_, axis) in enumerate(block) if axis and self.neurons.resolve(axis)]
        if len(owners) != 1:
            return self.neurons.complete(*(axis or () for _, axis in block))
        before = math.prod(length for length, _ in block[: owners[0]])
        behind = math.prod(length for length, _ in block[owners[0] + 1 :])
        runs = self.neurons.resolve(block[owners[0]][1] or ())
        return self.neurons.resolve(tuple(Run(run.set, run.repeat * behind) for run in runs) * before)

    def _kept(self, flat: Axis, lengths: list[int]) -> tuple[int, Axis]:
        """Split an axis into parts of these lengths: which of them keeps the neurons, and how they lie along it."""
        if len(lengths) == 1:
            return 0, flat
        exact = next((place for place in range(len(lengths)) if self._fits(flat, lengths, place)), None)
        if exact is None:
            kind = tuple(lengths)
            self.splits[kind] = len(lengths)
            exact = self.choices.setdefault(kind, len(lengths) - 2)
        before, behind = math.prod(lengths[:exact]), math.prod(lengths[exact + 1 :])
        return exact, self._folded(flat, before, lengths[exact] * behind, behind)

    def _fits(self, flat: Axis, lengths: list[int], place: int) -> bool:
        """Return whether the neurons lie along this part as they are."""
        behind, size = math.prod(lengths[place + 1 :]), math.prod(lengths[place:])
        if any(run.repeat % behind for run in flat):
            return False
        count, times = 0, 0
        for run in flat:  # the runs of the first copy, of which there must be whole ones
            if count == size:
                break
            count += self.neurons.length((run,))
            times += 1
        return count == size and flat == flat[:times] * math.prod(lengths[:place])

    def _folded(self, flat: Axis, copies: int, size: int, behind: int) -> Axis:
        """Return the neurons of an axis of ``copies`` times ``size`` entries, alike in each copy, ``behind`` as one."""
        mine, rest = self.neurons.cut(flat, size) if copies > 1 else (flat, ())
        for _ in range(copies - 1):
            if not rest:
                break
            other, rest = self.neurons.cut(rest, size)
            self.neurons.unite(mine, other)
        return self.neurons.coarsen(self.neurons.resolve(mine), behind)

    # --- products, and what multiplies with weights

    def _product(
        self, terms: Sequence[tuple[_Value | None, str]], result: str, *, weighs: bool
    ) -> tuple[Axis | None, ...]:
        """Products of matrices: an axis that is summed over mixes its neurons, the others keep them. weighs: one side
        is parameters, whose columns are then what lies there."""
        found: dict[str, Axis | None] = {}
        mixed = set() if weighs else {letter for _, letters in terms for letter in letters}
        for value, letters in terms:
            if value is None:
                continue
            for letter, axis, length in zip(letters, value.axes, value.shape, strict=True):
                if length > 1:  # a shorter one is broadcast, and an only neuron is always active
                    found[letter] = self._join(found[letter], axis) if letter in found else axis
                    mixed |= {letter} if axis is None else set()  # a constant has no neurons
        self.neurons.complete(*(axis or () for letter, axis in found.items() if letter in mixed - set(result)))
        fixed = all(value.fixed for value, _ in terms if value is not None)
        return tuple(None if found.get(letter) is None and fixed else found.get(letter) or () for letter in result)

    def _multiplied(self, first: _Value, second: _Value) -> tuple[Axis | None, ...]:
        batch = ["abcdefgh"[10 - max(len(value.shape), 2) :] for value in (first, second)]  # aligned at their ends
        left, right = "nm"[-len(first.shape) :], "mp"[: len(second.shape)]
        if len(first.shape) == 1:
            left = "m"
        result = max(batch, key=len) + left[:-1] + right[1:]
        terms = [(first, batch[0] + left), (second, batch[1] + right)]
        return self._product(terms, result, weighs=first.fixed or second.fixed)

    def _do_matmul(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        first, second = self._of(call.at(0)), self._of(call.at(1))
        if first is None or second is None:
            return self._unknown(call, values, shape)
        return self._multiplied(first, second)

    _do_mm = _do_bmm = _do_matmul

    def _do_addmm(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        added, first, second = (self._of(call.at(place)) for place in range(3))
        if added is None or first is None or second is None:
            return self._unknown(call, values, shape)
        made = _Value(shape, self._multiplied(first, second))
        return self._pointwise(call, [made, added], shape)

    _do_baddbmm = _do_addmm

    def _do_einsum(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        terms, arrow, result = str(call.at(0)).replace(" ", "").partition("->")
        given = [self._of(argument) for argument in call.at(1)]
        letters = terms.split(",")
        if not arrow or "." in terms or any(value is None for value in given):
            return self._unknown(call, values, shape)
        if any(len(set(term)) != len(term) for term in letters):
            return self._unknown(call, values, shape)
        weighs = any(value is not None and value.fixed for value in given)
        return self._product(list(zip(given, letters, strict=True)), result, weighs=weighs)

    def _do_scaled_dot_product_attention(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        given = [self._of(call.at(place)) for place in range(3)]
        if any(value is None for value in given) or any(len(value.shape) != len(shape) for value in given if value):
            return self._unknown(call, values, shape)
        batch = "abcdefgh"[10 - len(shape) :]
        terms = list(zip(given, (batch + "ls", batch + "ms", batch + "mt"), strict=True))
        mask = self._of(call.given["attn_mask"])
        if mask is not None:  # a learned bias has a place for each head
            terms.append((mask, (batch + "lm")[-len(mask.shape) :]))
        return self._product(terms, batch + "lt", weighs=False)

    def _do_linear(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Columns are the neurons of the input's last axis, rows are new ones."""
        value, weight = self._of(call.at(0)), self._of(call.at(1))
        if value is None or weight is None or not weight.fixed:
            return self._unknown(call, values, shape)
        self._meet(value, len(value.axes) - 1, weight.axes[1])
        rows = weight.axes[0] or ()
        self._with_bias(call.given["bias"], rows)
        return (*value.axes[:-1], rows)

    def _meet(self, value: _Value, place: int, columns: Axis | None) -> None:
        """Give the columns of a weight the neurons of what they multiply; a constant has none."""
        self._join(value.axes[place] or (), columns)

    def _with_bias(self, argument: Any, axis: Axis) -> None:
        bias = self._of(argument)
        if bias is not None and bias.shape[-1] > 1:
            self._join(axis, bias.axes[-1])

    def _convolved(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value, weight = self._of(call.at(0)), self._of(call.at(1))
        if value is None or weight is None or not weight.fixed or len(value.shape) != len(weight.shape):
            return self._unknown(call, values, shape)
        taps = len(weight.shape) - 2
        self.neurons.complete(*value.known[2:])
        channels, given = shape[1], value.shape[1]
        columns = weight.shape[1]
        if columns == given:
            self._meet(value, 1, weight.axes[1])
            rows = weight.axes[0] or ()
        elif columns == 1:  # a filter lives and dies with its channel
            lies = tuple(Run(run.set, run.repeat * (channels // given)) for run in self.neurons.resolve(value.known[1]))
            rows = self._join(lies, weight.axes[0]) or ()
        else:
            # With groups a column is another input channel in each group of rows, so that it belongs to nobody: a
            # weight is active with its row alone.
            self.neurons.complete(weight.known[1])
            rows = weight.axes[0] or ()
        self._with_bias(call.given["bias"], rows)
        return (value.axes[0], rows, *((),) * taps)

    _do_conv1d = _do_conv2d = _do_conv3d = _convolved

    def _transposed(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Convolve transposed: the weight has a row for each channel of its input."""
        value, weight = self._of(call.at(0)), self._of(call.at(1))
        if value is None or weight is None or weight.shape[1] != shape[1]:
            return self._unknown(call, values, shape)
        self.neurons.complete(*value.known[2:])
        self._meet(value, 1, weight.axes[0])
        rows = weight.axes[1] or ()
        self._with_bias(call.given["bias"], rows)
        return (value.axes[0], rows, *((),) * (len(shape) - 2))

    _do_conv_transpose1d = _do_conv_transpose2d = _do_conv_transpose3d = _transposed

    def _do_embedding(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Rows are words, columns are new neurons."""
        weight, index = self._of(call.at(0)), self._of(call.at(1))
        if weight is None or index is None:
            return self._unknown(call, values, shape)
        self.neurons.complete(weight.known[0], *index.known)
        fixed = weight.fixed and index.fixed
        return (*((None if fixed else (),) * len(index.shape)), weight.axes[1])

    def _channels_normed(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        """Batch, group and instance norm, PReLU: everything they hold follows the channel."""
        value = self._of(call.at(0))
        if value is None:
            return self._unknown(call, values, shape)
        axis = value.axes[1] if len(value.axes) > 1 else None
        for argument in call.given.values():
            held = self._of(argument)
            if held is None or held.shape != (value.shape[1],):
                continue
            if held.shape != (1,):
                axis = self._join(axis, held.axes[0])
            name = self._inputs.get(argument)
            if name is not None and name not in self._parameters:
                self.statistics.add(name)
                self.axes[name] = (value.known[1],)
        return (value.axes[0], axis or (), *value.axes[2:])

    _do_batch_norm = _do_instance_norm = _do_group_norm = _do_prelu = _channels_normed

    def _do_layer_norm(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...]) -> Any:
        value = values[0]
        count = len(call.at(1))
        axes = list(value.axes)
        # Blocks are cut out of the first two axes of a tensor only.
        self.neurons.complete(*(axis or () for axis in axes[-count:][2:]))
        axes[len(axes) - count + 2 :] = [()] * max(0, count - 2)
        for argument in (call.given["weight"], call.given.get("bias")):
            held = self._of(argument)
            if held is not None and held.fixed:
                for place, axis in enumerate(held.axes[:2]):
                    mine = len(axes) - count + place
                    axes[mine] = self._join(axes[mine], axis)
        return tuple(axes)

    _do_rms_norm = _do_layer_norm

    def _recurrent(self, call: Call, values: Sequence[_Value], shape: tuple[int, ...] | None) -> Any:
        """Recurrent layers: a unit has its rows of each gate, and its columns."""
        name = call.name
        value = self._of(call.at(0))
        states = call.at(1) if isinstance(call.at(1), (list, tuple)) else [call.at(1)]
        given = [self._of(argument) for argument in call.at(2)]
        layers, both = call.given["num_layers"], call.given["bidirectional"]
        if value is None or any(each is None for each in given) or any(not s.fixed for s in map(self._of, states) if s):
            return self._unknown(call, values, shape)
        weights = [each for each in given if each is not None]
        each_layer = len(weights) // (layers * (2 if both else 1))
        if each_layer not in (2, 4):  # a projection
            return self._unknown(call, values, shape)
        below = value.known[-1]
        for layer in range(layers):
            lies: Axis = ()
            for way in range(2 if both else 1):
                start = (layer * (2 if both else 1) + way) * each_layer
                first, second, *biases = weights[start : start + each_layer]
                units = second.known[1]
                self._join(below, first.axes[1])  # of a constant nothing
                for rows in (first, second, *biases):
                    self._join(units * _RECURRENT[name], rows.axes[0])
                lies += units
            below = self.neurons.resolve(lies)
        result = (*value.known[:-1], below)
        used = {user.args[1] for user in call.node.users if user in self._needed}
        made = []
        for place, each in enumerate(call.result):
            axes: Axes = result if place == 0 else ((),) * 3
            if place in used and place > 0:
                axes = self._last_state(weights, each_layer)
            made.append(self._value(call, values, tuple(each.shape), axes))
        return made

    def _last_state(self, weights: Sequence[_Value], each_layer: int) -> Axes:
        """Return the axes of the states in which several layers or ways end: their units are one set there."""
        units, *others = (weights[place].known[1] for place in range(1, len(weights), each_layer))
        for other in others:
            units = self.neurons.unite(units, other)
        return ((), (), units)


# --- reading nodes and modules ----------------------------------------------------------------------------------------

PARAMETER = "parameter"
"""The kind of a layer that is a parameter which ``forward`` uses by itself."""

_COUNTED_BY_INPUT = {
    "multiheadattention",
    "rnn",
    "gru",
    "lstm",
    "convtranspose1d",
    "convtranspose2d",
    "convtranspose3d",
}


def _base(module: nn.Module) -> type[nn.Module] | None:
    """Return the layer of torch that a module is, or is derived from, if it has parameters of its own."""
    if next(module.parameters(), None) is None:
        return None
    for each in type(module).__mro__:
        if each.__module__.startswith("torch.nn.modules.") and each is not nn.Module:
            return None if each.__module__.endswith((".container", ".transformer")) else each
    return None


def _kind(module: nn.Module) -> str:
    base = _base(module)
    assert base is not None
    return base.__name__.lower()


def _channels(module: nn.Module | None, weight: torch.Tensor) -> int:
    """Return the entries of a layer's output, or its input's where that is counted, that one position has."""
    if isinstance(module, nn.RNNBase):
        return module.input_size
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    if isinstance(module, nn.LayerNorm):
        return math.prod(module.normalized_shape)
    return int(weight.shape[0])


def _is_depthwise(values: Sequence[_Value]) -> bool:
    return len(values) > 1 and values[0].shape[1] > 1 == values[1].shape[1]


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CHANNEL_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    nn.GroupNorm,
)


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
