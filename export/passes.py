"""Export passes of other packages, which register a function under the entry point ``sparrow.export_passes``."""

from __future__ import annotations

import onnx.checker
from onnx import ModelProto

from sparrow.command_line.installed import installed, load

from .errors import ExportError


def installed_passes(model: ModelProto) -> ModelProto:
    """Return the model after every installed pass, in the order of their names.

    Raises ExportError, naming the pass, for one that leaves no valid ONNX model.
    """
    for entry in installed("sparrow.export_passes").values():
        model = load(entry, ExportError, what="export pass")(model)
        try:
            onnx.checker.check_model(model)
        except onnx.checker.ValidationError as error:
            raise ExportError(
                f"the export pass {entry.name} ({entry.value}) leaves no valid ONNX model: {error}; correct it, or "
                f"uninstall its package"
            ) from None
    return model
