"""What can be wrong with a model that is to become an ONNX file.

ExportError              the text says what was met, what was wanted, what to do
└── SkeletonError        the forward pass published with the federation cannot be used
"""


class ExportError(ValueError):
    """The model cannot be exported as asked."""


class SkeletonError(ExportError):
    """Bytes that are not the ONNX skeleton of this manifest, or not one that is safe to fill."""
