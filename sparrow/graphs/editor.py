"""Editor of a graph: its values, constants and shapes, and the clean-up after changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .graph import drop_unused_in_place, set_nodes_in_place


def name_outputs(graph: onnx.GraphProto) -> None:
    """Rename values whose copies are outputs of the graph, so that they replace the copies."""
    # These are an evaluation's output and loss if the training step computes the same values.
    outputs = {each.name for each in graph.output}
    made = {name for node in graph.node for name in node.output}
    for node in [each for each in graph.node if each.op_type == "Identity" and each.output[0] in outputs]:
        copied = node.input[0]
        name = node.output[0]
        if copied in outputs or copied not in made:
            continue
        graph.node.remove(node)
        for other in graph.node:
            other.input[:] = [name if read == copied else read for read in other.input]
            other.output[:] = [name if written == copied else written for written in other.output]
        for info in [each for each in graph.value_info if each.name == copied]:
            graph.value_info.remove(info)


def loss_part(graph: onnx.GraphProto, ends: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes, in order, between the model's output and ``ends``, the loss and its gradient."""
    behind = {"output"}
    reached = []
    for node in graph.node:
        if behind.intersection(node.input):
            behind.update(node.output)
            reached.append(node)
    wanted = set(ends)
    part = []
    for node in reversed(reached):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            part.append(node)
    return part[::-1]


class Editor:
    """A mutable graph: producers and consumers of each value, constants and known shapes.

    ``shape`` has None for an axis of unknown length.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.graph = proto.graph
        made = [name for node in self.graph.node for name in node.output]
        made += [tensor.name for tensor in self.graph.initializer]
        numbers = [name.partition(":")[2] for name in made if name.startswith(("value:", "constant:"))]
        # Continue the numbers of an earlier editor.
        self._count = max((int(number) for number in numbers if number.isdecimal()), default=0)
        inferred = onnx.shape_inference.infer_shapes(proto).graph
        self._shapes = {
            info.name: tuple(
                each.dim_value if each.HasField("dim_value") else None for each in info.type.tensor_type.shape.dim
            )
            for info in (*inferred.value_info, *inferred.input, *inferred.output)
            if info.type.tensor_type.HasField("shape")
        }
        self._types = {
            info.name: helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            for info in (*inferred.value_info, *inferred.input, *inferred.output)
        }
        self._constants: dict[str, Any] = {each.name: numpy_helper.to_array(each) for each in self.graph.initializer}
        for name, array in self._constants.items():
            self._shapes[name] = array.shape
            self._types[name] = array.dtype

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Return the shape of a value, or None if unknown."""
        return self._shapes.get(name)

    def dtype(self, name: str) -> Any:
        """Return the numpy type of a value's entries."""
        return self._types[name]

    def know(self, name: str, shape: Sequence[int | None]) -> None:
        """Record the shape of a new value."""
        self._shapes[name] = tuple(shape)

    def constant(self, name: str) -> Any:
        """Return the array of a constant, or None."""
        return self._constants.get(name)

    def maker(self, name: str) -> onnx.NodeProto | None:
        """Return the node that makes a value."""
        return next((node for node in self.graph.node if name in node.output), None)

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return [node for node in self.graph.node if name in node.input]

    def is_output(self, name: str) -> bool:
        """Return whether a value is an output of the graph."""
        return any(output.name == name for output in self.graph.output)

    def of_type(self, *kinds: str) -> Iterator[onnx.NodeProto]:
        """Yield the nodes with one of these operators; the graph may change meanwhile."""
        yield from [node for node in self.graph.node if node.op_type in kinds]

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of a new constant, int64 [n]."""
        return self.keep(np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Return the name of a new constant, float32 []."""
        return self.keep(np.array(value, np.float32))

    def keep(self, array: Any) -> str:
        """Return the name of a new constant."""
        self._count += 1
        name = f"constant:{self._count}"
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        self._constants[name] = array
        return name

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node, and return the name of its output."""
        name = output or self.fresh()
        self.graph.node.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def sort(self) -> None:
        """Sort nodes after the nodes whose outputs they read; keep the order otherwise."""
        nodes = list(self.graph.node)
        makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
        done = set[int]()
        ordered = list[onnx.NodeProto]()

        def put(place: int) -> None:
            if place in done:
                return
            done.add(place)
            for name in nodes[place].input:
                if name in makers:
                    put(makers[name])
            ordered.append(nodes[place])

        for place in range(len(nodes)):
            put(place)
        set_nodes_in_place(self.graph, ordered)

    def before(self, node: onnx.NodeProto) -> Builder:
        """Return a builder of nodes before this one."""
        return Builder(self, node)

    def fresh(self) -> str:
        """Return a new name of a value."""
        self._count += 1
        return f"value:{self._count}"

    def read_instead(self, name: str, other: str) -> None:
        """Replace ``name`` by ``other`` in all readers; an output of the graph keeps its name."""
        if self.is_output(name):
            maker = self.maker(other)
            if maker is None or self.is_output(other):
                self.graph.node.append(helper.make_node("Identity", [other], [name]))
            else:
                self.rename(other, name)
            return
        for node in self.readers(name):
            node.input[:] = [other if read == name else read for read in node.input]

    def rename(self, name: str, new: str) -> None:
        """Rename a value everywhere."""
        for info in (*self.graph.input, *self.graph.output, *self.graph.value_info):
            info.name = new if info.name == name else info.name
        for node in self.graph.node:
            node.input[:] = [new if read == name else read for read in node.input]
            node.output[:] = [new if made == name else made for made in node.output]

    def replace(self, node: onnx.NodeProto, values: Sequence[str]) -> None:
        """Remove a node; its outputs' readers read ``values`` instead."""
        outputs = list(node.output)
        node.output[:] = [self.fresh() for _ in outputs]
        for output, value in zip(outputs, values, strict=False):
            if value:
                if output in self._shapes:
                    self._shapes.setdefault(value, self._shapes[output])
                self.read_instead(output, value)
        self.graph.node.remove(node)

    def remove_unread(self) -> None:
        """Remove nodes, inputs and descriptions of values that no output needs."""
        drop_unused_in_place(self.graph)
        read = {name for node in self.graph.node for name in node.input} | {each.name for each in self.graph.output}
        made = {output for node in self.graph.node for output in node.output}
        for listed, there in ((self.graph.input, read), (self.graph.value_info, made)):
            for info in [info for info in listed if info.name not in there]:
                listed.remove(info)


class Builder:
    """Inserts nodes before a given one: ``builder.Transpose(x, perm=[1, 0])`` returns the name of its output."""

    def __init__(self, editor: Editor, before: onnx.NodeProto) -> None:
        self._editor = editor
        self._place = list(editor.graph.node).index(before)

    def insert(self, node: onnx.NodeProto) -> None:
        """Insert a node."""
        self._editor.graph.node.insert(self._place, node)
        self._place += 1

    def __getattr__(self, kind: str) -> Any:
        def add(*inputs: str, **attributes: Any) -> str:
            output = self._editor.fresh()
            self.insert(helper.make_node(kind, list(inputs), [output], **attributes))
            return output

        return add
