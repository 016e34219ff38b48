"""Hessian-vector products: the derivative of a step's gradients along a direction.

Beside each value v of the step, which computes the gradient g(w), the new graph computes the tangent dv/dε of
v(w + ε d), node by node from the weights on (forward mode), so that

    flow:NAME = d/dε g(w + ε d) = H d         for the input d, named along:NAME, of each requested weight

exactly. At a kink of a function the result is the derivative of the current piece. Finite differences of gradients are
inaccurate, because hundreds of activations cross kinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from .editor import Editor
from .errors import NoCurvature
from .graph import again, attribute

ALONG = "along:"
FLOW = "flow:"
GRADIENT = "grad:"

STILL = frozenset(
    [
        "And",
        "Ceil",
        "Constant",
        "ConstantOfShape",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Not",
        "OneHot",
        "Or",
        "Round",
        "Shape",
        "Sign",
        "Size",
    ]
)
"""Operators whose results are piecewise constant."""

LINEAR = frozenset(
    [
        "AveragePool",
        "Cast",
        "Expand",
        "Gather",
        "GatherElements",
        "GatherND",
        "GlobalAveragePool",
        "Identity",
        "MaxUnpool",
        "Neg",
        "ReduceMean",
        "ReduceSum",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Operators that are linear in the first input; other inputs, such as an index, have no tangent."""

PRODUCTS = frozenset(["Conv", "ConvTranspose", "Gemm", "MatMul", "Mul"])


def flow_graph(step: bytes, names: Collection[str]) -> bytes:
    """Return the graph of H d for the weights ``names``. Raises NoCurvature if an operator has no second derivative."""
    proto = onnx.load_from_string(step)
    graph = proto.graph
    tangents = Tangents(Editor(proto), {name: ALONG + name for name in names})
    inputs = {each.name: each for each in graph.input}
    for node in list(graph.node):
        tangents.add(node)
    made = {each.name: tangents.of.get(each.name) for each in graph.output if each.name.startswith(GRADIENT)}
    del graph.output[:]
    for name in names:
        found = made.get(GRADIENT + name)
        if name not in inputs or found is None:
            continue
        shape = [dim.dim_value for dim in inputs[name].type.tensor_type.shape.dim]
        graph.input.append(helper.make_tensor_value_info(ALONG + name, TensorProto.FLOAT, shape))
        graph.output.append(helper.make_tensor_value_info(FLOW + name, TensorProto.FLOAT, shape))
        graph.node.append(helper.make_node("Identity", [found], [FLOW + name]))
    tangents.editor.remove_unread()
    return bytes(proto.SerializeToString(deterministic=True))


class Tangents:
    """Builder of tangents in a graph. of: value -> its tangent, for values that depend on the weights."""

    def __init__(self, editor: Editor, of: dict[str, str]) -> None:
        self.editor = editor
        self.of = of
        self.make = editor.add
        self.number = editor.number

    def add(self, node: onnx.NodeProto) -> None:
        """Add the tangents of a node's outputs."""
        moving = [place for place, name in enumerate(node.input) if name in self.of]
        if not moving or node.op_type in STILL:
            return
        rule = RULES.get(node.op_type)
        made = None if rule is None or node.domain else rule(self, node, moving)
        if made is None:
            raise NoCurvature(f"{node.op_type} has no second derivative with ONNX Runtime: join with --engine torch")
        self.of |= {name: tangent for name, tangent in zip(node.output, made, strict=False) if name}

    def again(self, node: onnx.NodeProto, inputs: Sequence[str]) -> list[str]:
        """Add a node of the same kind with other inputs, and return its outputs."""
        copy = again(node, inputs, [self.editor.fresh() for _ in node.output])
        self.editor.graph.node.append(copy)
        return list(copy.output)

    def sum(self, terms: Sequence[str]) -> str:
        """Return the sum of values of equal shape."""
        total, *others = terms
        for term in others:
            total = self.make("Add", total, term)
        return total

    def whole(self, value: str) -> str:
        """Return the tangent of a value; zeros if it does not depend on the weights."""
        if value in self.of:
            return self.of[value]
        zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
        return self.make("ConstantOfShape", self.make("Shape", value), value=zero)

    def spread(self, tangent: str, like: str, source: str) -> str:
        """Return the tangent of ``source``, broadcast to the shape of another value."""
        if self.editor.shape(source) is not None and self.editor.shape(source) == self.editor.shape(like):
            return tangent
        return self.make("Expand", tangent, self.make("Shape", like))


Rule = Callable[[Tangents, onnx.NodeProto, Sequence[int]], "list[str] | None"]
"""(tangents, node, inputs with tangents) -> tangents of the outputs; None if there is no rule."""


def _linear(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    if moving != [0]:
        return None
    if node.op_type == "Cast" and attribute(node, "to", 0) != TensorProto.FLOAT:
        return []
    return to.again(node, [to.of[node.input[0]], *node.input[1:]])


def _sum(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    terms = []
    for place in moving:
        tangent = to.spread(to.of[node.input[place]], node.output[0], node.input[place])
        terms.append(to.make("Neg", tangent) if node.op_type == "Sub" and place == 1 else tangent)
    return [to.sum(terms)]


def _product(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    """Apply (ab)' = a'b + ab', and add the tangent of a bias."""
    terms = []
    for place in moving:
        if place < 2:
            inputs = list(node.input[:2])
            inputs[place] = to.of[inputs[place]]
            terms.append(to.again(node, inputs)[0])
    if 2 in moving:
        tangent = to.of[node.input[2]]
        axes = len(to.editor.shape(node.output[0]) or ())
        if node.op_type != "Gemm":
            tangent = to.make("Reshape", tangent, to.editor.integers([1, -1, *[1] * (axes - 2)]))
        elif attribute(node, "beta", 1.0) != 1:
            return None
        terms.append(to.make("Expand", tangent, to.make("Shape", node.output[0])))
    return [to.sum(terms)]


def _quotient(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    """Apply (a/b)' = (a' - (a/b) b') / b."""
    a, b = node.input
    terms = []
    if 0 in moving:
        terms.append(to.spread(to.of[a], node.output[0], a))
    if 1 in moving:
        terms.append(to.make("Neg", to.make("Mul", node.output[0], to.of[b])))
    return [to.make("Div", to.sum(terms), b)]


def _choice(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    condition, *values = node.input
    return [to.make("Where", condition, *(to.spread(to.whole(each), node.output[0], each) for each in values))]


def _extremum(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    if len(node.input) != 2:
        return None
    first = to.make("Equal", node.input[0], node.output[0])
    return [to.make("Where", first, *(to.spread(to.whole(each), node.output[0], each) for each in node.input))]


def _highest(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    """Return the tangent of the maximum along an axis; the mean for equal values."""
    if moving != [0] or not attribute(node, "keepdims", 1):
        return None
    there = to.make("Cast", to.make("Equal", node.input[0], node.output[0]), to=TensorProto.FLOAT)
    parts = (to.make("Mul", there, to.of[node.input[0]]), there)
    return [to.make("Div", *(to.make("ReduceSum", part, *node.input[1:]) for part in parts))]


def _pool(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    """Gather the tangents at the maxima."""
    node.output[:] = [node.output[0], node.output[1] if len(node.output) > 1 else to.editor.fresh()]
    flat = to.make("Reshape", to.of[node.input[0]], to.editor.integers([-1]))
    return [to.make("Gather", flat, node.output[1])]


def _scatter(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    data, index, updates = node.input
    if attribute(node, "reduction", b"none") not in (b"none", b"add"):
        return None
    return to.again(node, [to.whole(data), index, to.whole(updates)])


def _concat(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    return to.again(node, [to.whole(name) for name in node.input])


def _pad(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    given = [to.of[node.input[0]], node.input[1], "", *node.input[3:]]
    return to.again(node, given if len(given) > 3 else given[:2])


def _softmax(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    """Apply s' = s (x' - Σ s x'), and log s' = x' - Σ s x'."""
    tangent = to.of[node.input[0]]
    answer = node.output[0]
    share = to.make("Exp", answer) if node.op_type == "LogSoftmax" else answer
    axis = to.editor.integers([attribute(node, "axis", -1)])
    rest = to.make("Sub", tangent, to.make("ReduceSum", to.make("Mul", share, tangent), axis))
    return [rest if node.op_type == "LogSoftmax" else to.make("Mul", share, rest)]


def _power(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    x, exponent = node.input
    if moving != [0]:
        return None
    kind = to.editor.dtype(exponent)
    less = to.make("Pow", x, to.make("Sub", exponent, to.editor.keep(np.array(1, kind))))
    slope = to.make("Mul", less, to.make("Cast", exponent, to=TensorProto.FLOAT))
    return [to.make("Mul", slope, to.of[x])]


def _by(slope: Callable[[Tangents, str, str], str]) -> Rule:
    """Return the rule of a function of one value, f' = slope(x, f) x'."""

    def rule(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
        return [to.make("Mul", slope(to, node.input[0], node.output[0]), to.of[node.input[0]])]

    return rule


def _where(*inside: tuple[str, float]) -> Rule:
    """Return the rule of a function that passes values if all comparisons hold, and is otherwise constant."""

    def rule(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
        x = node.input[0]
        zero = to.number(0)
        tangent = to.of[x]
        for kind, bound in inside:
            tangent = to.make("Where", to.make(kind, x, to.number(bound)), tangent, zero)
        return [tangent]

    return rule


def _clip(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    x, *bounds = node.input
    tangent = to.of[x]
    for kind, bound in zip(("Greater", "Less"), bounds, strict=False):
        if bound:
            tangent = to.make("Where", to.make(kind, x, bound), tangent, to.number(0))
    return [tangent] if moving == [0] else None


def _leaky(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    """Multiply by the slope; below zero it is α for LeakyRelu, and f + α for Elu."""
    x = node.input[0]
    alpha = {"LeakyRelu": 0.01, "Elu": 1.0}[node.op_type]
    below = to.number(attribute(node, "alpha", alpha))
    if node.op_type == "Elu":
        below = to.make("Add", node.output[0], below)
    slope = to.make("Where", to.make("Greater", x, to.number(0)), to.number(1), below)
    return [to.make("Mul", slope, to.of[x])]


def _gaussian(to: Tangents, x: str, scale: float, width: float) -> str:
    """Return scale · exp(-x² / width)."""
    return to.make("Mul", to.number(scale), to.make("Exp", to.make("Mul", to.make("Mul", x, x), to.number(-1 / width))))


def _gelu(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str] | None:
    """Multiply by Φ(x) + x φ(x)."""
    if attribute(node, "approximate", b"none") != b"none":
        return None
    x = node.input[0]
    error = to.make("Erf", to.make("Mul", x, to.number(math.sqrt(0.5))))
    share = to.make("Mul", to.make("Add", error, to.number(1)), to.number(0.5))
    slope = to.make("Add", share, to.make("Mul", x, _gaussian(to, x, 1 / math.sqrt(2 * math.pi), 2)))
    return [to.make("Mul", slope, to.of[x])]


def _hard_swish(to: Tangents, node: onnx.NodeProto, moving: Sequence[int]) -> list[str]:
    """Multiply by 0 below -3, 1 above 3, and x / 3 + 1 / 2 between."""
    x = node.input[0]
    zero = to.number(0)
    one = to.number(1)
    slope = to.make("Add", to.make("Mul", x, to.number(1 / 3)), to.number(0.5))
    slope = to.make("Where", to.make("Less", x, to.number(3)), slope, one)
    return [to.make("Mul", to.make("Where", to.make("Greater", x, to.number(-3)), slope, zero), to.of[x])]


def _logistic(to: Tangents, x: str, y: str) -> str:
    return to.make("Mul", y, to.make("Sub", to.number(1), y))


RULES: dict[str, Rule] = {
    **dict.fromkeys(LINEAR, _linear),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(("Add", "Sub"), _sum),
    **dict.fromkeys(("Max", "Min"), _extremum),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _scatter),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(("LeakyRelu", "Elu"), _leaky),
    "Div": _quotient,
    "Where": _choice,
    "ReduceMax": _highest,
    "MaxPool": _pool,
    "Concat": _concat,
    "Pad": _pad,
    "Pow": _power,
    "Clip": _clip,
    "Relu": _where(("Greater", 0)),
    "Gelu": _gelu,
    "HardSwish": _hard_swish,
    "Abs": _by(lambda to, x, y: to.make("Sign", x)),
    "Cos": _by(lambda to, x, y: to.make("Neg", to.make("Sin", x))),
    "Erf": _by(lambda to, x, y: _gaussian(to, x, 2 / math.sqrt(math.pi), 1)),
    "Exp": _by(lambda to, x, y: y),
    "Log": _by(lambda to, x, y: to.make("Reciprocal", x)),
    "Reciprocal": _by(lambda to, x, y: to.make("Neg", to.make("Mul", y, y))),
    "Sigmoid": _by(_logistic),
    "Sin": _by(lambda to, x, y: to.make("Cos", x)),
    "Softplus": _by(lambda to, x, y: to.make("Sigmoid", x)),
    "Sqrt": _by(lambda to, x, y: to.make("Div", to.number(0.5), y)),
    "Tanh": _by(lambda to, x, y: to.make("Sub", to.number(1), to.make("Mul", y, y))),
}
