"""A task's training step and evaluation as ONNX graphs.

PyTorch's autograd records the step once, when a task is published. The inference runtime then trains with it
(``edge_sdk.engines.onnx``) on devices that have neither PyTorch nor the model's code.

    step        parameters, buffers, input, target, random numbers -> loss, output, error, gradients, buffers
    evaluation  parameters, buffers, input, target                 -> loss, output

Parameters and buffers have their state-dict names; gradients are named ``grad:NAME``, and buffers that the forward pass
moves ``new:NAME``; ``error`` is the gradient of the loss by the output. Only the batch axis is free. The graphs hold
neither weights nor data. Both are compared with PyTorch at two batch sizes before publication.

This module holds the package's only uses of PyTorch's private API: fake tensors with a free batch, functional tensors,
and the table of decompositions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow.graphs import Graphs
from sparrow.graphs.editor import Editor
from sparrow.protocol.errors import MissingPart

from . import chance, translations
from .modes import begin_training
from .skeleton import OPSET, exporting, remove_notes
from .targets import ignored_label
from .translations import CannotCompile

if TYPE_CHECKING:
    import onnx

BATCHES = (5, 3)
"""Batch sizes for tracing, recording and comparison."""

CLOSE = 1e-4
"""Relative L2 distance between a graph and PyTorch that rounding may cause, per gradient."""

ROUNDING = 1e-2
"""Outputs smaller than this share of the largest are compared relative to that: gradients of biases that a batch norm
cancels consist of rounding errors."""

OWN_ROUNDING = 16
"""A graph may differ by this many times PyTorch's own distance from double precision: batch norm over a few samples of
maps with one value leaves gradients that nearly cancel."""

NEEDED = "publishing needs onnx, onnxscript and onnxruntime: pip install 'sparrow-fl[publish]'"

Loss = Callable[[Tensor, Tensor], Tensor]


def compile_step(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Graphs:
    """Return the graphs of a model and its loss.

    inputs [N, ...] and targets [N, ...]: a few samples, N >= 1. The model does not change. Raises CannotCompile, and
    MissingPart without onnx, onnxscript and onnxruntime.
    """
    model = _plain(model)
    batch = Batch(*_counting(inputs, targets, ignored_label(loss)))
    training = _Half(model, loss, batch, trains=True)
    evaluation = _Half(model, loss, batch, trains=False)
    # Exported at once, because the exporter takes a second for any graph.
    both = _export([training, evaluation], batch)
    graphs = Graphs(_cut_out(both, training), _cut_out(both, evaluation))
    for half, graph in ((training, graphs.step), (evaluation, graphs.evaluation)):
        for count in BATCHES:
            half.compare(graph, count)
    return graphs


def _counting(inputs: Tensor, targets: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Return the samples with a target that the loss counts; without one, the mean loss would be 0 / 0."""
    if ignored is None:
        return inputs, targets
    known = targets.reshape(len(targets), -1).ne(ignored).any(dim=1)
    return (inputs[known], targets[known]) if known.any() else (inputs, targets)


@dataclass(frozen=True)
class Batch:
    """Samples to trace with, repeated to any batch size."""

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
    def prefix(self) -> str:
        """A prefix of names that are specific to this half of the joint graph."""
        return "" if self._trains else "evaluation:"

    def drawn(self, count: int) -> dict[str, Tensor]:
        """Return random numbers for ``count`` samples, by input name."""
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
        """Return loss, output, its error and the gradients if training, and the moved buffers."""
        leaves = {name: value.detach() for name, value in parameters.items()}
        for name in self._trained:
            leaves[name].requires_grad_()
        after = {name: value.clone() for name, value in buffers.items()}
        if self._trains:
            begin_training(self._model)
        else:
            self._model.eval()
        given = chance.Chance(chance.Given(self._draws, drawn)) if self._draws else nullcontext()
        # ONNX has no operators for the faster kernels of attention.
        with sdpa_kernel(SDPBackend.MATH), given, torch.set_grad_enabled(self._trains):
            output = functional_call(self._model, ({**leaves, **after}), (inputs,))
            loss = self._loss(output, targets)
        if not self._trains:
            return loss, output, (), (), after
        wanted = [output, *(leaves[name] for name in self._trained)]
        error, *gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return loss, output, [torch.zeros_like(output) if error is None else error], gradients, after

    def _exact(self, inputs: Tensor, targets: Tensor, drawn: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of ``outputs`` in double precision, or an empty list if the model does not support it."""
        given = _double({"inputs": inputs, "targets": targets, **drawn})
        inputs = given.pop("inputs")
        targets = given.pop("targets")
        try:
            return self(_double(self.parameters), _double(self.buffers), inputs, targets, given)
        # The model's own code may require single precision.
        except Exception:
            return []

    def compare(self, graph: bytes, count: int) -> None:
        """Raise CannotCompile if the graph and PyTorch differ on ``count`` samples."""
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
            raise CannotCompile(f"ONNX Runtime cannot run the graph: {_first_line(error)}") from error
        exact: list[Tensor] | None = None
        for place, (name, value, right) in enumerate(zip(self.outputs, found, wanted, strict=True)):
            right_array = right.detach().numpy()
            distance = float(np.linalg.norm(np.asarray(value, np.float64) - right_array))
            size = float(np.linalg.norm(right_array.astype(np.float64)))
            # If the exact value is zero, such as for a bias before batch norm, both values are rounding errors.
            if not distance <= CLOSE * max(size, ROUNDING * largest):
                exact = self._exact(inputs, targets, drawn) if exact is None else exact
                own = float(np.linalg.norm(exact[place].detach().numpy() - right_array)) if exact else 0.0
                if distance <= OWN_ROUNDING * own:
                    continue
                raise CannotCompile(f"{name}: the graph and PyTorch differ by {distance:.1e}, for a norm of {size:.1e}")


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}


def _export(halves: Sequence[_Half], batch: Batch) -> onnx.ModelProto:
    inputs, targets = batch.of(BATCHES[0])
    first = halves[0]
    drawn = [half.drawn(BATCHES[0]) for half in halves]
    named = {
        f"{half.prefix}{name}": each for half, own in zip(halves, drawn, strict=True) for name, each in own.items()
    }

    def together(parameters: Any, buffers: Any, inputs: Tensor, targets: Tensor, *drawn: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for half, own in zip(halves, drawn, strict=True):
            found += half(parameters, buffers, inputs, targets, own)
        return found

    given = (first.parameters, first.buffers, inputs, targets, *drawn)
    read = [*first.parameters, *first.buffers, "input", "target", *named]
    names = [f"{half.prefix}{name}" for half in halves for name in half.outputs]
    free = torch.export.Dim("batch", min=2)
    still: dict[int, Any] = {}
    sizes = [{name: {0: free} if name in chance.KINDS else still for name in own} for own in drawn]
    dynamic = (dict.fromkeys(first.parameters, still), dict.fromkeys(first.buffers, still), {0: free}, {0: free})

    def written(*, functional: bool) -> onnx.ModelProto:
        traced = _trace(together, given, functional=functional)
        try:
            program = torch.export.export(traced, given, dynamic_shapes=(*dynamic, *sizes), strict=False)
        except (torch._dynamo.exc.UserError, ValueError, RuntimeError) as error:
            raise CannotCompile(
                f"the batch size cannot be left free ({_first_line(error)}): in forward, write x.shape[0] "
                "instead of len(x) or a number"
            ) from error
        # The program is decomposed already; tracing it once more would double the time.
        if functional:
            program.run_decompositions = lambda table=None: program
        return _to_onnx(program, read, names)

    with exporting(), torch.backends.mkldnn.flags(enabled=False):
        try:
            return written(functional=True)
        # Indexing by values, as in GPT-2, and operators that only the exporter decomposes fail as functional ones.
        except CannotCompile:
            return written(functional=False)


def _trace(flat: Callable[..., list[Tensor]], given: tuple[Any, ...], *, functional: bool) -> GraphModule:
    """Record every operator that runs, decomposed by ``_table``. functional: replace in-place operators."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def still(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor, static_shapes=True)

    def free(tensor: Tensor) -> Tensor:
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    parameters, buffers, inputs, targets, *drawn = given
    batch = free(inputs)

    def beside(tensor: Tensor) -> Tensor:
        with mode:
            return torch.zeros((batch.shape[0], *tensor.shape[1:]), dtype=tensor.dtype)

    fakes = (
        {name: still(tensor) for name, tensor in parameters.items()},
        {name: still(tensor) for name, tensor in buffers.items()},
        batch,
        beside(targets),
        *({name: beside(each) if name in chance.KINDS else still(each) for name, each in own.items()} for own in drawn),
    )
    try:
        with mode, enable_python_dispatcher(), translations.Fourier():
            if not functional:
                return make_fx(flat, decomposition_table=_table())(*fakes)
            # The exporter lacks this decomposition.
            table = {**_table(), **get_decompositions([torch.ops.aten.squeeze.dims])}
            return make_fx(dispatch_functionalize(flat, FunctionalTensorMode()), decomposition_table=table)(*fakes)
    except CannotCompile:
        raise
    # The user's code may raise anything, and torch if an operator needs values.
    except Exception as error:
        raise CannotCompile(f"the step cannot be traced: {_first_line(error)}") from error


def _cut_out(both: onnx.ModelProto, half: _Half) -> bytes:
    proto = both.__class__.FromString(both.SerializeToString())
    graph = proto.graph
    wanted = {f"{half.prefix}{name}": name for name in half.outputs}
    kept = [output for output in graph.output if output.name in wanted]
    del graph.output[:]
    graph.output.extend(kept)
    # The exporter may read the batch size from the other half's random numbers.
    drawn = {*chance.KINDS, *(f"evaluation:{kind}" for kind in chance.KINDS)}
    mine = {f"{half.prefix}{kind}" for kind in chance.KINDS}
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in drawn - mine:
            node.input[0] = "input"
    editor = Editor(proto)
    editor.remove_unread()
    for read in graph.input:
        editor.rename(read.name, read.name.removeprefix(half.prefix))
    for output in kept:
        # A value that both halves compute has the other half's name.
        if half.prefix:
            editor.rename(wanted[output.name], editor.fresh())
        editor.rename(output.name, wanted[output.name])
    proto.graph.name = "step" if not half.prefix else "evaluation"
    return bytes(proto.SerializeToString(deterministic=True))


def _plain(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).cpu()
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.num_batches_tracked is not None:
            if module.momentum is None:
                raise CannotCompile(f"{path}: running statistics need a momentum for training; set it to a number")
            module.num_batches_tracked = None
    return model


def _table() -> dict[Any, Any]:
    """Return the decompositions of operators without a translation here."""
    made = {**core_aten_decompositions(), **translations.DECOMPOSITIONS, torch.ops.aten.empty_permuted.default: _zeros}
    return {op: how for op, how in made.items() if op not in translations.TABLE}


def _zeros(size: Sequence[int], order: Sequence[int], **kind: Any) -> Tensor:
    """Return zeros for memory that will be overwritten."""
    return torch.zeros(size, dtype=kind.get("dtype"))


def _to_onnx(program: Any, read: Sequence[str], names: Sequence[str]) -> onnx.ModelProto:
    try:
        exported = torch.onnx.export(
            program,
            (),
            dynamo=True,
            optimize=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(read),
            output_names=list(names),
            custom_translation_table=translations.TABLE,
        )
    except ImportError as error:
        raise MissingPart(NEEDED) from error
    except torch.onnx.OnnxExporterError as error:
        raise CannotCompile(_operator(error)) from error
    assert exported is not None
    proto: onnx.ModelProto = exported.model_proto
    remove_notes(proto, shapes=True)
    return proto


def _operator(error: BaseException) -> str:
    """Return the message of the root cause."""
    while error.__cause__ is not None:
        if isinstance(error.__cause__, CannotCompile):
            return str(error.__cause__)
        if not isinstance(error.__cause__, torch.onnx.OnnxExporterError):
            break
        error = error.__cause__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
