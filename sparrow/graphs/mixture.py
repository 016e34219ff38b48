"""The graphs of a mixture, from those of one model (``sparrow.protocol.mixture``).

The nodes of the forward pass, and of a training step's backward pass, are repeated for each component. Added are

    output             ln Σ_m π_m softmax(z_m), of the components' outputs z_m
    loss               the task's own, of this output
    responsibilities   [N, M]: r_m = π_m p_m(y) / Σ_m' π_m' p_m'(y), by which each sample's error in component m is
                       multiplied

so that a step has the gradients of EM's M-step. All components share a model's random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TypeVar

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from ..protocol.manifest import GraphName, Manifest
from ..protocol.mixture import SMALLEST_WEIGHT, WEIGHTS, name_in, names_in
from .bounds import check_fields
from .building import Building
from .editor import loss_part, name_outputs
from .errors import SkeletonError
from .graph import again
from .skeleton import OUTPUT, check_structure, parse

RESPONSIBILITIES = "responsibilities"
LOSS = "loss"
ERROR = "error"
TARGET = "target"
_OF_TENSORS = ("grad:", "new:")

MIXED: tuple[GraphName, ...] = ("skeleton", "step", "evaluation")
"""Graphs that a mixture replaces."""

Rename = Callable[[str], str]
Named = TypeVar("Named", ValueInfoProto, TensorProto)


def mix(graph: bytes, manifest: Manifest, components: int) -> bytes:
    """Return a mixture's skeleton, evaluation or training step from that of one model.

    manifest: the one model's. Raises SkeletonError for an invalid graph, and for a step whose targets are not classes.
    """
    check_fields(graph)
    model = parse(graph)
    check_structure(model)
    name_outputs(model.graph)
    return _Mixing(model, manifest, components).mixed()


def mix_all(graphs: Mapping[GraphName, bytes], manifest: Manifest, components: int) -> dict[GraphName, bytes]:
    """Return the mixture's version of the graphs in ``MIXED``. Raises as ``mix``."""
    return {name: mix(graphs[name], manifest, components) for name in MIXED if name in graphs}


class _Mixing:
    def __init__(self, model: ModelProto, manifest: Manifest, components: int) -> None:
        self._model = model
        self._graph = model.graph
        self._components = range(components)
        (self._classes,) = manifest.output_shape
        self._names = [names_in(each, manifest) for each in self._components]
        self._tensors = self._names[0].keys()
        held = {tensor.name for tensor in self._graph.initializer}
        self._constants = held - self._tensors
        self._given = {each.name for each in self._graph.input} - self._tensors - held
        self._ends = {each.name for each in self._graph.output} & {LOSS, ERROR}
        self._add = Building("mixture.")

    def mixed(self) -> bytes:
        part = loss_part(self._graph, self._ends) if self._ends else []
        backward = _behind(self._graph, ERROR, part) if ERROR in self._ends else []
        late = {name for node in backward for name in node.output}
        forward = [node for node in self._graph.node if late.isdisjoint(node.output)]
        nodes = [_copy(node, self._of(each)) for each in self._components for node in forward]
        terms = self._output()
        if ERROR in self._ends:
            self._weigh(terms)
        nodes += self._add.nodes
        nodes += [_copy(node, self._of_mixture(part)) for node in part]
        for each in self._components:
            nodes += [_copy(node, self._weighed(each)) for node in backward]
        self._write(nodes)
        return bytes(self._model.SerializeToString(deterministic=True))

    def _of(self, component: int) -> Rename:
        """Return the renaming of a component's values."""
        names = self._names[component]
        named = {kind + name: kind + new for kind in ("", *_OF_TENSORS) for name, new in names.items()}

        def rename(name: str) -> str:
            if not name or name in self._given:
                return name
            return f"constants.{name}" if name in self._constants else named.get(name, name_in(component, name))

        return rename

    def _weighed(self, component: int) -> Rename:
        """Return the renaming of a component's values with its weighted error."""
        rename = self._of(component)
        return lambda name: _error(component) if name == ERROR else rename(name)

    def _of_mixture(self, part: Iterable[NodeProto]) -> Rename:
        """Return the renaming for the mixture's loss; other values are those of the first component."""
        made = {name for node in part for name in node.output}
        first = self._of(0)

        def rename(name: str) -> str:
            if name in self._ends or name == OUTPUT:
                return name
            return f"mixture.loss.{name}" if name in made else first(name)

        return rename

    def _output(self) -> list[str]:
        """Add the mixture's output; return ln π_m softmax(z_m) [N, C] of each component."""
        add = self._add.add
        smallest = self._add.constant(np.array(SMALLEST_WEIGHT, np.float32))
        logs = add("Log", add("Max", WEIGHTS, smallest))
        terms = [
            add(
                "Add",
                add("LogSoftmax", self._of(each)(OUTPUT), axis=1),
                add("Gather", logs, self._add.whole(each), axis=0),
            )
            for each in self._components
        ]
        if len(terms) == 1:
            add("Identity", terms[0], output=OUTPUT)
            return terms
        top = add("Max", *terms)
        total, *others = (add("Exp", add("Sub", term, top)) for term in terms)
        for other in others:
            total = add("Add", total, other)
        add("Add", top, add("Log", total), output=OUTPUT)
        return terms

    def _weigh(self, terms: Iterable[str]) -> None:
        """Add the responsibilities, and each component's error multiplied by them."""
        add = self._add.add
        whole = self._add.whole
        target = next((each for each in self._graph.input if each.name == TARGET), None)
        kind = target.type.tensor_type if target is not None else None
        if kind is None or len(kind.shape.dim) != 1 or kind.elem_type not in (TensorProto.INT64, TensorProto.INT32):
            raise SkeletonError(
                "the step's targets are not classes, one per sample; a mixture needs a classifier: choose another "
                "method for this task"
            )
        classes = add("Cast", TARGET, to=TensorProto.INT64)
        choices = self._add.constant(np.array([0, 1], np.float32))
        chosen = add("OneHot", classes, whole(self._classes), choices, axis=-1)
        joint = [add("ReduceSum", add("Mul", chosen, term), whole(1), keepdims=1) for term in terms]
        add("Softmax", add("Concat", *joint, axis=1), axis=1, output=RESPONSIBILITIES)
        for each in self._components:
            share = add("Gather", RESPONSIBILITIES, whole(each), axis=1)
            add("Mul", self._of(each)(ERROR), share, output=_error(each))

    def _write(self, nodes: list[NodeProto]) -> None:
        """Write the mixture's graph into the model."""
        old = self._graph
        new = GraphProto(name=self._graph.name)
        new.node.extend(nodes)
        shared = [each for each in old.input if each.name in self._given]
        own = [each for each in old.input if each.name not in self._given]
        size = len(self._components)
        new.input.extend(self._once(own))
        if own:
            new.input.append(helper.make_tensor_value_info(WEIGHTS, TensorProto.FLOAT, [size]))
        new.input.extend(shared)
        new.initializer.extend(self._once([tensor for tensor in old.initializer if tensor.name in self._tensors]))
        if not own:
            new.initializer.append(TensorProto(name=WEIGHTS, data_type=TensorProto.FLOAT, dims=[size]))
        constants = (tensor for tensor in old.initializer if tensor.name in self._constants)
        new.initializer.extend(_renamed(constants, self._of(0)))
        new.initializer.extend(self._add.initializers)
        answers = self._ends | {OUTPUT}
        new.output.extend(each for each in old.output if each.name in answers)
        for each in self._components:
            new.output.extend(_renamed((one for one in old.output if one.name not in answers), self._of(each)))
            new.value_info.extend(_renamed(old.value_info, self._of(each)))
        old.CopyFrom(new)

    def _once(self, tensors: Sequence[Named]) -> list[Named]:
        """Return the tensors of all components, with shared ones included once."""
        found = {each.name: each for component in self._components for each in _renamed(tensors, self._of(component))}
        return list(found.values())


def _error(component: int) -> str:
    """Return the name of a component's weighted error."""
    return f"mixture.error.{component}"


def _behind(graph: GraphProto, name: str, but: Iterable[NodeProto]) -> list[NodeProto]:
    """Return the nodes that depend on a value, in order, without ``but``."""
    left_out = {made for node in but for made in node.output}
    reached = {name}
    behind = []
    for node in graph.node:
        if left_out.isdisjoint(node.output) and reached.intersection(node.input):
            reached.update(node.output)
            behind.append(node)
    return behind


def _copy(node: NodeProto, rename: Rename) -> NodeProto:
    return again(node, map(rename, node.input), [rename(name) if name else name for name in node.output])


def _renamed(values: Iterable[Named], rename: Rename) -> list[Named]:
    copies = []
    for value in values:
        copy = deepcopy(value)
        copy.name = rename(value.name)
        copies.append(copy)
    return copies
