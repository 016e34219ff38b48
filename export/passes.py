"""Export passes of other packages, registered in the entry points ``sparrow.export_passes``."""

from __future__ import annotations

from onnx import ModelProto

from sparrow.command_line.installed import installed, load
from sparrow.graphs.graph import check_valid

from .errors import ExportError


def installed_passes(model: ModelProto) -> ModelProto:
    """Apply every installed pass, in order of name. Raises ExportError if one returns an invalid model."""
    for entry in installed("sparrow.export_passes").values():
        model = load(entry, ExportError, what="export pass")(model)
        fault = f"the export pass {entry.name} ({entry.value}) returned an invalid ONNX model"
        check_valid(model, fault, "correct it, or uninstall its package")
    return model
