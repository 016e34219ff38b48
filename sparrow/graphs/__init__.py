"""ONNX graphs as devices, the coordinator and exports read, check and rewrite them, with onnx and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.manifest import Tensors


@dataclass(frozen=True)
class Graphs:
    """The training step and the evaluation of a task, serialised ONNX. frozen: what they read that nobody trains, by
    name; networks read it where it lies. first: how what stays on devices begins."""

    step: bytes
    evaluation: bytes
    frozen: Tensors = field(default_factory=dict)
    first: Tensors = field(default_factory=dict)
