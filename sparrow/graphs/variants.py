"""Variants of published graphs: steps with other losses, batch statistics, likelihoods under a mixture.

A published step names the model's ``output`` and its ``error``, the gradient of the loss by it. The nodes between them
compute the task's loss; the nodes that read the error are the model's backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import onnx
from onnx import TensorProto, helper

from ..protocol.mixture import WEIGHTS, name_in
from .editor import Editor, loss_part, name_outputs
from .graph import again
from .mixture import RESPONSIBILITIES

ENDS = ("loss", "error")


def scale_outputs(step: bytes) -> bytes:
    """Return the step with the loss of the output times an input ``scale``, which is broadcast."""
    proto = onnx.load_from_string(step)
    editor = Editor(proto)
    names = {"output": editor.fresh()}
    copies = []
    # Other readers of the loss's values belong to the model's backward pass.
    for node in loss_part(editor.graph, ENDS):
        names |= {name: editor.fresh() for name in node.output if name}
        read, made = ([names.get(name, name) for name in values] for values in (node.input, node.output))
        copies.append(again(node, read, made))
    ends = _free_ends(editor)
    loss, error = (names.get(name, ends[name]) for name in ENDS)
    editor.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, None))
    editor.add("Mul", "output", "scale", output=names["output"])
    editor.graph.node.extend(copies)
    editor.add("Identity", loss, output="loss")
    editor.add("Mul", error, "scale", output="error")
    return _finished(proto, editor)


def distil(step: bytes, weight: float, temperature: float) -> bytes:
    """Return a student's step with the loss (1 - α) loss + α T² KL(softmax(z' / T) ‖ softmax(z / T)).

    z are the outputs, z' an input ``teacher`` of their shape, [N, classes, ...]. The gradient of the mean divergence by
    z is (softmax(z / T) - softmax(z' / T)) / T, divided by the number of terms.
    """
    proto = onnx.load_from_string(step)
    editor = Editor(proto)
    ends = _free_ends(editor)
    add = editor.add
    output = next(each for each in editor.graph.output if each.name == "output")
    teacher = deepcopy(output)
    teacher.name = "teacher"
    editor.graph.input.append(teacher)

    cool = editor.number(1 / temperature)
    wanted, found = (add("LogSoftmax", add("Mul", each, cool), axis=1) for each in ("teacher", "output"))
    right = add("Exp", wanted)
    terms = add("ReduceSum", add("Mul", right, add("Sub", wanted, found)), editor.integers([1]))
    divergence = add("ReduceMean", terms, keepdims=0)
    apart = add("Div", add("Sub", add("Exp", found), right), add("Cast", add("Size", terms), to=TensorProto.FLOAT))
    taught = {"loss": (divergence, weight * temperature**2), "error": (apart, weight * temperature)}
    for end, (value, factor) in taught.items():
        task = [add("Mul", ends[end], editor.number(1 - weight))] if weight < 1 else []
        own = add("Mul", value, editor.number(factor))
        add("Add" if task else "Identity", own, *task, output=end)
    return _finished(proto, editor)


def weigh(step: bytes) -> bytes:
    """Return the step of a mixture whose ``responsibilities`` [N, M] are an input."""
    proto = onnx.load_from_string(step)
    editor = Editor(proto)
    maker = editor.maker(RESPONSIBILITIES)
    shape = [None, _components(proto)]
    if maker is not None:
        maker.output[:] = [editor.fresh()]
    editor.graph.input.append(helper.make_tensor_value_info(RESPONSIBILITIES, TensorProto.FLOAT, shape))
    return _finished(proto, editor)


def likelihoods(evaluation: bytes) -> bytes:
    """Return the graph of a mixture's ``likelihoods`` [N, M]: ln p(y | x) of each sample under each component."""
    proto = onnx.load_from_string(evaluation)
    editor = Editor(proto)
    add = editor.add
    target = next(each for each in editor.graph.input if each.name == "target")

    places = add("Unsqueeze", add("Cast", target.name, to=TensorProto.INT64), editor.integers([1]))
    found = [
        add("GatherElements", add("LogSoftmax", name_in(each, "output"), axis=1), places, axis=1)
        for each in range(_components(proto))
    ]
    add("Concat", *found, output="likelihoods", axis=1)
    del editor.graph.output[:]
    editor.graph.output.append(helper.make_tensor_value_info("likelihoods", TensorProto.FLOAT, None))
    return _finished(proto, editor)


def _components(proto: onnx.ModelProto) -> int:
    """Return the number of components of a mixture's graph."""
    (weights,) = (each for each in proto.graph.input if each.name == WEIGHTS)
    return int(weights.type.tensor_type.shape.dim[0].dim_value)


def batch_statistics(evaluation: bytes) -> bytes | None:
    """Return the graph of a model's batch statistics: evaluation mode, but norms by batch; None without batch norms.

    Its outputs are named ``PLACE:NAME`` by the tensors that hold the statistics.
    """
    proto = onnx.load_from_string(evaluation)
    editor = Editor(proto)
    graph = proto.graph
    read = {each.name for each in graph.input}
    del graph.output[:]
    for place, norm in enumerate(list(editor.of_type("BatchNormalization"))):
        if not read.issuperset(norm.input[3:5]):
            continue
        add = editor.before(norm)
        x = norm.input[0]
        axes = editor.integers([axis for axis in range(len(editor.shape(x) or ())) if axis != 1])
        mean = add.ReduceMean(x, axes)
        spread = add.Sub(x, mean)
        spread = add.ReduceMean(add.Mul(spread, spread), axes, keepdims=0)
        size = add.Div(*(add.Cast(add.Size(each), to=TensorProto.FLOAT) for each in (x, mean)))
        unbiased = add.Mul(spread, add.Div(size, add.Sub(size, editor.number(1))))
        mean = add.Reshape(mean, editor.integers([-1]))
        for name, value in zip(norm.input[3:5], (mean, unbiased), strict=True):
            graph.output.append(helper.make_tensor_value_info(f"{place}:{name}", TensorProto.FLOAT, None))
            add.insert(helper.make_node("Identity", [value], [f"{place}:{name}"]))
        norm.input[3] = mean
        norm.input[4] = spread
    return _finished(proto, editor) if graph.output else None


def judge_outputs(model: bytes) -> bytes:
    """Return the part of an evaluation after the outputs: output [N, ...] and target in, loss out."""
    proto = onnx.load_from_string(model)
    name_outputs(proto.graph)
    editor = Editor(proto)
    graph = proto.graph
    (output,) = [each for each in graph.output if each.name == "output"]
    graph.input.append(output)
    graph.output.remove(output)
    maker = editor.maker("output")
    if maker is not None:
        maker.output[:] = [editor.fresh() if each == "output" else each for each in maker.output]
    editor.remove_unread()
    return bytes(proto.SerializeToString(deterministic=True))


def _free_ends(editor: Editor) -> Mapping[str, str]:
    """Rename loss and error, to free the names that the backward pass reads."""
    names = {name: editor.fresh() for name in ENDS}
    part = loss_part(editor.graph, ENDS)
    makers = [maker for maker in map(editor.maker, ENDS) if maker is not None]
    for node in part:
        node.input[:] = [names.get(name, name) for name in node.input]
    for node in makers:
        node.output[:] = [names.get(name, name) for name in node.output]
    return names


def _finished(proto: onnx.ModelProto, editor: Editor) -> bytes:
    editor.sort()
    editor.remove_unread()
    return bytes(proto.SerializeToString(deterministic=True))
