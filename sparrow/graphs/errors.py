"""Errors of graphs that cannot be used, filled, exported or differentiated."""

from __future__ import annotations

from typing import ClassVar

from ..command_line.exits import Exit
from ..protocol.errors import ManifestError, SdkError
from ..protocol.failures import Failure


class ExportError(SdkError):
    """The model cannot be exported as asked."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class SkeletonError(ExportError):
    """Bytes that are not the ONNX skeleton of this manifest, or not one that is safe to fill."""


class NoCurvature(ManifestError):
    """The loss cannot be differentiated twice."""

    failure = Failure("unknown-work/curvature")
