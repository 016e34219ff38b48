"""Read, check and rewrite ONNX graphs for devices, coordinator and exports, with onnx and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.manifest import Tensors


@dataclass(frozen=True)
class Graphs:
    """The training step and the evaluation of a task, serialised ONNX."""

    step: bytes
    evaluation: bytes
    # Values that the graphs read and that do not train, by name; networks share these arrays.
    frozen: Tensors = field(default_factory=dict)
    # Initial values of tensors that stay on devices.
    first: Tensors = field(default_factory=dict)
