"""First run of an untrusted training step, in a process that can be killed (``sparrow.limited``)."""

from __future__ import annotations

from typing import Any

GRAPH = "sparrow.step"
"""Name of the graph among the tensors of a request."""
TYPES = {"tensor(float)": "float32", **{f"tensor({kind})": kind for kind in ("int64", "int32", "uint8", "bool")}}
"""ONNX Runtime's names of the manifest's types."""


def answer(request: bytes) -> bytes:
    """Run a step once and return no bytes.

    request: a safetensors file of the graph, as bytes, and its inputs by name; missing ones are random.
    """
    import numpy as np
    import onnxruntime
    import safetensors.numpy

    held = safetensors.numpy.load(request)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    graph = held.pop(GRAPH).tobytes()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    chance = np.random.Generator(np.random.PCG64(0))
    feeds: dict[str, Any] = {}
    for each in session.get_inputs():
        if each.name in held:
            feeds[each.name] = held[each.name].astype(TYPES[each.type], copy=False)
            continue
        shape = [size if isinstance(size, int) else len(held["input"]) for size in each.shape]
        feeds[each.name] = chance.standard_normal(shape, np.float32)
    session.run(None, feeds)
    return b""
