"""A torch model as a manifest and as an ONNX skeleton."""

from typing import Literal

FrozenPrecision = Literal["auto", "float32", "float16"]
"""Storage and wire type of frozen weights. ``auto``: half precision if the model's output hardly changes."""

RunningStatistics = Literal["shared", "personal"]
"""Whether the running statistics of batch norm are averaged or kept by each device."""
