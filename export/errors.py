"""Errors of exports, by what a user can do about them.

ExportError              the text says what was met, what was wanted, what to do
├── NotThere             a file that is needed does not exist
├── NotTheSame           the file predicts something else than the model it was made from
└── SkeletonError        the forward pass published with the federation cannot be used
"""

from __future__ import annotations

from typing import ClassVar

from sparrow.command_line.exits import Exit
from sparrow.protocol.errors import SdkError

__all__ = ["ExportError", "NotTheSame", "NotThere", "SkeletonError"]


class ExportError(SdkError):
    """The model cannot be exported as asked."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class NotThere(ExportError):
    """A file of the model does not exist."""

    exit_code: ClassVar[Exit] = Exit.NOT_FOUND


class NotTheSame(ExportError):
    """The export predicts something else than the model it was made from; it was not written."""


class SkeletonError(ExportError):
    """Bytes that are not the ONNX skeleton of this manifest, or not one that is safe to fill."""
