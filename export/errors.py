"""Errors of a model that is to become an ONNX file.

ExportError              the text says what was met, what was wanted, what to do
├── NotThere             a file that is needed does not exist
└── SkeletonError        the forward pass published with the federation cannot be used
"""

from edge_sdk.protocol.errors import SdkError
from sparrow.command_line.exits import Exit


class ExportError(SdkError):
    """The model cannot be exported as asked."""


class NotThere(ExportError):
    """A file of the model does not exist."""

    exit_code = Exit.NOT_FOUND


class SkeletonError(ExportError):
    """Bytes that are not the ONNX skeleton of this manifest, or not one that is safe to fill."""
