"""Maintainers' tool: write the built-in tasks' manifests and skeletons anew after a model changed.

    python -m edge_sdk.publishing.write_builtin

A test compares the committed files with what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from edge_sdk.protocol import builtin
from edge_sdk.protocol.builtin import BuiltinTask, file_stem
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.tasks.digits import DigitsNet
from edge_sdk.tasks.models import MODELS as CHOICES
from edge_sdk.tasks.models import full_name

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (DigitsNet, (1, 8, 8)),
    **{
        full_name(task, model): (choice.build, choice.shape)
        for task, choices in CHOICES.items()
        for model, choice in choices.items()
    },
}
"""Task, with its model where that is not the default -> its network and the shape of one sample."""


def make_builtin(name: str) -> BuiltinTask:
    """Return the built-in task ``name`` made from its model: initial values as recipes, skeleton named
    by its digest."""
    build, input_shape = MODELS[name]
    model, example = build(), torch.zeros(1, *input_shape)
    manifest = describe(model, example, task=name, recipes=True)
    skeleton = make_skeleton(model, example, manifest)
    return BuiltinTask(name, manifest.with_skeleton(skeleton), skeleton)


def write_builtin(folder: Path) -> list[Path]:
    """Write every built-in task into ``folder``; returns the files."""
    written = []
    for name in MODELS:
        task = make_builtin(name)
        for suffix, content in (
            ("json", task.manifest.model_dump_json(indent=1).encode() + b"\n"),
            ("onnx", task.skeleton),
        ):
            path = folder / f"{file_stem(name)}.{suffix}"
            path.write_bytes(content)
            written.append(path)
    return written


if __name__ == "__main__":
    for path in write_builtin(Path(next(iter(builtin.__path__)))):
        sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")
