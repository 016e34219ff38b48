"""A task's training step and evaluation as ONNX graphs.

The operators that PyTorch's autograd runs for a step are recorded once, when a task is published (``recording``), and
written as a graph (``lowering``). The inference runtime then trains with it (``edge_sdk.engines.onnx``).

    step        parameters, buffers, input, target, random numbers -> loss, output, error, gradients, buffers
    evaluation  parameters, buffers, input, target                 -> loss, output

Parameters and buffers have their state-dict names; gradients are named ``grad:NAME``, and buffers that the forward pass
moves ``new:NAME``; ``error`` is the gradient of the loss by the output. Only the batch axis is free. The graphs hold
neither weights nor data. Both are compared with PyTorch at two batch sizes before publication.

This module, ``recording`` and ``lowering`` hold the package's only uses of PyTorch's private API.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow.graphs import Graphs
from sparrow.protocol.errors import MissingPart

from . import chance, translations
from .lowering import is_translated, to_onnx
from .modes import begin_training
from .recording import first_line, free_batch, plain, record
from .skeleton import exporting
from .targets import ignored_label
from .translations import CannotCompile

if TYPE_CHECKING:
    pass

BATCHES = (5, 3)
"""Batch sizes for recording."""

COMPARED = (8, 7, 6, 4)
"""Batch sizes for comparison with PyTorch: others, because two recordings cannot tell n * n from 8 * n - 15. A graph
must agree at two of them, because at one a kink may be within single precision's rounding error."""

CLOSE = 1e-4
"""Largest relative L2 distance between a graph and PyTorch that rounding may cause, per gradient."""

ROUNDING = 1e-2
"""Outputs smaller than this share of the largest are compared relative to that: gradients of biases that a batch norm
cancels consist of rounding errors."""

OWN_ROUNDING = 16
"""A graph may differ from double precision by this many times PyTorch's own distance: batch norm over a few samples of
maps with one value leaves gradients that nearly cancel."""

MOVED = 2.0**-19
"""A relative change of the parameters, 16 times single precision's rounding error. Its effect shows whether a kink is
near: an activation or a maximum that changes sides changes gradients by up to a percent."""

MOVED_ROUNDING = 4
"""Outputs of a graph may differ from double precision by this many times the largest relative effect, ..."""

MOST_ROUNDING = 0.05
"""... and by no more than this share."""

NEEDED = "publishing needs onnx, onnxscript and onnxruntime: pip install 'sparrow-fl[publish]'"

Loss = Callable[[Tensor, Tensor], Tensor]


def compile_step(
    model: nn.Module,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    progress: Callable[[str], object] = lambda doing: None,
) -> Graphs:
    """Return the graphs of a model and its loss.

    inputs [N, ...] and targets [N, ...]: a few samples, N >= 1. progress: called with a description of each phase.
    Raises CannotCompile, and MissingPart without onnx, onnxscript and onnxruntime.
    """
    model = _plain(model)
    batch = Batch(*_counting(inputs, targets, ignored_label(loss)))
    graphs: list[bytes] = []
    for trains in (True, False):
        what = "the training step" if trains else "the evaluation"
        progress(f"compiling {what}")
        half = _Half(model, loss, batch, trains=trains)
        graph = _compiled(half, batch)
        progress(f"comparing {what} with PyTorch")
        half.compare(graph)
        graphs.append(graph)
    step, evaluation = graphs
    return Graphs(step, evaluation)


def _counting(inputs: Tensor, targets: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Return the samples whose target the loss counts."""
    if ignored is None:
        return inputs, targets
    known = targets.reshape(len(targets), -1).ne(ignored).any(dim=1)
    return (inputs[known], targets[known]) if known.any() else (inputs, targets)


@dataclass(frozen=True)
class Batch:
    """Samples for tracing, repeated to any batch size."""

    inputs: Tensor
    targets: Tensor

    def of(self, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` samples."""
        index = torch.arange(count) % len(self.inputs)
        return self.inputs[index].detach().cpu(), self.targets[index].detach().cpu()


class _Half:
    """The training step or the evaluation as a function of tensors."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch, *, trains: bool) -> None:
        self._model = model
        self._loss = loss
        self._batch = batch
        self._trains = trains
        self.parameters = {name: value.detach() for name, value in model.named_parameters()}
        # Other buffers are constants, such as a table of positions.
        kept = model.state_dict(keep_vars=True)
        self.buffers = {name: value.detach() for name, value in model.named_buffers() if name in kept}
        self._trained = [name for name, value in model.named_parameters() if value.requires_grad and trains]
        self._draws: list[chance.Draw] = []
        state = (self.parameters, self.buffers)
        self._draws = chance.record(lambda count: self._run(*state, *batch.of(count), {}), BATCHES)
        _, _, _, gradients, after = self._run(*state, *batch.of(BATCHES[0]), self.drawn(BATCHES[0]))
        self._trained = [name for name, each in zip(self._trained, gradients, strict=True) if each is not None]
        self._moved = [name for name, value in after.items() if not torch.equal(value, self.buffers[name])]

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        moved = [f"new:{name}" for name in self._moved]
        error = ["error"] if self._trains else []
        return ["loss", "output", *error, *(f"grad:{name}" for name in self._trained), *moved]

    @property
    def name(self) -> str:
        """The name of the graph."""
        return "step" if self._trains else "evaluation"

    def drawn(self, count: int) -> dict[str, Tensor]:
        """Return random numbers for ``count`` samples: input name -> array."""
        generator = torch.Generator().manual_seed(count)
        return {
            name: (torch.rand if name.startswith("uniform") else torch.randn)(shape, generator=generator)
            for name, shape in chance.shapes_of(self._draws, count).items()
        }

    def __call__(self, parameters: Any, buffers: Any, inputs: Tensor, targets: Tensor, drawn: Any) -> list[Tensor]:
        """Return the values of ``outputs``."""
        loss, output, error, gradients, after = self._run(parameters, buffers, inputs, targets, drawn)
        moved = [after[name] for name in self._moved]
        return [loss, output, *error, *(each for each in gradients if each is not None), *moved]

    def _run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        drawn: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor | None], dict[str, Tensor]]:
        """Return loss and output; in training also the output's error, gradients and updated buffers."""
        leaves = {name: value.detach() for name, value in parameters.items()}
        for name in self._trained:
            leaves[name].requires_grad_()
        after = {name: value.clone() for name, value in buffers.items()}
        if self._trains:
            begin_training(self._model)
        else:
            self._model.eval()
        numbers = {name: plain(each) for name, each in drawn.items()}
        given = chance.Chance(chance.Given(self._draws, numbers)) if self._draws else nullcontext()
        # ONNX has no operators for the faster kernels of attention.
        with sdpa_kernel(SDPBackend.MATH), given, torch.set_grad_enabled(self._trains):
            output = functional_call(self._model, ({**leaves, **after}), (inputs,))
            loss = self._loss(output, targets)
        if not self._trains:
            return loss, output, (), (), after
        wanted = [output, *(leaves[name] for name in self._trained)]
        error, *gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return loss, output, [torch.zeros_like(output) if error is None else error], gradients, after

    def _exact(self, inputs: Tensor, targets: Tensor, drawn: Mapping[str, Tensor]) -> _Exact:
        """Return the values of ``outputs`` in double precision; none if the model does not support it."""
        given = _double({"inputs": inputs, "targets": targets, **drawn})
        inputs = given.pop("inputs")
        targets = given.pop("targets")
        parameters = _double(self.parameters)
        generator = torch.Generator().manual_seed(0)
        moved = {
            name: each * (1 + MOVED * (2 * torch.rand(each.shape, generator=generator, dtype=each.dtype) - 1))
            for name, each in parameters.items()
        }
        try:
            values, others = (self(each, _double(self.buffers), inputs, targets, given) for each in (parameters, moved))
        # The model's own code may require single precision.
        except Exception:
            return _Exact([], 0.0)
        return _Exact.of(values, others)

    def compare(self, graph: bytes) -> None:
        """Raise CannotCompile if the graph and PyTorch differ."""
        agreed = 0
        differences: list[_Differs] = []
        for count in COMPARED:
            try:
                self._compare(graph, count)
                agreed += 1
            except _Differs as error:
                differences.append(error)
            if agreed == 2:
                return
        raise differences[0]

    def _compare(self, graph: bytes, count: int) -> None:
        try:
            # Imported late, because only publishing needs it.
            import onnxruntime
        except ImportError as error:
            raise MissingPart(NEEDED) from error
        inputs, targets = self._batch.of(count)
        drawn = self.drawn(count)
        wanted = self(self.parameters, self.buffers, inputs, targets, drawn)
        largest = max([float(each.detach().norm()) for each in wanted])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        given = {**self.parameters, **self.buffers, "input": inputs, "target": targets, **drawn}
        try:
            session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            feeds = {each.name: np.ascontiguousarray(given[each.name].numpy()) for each in session.get_inputs()}
            found = session.run(self.outputs, feeds)
        # ONNX Runtime's exceptions have no common base class.
        except Exception as error:
            raise CannotCompile(f"ONNX Runtime cannot run the graph: {first_line(error)}") from error
        exact: _Exact | None = None
        for place, (name, value, right) in enumerate(zip(self.outputs, found, wanted, strict=True)):
            distance = _distance(value, right)
            size = _distance(right, 0.0)
            # If the exact value is zero, such as for a bias before batch norm, both values are rounding errors.
            if distance <= CLOSE * max(size, ROUNDING * largest):
                continue
            if exact is None:
                exact = self._exact(inputs, targets, drawn)
            if not exact.allows(place, value, right):
                raise _Differs(f"{name}: the graph and PyTorch differ by {distance:.1e}, for a norm of {size:.1e}")


class _Differs(CannotCompile):
    """The graph and PyTorch differ by more than rounding."""


@dataclass(frozen=True)
class _Exact:
    """Outputs in double precision; ``effect``: the largest relative effect of changed parameters."""

    values: list[Tensor]
    effect: float

    @classmethod
    def of(cls, values: list[Tensor], moved: list[Tensor]) -> _Exact:
        """Return the values with the effect of the parameters' change, from the outputs ``moved``."""
        sizes = [_distance(each, 0.0) for each in values]
        effects = [
            _distance(value, other) / size
            for value, other, size in zip(values, moved, sizes, strict=True)
            if size > ROUNDING * max(sizes)
        ]
        return cls(values, max(effects, default=0.0))

    def allows(self, place: int, value: Any, right: Tensor) -> bool:
        """Return True if the difference of a graph's value is within rounding. right: PyTorch's value."""
        if not self.values:
            return False
        exact = self.values[place]
        share = max(CLOSE, min(MOVED_ROUNDING * self.effect, MOST_ROUNDING))
        return _distance(value, exact) <= max(share * _distance(exact, 0.0), OWN_ROUNDING * _distance(right, exact))


def _distance(value: Any, other: Any) -> float:
    """Return the L2 distance of two arrays or tensors."""
    one, another = (each.detach().numpy() if isinstance(each, Tensor) else each for each in (value, other))
    return float(np.linalg.norm(np.asarray(one, np.float64) - np.asarray(another, np.float64)))


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}


def _compiled(half: _Half, batch: Batch) -> bytes:
    """Return the graph of one half, recorded at both batch sizes."""
    with exporting():
        try:
            table = _table()
        except ImportError as error:
            raise MissingPart(NEEDED) from error
    with exporting(), torch.backends.mkldnn.flags(enabled=False):
        one, other = (
            record(half, (half.parameters, half.buffers, *batch.of(count), half.drawn(count)), count, table)
            for count in BATCHES
        )
        read = [*half.parameters, *half.buffers, "input", "target", *half.drawn(BATCHES[0])]
        try:
            proto = to_onnx(free_batch(one, other), read, half.outputs, half.name)
        except ImportError as error:
            raise MissingPart(NEEDED) from error
    return bytes(proto.SerializeToString(deterministic=True))


def _plain(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).cpu()
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.num_batches_tracked is not None:
            if module.momentum is None:
                raise CannotCompile(f"{path}: running statistics need a momentum for training; set it to a number")
            module.num_batches_tracked = None
    return model


@functools.cache
def _table() -> dict[Any, Any]:
    """Return the decompositions of operators without a translation."""
    made = {
        **{op: how for op, how in decomposition_table.items() if not is_translated(op)},
        **core_aten_decompositions(),
        **translations.DECOMPOSITIONS,
        torch.ops.aten.empty_permuted.default: _zeros,
    }
    return {op: how for op, how in made.items() if op not in translations.TABLE}


def _zeros(size: Sequence[int], order: Sequence[int], **kind: Any) -> Tensor:
    """Return zeros for memory that will be overwritten."""
    return torch.zeros(size, dtype=kind.get("dtype"))
