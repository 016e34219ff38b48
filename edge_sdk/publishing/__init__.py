"""A torch model as a manifest and as an ONNX skeleton."""

from typing import Literal

FrozenPrecision = Literal["auto", "float32", "float16"]
"""What the weights that nobody trains are stored and sent in; ``auto``: in half where the model answers alike."""

RunningStatistics = Literal["shared", "personal"]
"""Whether batch norm's are averaged, or kept by each device."""
