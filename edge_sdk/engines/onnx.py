"""A model that ONNX Runtime trains, for inference as it is: with the training step as a graph.

Parameters and buffers are numpy arrays that the runtime reads where they lie, and gradients are written into arrays
that are used again, so that a step copies nothing but its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge_sdk.engines import Graphs
from edge_sdk.engines.optimiser import Optimiser, Rule
from edge_sdk.engines.parts import EVERYTHING, Part, leaves_of, products_of
from edge_sdk.engines.passes import Parts, optimise
from edge_sdk.protocol.manifest import Manifest, Tensors

Array = NDArray[Any]
Index = NDArray[np.int64]

GRADIENT, NEXT = "grad:", "new:"


class Network:
    """A model's tensors, and the graphs that train and judge it.

    threads: that one step may use. Sessions of the runtime are made when they are first needed.
    """

    def __init__(self, manifest: Manifest, graphs: Graphs, *, threads: int = 1) -> None:
        self.manifest, self._graphs, self._threads = manifest, graphs, threads
        self.tensors: Tensors = {spec.name: np.zeros(spec.shape, np.dtype(spec.dtype)) for spec in manifest.kept}
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._evaluation: Step | None = None

    def load(self, tensors: Mapping[str, Array]) -> None:
        """Copy tensors into the model, by name; what is not named stays."""
        for name, tensor in tensors.items():
            np.copyto(self.tensors[name], tensor, casting="unsafe")

    def read(self) -> Tensors:
        """Return copies of all tensors."""
        return {name: np.array(tensor) for name, tensor in self.tensors.items()}

    def step(self, parts: Parts | None = None, lowest: Collection[str] = ()) -> Step:
        """Return the training step, of some rows and columns of weights alone where ``parts`` says so."""
        key = (tuple(sorted((parts or {}).items())), tuple(sorted(lowest)))
        if key not in self._steps:
            self._steps[key] = Step(optimise(self._graphs.step, parts, lowest), self.tensors, self._threads)
        return self._steps[key]

    @property
    def evaluation(self) -> Step:
        """The evaluation: ``run`` it for loss and outputs."""
        if self._evaluation is None:
            self._evaluation = Step(optimise(self._graphs.evaluation), self.tensors, self._threads)
        return self._evaluation


class Step:
    """A graph bound to a model's tensors. gradients: name -> array, which every run writes anew."""

    def __init__(self, graph: bytes, tensors: Tensors, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._held: dict[str, Any] = {}  # what the runtime reads and writes must live as long as it may
        self.inputs = {each.name: tuple(each.shape) for each in self._session.get_inputs()}
        for name in self.inputs.keys() & tensors.keys():
            self._bind(name, tensors[name])
        self.gradients: dict[str, NDArray[np.float32]] = {}
        self._moved: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._free: list[str] = []  # as long as the batch
        self._order: list[str] = []  # in which they were bound: that of what the binding returns
        self._batch = 0
        for output in self._session.get_outputs():
            kind, _, name = output.name.partition(":")
            if f"{kind}:" not in (GRADIENT, NEXT):
                self._free.append(output.name)
                continue
            array = np.zeros([int(size) for size in output.shape], np.float32)
            self._binding.bind_ortvalue_output(output.name, self._hold(output.name, array))
            self._order.append(output.name)
            if f"{kind}:" == GRADIENT:
                self.gradients[name] = array
            else:
                self._moved.append((tensors[name], array))

    def _bind(self, name: str, array: Array) -> None:
        self._binding.bind_ortvalue_input(name, self._hold(name, array))

    def _hold(self, name: str, array: Array) -> Any:
        """Return an array as the runtime takes it; it lives until another has its name."""
        self._held[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        return self._held[name]

    def choose(self, index: Mapping[str, Index]) -> None:
        """Give the active rows and columns: ``rows:NAME``, ``columns:NAME``, int64."""
        for name, places in index.items():
            self._bind(name, np.ascontiguousarray(places, np.int64))

    def run(
        self, inputs: Array, targets: Array, drawn: Mapping[str, Array] | None = None
    ) -> tuple[float, NDArray[np.float32]]:
        """Return loss and outputs of a batch; gradients are in ``gradients``, and running statistics have moved."""
        given = {"input": inputs, "target": targets, **(drawn or {})}
        values = {name: np.ascontiguousarray(given[name]) for name in given if name in self.inputs}
        for name, array in values.items():
            self._binding.bind_cpu_input(name, array)
        if len(inputs) != self._batch:  # what was made for another one is too short
            self._batch = len(inputs)
            for name in self._free:
                self._binding.bind_output(name)
            self._order = [*(name for name in self._order if name not in self._free), *self._free]
        self._session.run_with_iobinding(self._binding)
        outputs = dict(zip(self._order, self._binding.get_outputs(), strict=True))
        for tensor, moved in self._moved:
            np.copyto(tensor, moved)
        return float(outputs["loss"].numpy()), outputs["output"].numpy()


class Training:
    """Steps of a network: what ``part`` names of it is moved by an optimiser that begins anew.

    proximal_weight: μ of a pull of what is trained to ``centre``, by name, or where it is now (FedProx,
    arXiv:1812.06127, Eq. 2). A parameter that the loss does not depend on never moves.
    """

    def __init__(
        self,
        network: Network,
        rule: Rule,
        part: Part = EVERYTHING,
        *,
        proximal_weight: float = 0.0,
        centre: Mapping[str, Array] | None = None,
    ) -> None:
        self._leaves = leaves_of(network.manifest, network.tensors, part)
        parts, index, lowest = products_of(network.manifest, self._leaves)
        self._step = network.step(parts, lowest)
        self._step.choose(index)
        self._optimiser = Optimiser(rule, {name: leaf.values for name, leaf in self._leaves.items()})
        self._weight = np.float32(proximal_weight)
        self._centres: dict[str, NDArray[np.float32]] = {}
        if proximal_weight:
            start = centre or {name: leaf.whole for name, leaf in self._leaves.items()}
            self._centres = {
                name: leaf.gradient(np.array(start[name], np.float32)) for name, leaf in self._leaves.items()
            }

    def step(self, inputs: Array, targets: Array, drawn: Mapping[str, Array] | None = None) -> float:
        """Take a step on a batch, and return its loss before it."""
        loss, _ = self._step.run(inputs, targets, drawn)
        gradients = {}
        for name, leaf in self._leaves.items():
            if name in self._step.gradients:
                gradients[name] = gradient = leaf.gradient(self._step.gradients[name])
                if name in self._centres:
                    gradient += self._weight * (leaf.values - self._centres[name])
        self._optimiser.step(gradients)
        for name in gradients:
            self._leaves[name].write_back()
        return loss
