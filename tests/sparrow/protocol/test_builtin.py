import hashlib
from importlib import resources
from typing import get_args

import numpy as np
import onnxruntime
import pytest
import torch

from edge_sdk.publishing.write_builtin import MODELS, make_builtin, write_builtin
from edge_sdk.tasks.models import DigitsNet
from sparrow.graphs import Graphs
from sparrow.graphs.checking import check_graphs
from sparrow.graphs.skeleton import check_skeleton, fill, parse
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Data, GraphName, initial_values
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons

from ...kinds import chosen

KINDS = ("cifar10:dmpfl", "digits", "emnist", "har")


def test_the_tasks_are_those_the_tool_writes():
    assert builtin_tasks() == tuple(sorted(MODELS))


@pytest.mark.integration
@pytest.mark.parametrize("name", chosen(builtin_tasks(), KINDS))
def test_committed_files_equal_a_regeneration(name):
    """The manifest to the letter; the graphs by their operators, since another torch may name nodes otherwise."""
    committed, made = load_builtin(name), make_builtin(name)
    without = {f"{graph}_sha256" for graph in get_args(GraphName)}
    assert committed.manifest.model_dump(exclude=without) == made.manifest.model_dump(exclude=without)
    assert operators(committed) == operators(made)


def operators(task):
    return {name: [node.op_type for node in parse(graph).graph.node] for name, graph in task.graphs.items()}


@pytest.mark.parametrize("name", builtin_tasks())
def test_every_task_has_graphs_that_devices_accept(name):
    task = load_builtin(name)
    assert task.manifest.graphs == {name: hashlib.sha256(graph).hexdigest() for name, graph in task.graphs.items()}
    assert task.graphs.keys() == {"skeleton", "step", "evaluation"}
    check_skeleton(task.skeleton, task.manifest)
    check_graphs(Graphs(task.graphs["step"], task.graphs["evaluation"]), task.manifest)


@pytest.mark.integration
@pytest.mark.parametrize("name", chosen(builtin_tasks(), KINDS))
def test_initial_weights_need_nothing_published(name):
    task = load_builtin(name)
    assert all(spec.init != Data() for spec in task.manifest.shared)
    filled = fill(task.skeleton, task.manifest, initial_values(task.manifest, seed=1))
    session = onnxruntime.InferenceSession(filled, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"input": np.zeros((2, *task.manifest.input_shape), dtype=np.float32)})
    assert output.shape == (2, *task.manifest.output_shape)


def test_digits_predicts_as_its_network_does():
    task, model = load_builtin("digits"), DigitsNet().eval()
    filled = fill(task.skeleton, task.manifest, {key: value.numpy() for key, value in model.state_dict().items()})
    images = torch.rand(7, 1, 8, 8)
    (output,) = onnxruntime.InferenceSession(filled).run(None, {"input": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(output, model(images).numpy(), atol=1e-5)


def test_digits_sizes_by_hand():
    manifest = load_builtin("digits").manifest
    assert manifest.group_sizes == {"conv1": 16, "conv2": 32, "fc1": 64}
    a, b, c = 8, 16, 32
    half = draw_neurons(manifest, NeuronDraw("device", 0.5))
    wanted = a * (9 + 1 + 4) + b * (9 * a + 1 + 4) + c * (4 * b + 1) + 10 * (c + 1)
    assert count_values(manifest, half) == wanted


def test_the_tool_writes_a_file_for_each_task(tmp_path, monkeypatch):
    monkeypatch.setattr("edge_sdk.publishing.write_builtin.make_builtin", load_builtin)
    written = [path.name for path in write_builtin(tmp_path)]
    assert {"digits.safetensors", "mnist-leaf.safetensors"} <= set(written)
    assert len(written) == len(MODELS)
    kept, committed = tmp_path / "digits.safetensors", resources.files("sparrow.protocol.builtin")
    assert kept.read_bytes() == (committed / kept.name).read_bytes()


def test_an_unknown_task_lists_the_known():
    with pytest.raises(ManifestError, match=r"'imagenet'.*cifar10, .*digits.*sparrow publish"):
        load_builtin("imagenet")
    with pytest.raises(ManifestError):
        load_builtin("../digits")
