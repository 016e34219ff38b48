"""A task's training step and evaluation as ONNX graphs: parameters and a batch in, loss and gradients out.

PyTorch's own autograd writes the step down once, when a task is published; the inference runtime then trains with it
(``edge_sdk.engines.onnx``), on devices that have neither PyTorch nor the model's code.

    step        parameters, buffers, input, target, what is drawn -> loss, output, gradients, buffers
    evaluation  parameters, buffers, input, target                -> loss, output

Parameters and buffers have their state-dict names; a gradient is called ``grad:NAME``, a buffer that the forward pass
moves ``new:NAME``. The batch axis is free, every other one fixed. Neither graph holds weights or data. Both are
compared with PyTorch at two batch sizes before they are published.

What follows is the whole of this package's use of PyTorch's private parts: fake tensors of a free batch, and the table
of decompositions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from edge_sdk.protocol.errors import ManifestError, MissingPart
from edge_sdk.publishing import chance, norms, translations
from edge_sdk.publishing.skeleton import quiet, remove_notes

OPSET = 21
BATCHES = (5, 3)
"""Samples that a step is traced with and recorded at, and compared at, too."""

CLOSE = 1e-4
"""Relative L2 distance that rounding may make between a graph and PyTorch, for each gradient."""

ROUNDING = 1e-3
"""Gradients below this share of the largest are compared with that."""

Loss = Callable[[Tensor, Tensor], Tensor]


class CannotCompile(ManifestError):
    """The training step cannot be written as a graph; the text names the operator. PyTorch trains it all the same."""


@dataclass(frozen=True)
class Compiled:
    """The two graphs of a task, serialised ONNX."""

    step: bytes
    evaluation: bytes


def compile_step(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Compiled:
    """Return the graphs of a model and its loss.

    inputs [N, ...] and targets [N, ...]: a few samples, N >= 1; the model is left as it was. Raises CannotCompile, and
    MissingPart without onnx and onnxscript.
    """
    batch = Batch(inputs, targets)
    work = _Work(model, loss, batch)
    return Compiled(work.step(), work.evaluation())


@dataclass(frozen=True)
class Batch:
    """Samples to trace with, repeated to any number."""

    inputs: Tensor
    targets: Tensor

    def of(self, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` samples."""
        index = torch.arange(count) % len(self.inputs)
        return self.inputs[index].detach().cpu(), self.targets[index].detach().cpu()


class _Work:
    def __init__(self, model: nn.Module, loss: Loss, batch: Batch) -> None:
        self._model, self._loss, self._batch = _plain(model), loss, batch
        self._parameters = {name: value.detach() for name, value in self._model.named_parameters()}
        self._trained = [name for name, value in self._model.named_parameters() if value.requires_grad]
        self._buffers = {name: value.detach() for name, value in self._model.named_buffers()}
        self._draws: list[chance.Draw] = []
        self._moved: list[str] = []
        self._used: list[str] = []

    def step(self) -> bytes:
        """Return the graph of a training step."""
        self._model.train()
        drawn = self._record()
        inputs, targets = self._batch.of(BATCHES[0])
        before = {name: value.clone() for name, value in self._buffers.items()}
        _, _, gradients, after = self._step(self._parameters, self._buffers, inputs, targets, drawn)
        self._used = [name for name, each in zip(self._trained, gradients, strict=True) if each is not None]
        self._moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
        names = ["loss", "output", *(f"grad:{name}" for name in self._used), *(f"new:{name}" for name in self._moved)]

        def flat(parameters: Any, buffers: Any, inputs: Tensor, targets: Tensor, drawn: Any) -> list[Tensor]:
            loss, output, gradients, after = self._step(parameters, buffers, inputs, targets, drawn)
            return [
                loss,
                output,
                *(each for each in gradients if each is not None),
                *(after[name] for name in self._moved),
            ]

        graph = self._export(flat, drawn, names)
        for count in BATCHES:
            self._compare(graph, flat, count, names)
        return graph

    def evaluation(self) -> bytes:
        """Return the graph of an evaluation."""
        self._model.eval()
        drawn = self._record()

        def flat(parameters: Any, buffers: Any, inputs: Tensor, targets: Tensor, drawn: Any) -> list[Tensor]:
            with self._given(drawn):
                output = functional_call(self._model, ({**parameters, **buffers}), (inputs,))
            return [self._loss(output, targets), output]

        with torch.no_grad():
            graph = self._export(flat, drawn, ["loss", "output"])
            for count in BATCHES:
                self._compare(graph, flat, count, ["loss", "output"])
        return graph

    def _record(self) -> dict[str, Tensor]:
        """Find out what the model draws in its mode, and return such numbers for the first of BATCHES."""
        try:
            self._draws = chance.record(lambda count: self._forward(*self._batch.of(count)), BATCHES)
        except chance.UnknownChance as error:
            raise CannotCompile(f"{error} draws numbers that no input stands for") from None
        return self._drawn(BATCHES[0])

    def _drawn(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(count)
        return {
            name: (torch.rand if name.startswith("uniform") else torch.randn)(shape, generator=generator)
            for name, shape in chance.shapes_of(self._draws, BATCHES[0], count).items()
        }

    def _given(self, drawn: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        return chance.Chance(chance.Given(self._draws, BATCHES[0], drawn)) if self._draws else nullcontext()

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        buffers = {name: value.clone() for name, value in self._buffers.items()}
        return self._loss(functional_call(self._model, ({**self._parameters, **buffers}), (inputs,)), targets)

    def _step(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        drawn: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None], dict[str, Tensor]]:
        """Return loss, output, the gradients of what is trained, and the buffers afterwards."""
        leaves = {name: value.detach() for name, value in parameters.items()}
        for name in self._trained:
            leaves[name].requires_grad_()
        after = {name: value.clone() for name, value in buffers.items()}
        with self._given(drawn):
            output = functional_call(self._model, ({**leaves, **after}), (inputs,))
            loss = self._loss(output, targets)
        gradients = torch.autograd.grad(loss, [leaves[name] for name in self._trained], allow_unused=True)
        return loss, output, gradients, after

    def _export(self, flat: Callable[..., list[Tensor]], drawn: Mapping[str, Tensor], names: Sequence[str]) -> bytes:
        inputs, targets = self._batch.of(BATCHES[0])
        given = (self._parameters, self._buffers, inputs, targets, dict(drawn))
        read = [*self._parameters, *self._buffers, "input", "target", *drawn]
        free = torch.export.Dim("batch", min=2)
        still: dict[int, Any] = {}
        sizes = {name: {0: free} if name in chance.KINDS else still for name in drawn}
        dynamic = (dict.fromkeys(self._parameters, still), dict.fromkeys(self._buffers, still), {0: free}, {0: free})
        with quiet(), torch.backends.mkldnn.flags(enabled=False):
            traced = self._trace(flat, given)
            try:
                program = torch.export.export(traced, given, dynamic_shapes=(*dynamic, sizes), strict=False)
            except (torch._dynamo.exc.UserError, ValueError, RuntimeError) as error:
                raise CannotCompile(f"the batch size cannot be left free: {_first_line(error)}") from error
            return _to_onnx(program, read, names)

    def _trace(self, flat: Callable[..., list[Tensor]], given: tuple[Any, ...]) -> GraphModule:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

        def still(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor, static_shapes=True)

        def free(tensor: Tensor) -> Tensor:
            sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
            return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

        parameters, buffers, inputs, targets, drawn = given
        batch = free(inputs)

        def beside(tensor: Tensor) -> Tensor:
            with mode:
                return torch.zeros((batch.shape[0], *tensor.shape[1:]), dtype=tensor.dtype)

        fakes = (
            {name: still(tensor) for name, tensor in parameters.items()},
            {name: still(tensor) for name, tensor in buffers.items()},
            batch,
            beside(targets),
            {name: beside(tensor) if name in chance.KINDS else still(tensor) for name, tensor in drawn.items()},
        )
        try:
            with mode, enable_python_dispatcher():
                return make_fx(flat, decomposition_table=_table())(*fakes)
        except Exception as error:  # the user's code, or what torch cannot run without values
            raise CannotCompile(f"the step cannot be traced: {_first_line(error)}") from error

    def _compare(self, graph: bytes, flat: Callable[..., list[Tensor]], count: int, names: Sequence[str]) -> None:
        """Raise CannotCompile unless the graph answers what PyTorch does, on ``count`` samples."""
        import onnxruntime  # here, because it is needed to publish alone

        inputs, targets = self._batch.of(count)
        drawn = self._drawn(count)
        wanted = flat(self._parameters, self._buffers, inputs, targets, drawn)
        largest = max([float(each.detach().norm()) for each in wanted])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        given = {**self._parameters, **self._buffers, "input": inputs, "target": targets, **drawn}
        feeds = {each.name: np.ascontiguousarray(given[each.name].numpy()) for each in session.get_inputs()}
        found = session.run(list(names), feeds)
        for name, value, right in zip(names, found, wanted, strict=True):
            right_array = right.detach().numpy()
            distance = float(np.linalg.norm(np.asarray(value, np.float64) - right_array))
            size = float(np.linalg.norm(right_array.astype(np.float64)))
            # Where the truth is zero, such as for a bias before batch norm, all is rounding.
            if not distance <= CLOSE * max(size, ROUNDING * largest):
                raise CannotCompile(f"{name}: the graph answers another value than PyTorch, by {distance / size:.1e}")


def _plain(model: nn.Module) -> nn.Module:
    """Return a copy in which nothing counts batches or is computed in a form that fixes their size."""
    model = copy.deepcopy(model).cpu()
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.num_batches_tracked is not None:
            if module.momentum is None:
                raise CannotCompile(f"{path}: running statistics without a momentum go by a count of batches; give one")
            module.num_batches_tracked = None
    return model


def _table() -> dict[Any, Any]:
    """Return the decompositions of what has no translation here."""
    made = {**core_aten_decompositions(), **norms.DECOMPOSITIONS, torch.ops.aten.empty_permuted.default: _zeros}
    return {op: how for op, how in made.items() if op not in translations.TABLE}


def _zeros(size: Sequence[int], order: Sequence[int], **kind: Any) -> Tensor:
    """Stand for memory that is about to be written."""
    return torch.zeros(size, dtype=kind.get("dtype"))


def _to_onnx(program: Any, read: Sequence[str], names: Sequence[str]) -> bytes:
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
        raise MissingPart("publishing needs onnx and onnxscript: pip install 'sparrow-fl[publish]'") from error
    except translations.NoTranslation as error:
        raise CannotCompile(str(error)) from error
    except torch.onnx.OnnxExporterError as error:
        raise CannotCompile(_operator(error)) from error
    assert exported is not None
    proto = exported.model_proto
    remove_notes(proto, shapes=True)
    return bytes(proto.SerializeToString(deterministic=True))


def _operator(error: BaseException) -> str:
    cause = error.__cause__ or error
    return _first_line(cause)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
