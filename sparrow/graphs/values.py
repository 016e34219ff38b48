"""Static properties of a graph's values: types, shapes, sizes, and data of small constants."""

from __future__ import annotations

import math

import numpy as np
import onnx.helper
from onnx import NodeProto, TensorProto, TypeProto

from ..protocol.manifest import Array
from .errors import SkeletonError

LARGEST_SIZE = 2**31

BYTES: dict[int, int] = {
    int(number): np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number)).itemsize
    for number in (
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.BOOL,
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
    )
}

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


class Values:
    """The values of a graph that runs on ``samples`` samples.

    sizes: name -> bytes. data: name -> array, for small constants. pieces: types of the parts of a sequence. varies:
    values that depend on an input.
    """

    def __init__(self, samples: int, opset: int) -> None:
        self.samples = samples
        self.opset = opset
        self.types: dict[str, TypeProto] = {}
        self.sizes: dict[str, int] = {}
        self.data: dict[str, Array] = {}
        self.pieces: dict[str, list[TypeProto]] = {}
        self.varies: set[str] = set()

    def add(self, name: str, described: TypeProto, node: NodeProto | None = None) -> None:
        """Add a value. Raises SkeletonError if its size is unknown or too large."""
        tensor = described.tensor_type
        dims = tensor.shape.dim
        if not tensor.HasField("shape") or any(dim.WhichOneof("value") != "dim_value" for dim in dims):
            raise unknown(node)
        sizes = [dim.dim_value for dim in dims]
        if tensor.elem_type not in BYTES or len(sizes) > 16 or any(not 0 <= size <= LARGEST_SIZE for size in sizes):
            what = repr(name[:80]) if node is None else named(node)
            raise SkeletonError(f"{what}: a value is not a tensor of numbers of a common type and size")
        self.types[name] = described
        self.sizes[name] = math.prod(sizes) * BYTES[tensor.elem_type]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a value."""
        if name in self.pieces:
            return self._shape(self.pieces[name][0])
        return self._shape(self.types[name])

    @staticmethod
    def _shape(described: TypeProto) -> list[int]:
        return [dim.dim_value for dim in described.tensor_type.shape.dim]

    def kind(self, name: str) -> int:
        """Return a value's type, of ``TensorProto``."""
        described = self.pieces[name][0] if name in self.pieces else self.types[name]
        return int(described.tensor_type.elem_type)

    def size(self, name: str) -> int:
        """Return a value's bytes."""
        return self.sizes.get(name, 0)

    def known(self, name: str) -> Array | None:
        """Return the data of a small constant, if known."""
        return self.data.get(name)


def named(node: NodeProto) -> str:
    """Return a node's name for error messages."""
    return f"the node {node.name[:80]!r} ({node.op_type[:80]!r})"


def unknown(node: NodeProto | None) -> SkeletonError:
    """Return the error for a node, an input or an initialiser whose size is unknown."""
    what = "an input or initialiser" if node is None else named(node)
    return SkeletonError(f"{what}: the size of a value is not known before it runs; derive shapes from the input's")
