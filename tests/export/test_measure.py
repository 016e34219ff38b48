"""What running a file takes: that figures are there, belong to their file, and failures are told; never how large."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sparrow.export.errors import ExportError
from sparrow.export.measure import latencies, load_costs

SAMPLE = np.zeros((1, 1000), np.float32)


def save(path, width):
    """A layer of 1000 x ``width`` weights."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], ["output"])],
        "model",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 1000])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", width])],
        [numpy_helper.from_array(np.ones((1000, width), np.float32), "w")],
    )
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


@pytest.mark.integration
def test_figures_belong_to_their_files(tmp_path):
    files = [save(tmp_path / "large.onnx", 6000), save(tmp_path / "small.onnx", 1)]
    told = []
    large, small = load_costs(files, SAMPLE, repeats=1, done=lambda: told.append(1))
    assert len(told) == 2
    assert large.peak > 24_000_000 > small.peak > 0  # bytes of its weights
    assert min(large.load_seconds, small.load_seconds, large.first_seconds, small.first_seconds) > 0
    for latency in latencies(files, SAMPLE, threads=1):
        assert 0 < latency.p50 <= latency.p95


def test_a_file_that_cannot_be_run_is_told(tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(ExportError, match=r"could not be measured: .*broken\.onnx"):
        load_costs([tmp_path / "broken.onnx"], SAMPLE, repeats=1)
    with pytest.raises(ExportError, match="could not be measured"):
        latencies([save(tmp_path / "m.onnx", 1)], SAMPLE[:, :3], threads=1)
