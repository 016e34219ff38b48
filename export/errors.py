"""Errors of exports.

ExportError              base class; the message includes advice
├── NotThere             a required file is missing
├── NotTheSame           the export's predictions differ from the model's
└── SkeletonError        the federation's published graph is unusable
"""

from __future__ import annotations

from typing import ClassVar

from sparrow.command_line.exits import Exit
from sparrow.graphs.errors import ExportError, SkeletonError

__all__ = ["ExportError", "NotTheSame", "NotThere", "SkeletonError"]


class NotThere(ExportError):
    """A file of the model is missing."""

    exit_code: ClassVar[Exit] = Exit.NOT_FOUND


class NotTheSame(ExportError):
    """The export's predictions differ from the model's; the file was not written."""
