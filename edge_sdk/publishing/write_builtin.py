"""Maintainers' tool: rewrite the files of the built-in tasks after a model changed.

python -m edge_sdk.publishing.write_builtin
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from sparrow.graphs.checking import check_graphs
from sparrow.protocol import builtin
from sparrow.protocol.builtin import BuiltinTask, file_name
from sparrow.protocol.manifest import GraphName

from ..tasks.models import DigitsNet
from ..tasks.public import BY_DEVICES, full_name
from ..tasks.public import MODELS as CHOICES
from .coupling import describe
from .skeleton import make_skeleton
from .step import compile_step

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (DigitsNet, (1, 8, 8)),
    **{
        full_name(task, model): (choice.build, choice.shape)
        for task, choices in CHOICES.items()
        if task not in BY_DEVICES
        for model, choice in choices.items()
    },
}
"""Task, followed by its model unless that is the default -> network and shape of one sample."""


def make_builtin(name: str) -> BuiltinTask:
    """Return a built-in classification task, with initial values as recipes."""
    build, input_shape = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    model = build()
    example = torch.randn(2, *input_shape, generator=generator)
    manifest = describe(model, example, task=name, recipes=True)
    compiled = compile_step(model, F.cross_entropy, example, torch.tensor([0, 1]))
    check_graphs(compiled, manifest)
    skeleton = make_skeleton(model, example, manifest)
    graphs: dict[GraphName, bytes] = {
        "skeleton": skeleton,
        "step": compiled.step,
        "evaluation": compiled.evaluation,
    }
    return BuiltinTask(name, manifest.with_graphs(graphs), graphs)


def write_builtin(folder: Path) -> list[Path]:
    """Write every built-in task into ``folder``, and return the files."""
    written = []
    for name in MODELS:
        path = folder / file_name(name)
        path.write_bytes(make_builtin(name).to_file())
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_builtin(Path(next(iter(builtin.__path__)))):
        sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")
