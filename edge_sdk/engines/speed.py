"""The speed of this machine's core relative to the reference for the costs of graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import onnxruntime
from onnx import NodeProto, TensorProto, helper

from sparrow.graphs.costs import FLOP, Speed

TRIES = 5
"""Runs per graph; the fastest counts, because other load only adds time."""


@cache
def measured_speed() -> Speed:
    """Return the speed of one core, measured once in a process by ``TRIES`` short runs."""
    values = 1_000_000
    side = 256
    return Speed(
        products=_over(helper.make_node("MatMul", ["x", "x"], ["y"]), (side, side), 1e-9 * FLOP * 2 * side**3),
        moving=_over(helper.make_node("Add", ["x", "x"], ["y"]), (values,), 0.9e-9 * values),
        plain=_over(helper.make_node("Softplus", ["x"], ["y"]), (values // 10,), 15e-9 * values / 10),
    )


def _over(node: NodeProto, shape: tuple[int, ...], reference: float) -> float:
    """Return a node's seconds relative to the reference."""
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y"))
    model = helper.make_model(
        helper.make_graph([node], "speed", [given], [made]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return min(_seconds(lambda: session.run(None, {"x": values})) for _ in range(TRIES)) / reference


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
