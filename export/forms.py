"""Dynamic exports, which select a model or weights for each sample.

A method that supports this registers its ``DynamicForm`` under its own name in the entry points
``sparrow.dynamic_exports``. The function must not import torch.
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
"""Function from a state and a budget (None: the device's) to the dynamic model. Raises ExportError."""


def load_form(source: Source) -> DynamicForm:
    """Return the dynamic form of the method that trained ``source``. Raises ExportError if it has none."""
    if source.membership is None:
        raise ExportError(
            "--mode dynamic needs the device's state folder with its federation.json; run sparrow join again, or leave "
            "--mode out"
        )
    found = installed(GROUP)
    if source.method not in found:
        raise ExportError(
            f"--mode dynamic is for {' and '.join(found)}, which choose a model for each sample; "
            f"{source.method} does not: leave --mode out"
        )
    return cast(DynamicForm, load(found[source.method], ExportError, what="dynamic export"))
