"""Errors of exports, by what a user can do about them.

ExportError              the text says what was met, what was wanted, what to do
├── NotThere             a file that is needed does not exist
├── NotTheSame           the file predicts something else than the model it was made from
└── SkeletonError        the forward pass published with the federation cannot be used
"""

from __future__ import annotations

from typing import ClassVar

from sparrow.command_line.exits import Exit
from sparrow.graphs.errors import ExportError, SkeletonError

__all__ = ["ExportError", "NotTheSame", "NotThere", "SkeletonError"]


class NotThere(ExportError):
    """A file of the model does not exist."""

    exit_code: ClassVar[Exit] = Exit.NOT_FOUND


class NotTheSame(ExportError):
    """The export predicts something else than the model it was made from; it was not written."""
