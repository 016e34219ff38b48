"""A device's gated model with its gate in one ONNX graph: pFedGate, for every sample its own choice of blocks.

    gates = gating layer(x)          SN with running statistics, pooling, linear map, batch norm, sigmoid
    I     = knapsack(G)              within the device's budget, ``selection``
    y     = f(θ ⊛ M·I; x)

(arXiv:2305.02776; the method card, 4.1 to 4.4 and 4.9.) θ is that of the device's last round. Where the blocks of all
tensors are whole rows, gates scale what each layer gives of each sample, so that a batch is computed at once;
elsewhere a ``Scan`` goes through the batch and scales the weights for every sample. The knapsack is solved exactly, or,
for costs of which there would be too many sums, by the guard rule; the property ``selection`` of the file says which:
``exact``, ``greedy``, or ``fixed`` where blocks do not depend on the input: the budget is everything, or the gate does
not see the input, in which case the file is a plain model.

Normalisation of the gate's logits is part of its linear map in the file, so gates differ from PyTorch's by about 1e-7,
and samples whose two best choices are as near to each other may get the other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.reference import ReferenceEvaluator

from edge_sdk.protocol.blocks import BlockTable, Costs
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.flops import block_flops
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.masks import unpack
from export.building import Building
from export.errors import ExportError
from export.selection import LARGEST_TABLE, decisions, exact, greedy
from export.skeleton import INPUT, OUTPUT, fill

GATES = "gate/scales"
"""What the scales times the choice, M' [N, L], are called in the graph."""

MARGIN = 1e-5
"""Of two choices whose importances add up to sums less than this apart, rounding may decide."""

_EPSILON = 1e-5
_POOLED = (2, 3, 4)
"""Dimensions of inputs, channels first, that a gate may pool."""
_SAMPLES = 7
"""A number of samples by which an axis of samples is known from others."""
_TIE = 1e-9
"""Taken off importances per place, as in ``edge_sdk.protocol.blocks``."""

_ROWS = {"Conv": 1, "BatchNormalization": 1, "GroupNormalization": 1, "InstanceNormalization": 1}
"""Operators whose inputs 1 and 2 are weight and bias of their outputs' axis 1."""


def gated_model(
    skeleton: bytes,
    manifest: Manifest,
    own: Tensors,
    settings: Mapping[str, Any],
    budget: float,
    *,
    personal: Tensors | None = None,
    largest_table: int = LARGEST_TABLE,
) -> ModelProto:
    """The gated model of a device of pFedGate, for any number of samples.

    manifest: the federation's, with its table of blocks. own: the arrays of the device's state. settings: the
    method's, complete. budget: the device's, in (0, 1]. personal: the state's model, which is needed where the manifest
    has tensors that are never sent. largest_table: beyond, the choice is the guard rule's, see ``selection``. Raises
    SkeletonError, and ExportError where state, settings and manifest do not belong together or nothing fits the budget.
    """
    table = _table(manifest)
    missing = [name for name in ("model", "static") if name not in own]
    if missing:
        raise ExportError(
            f"the state has no {missing[0]!r}: it is no state of pFedGate, or its device has not trained yet; "
            f"export its personal model instead, or after its first round"
        )
    tensors = _weights(manifest, own["model"], personal)
    gate = _Gate.of(manifest, own, settings)
    costs = _costs(manifest, own, settings)
    try:
        everything = table.capacity(budget, costs) >= costs[~table.forced].sum()
    except ValueError as error:
        raise ExportError(f"{error}; or export with the budget that the device trained with") from None
    if gate.constant is not None:
        scales, importances = gate.constant
        chosen = table.select(importances.astype(np.float64), budget, costs)
        return _finished(_loaded(skeleton, manifest, _scaled(tensors, table, np.where(chosen, scales, 0.0))), "fixed")
    model = _loaded(skeleton, manifest, tensors)
    to = Building("gate/")
    importances_name, scales_name = gate.build(to, model.graph.input[0].type.tensor_type.elem_type)
    selection = "fixed"
    if not everything:
        chosen_name, selection = _choose(to, importances_name, table, costs, budget, largest_table)
        to.add("Mul", scales_name, chosen_name, output=GATES)
    else:
        to.add("Identity", scales_name, output=GATES)
    rows = _Rows.of(model, table, manifest)
    if rows is None:
        _by_sample(model.graph, to, table, manifest)
    else:
        rows.scale(model.graph, to)
    return _finished(model, selection)


def _table(manifest: Manifest) -> BlockTable:
    table = manifest.block_table
    uncut = [spec.name for spec in manifest.shared if spec.trainable and spec.name not in table.tensors]
    if uncut:
        raise ExportError(
            f"{uncut[0]}: the manifest does not say how it is cut into blocks; give the federation's manifest, which "
            f"lies in the device's state, and not the published one"
        )
    return table


def _weights(manifest: Manifest, packed: NDArray[Any], personal: Tensors | None) -> Tensors:
    """θ as the device's last round left it, and from ``personal`` what is never sent."""
    try:
        parts = unpack(manifest, np.asarray(packed, dtype=np.float32), None)
        tensors = {spec.name: np.array(part).reshape(spec.shape) for spec, _, part in parts}
    except (ProtocolError, ValueError) as error:
        raise ExportError(f"the state is one of another model: {error}; use the manifest it was trained with") from None
    for spec in manifest.kept:
        if spec.name not in tensors:
            if personal is None or spec.name not in personal:
                raise ExportError(f"{spec.name}: it is never sent; give the personal model of the state, which has it")
            tensors[spec.name] = np.asarray(personal[spec.name])
    return tensors


def _costs(manifest: Manifest, own: Tensors, settings: Mapping[str, Any]) -> Costs:
    match settings.get("cost", "parameters"):
        case "parameters":
            return manifest.block_table.sizes
        case "flops":
            return block_flops(manifest)
        case "seconds" if "nanoseconds" in own and len(own["nanoseconds"]) == len(manifest.block_table.sizes):
            return own["nanoseconds"].astype(np.int64)
    raise ExportError(
        f"budgets are a share of {settings.get('cost')!r}, and the state does not say what blocks cost; export from "
        f"the state of the device that trained"
    )


def _scaled(tensors: Tensors, table: BlockTable, gates: NDArray[Any]) -> Tensors:
    """θ ⊛ M' for good."""
    scaled = dict(tensors)
    for name, sizes in table.tensors.items():
        factors = np.repeat(gates[table.places[name]].astype(np.float32), sizes)
        scaled[name] = np.multiply(tensors[name], factors.reshape(tensors[name].shape))
    return scaled


def _loaded(skeleton: bytes, manifest: Manifest, tensors: Tensors) -> ModelProto:
    return onnx.load_model_from_string(fill(skeleton, manifest, tensors))


def _finished(model: ModelProto, selection: str) -> ModelProto:
    onnx.helper.set_model_props(model, {"selection": selection})
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise ExportError(f"the gated model is no valid ONNX model: {error}; export the static model instead") from None
    return model


def _choose(
    to: Building, importances: str, table: BlockTable, costs: Costs, budget: float, largest: int
) -> tuple[str, str]:
    """float32 [N, L], 1 where a block is on, and the rule."""
    candidates = np.flatnonzero(~table.forced)
    values = to.add("Gather", importances, to.index(candidates), axis=1)
    exactly = to.add("Sub", to.add("Cast", values, to=TensorProto.DOUBLE), to.constant(_TIE * candidates))
    capacity = table.capacity(budget, costs)
    plan = decisions(costs[candidates], capacity, largest)
    if plan is None:
        taken, rule = greedy(to, exactly, costs[candidates], capacity), "greedy"
    else:
        taken, rule = exact(to, exactly, plan, costs[candidates]), "exact"
    ahead = to.add("Pad", taken, to.whole(0, 0, 0, 1), to.constant(np.array(1, np.float32)))
    places = np.full(len(costs), len(candidates))
    places[candidates] = np.arange(len(candidates))
    return to.add("Gather", ahead, to.index(places), axis=1), rule


@dataclass(frozen=True)
class _Gate:
    """The gating layer as its tensors, for inputs of ``shape``: see ``edge_sdk.training.gating``."""

    tensors: Tensors
    shape: tuple[int, ...]
    length: int
    pool: int
    squashes: bool

    @classmethod
    def of(cls, manifest: Manifest, own: Tensors, settings: Mapping[str, Any]) -> _Gate:
        """From a device's state. Which parts there are follows from the tensors."""
        tensors = {name.removeprefix("gate:"): value for name, value in own.items() if name.startswith("gate:")}
        shape, length = manifest.input_shape, len(manifest.block_table.sizes)
        map_ = tensors.get("linear.weight")
        outputs = len(tensors.get("logits", np.zeros(0)) if map_ is None else map_)
        if outputs not in (length, 2 * length):
            raise ExportError(
                f"the state's gate has {outputs} outputs, the model {length} blocks; use state and manifest of one "
                f"federation"
            )
        pool = int(settings.get("gate_pool", 0))
        if map_ is not None:
            pools = [pool] if pool and len(shape) in _POOLED else range(1, max(shape) + 1)
            fitting = [each for each in pools if _width(shape, each) == map_.shape[1]]
            if not fitting:
                raise ExportError(
                    f"the state's gate sees {map_.shape[1]} numbers, which no pooling makes of inputs of {shape}; "
                    f"give the federation's settings"
                )
            pool = fitting[0]  # the smallest: that is how a pool is chosen where the settings leave it open
        return cls(tensors, shape, length, pool, bool(settings.get("gate_sigmoid", True)))

    @property
    def constant(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Scales and importances, [L] both, where the gate does not see the input."""
        if "logits" not in self.tensors:
            return None
        logits = np.asarray(self.tensors["logits"], dtype=np.float64)
        gates: NDArray[np.float32] = (1 / (1 + np.exp(-logits)) if self.squashes else logits).astype(np.float32)
        return gates[: self.length], gates[-self.length :]

    def build(self, to: Building, input_type: int) -> tuple[str, str]:
        """The names of importances and scales, [N, L] both."""
        seen = INPUT if input_type == TensorProto.FLOAT else to.add("Cast", INPUT, to=TensorProto.FLOAT)
        weight, bias = self._map()
        gates = to.add("Gemm", self._normalised(to, seen), to.constant(weight), to.constant(bias), transB=1)
        if self.squashes:
            gates = to.add("Sigmoid", gates)
        outputs = len(weight)
        if outputs == self.length:
            return gates, gates
        return to.slice(gates, 1, self.length, outputs), to.slice(gates, 1, 0, self.length)

    def _map(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The linear map and the batch norm behind it as one."""
        weight, bias = (self.tensors[f"linear.{part}"].astype(np.float64) for part in ("weight", "bias"))
        if "batch_norm.weight" in self.tensors:
            mean, variance, scale, shift = (
                self.tensors[f"batch_norm.{part}"].astype(np.float64)
                for part in ("running_mean", "running_var", "weight", "bias")
            )
            scale = scale / np.sqrt(variance + _EPSILON)
            weight, bias = weight * scale[:, None], (bias - mean) * scale + shift
        return weight.astype(np.float32), bias.astype(np.float32)

    def _normalised(self, to: Building, seen: str) -> str:
        """SN(x), pooled and flat, [N, d_X]."""
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
        """The factor and the summand that normalise: see ``gating.SwitchNorm``."""
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
        means, variances = [mean], [spread]
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
    """How many numbers a gate sees of an input of ``shape``."""
    if len(shape) not in _POOLED:
        return math.prod(shape)
    return math.prod([shape[0], *(math.ceil(side / pool) for side in shape[1:])])


@dataclass(frozen=True)
class _Layer:
    """A node that is linear in its weight, row by row, and adds its bias. ``ranks``: dimensions of its output."""

    weight: str
    bias: str
    axis: int
    ranks: int


class _Rows:
    """A graph in which gates scale what layers give, sample by sample."""

    def __init__(self, layers: Mapping[str, _Layer], rows: Mapping[str, NDArray[np.int64]], sizes: Mapping[str, int]):
        self._layers, self._rows, self._sizes = layers, rows, sizes

    @classmethod
    def of(cls, model: ModelProto, table: BlockTable, manifest: Manifest) -> _Rows | None:
        """None where a block cuts a row, or a node uses a tensor of the table in another way."""
        shapes = {spec.name: spec.shape for spec in manifest.shared}
        rows: dict[str, NDArray[np.int64]] = {}
        for name, blocks in table.tensors.items():
            sizes, row = np.array(blocks), math.prod(shapes[name][1:])
            if (sizes % row).any():
                return None
            place = table.places[name]
            rows[name] = np.repeat(np.arange(place.start, place.stop), sizes // row)
        outputs = _output_shapes(model)
        turned = {
            node.output[0]: node.input[0]
            for node in model.graph.node
            if node.op_type == "Transpose" and node.input[0] in rows and len(shapes[node.input[0]]) == 2
        }
        layers = {}
        for node in model.graph.node:
            used = [name for name in node.input if name in rows or name in turned]
            if not used or node.output[0] in turned or node.op_type == "Shape":
                continue
            layer = _layer(node, turned, outputs.get(node.output[0], []), shapes)
            if layer is None or {turned.get(name, name) for name in used} - {layer.weight, layer.bias}:
                return None
            layers[node.output[0]] = layer
        return cls(layers, rows, {spec.name: spec.size for spec in manifest.kept})

    def scale(self, graph: GraphProto, to: Building) -> None:
        """Do it, with the gates [N, L] that ``to`` computes."""
        nodes = list(graph.node)
        done = Building("gated/")
        for node in nodes:
            layer = self._layers.get(node.output[0])
            if layer is None:
                done.nodes.append(node)
                continue
            self._scale(node, layer, done)
        del graph.node[:]
        graph.node.extend([*to.nodes, *done.nodes])
        graph.initializer.extend([*to.initializers, *done.initializers])

    def _scale(self, node: NodeProto, layer: _Layer, to: Building) -> None:
        result, plain = node.output[0], to.name("plain")
        if node.op_type == "Add":
            (plain,) = (name for name in node.input if name != layer.bias)
        else:
            node.output[0] = plain
            if layer.bias and node.op_type in ("Conv", "Gemm", "LayerNormalization"):
                del node.input[2]
            elif layer.bias:
                node.input[2] = to.constant(np.zeros(self._sizes[layer.weight], np.float32))
            to.nodes.append(node)
        weighs, adds = layer.weight in self._rows, bool(layer.bias)
        if weighs:
            gates = self._gates(layer.weight, layer, to)
            plain = to.add("Mul", plain, gates, output=None if adds else result)
        if adds:
            summand = layer.bias
            if summand in self._rows:
                gates = to.add("Gather", GATES, to.index(self._rows[summand]), axis=1)
                summand = to.add("Mul", gates, summand)
                summand = self._placed(summand, layer, to)
            else:
                wide = [1] * layer.ranks
                wide[layer.axis] = -1
                summand = to.reshape(summand, wide)
            to.add("Add", plain, summand, output=result)

    def _gates(self, name: str, layer: _Layer, to: Building) -> str:
        """Gates of the rows of a tensor, of the dimensions of the layer's output."""
        return self._placed(to.add("Gather", GATES, to.index(self._rows[name]), axis=1), layer, to)

    @staticmethod
    def _placed(values: str, layer: _Layer, to: Building) -> str:
        """[N, rows] as [N, .., rows, ..]."""
        axes = [axis for axis in range(1, layer.ranks) if axis != layer.axis]
        return to.add("Unsqueeze", values, to.whole(*axes)) if axes else values


def _layer(
    node: NodeProto, turned: Mapping[str, str], output: list[int | None], shapes: Mapping[str, tuple[int, ...]]
) -> _Layer | None:
    """How ``node`` uses its weights; None where rows of them are not rows of what it gives, one for each sample."""
    ranks = len(output)
    if ranks < 2 or output[0] != _SAMPLES:
        return None
    weight = node.input[1] if len(node.input) > 1 else ""
    bias = node.input[2] if len(node.input) > 2 else ""
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    kind = node.op_type
    if kind in _ROWS:
        return _Layer(weight, bias, 1, ranks)
    if kind == "LayerNormalization" and len(shapes.get(weight, ())) == 1:
        return _Layer(weight, bias, ranks - 1, ranks)
    plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    if kind == "Gemm" and attributes.get("transB") and not attributes.get("transA") and plain:
        return _Layer(weight, bias, 1, ranks)
    if kind == "MatMul" and weight in turned:
        return _Layer(turned[weight], "", ranks - 1, ranks)
    if kind == "Add":
        for name in node.input:
            if len(shapes.get(name, ())) == 1 and node.input[0] != node.input[1]:
                return _Layer("", name, ranks - 1, ranks)
    return None


def _output_shapes(model: ModelProto) -> dict[str, list[int | None]]:
    """Value -> its shape for a batch of _SAMPLES; None for lengths that cannot be told."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = _SAMPLES
    for node in fixed.graph.node:
        if node.op_type == "GroupNormalization":  # ONNX infers no shapes for it
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
    shapes = _inferred(fixed)
    while _fold_shapes(fixed.graph, shapes):
        shapes = _inferred(fixed)
    return shapes


def _inferred(model: ModelProto) -> dict[str, list[int | None]]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def _fold_shapes(graph: GraphProto, shapes: Mapping[str, list[int | None]]) -> bool:
    """Make constants of lengths that are known, and of what is computed of them: ONNX's own inference gives up there.
    Whether there was anything to do."""
    lengths = {each.name: each for each in graph.initializer if each.data_type == TensorProto.INT64}
    known: dict[str, NDArray[Any]] = {name: onnx.numpy_helper.to_array(each) for name, each in lengths.items()}
    folded = []
    for node in graph.node:
        if node.op_type == "Shape":
            shape = [length for length in shapes.get(node.input[0], [None]) if length is not None]
            if len(shape) < len(shapes.get(node.input[0], [None])):
                continue
            feeds = {node.input[0]: np.broadcast_to(np.float32(0), shape)}
        elif all(name in known for name in node.input if name):
            feeds = {name: known[name] for name in node.input if name}
        else:
            continue
        results = [np.asarray(result) for result in ReferenceEvaluator(node).run(None, feeds)]
        if all(result.dtype == np.int64 and result.size < 100 for result in results):
            known |= dict(zip(node.output, results, strict=True))
            folded.append(node)
    for node in folded:
        graph.node.remove(node)
        graph.initializer.extend(onnx.numpy_helper.from_array(known[name], name) for name in node.output)
    return bool(folded)


def _by_sample(graph: GraphProto, to: Building, table: BlockTable, manifest: Manifest) -> None:
    """Sample after sample through the whole graph, with weights scaled by that sample's gates."""
    inside = Building("sample/")
    sample, gates = inside.name("input"), inside.name("gates")
    names = {INPUT: inside.add("Unsqueeze", sample, inside.whole(0))}
    shapes = {spec.name: spec.shape for spec in manifest.shared}
    for name, sizes in table.tensors.items():
        place = table.places[name]
        own = inside.slice(gates, 0, place.start, place.stop)
        if len(sizes) > 1:
            flat = inside.reshape(name, (-1,))
            ends = list(accumulate(sizes))
            runs = [inside.slice(flat, 0, end - size, end) for end, size in zip(ends, sizes, strict=True)]
            factors = inside.several("Split", own, inside.whole(*[1] * len(sizes)), outputs=len(sizes), axis=0)
            scaled = [inside.add("Mul", run, factor) for run, factor in zip(runs, factors, strict=True)]
            names[name] = inside.reshape(inside.add("Concat", *scaled, axis=0), shapes[name])
        else:
            names[name] = inside.add("Mul", name, own)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        inside.nodes.append(node)
    result = inside.add("Squeeze", OUTPUT, inside.whole(0))
    body = GraphProto(name="sample", node=inside.nodes, initializer=inside.initializers)
    body.input.append(_sample_of(graph.input[0], sample))
    body.input.append(onnx.helper.make_tensor_value_info(gates, TensorProto.FLOAT, [len(table.sizes)]))
    body.output.append(_sample_of(graph.output[0], result))
    for node in body.node:  # names of inner values may not be those of outer ones
        node.output[:] = [f"sample/{OUTPUT}" if name == OUTPUT else name for name in node.output]
        node.input[:] = [f"sample/{OUTPUT}" if name == OUTPUT else name for name in node.input]
    del graph.node[:]
    graph.node.extend(to.nodes)
    graph.initializer.extend(to.initializers)
    graph.node.append(onnx.helper.make_node("Scan", [INPUT, GATES], [OUTPUT], "samples", body=body, num_scan_inputs=2))


def _sample_of(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    """The type of one sample of ``value``, as a value of its own."""
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim][1:]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, shape)
