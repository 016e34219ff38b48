"""Training with ONNX Runtime's inference package, which runs the training step as a graph."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from sparrow.graphs import Graphs
from sparrow.graphs.steps import Parts, optimise, products_of
from sparrow.graphs.tangents import ALONG, FLOW, flow_graph
from sparrow.graphs.variants import batch_statistics, distil, judge_outputs, likelihoods, scale_outputs, weigh
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronMask
from sparrow.trial import TYPES

from .optimiser import Optimiser, Rule
from .parts import bits_of, frozen_in_part, leaves_of
from .training import (
    EVERYTHING,
    Change,
    Part,
    Pull,
    check_loadable,
)

Array = NDArray[Any]
Index = NDArray[np.int64]

GRADIENT = "grad:"
NEXT = "new:"
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float32]]] = {
    "uniform": lambda chance, shape: chance.random(shape, np.float32),
    "normal": lambda chance, shape: chance.standard_normal(shape, np.float32),
}


# One arena for all sessions of a process, which grows by the missing bytes. By default each session doubles its own.
onnxruntime.create_and_register_allocator(
    onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    ),
    onnxruntime.OrtArenaCfg(0, 1, -1, -1),
)


def give_back() -> None:
    """Return the arena's free memory to the system."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _idle().run(None, {"x": np.zeros(1, np.float32)}, options)


# The arena shrinks only at the end of a run.
@cache
def _idle() -> onnxruntime.InferenceSession:
    """Return a session with a trivial graph."""
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "idle", [given], [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), _options(1), providers=["CPUExecutionProvider"])


def _options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # With memory patterns each session would hold one more block for all values of a step.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class Sessions:
    """Sessions of a task's graphs, made on demand; thread-safe."""

    def __init__(self, graphs: Graphs, *, threads: int = 1) -> None:
        self.graphs = graphs
        self.threads = threads
        self.lock = threading.RLock()
        self.narrow: dict[tuple[int, ...], Any] = {}
        self._others: dict[tuple[Any, ...], Sessions] = {}
        self._made: dict[tuple[Any, ...], onnxruntime.InferenceSession] = {}

    def anew(self) -> Sessions:
        """Return new sessions of the same graphs."""
        return Sessions(self.graphs, threads=self.threads)

    def step(self, parts: Parts, lowest: Collection[str]) -> onnxruntime.InferenceSession:
        """Return the training step, restricted to some rows and columns of the weights in ``parts``."""
        key = ("step", *sorted(parts.items()), *sorted(lowest))
        return self._of(key, lambda: optimise(self.graphs.step, parts, lowest))

    def scaled(self) -> Sessions:
        """Return the sessions of a step whose outputs are multiplied by an input ``scale``."""
        return self._other(("scaled",), scale_outputs)

    def taught(self, weight: float, temperature: float) -> Sessions:
        """Return the sessions of a student's step, which has an input ``teacher``."""
        return self._other(("taught", weight, temperature), lambda step: distil(step, weight, temperature))

    def weighed(self) -> Sessions:
        """Return the sessions of a mixture's step, which has responsibilities as an input."""
        return self._other(("weighed",), weigh)

    def _other(self, key: tuple[Any, ...], make: Callable[[bytes], bytes]) -> Sessions:
        with self.lock:
            if key not in self._others:
                graphs = replace(self.graphs, step=make(self.graphs.step))
                self._others[key] = Sessions(graphs, threads=self.threads)
            return self._others[key]

    def flow(self, names: Collection[str]) -> onnxruntime.InferenceSession:
        """Return the Hessian times a direction for the weights ``names``. Raises NoCurvature if an operator has no
        second derivative.
        """
        return self._of(("flow", *names), lambda: flow_graph(self.graphs.step, names))

    def statistics(self) -> onnxruntime.InferenceSession | None:
        """Return the batch statistics of batch norms; None if the model has none."""
        graph = self._statistics
        return None if graph is None else self._of(("statistics",), lambda: graph)

    def likelihoods(self) -> onnxruntime.InferenceSession:
        """Return the likelihoods of samples under a mixture's components."""
        return self._of(("likelihoods",), lambda: likelihoods(self.graphs.evaluation))

    @cached_property
    def _statistics(self) -> bytes | None:
        return batch_statistics(self.graphs.evaluation)

    def evaluation(self) -> onnxruntime.InferenceSession:
        """Return the model's outputs and loss."""
        return self._of(("evaluation",), lambda: optimise(self.graphs.evaluation))

    def judgement(self) -> onnxruntime.InferenceSession:
        """Return the loss of given outputs."""
        return self._of(("judgement",), lambda: judge_outputs(self.graphs.evaluation))

    def _of(self, key: tuple[Any, ...], graph: Callable[[], bytes]) -> onnxruntime.InferenceSession:
        with self.lock:
            if key not in self._made:
                self._made[key] = onnxruntime.InferenceSession(
                    graph(), _options(self.threads), providers=["CPUExecutionProvider"]
                )
            return self._made[key]


class Network:
    """A model's tensors, without frozen ones, and its graphs. index: further inputs of the graphs."""

    def __init__(
        self,
        manifest: Manifest,
        sessions: Sessions,
        index: Mapping[str, Array] | None = None,
        tensors: Tensors | None = None,
    ) -> None:
        self.manifest = manifest
        self.sessions = sessions
        self._index = dict(index or {})
        self._fixed = {**sessions.graphs.frozen, **self._index}
        self.tensors: Tensors = tensors or {
            spec.name: np.zeros(spec.shape, np.dtype(spec.dtype)) for spec in manifest.kept
        }
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._students: dict[tuple[float, float], Network] = {}
        self._evaluation: Step | None = None
        self.cut_from: tuple[Network, NeuronMask] | None = None
        """For a narrow network, the whole network and the active neurons."""

    def twin(self) -> Network:
        """Return a copy of the model."""
        twin = Network(self.manifest, self.sessions, self._index)
        twin.load(self.tensors)
        return twin

    def scaled(self, scale: Array) -> Network:
        """Return the same model with the loss of its outputs times ``scale`` [C] or []."""
        shape = (*self.manifest.output_shape[:1], *(1 for _ in self.manifest.output_shape[1:]))
        factor = np.array(np.broadcast_to(np.asarray(scale, np.float32), shape[:1]).reshape(shape))
        return Network(self.manifest, self.sessions.scaled(), {**self._index, "scale": factor}, self.tensors)

    def taught(self, weight: float, temperature: float) -> Network:
        """Return the same model with a student's loss."""
        key = (weight, temperature)
        if key not in self._students:
            self._students[key] = Network(self.manifest, self.sessions.taught(*key), self._index, self.tensors)
        return self._students[key]

    @cached_property
    def weighed(self) -> Network:
        """The same mixture with responsibilities as an input of its step."""
        return Network(self.manifest, self.sessions.weighed(), self._index, self.tensors)

    def load(self, tensors: Mapping[str, Array]) -> None:
        """Copy tensors into the model by name. Raises ManifestError, naming the tensor."""
        check_loadable(tensors, {name: tensor.shape for name, tensor in self.tensors.items()})
        for name, tensor in tensors.items():
            np.copyto(self.tensors[name], tensor, casting="unsafe")

    def read(self) -> Tensors:
        """Return copies of all tensors."""
        return {name: np.array(tensor) for name, tensor in self.tensors.items()}

    def step(self, parts: Parts | None = None, lowest: Collection[str] = ()) -> Step:
        """Return the training step, restricted to some rows and columns of the weights in ``parts``."""
        parts = parts or {}
        key = (*sorted(parts.items()), *sorted(lowest))
        if key not in self._steps:
            self._steps[key] = Step(self.sessions.step(parts, lowest), {**self.tensors, **self._fixed})
        return self._steps[key]

    @property
    def evaluation(self) -> Step:
        """The evaluation; ``run`` gives loss and outputs."""
        if self._evaluation is None:
            self._evaluation = Step(self.sessions.evaluation(), {**self.tensors, **self._fixed})
        return self._evaluation

    def loss(self, outputs: Array, targets: Array) -> float:
        """Return the loss of outputs [N, ...]."""
        return float(self._run(self.sessions.judgement(), {"output": outputs, "target": targets})["loss"])

    def likelihoods(self, inputs: Array, targets: Array) -> Array:
        """Return ln p(y | x) under each component of a mixture, float32 [N, M]."""
        return self._run(self.sessions.likelihoods(), {"input": inputs, "target": targets})["likelihoods"]

    def flow(self, given: Mapping[str, Array], direction: Mapping[str, Array]) -> Tensors:
        """Return the Hessian times ``direction``.

        given: a batch and its random inputs. Raises NoCurvature if an operator has no second derivative.
        """
        along = {ALONG + name: each for name, each in direction.items()}
        found = self._run(self.sessions.flow(tuple(direction)), {**given, **along})
        return {
            name: found[FLOW + name] if FLOW + name in found else np.zeros_like(each)
            for name, each in direction.items()
        }

    def statistics(self, inputs: Array) -> dict[str, list[Array]]:
        """Return the batch statistics of a batch: tensor -> an array per use of its norm."""
        session = self.sessions.statistics()
        named = dict[str, list[Array]]()
        for place, found in (self._run(session, {"input": inputs}) if session else {}).items():
            name = place.partition(":")[2]
            # Statistics of frozen norms stay.
            if name in self.tensors:
                named.setdefault(name, []).append(found)
        return named

    def _run(self, session: onnxruntime.InferenceSession, given: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of a graph by name, without binding."""
        held = {**self.tensors, **self._fixed, **given}
        feeds: dict[str, Array] = {
            each.name: np.ascontiguousarray(held[each.name], TYPES[each.type]) for each in session.get_inputs()
        }
        names = [each.name for each in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))


# The runtime reads parameters in place and writes gradients into reused arrays, so that a step copies only its batch.
class Step:
    """A graph bound to a model's tensors. gradients: name -> array, overwritten by every run."""

    def __init__(self, session: onnxruntime.InferenceSession, tensors: Tensors) -> None:
        self._session = session
        self._binding = self._session.io_binding()
        # The runtime reads and writes these arrays, so they must stay alive.
        self._held: dict[str, Any] = {}
        self.inputs = {each.name: tuple(each.shape) for each in self._session.get_inputs()}
        self._types = {each.name: TYPES[each.type] for each in self._session.get_inputs()}
        for name in self.inputs.keys() & tensors.keys():
            self._bind(name, tensors[name])
        self.gradients: dict[str, NDArray[np.float32]] = {}
        self._moved: list[tuple[NDArray[Any], NDArray[Any]]] = []
        # Outputs of the batch's length.
        self._free: list[str] = []
        self._loss = np.zeros((), np.float32)
        # Number of outputs with fixed arrays, which come before the free ones.
        self._bound = 0
        self._batch = 0
        for output in self._session.get_outputs():
            kind, colon, name = output.name.partition(":")
            if output.name == "loss":
                array = self._loss
            elif kind + colon in (GRADIENT, NEXT):
                array = np.zeros([int(size) for size in output.shape], np.float32)
            else:
                self._free.append(output.name)
                continue
            self._binding.bind_ortvalue_output(output.name, self._hold(output.name, array))
            self._bound += 1
            if kind + colon == GRADIENT:
                self.gradients[name] = array
            elif kind + colon == NEXT:
                self._moved.append((tensors[name], array))

    def _bind(self, name: str, array: Array) -> None:
        self._binding.bind_ortvalue_input(name, self._hold(name, array))

    def _hold(self, name: str, array: Array) -> Any:
        self._held[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        return self._held[name]

    def choose(self, index: Mapping[str, Index]) -> None:
        """Bind the active rows and columns: ``rows:NAME``, ``columns:NAME``, int64."""
        for name, places in index.items():
            if name in self.inputs:
                self._bind(name, np.ascontiguousarray(places, np.int64))

    def draw(self, chance: np.random.Generator, count: int) -> dict[str, NDArray[np.float32]]:
        """Return random inputs of the step for ``count`` samples: name -> array."""
        drawn = {}
        for name, shape in self.inputs.items():
            kind = name.removesuffix("_step")
            if kind in DRAWS:
                drawn[name] = DRAWS[kind](chance, tuple(each if isinstance(each, int) else count for each in shape))
        return drawn

    def run(
        self, inputs: Array, targets: Array, drawn: Mapping[str, Array] | None = None, *, moves: bool = True
    ) -> float:
        """Return the loss of a batch; write ``gradients``, and update running statistics."""
        given = {"input": inputs, "target": targets, **(drawn or {})}
        for name, array in given.items():
            if name in self.inputs:
                self._binding.bind_cpu_input(name, np.ascontiguousarray(array, self._types[name]))
        # Outputs that were allocated for another batch size do not fit.
        if len(inputs) != self._batch:
            self._batch = len(inputs)
            for name in self._free:
                self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        for tensor, moved in self._moved if moves else ():
            np.copyto(tensor, moved)
        return float(self._loss)

    def answer(self, inputs: Array, targets: Array) -> tuple[float, NDArray[np.float32]]:
        """Return loss and outputs of a batch."""
        return self.run(inputs, targets), self.output()

    def output(self) -> NDArray[np.float32]:
        """Return a copy of the last run's outputs [N, ...]."""
        outputs = self._binding.get_outputs()
        return np.array(outputs[self._bound + self._free.index("output")].numpy())


class Training:
    """Training steps of a ``part`` of a network, with a new optimiser."""

    def __init__(self, network: Network, rule: Rule, part: Part = EVERYTHING, pull: Pull | None = None) -> None:
        self._leaves = leaves_of(network.manifest, network.tensors, part)
        parts, index, lowest = products_of(network.manifest, frozen_in_part(self._leaves))
        self._step = network.step(parts, lowest)
        self._step.choose(index)
        self._optimiser = Optimiser(rule, {name: leaf.values for name, leaf in self._leaves.items()})
        self._pull = pull
        self._start = dict[str, Array]()
        if pull:
            start = pull.centre or {name: leaf.whole for name, leaf in self._leaves.items()}
            self._start = {name: np.array(start[name], np.float32) for name in self._leaves}
        self._centres = self._centred()
        for leaf in self._leaves.values():
            if leaf.factor is not None:
                leaf.write_back()

    def end(self) -> None:
        """Finish training: remove the factors."""
        for leaf in self._leaves.values():
            leaf.leave()

    def _centred(self) -> dict[str, Array]:
        return {name: leaf.gradient(np.array(self._start[name])) for name, leaf in self._leaves.items() if self._pull}

    def draw(self, chance: np.random.Generator, count: int) -> dict[str, NDArray[np.float32]]:
        """Return random inputs of a step for ``count`` samples: name -> array."""
        return self._step.draw(chance, count)

    def step(self, inputs: Array, targets: Array, drawn: Mapping[str, Array] | None = None) -> float:
        """Take a step on a batch and return the loss before it."""
        loss = self._step.run(inputs, targets, drawn)
        if not math.isfinite(loss):
            return loss
        gradients = {}
        for name, leaf in self._leaves.items():
            if name in self._step.gradients:
                gradients[name] = gradient = leaf.gradient(self._step.gradients[name])
                if leaf.factor is not None:
                    gradient *= leaf.factor
                if self._pull:
                    gradient += np.float32(self._pull.weight) * (leaf.values - self._centres[name])
        self._optimiser.step(gradients)
        for name in gradients:
            self._leaves[name].write_back()
        return loss

    def change(self, change: Change) -> None:
        """Continue with other existing elements, after the change of the weights."""
        for name, exists in change.elements.items():
            leaf = self._leaves.get(name)
            if leaf is None:
                continue
            leaf.bits = bits_of(exists)
            if (renewed := change.renewed.get(name)) is not None:
                for slot in self._optimiser.slots[name]:
                    slot[renewed.reshape(-1)] = 0
        self._centres = self._centred()
