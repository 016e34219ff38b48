"""Builder of nodes and constants for an ONNX graph, with generated names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto


class Building:
    """Builder of nodes and initialisers, in order; all names begin with ``prefix``.

    Use only operators with the same meaning in all versions of ``skeleton.OPSETS``.
    """

    def __init__(self, prefix: str) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._prefix = prefix
        self._count = 0
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def name(self, what: str) -> str:
        """Return a new name."""
        self._count += 1
        return f"{self._prefix}{what}_{self._count}"

    def constant(self, values: NDArray[Any]) -> str:
        """Return the name of an initialiser with these values; equal ones are shared."""
        array = np.ascontiguousarray(values).reshape(np.shape(values))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.name("constant")
            self.initializers.append(onnx.numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def whole(self, *numbers: int) -> str:
        """Return the name of an int64 constant, such as axes or a shape."""
        return self.constant(np.array(numbers, dtype=np.int64))

    def index(self, values: NDArray[np.integer[Any]]) -> str:
        """Return the name of integers >= 0 as int64, stored in the smallest type."""
        largest = int(values.max(initial=0))
        small = np.uint8 if largest < 2**8 else np.uint16 if largest < 2**16 else np.int32
        return self.add("Cast", self.constant(values.astype(small)), to=TensorProto.INT64)

    def several(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs, and return their names."""
        names = [self.name(kind.lower()) for _ in range(outputs)]
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), names, names[0], **attributes))
        return names

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node, and return the name of its output: ``output``, if given."""
        name = output or self.name(kind.lower())
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def sum(self, values: str, axis: int, keep: bool = True) -> str:
        """Return the sum along one axis."""
        return self.add("ReduceSum", values, self.whole(axis), keepdims=int(keep))

    def slice(self, values: str, axis: int, start: int, stop: int) -> str:
        """Return ``values[start:stop]`` along an axis."""
        return self.add("Slice", values, self.whole(start), self.whole(stop), self.whole(axis))

    def reshape(self, values: str, shape: Sequence[int]) -> str:
        """Return the value in another shape: 0 keeps an axis, -1 is the rest."""
        return self.add("Reshape", values, self.whole(*shape))
