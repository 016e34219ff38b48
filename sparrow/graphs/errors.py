"""Errors for graphs that cannot be used, filled, exported or differentiated."""

from __future__ import annotations

from typing import ClassVar

from ..command_line.exits import Exit
from ..protocol.errors import ManifestError, SdkError
from ..protocol.failures import Failure


class ExportError(SdkError):
    """The model cannot be exported as requested."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class SkeletonError(ExportError):
    """The file is not the ONNX skeleton of this manifest, or is not safe to fill."""


class NoCurvature(ManifestError):
    """The loss cannot be differentiated twice."""

    failure = Failure("unknown-work/curvature")
