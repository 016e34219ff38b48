"""Dynamic exports: files in which each sample is answered by a model of its own choice.

A method whose devices choose sample by sample registers, under its own name in the entry points
``sparrow.dynamic_exports``, a function that makes such a model from a device's state, without torch. Other methods need
none: every device's personal model is exported without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from onnx import ModelProto

from sparrow.command_line.installed import installed, load

from .errors import ExportError
from .source import Source

GROUP = "sparrow.dynamic_exports"

DynamicForm = Callable[[Source, "float | None"], ModelProto]
"""Returns the dynamic model of a state at a budget, the device's own by default. Raises ExportError."""


def load_form(source: Source) -> DynamicForm:
    """Return the dynamic form of the method that trained ``source``. Raises ExportError where there is none."""
    if source.membership is None:
        raise ExportError(
            "--mode dynamic needs a device's whole state folder, with the federation.json that joining writes; "
            "join once more, or leave --mode out"
        )
    found = installed(GROUP)
    if source.method not in found:
        raise ExportError(
            f"--mode dynamic is for {' and '.join(found)}, whose devices choose sample by sample; "
            f"{source.method} has one model, leave --mode out"
        )
    return cast(DynamicForm, load(found[source.method], ExportError, what="dynamic export"))
