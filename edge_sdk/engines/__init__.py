"""Training without PyTorch: the training step as a graph, made fast, and optimisers in numpy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Graphs:
    """The training step and the evaluation of a task, serialised ONNX."""

    step: bytes
    evaluation: bytes
