"""Export passes of other packages, which register a function under the entry point ``sparrow.export_passes``."""

from __future__ import annotations

from onnx import ModelProto

from sparrow.command_line.installed import installed, load
from sparrow.graphs.graph import check_valid

from .errors import ExportError


def installed_passes(model: ModelProto) -> ModelProto:
    """Return the model after every installed pass, in the order of their names.

    Raises ExportError, naming the pass, for one that leaves no valid ONNX model.
    """
    for entry in installed("sparrow.export_passes").values():
        model = load(entry, ExportError, what="export pass")(model)
        what = f"the export pass {entry.name} ({entry.value}) leaves no valid ONNX model"
        check_valid(model, what, "correct it, or uninstall its package")
    return model
