"""The built-in tasks: their manifests and ONNX graphs, as data.

``<task>.safetensors`` beside this file is a checkpoint (``protocol.checkpoint``) with the manifest as note and the
graphs as uint8 vectors, written by ``python -m edge_sdk.publishing.write_builtin``. The file of ``mnist:leaf`` is
``mnist-leaf``, since some file systems do not allow colons.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import numpy as np

from .. import checkpoint
from ..errors import ManifestError
from ..manifest import GraphName, Manifest, Tensors

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class BuiltinTask:
    """A task's model, and the manifest's ONNX graphs."""

    name: str
    manifest: Manifest
    graphs: dict[GraphName, bytes]

    @property
    def skeleton(self) -> bytes:
        """The forward pass without weights."""
        return self.graphs["skeleton"]

    def to_file(self) -> bytes:
        """Return the content of the task's file."""
        vectors: Tensors = {str(name): np.frombuffer(graph, np.uint8) for name, graph in self.graphs.items()}
        return checkpoint.save(vectors, self.manifest.text)


def builtin_tasks() -> tuple[str, ...]:
    """Return the names of all built-in tasks, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    stems = (name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX))
    return tuple(sorted(stem.replace("-", ":") for stem in stems))


def file_name(name: str) -> str:
    """Return the name of the file of the task ``name``."""
    return name.replace(":", "-") + SUFFIX


def load_builtin(name: str) -> BuiltinTask:
    """Return the built-in task ``name``. Raises ManifestError, listing the names, if there is none."""
    if name not in builtin_tasks():
        raise ManifestError(
            f"there is no built-in task {name!r}; there are {', '.join(builtin_tasks())}. "
            "Publish a model of your own with sparrow publish"
        )
    vectors, note = checkpoint.load((resources.files(__name__) / file_name(name)).read_bytes())
    manifest = Manifest.model_validate_json(note)
    return BuiltinTask(name, manifest, {each: vectors[each].tobytes() for each in manifest.graphs})
