"""The tasks every coordinator knows without being told: their manifests and ONNX skeletons, as data.

``<task>.json`` and ``<task>.onnx`` beside this file are written by ``python -m edge_sdk.publishing.write_builtin``;
initial weights follow from the manifest's recipes, so that a coordinator needs no torch to begin. A task with another
model than its usual one, ``mnist:leaf``, is kept as ``mnist-leaf``, since not every file system takes a colon.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Manifest


@dataclass(frozen=True)
class BuiltinTask:
    """A task's model: ``skeleton`` is its forward pass as ONNX without weights, named by ``manifest``."""

    name: str
    manifest: Manifest
    skeleton: bytes


def builtin_tasks() -> tuple[str, ...]:
    """Return the names of all built-in tasks, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    stems = (name.removesuffix(".json") for name in files if name.endswith(".json"))
    return tuple(sorted(stem.replace("-", ":") for stem in stems))


def file_stem(name: str) -> str:
    """Return the name of the files of the task ``name``, without their ending."""
    return name.replace(":", "-")


def load_builtin(name: str) -> BuiltinTask:
    """Return the built-in task ``name``. Raises ManifestError, listing the names, when there is none."""
    if name not in builtin_tasks():
        raise ManifestError(
            f"there is no built-in task {name!r}; there are {', '.join(builtin_tasks())}. "
            "Publish a model of your own with sparrow publish"
        )
    folder = resources.files(__name__)
    manifest = Manifest.model_validate_json((folder / f"{file_stem(name)}.json").read_text(encoding="utf-8"))
    return BuiltinTask(name, manifest, (folder / f"{file_stem(name)}.onnx").read_bytes())
