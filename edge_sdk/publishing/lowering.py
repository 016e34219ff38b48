"""A recording of PyTorch's operators as an ONNX graph.

Each call is translated by ``translations.TABLE`` or by onnxscript's library of PyTorch's operators. Types are promoted
as PyTorch does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from . import translations
from .recording import Call, FreeRecording, Ref, Sized, first_line
from .skeleton import IR_VERSION, OPSET
from .translations import CannotCompile

if TYPE_CHECKING:
    import onnx

_ATEN = torch.ops.aten

LARGEST_FOLDED = 2**14
"""Largest number of values of a constant that is computed at publication."""

_RESHAPING = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)

_SPLITTING = {_ATEN.split.Tensor: 2, _ATEN.split_with_sizes.default: 2, _ATEN.unbind.int: 1}
"""Operator -> position of its axis."""

_ADDING = (
    _ATEN.cumsum.default,
    _ATEN.cumprod.default,
    _ATEN.mean.default,
    _ATEN.mean.dim,
    _ATEN.prod.default,
    _ATEN.prod.dim_int,
    _ATEN.sum.default,
    _ATEN.sum.dim_IntList,
)
"""Operators that add in the type of the result."""


@functools.cache
def _registry() -> Any:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry = ONNXRegistry.from_torchlib(OPSET)
    for operator, function in translations.TABLE.items():
        registry.register_op(operator, function)
    return registry


def is_translated(operator: Any) -> bool:
    """Return True if an operator has a translation."""
    return bool(_registry().is_registered(operator))


def to_onnx(recording: FreeRecording, read: Sequence[str], names: Sequence[str], name: str) -> onnx.ModelProto:
    """Return the graph ``name``.

    read, names: names of the inputs and of the outputs, in order. Raises CannotCompile if an operator has no
    translation.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common
    from onnxscript.optimizer._constant_folding import FoldConstantsPass

    model = _Lowering(recording, read).model(names, name)
    ir.passes.Sequential(
        common.InlinePass(),
        common.RemoveUnusedNodesPass(),
        FoldConstantsPass(shape_inference=True, input_size_limit=LARGEST_FOLDED, output_size_limit=LARGEST_FOLDED),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
    )(model)
    _drop_unread_inputs(model, set(names))
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


def _drop_unread_inputs(model: Any, kept: set[str]) -> None:
    unread = [each for each in model.graph.inputs if not each.uses() and each.name not in kept]
    for each in unread:
        model.graph.inputs.remove(each)


class _Lowering:
    def __init__(self, recording: FreeRecording, read: Sequence[str]) -> None:
        import onnx_ir as ir
        from onnxscript import evaluator, values
        from torch.onnx._internal.exporter import _building, _tensors

        self._ir = ir
        self._recording = recording
        self._tensors = _tensors
        self._opset = values.Opset("", OPSET)
        self._recorder: Any = _building.OpRecorder(self._opset, {})  # type: ignore[abstract]
        self._values: dict[int, Any] = {}
        self._sizes: dict[tuple[Sized, Any], Any] = {}
        # Place -> the place that it is a permutation of, and the axes.
        self._permuted: dict[int, tuple[int, list[int]]] = {}
        self._inputs: list[Any] = []
        self._initializers: list[Any] = []
        for place, name in zip(recording.inputs, read, strict=True):
            value = _tensors.SymbolicTensor(self._opset, name=name)
            self._describe(value, place)
            self._values[place] = value
            self._inputs.append(value)
        self._batch = self._inputs[list(read).index("input")]
        with evaluator.default_as(self._recorder):
            for call in recording.calls:
                self._lower(call)

    def model(self, names: Sequence[str], name: str) -> Any:
        """Return the graph with named outputs."""
        from torch.onnx._internal.exporter._ir_passes import add_opset_imports

        ir = self._ir
        outputs = []
        nodes = self._recorder.nodes
        for place, made in zip(self._recording.outputs, names, strict=True):
            value = self._value(place)
            if value in outputs or value.producer() is None:
                node = ir.Node("", "Identity", [value])
                nodes.append(node)
                value = node.outputs[0]
                self._describe(value, place)
            value.name = made
            outputs.append(value)
        # The library keeps its functions for other exports.
        functions = [each.function_ir.clone() for each in self._recorder.functions.values()]
        for each in functions:
            # Those of the library are written for an older version, whose operators the newer one has.
            each.opset_imports[""] = OPSET
        graph = ir.Graph(
            self._inputs,
            outputs,
            nodes=nodes,
            initializers=self._initializers,
            opset_imports={"": OPSET, **{each.domain: 1 for each in functions}},
            name=name,
        )
        model = ir.Model(graph, ir_version=IR_VERSION, functions=functions)
        add_opset_imports(model)
        return model

    def _describe(self, value: Any, place: int) -> None:
        ir = self._ir
        value.type = ir.TensorType(_kind(ir, self._recording.dtypes[place]))
        value.shape = ir.Shape([_length(size) for size in self._recording.shapes[place]])

    def _value(self, place: int) -> Any:
        found = self._values.get(place)
        if found is None:
            found = self._constant(place)
            self._values[place] = found
        return found

    def _constant(self, place: int) -> Any:
        ir = self._ir
        tensor = self._recording.constants[place].detach()
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        value = self._tensors.SymbolicTensor(self._opset, name=f"constant_{place}")
        self._describe(value, place)
        value.const_value = ir.tensor(tensor.contiguous().numpy(), name=value.name)
        self._initializers.append(value)
        return value

    def _lower(self, call: Call) -> None:
        if call.operator is _ATEN.permute.default and self._permute(call):
            return
        try:
            made = self._split(call) if call.operator in _SPLITTING else self._translated(call)
        except CannotCompile:
            raise
        # Translations of onnxscript raise anything.
        except Exception as error:
            raise CannotCompile(_cause(error, call)) from error
        results = list(made) if isinstance(made, tuple | list) else [made]
        for place, value in zip(call.made, results, strict=False):
            if place is not None and value is not None:
                self._describe(value, place)
                self._values[place] = value

    def _permute(self, call: Call) -> bool:
        """Return True if a permutation reverses an earlier one; its result is then the value before both."""
        place = call.args[0].place
        axes = [axis % len(call.args[1]) for axis in call.args[1]]
        source, before = self._permuted.get(place, (place, list(range(len(axes)))))
        together = [before[axis] for axis in axes]
        made = call.made[0]
        assert made is not None
        if together == sorted(together):
            self._values[made] = self._value(source)
            return True
        self._permuted[made] = (source, together)
        return False

    def _split(self, call: Call) -> Sequence[Any]:
        """Translate operators whose results are parts of their argument."""
        ir = self._ir
        op = self._opset
        x = call.args[0].place
        axis = (call.args[_SPLITTING[call.operator]] if len(call.args) > _SPLITTING[call.operator] else 0) % len(
            self._recording.shapes[x]
        )
        if call.operator is _ATEN.unbind.int:
            return [
                op.Gather(self._value(x), op.Constant(value_int=place), axis=axis) for place in range(len(call.made))
            ]
        sizes = [self._recording.shapes[place][axis] for place in call.made if place is not None]
        if any(isinstance(each, Sized) for each in sizes):
            raise CannotCompile("a split of a batch cannot be compiled: split another axis")
        lengths = op.Constant(value=ir.tensor(sizes, dtype=ir.DataType.INT64))
        outputs = [self._tensors.SymbolicTensor(self._opset) for _ in sizes]
        node = ir.Node("", "Split", [self._value(x), lengths], [ir.AttrInt64("axis", axis)], outputs=outputs)
        self._recorder.nodes.append(node)
        return outputs

    def _translated(self, call: Call) -> Any:
        function = self._function(call)
        args, kwargs = self._converted(call)
        return function(*args, **kwargs)

    def _function(self, call: Call) -> Any:
        found = [each for each in _registry().get_decomps(call.operator) if not each.is_complex]
        if not found:
            raise CannotCompile(f"No ONNX function found for {call.operator}")
        return found[0].onnx_function

    def _converted(self, call: Call) -> tuple[Sequence[Any], Mapping[str, Any]]:
        ir = self._ir
        if call.operator in _RESHAPING:
            return (self._value(call.args[0].place), _one_unknown(call.args[1], self._size)), {}
        if call.operator is _ATEN.expand.default:
            before = self._recording.shapes[call.args[0].place]
            sizes = list(call.args[1])
            for axis in range(1, len(before) + 1):
                if sizes[-axis] == before[-axis]:
                    sizes[-axis] = 1
            return (self._value(call.args[0].place), [self._size(each) for each in sizes]), {}
        promoted = self._promoted(call)

        def convert(value: Any) -> Any:
            if isinstance(value, Ref):
                found = self._value(value.place)
                kind = promoted.get(value.place)
                return found if kind is None else self._cast(found, kind)
            if isinstance(value, Sized):
                return self._size(value, promoted.get(None))
            if isinstance(value, torch.dtype):
                return int(_kind(ir, value))
            if isinstance(value, torch.device | torch.layout | torch.memory_format):
                return None
            return value

        args = [tree_map(convert, each) for each in call.args]
        kwargs = {key: tree_map(convert, value) for key, value in call.kwargs.items()}
        if "dtype" in kwargs and kwargs["dtype"] is None:
            kwargs["dtype"] = -1
        return args, kwargs

    def _promoted(self, call: Call) -> dict[int | None, Any]:
        """Return place -> type to cast to, for operators on entries; None -> the type of a number."""
        ir = self._ir
        dtypes = self._recording.dtypes
        made = dtypes[next(place for place in call.made if place is not None)]
        if torch.Tag.pointwise not in call.operator.tags:
            if call.operator not in _ADDING or dtypes[call.args[0].place] == made:
                return {}
            return {call.args[0].place: _kind(ir, made)}
        shapes = self._recording.shapes
        refs = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Ref)]
        numbers = [each for each in tree_leaves(call.args) if isinstance(each, int | float | Sized)]
        common = made
        if made == torch.bool or not refs:
            some = [torch.empty((1,) * len(shapes[each.place]), dtype=dtypes[each.place]) for each in refs]
            plain = [each.at(1) if isinstance(each, Sized) else each for each in numbers]
            common = functools.reduce(torch.promote_types, [each.dtype for each in some])
            if any(isinstance(each, float) for each in plain) and not common.is_floating_point:
                common = torch.float32
        if common == torch.float64:
            common = torch.float32
        kind = _kind(ir, common)
        conditions = {call.args[0].place} if call.operator is _ATEN.where.self else set()
        found: dict[int | None, Any] = {
            each.place: kind
            for each in refs
            if dtypes[each.place] != common and each.place not in conditions and common != torch.bool
        }
        found[None] = kind
        return found

    def _cast(self, value: Any, kind: Any) -> Any:
        found = self._opset.Cast(value, to=kind)
        found.type = self._ir.TensorType(kind)
        found.shape = value.shape
        return found

    def _size(self, value: Any, kind: Any = None) -> Any:
        """Return a number, or for a ``Sized`` number a value of the graph."""
        if not isinstance(value, Sized):
            return value
        found = self._sizes.get((value, kind))
        if found is None:
            found = self._computed(value, kind)
            self._sizes[value, kind] = found
        return found

    def _computed(self, value: Sized, kind: Any) -> Any:
        ir = self._ir
        op = self._opset
        whole = not value.inverse and float(value.slope).is_integer()
        if kind is None:
            kind = ir.DataType.INT64 if whole else ir.DataType.FLOAT

        def number(content: float, of: Any) -> Any:
            return op.Constant(value=ir.tensor(content, dtype=of))

        size = op.Squeeze(op.Shape(self._batch, start=0, end=1))
        _set(ir, size, ir.DataType.INT64)
        if not whole:
            size = op.Cast(size, to=ir.DataType.FLOAT)
            of = ir.DataType.FLOAT
            slope = value.slope
        else:
            of = ir.DataType.INT64
            slope = int(value.slope)
        if value.inverse:
            size = op.Div(number(slope, of), size)
        elif slope != 1:
            size = op.Mul(size, number(slope, of))
        if value.rest:
            size = op.Add(size, number(value.rest, of))
        if kind != of:
            size = op.Cast(size, to=kind)
        _set(ir, size, kind)
        return size


def _set(ir: Any, value: Any, kind: Any) -> None:
    value.type = ir.TensorType(kind)
    value.shape = ir.Shape([])


def _one_unknown(sizes: Sequence[Any], computed: Any) -> list[Any]:
    """Return the sizes of a reshape; a single size that is not a number becomes -1."""
    unknown = [each for each in sizes if isinstance(each, Sized)]
    if len(unknown) == 1 and -1 not in sizes:
        return [-1 if isinstance(each, Sized) else each for each in sizes]
    return [computed(each) for each in sizes]


def _length(size: int | Sized) -> int | str:
    if not isinstance(size, Sized):
        return size
    if size == Sized(1):
        return "batch"
    return f"{size.slope}*batch{size.rest:+d}" if size.rest else f"{size.slope}*batch"


def _kind(ir: Any, dtype: torch.dtype) -> Any:
    kinds = {
        torch.float32: ir.DataType.FLOAT,
        # Graphs compute in single precision.
        torch.float64: ir.DataType.FLOAT,
        torch.float16: ir.DataType.FLOAT16,
        torch.bfloat16: ir.DataType.BFLOAT16,
        torch.int64: ir.DataType.INT64,
        torch.int32: ir.DataType.INT32,
        torch.int16: ir.DataType.INT16,
        torch.int8: ir.DataType.INT8,
        torch.uint8: ir.DataType.UINT8,
        torch.bool: ir.DataType.BOOL,
    }
    if dtype not in kinds:
        raise CannotCompile(f"values of {str(dtype).removeprefix('torch.')} cannot be compiled")
    return kinds[dtype]


def _cause(error: BaseException, call: Call) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CannotCompile):
        return str(error)
    return f"{call.operator} cannot be compiled: {first_line(error)}"
