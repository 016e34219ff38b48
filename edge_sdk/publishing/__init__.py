"""A torch model as a manifest and as an ONNX skeleton."""

from typing import Literal

RunningStatistics = Literal["shared", "personal"]
"""Whether batch norm's are averaged, or kept by each device."""
