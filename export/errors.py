"""What can be wrong with a model that is to become an ONNX file.

ExportError              the text says what was met, what was wanted, what to do
├── NotThere             a file that is needed does not exist
└── SkeletonError        the forward pass published with the federation cannot be used
"""


class ExportError(ValueError):
    """The model cannot be exported as asked."""


class NotThere(ExportError):
    """A file of the model is not there."""


class SkeletonError(ExportError):
    """Bytes that are not the ONNX skeleton of this manifest, or not one that is safe to fill."""
