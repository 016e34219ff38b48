"""Raw samples through a federation's preparation on a device: once if they fit, batch by batch if they do not."""

import numpy as np
import pytest

from edge_sdk.errors import BadArgument
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import ArrayBatches, Arrays, Chosen
from edge_sdk.tasks.prepared import differences, prepared, raw_statistics
from edge_sdk.tasks.preparing import prepare_array, statistics_of
from sparrow.devices import memory
from sparrow.export.preparation import Preparer
from sparrow.protocol.errors import GraphError

RANDOM = np.random.default_rng(0)


class Counting(Preparer):
    """A preparer that counts the samples that it prepares."""

    samples = 0

    def __call__(self, raw):
        self.samples += len(raw)
        return super().__call__(raw)


def windows(count=64):
    return RANDOM.normal(5, 3, (count, 6, 32)).astype(np.float32)


def counting(raw):
    return Counting(prepare_array("float32", raw.shape[1:], "CT", statistics_of([raw], 0)).graph)


def task_of(raw, make=None):
    targets = np.arange(len(raw)) % 3
    make = make or (lambda cut: ArrayBatches(Arrays(raw[cut], targets[cut]), 8))
    return Task("t", None, None, make(slice(0, 40)), make(slice(40, 48)), make(slice(48, 64)))


def one_pass(task):
    return np.concatenate([inputs for inputs, _ in task.train])


def test_samples_are_prepared_once_when_they_are_loaded():
    raw = windows()
    preparer = counting(raw)
    task = prepared(task_of(raw), preparer)
    after_loading = preparer.samples
    first, second = one_pass(task), one_pass(task)
    assert preparer.samples == after_loading
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, Preparer(preparer.graph)(raw[:40]), atol=1e-6)


def test_samples_are_prepared_batch_by_batch_if_memory_is_short():
    raw = windows()
    preparer = counting(raw)
    task = prepared(task_of(raw), preparer, memory_limit=1)
    after_loading = preparer.samples
    assert after_loading < len(raw)
    np.testing.assert_allclose(one_pass(task), Preparer(preparer.graph)(raw[:40]), atol=1e-6)
    assert preparer.samples == after_loading + 40
    assert task.train.num_examples == 40


def test_arrays_that_devices_share_are_prepared_once_for_all():
    raw = windows()
    preparer = counting(raw)
    targets = np.arange(64) % 3
    for number in range(4):
        index = np.arange(number * 16, number * 16 + 16)
        each = ArrayBatches(Chosen(raw, targets, index), 8)
        task = prepared(Task("t", None, None, each, each), preparer)
        np.testing.assert_allclose(one_pass(task), Preparer(preparer.graph)(raw[index]), atol=1e-6)
    assert preparer.samples < 2 * len(raw), "and not once for each device"


def test_ten_thousand_prepared_windows_fit_a_small_device(monkeypatch):
    raw = np.zeros((10_000, 6, 128), np.float32)
    monkeypatch.setattr(memory, "available", lambda: 60 * 2**20)
    preparer = counting(raw)
    kept = []
    task = prepared(task_of(raw, lambda cut: ArrayBatches(Arrays(raw, np.zeros(len(raw), int)), 32)), preparer)
    loaded = preparer.samples
    for inputs, _ in task.train:
        kept.append(inputs.nbytes)
    assert max(kept) <= 33 * raw[0].nbytes
    assert loaded < 100, "30 MB of prepared windows are more than a quarter of 60 MB"


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_users_own_batches_are_prepared_as_they_come(shuffles):
    raw = windows(24)
    pairs = [(raw[start : start + 8], np.zeros(8, int)) for start in (0, 8, 16)]

    class Batches(list):
        def shuffled(self, generator):
            return (self[place] for place in generator.permutation(len(self)))

    data = Batches(pairs) if shuffles else pairs
    preparer = counting(raw)
    task = prepared(Task("t", None, None, data, data), preparer)
    assert len(task.train) == 3
    assert one_pass(task).shape == (24, 6, 32)
    assert hasattr(task.train, "shuffled") == shuffles
    if shuffles:
        mixed = np.concatenate([inputs for inputs, _ in task.train.shuffled(np.random.default_rng(1))])
        assert sorted(mixed.ravel().tolist()) == sorted(one_pass(task).ravel().tolist())


def test_a_task_is_prepared_once():
    raw = windows()
    task = prepared(task_of(raw), counting(raw))
    assert prepared(task, counting(raw)) is task


def test_raw_samples_of_another_shape_or_type_are_refused():
    raw = windows()
    preparer = counting(raw)
    with pytest.raises(BadArgument, match=r"train.*\(6, 31\).*\(6, 32\)"):
        prepared(task_of(raw[:, :, 1:]), preparer)
    bytes_only = Preparer(prepare_array("uint8", (4,), "", None).graph)
    with pytest.raises(BadArgument, match=r"float32.*uint8"):
        prepared(task_of(RANDOM.random((64, 4), np.float32)), bytes_only)
    whole = prepared(task_of(np.full((64, 4), 255.0, np.float32)), bytes_only)
    assert one_pass(whole).max() == 1, "whole numbers that fit are bytes"


def test_a_preparation_that_mixes_samples_is_refused():
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["input", "axes"], ["mean"], keepdims=1),
            helper.make_node("Sub", ["input", "mean"], ["output"]),
        ],
        "mixes",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.array([0]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(GraphError, match="depend on the other samples"):
        prepared(task_of(RANDOM.random((64, 4), np.float32)), Preparer(model.SerializeToString()))


def test_other_units_are_noticed_and_a_constant_column_is_not():
    raw = RANDOM.normal([10, 1, 5], [2, 0.04, 1], (200, 3)).astype(np.float32)
    description = prepare_array("float32", (3,), "", statistics_of([raw], 0)).description
    assert not differences(raw_statistics(task_of(raw + np.float32(0.05)).train, description), description)
    wild = raw * np.array([1, 100, 1], np.float32)
    wild[:, 2] = 5
    ((here, there),) = differences(raw_statistics(task_of(wild).train, description), description)
    assert "feature 1" in here
    assert "in the federation 0.0" in here
    assert "feature 1" in there
    assert not any(f"{value:.2g}" in there for value in (wild[:, 1].std(), wild[:, 1].mean()))
    moved = raw + np.array([100, 0, 0], np.float32)
    ((here, _),) = differences(raw_statistics(task_of(moved).train, description), description)
    assert "mean here" in here
