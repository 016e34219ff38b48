from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_sdk.tasks import UnknownTask, load_task, public
from edge_sdk.tasks.formats import SampleFormat
from edge_sdk.tasks.loading import ArrayBatches, Arrays, Chosen, Scale
from edge_sdk.tasks.public import BY_DEVICES, MODELS, full_name
from edge_sdk.training.freezing import Freezing
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.masks import NeuronDraw, blocks, count_values, draw_neurons
from sparrow.reading.errors import DataError

EVERY = [(task, model) for task, choices in MODELS.items() for model in choices]
BUILT_IN = [(task, model) for task, model in EVERY if task not in BY_DEVICES]
CLASSES = {each.task: each.classes for each in vars(public).values() if isinstance(each, SampleFormat)}


@pytest.mark.parametrize(("task", "model"), EVERY)
def test_parameters_are_those_of_the_papers(task, model):
    choice = MODELS[task][model]
    network = choice.build().eval()
    assert sum(parameter.numel() for parameter in network.parameters()) == choice.parameters
    inputs = torch.rand(2, *choice.shape)
    assert network(inputs).shape == (2, CLASSES[task])
    assert len(choice.mean) == len(choice.deviation) == choice.shape[0]


def test_the_counts_by_name():
    counts = {full_name(task, model): MODELS[task][model].parameters for task, model in EVERY}
    assert counts == {
        "mnist": 21_840,
        "mnist:fedsgc": 261_840,
        "mnist:dmpfl": 1_663_370,
        "mnist:leaf": 2_171_786,
        "emnist": 64_722,
        "emnist:leaf": 2_278_334,
        "femnist": 2_278_334,
        "cifar10": 134_902,
        "cifar10:fedsgc": 232_970,
        "cifar10:dmpfl": 797_962,
        "cifar10:pfedgate": 256_830,
        "cifar100": 3_537_444,
        "har": 57_125,
        "uci_har": 90_438,
        "uci_har:dmpfl": 1152 * 256 + 256 + 256 * 128 + 128 + 128 * 6 + 6,
        "pacs": 11_180_103,
        "pacs:small": 156_455,
        "shakespeare": 79_561,
        "shakespeare:leaf": 815_945,
    }
    assert set(builtin_tasks()) == {"digits", *(full_name(*each) for each in BUILT_IN)}
    for name, count in ((name, counts[name]) for name in builtin_tasks() if name != "digits"):
        assert load_builtin(name).manifest.task == name
        assert load_builtin(name).manifest.trainable_values == count


def test_batch_norm_statistics_travel_and_the_stated_biases_are_missing():
    manifest = load_builtin("cifar10").manifest
    assert manifest.shared_values - manifest.trainable_values == 44
    names = {spec.name for spec in manifest.tensors}
    assert {"conv1.bias", "conv2.bias", "out.bias"} <= names
    assert not {"fc1.bias", "fc2.bias"} & names


@pytest.mark.parametrize(("task", "model"), BUILT_IN)
def test_pooling_before_relu_is_the_same_function(task, model):
    network = MODELS[task][model].build().eval()
    inputs = torch.randn(2, *MODELS[task][model].shape)
    modules = list(network)
    pools = [place for place, module in enumerate(modules) if type(module).__name__.startswith("MaxPool")]
    for place in pools:
        modules[place : place + 2] = reversed(modules[place : place + 2])
    with torch.no_grad():
        assert torch.equal(network(inputs), torch.nn.Sequential(*modules)(inputs))


@pytest.mark.parametrize(("task", "model"), BUILT_IN)
def test_a_masked_step_changes_active_values_only(task, model):
    choice = MODELS[task][model]
    manifest = load_builtin(full_name(task, model)).manifest
    network = choice.build()
    mask = draw_neurons(manifest, NeuronDraw("device", 0.5))
    before = {name: value.detach().numpy().copy() for name, value in network.named_parameters()}
    with Freezing(network, manifest, mask) as freezing:
        torch.nn.functional.cross_entropy(network(torch.randn(4, *choice.shape)), torch.tensor([0, 1, 2, 3])).backward()
        freezing.collect_gradients()
        torch.optim.SGD(freezing.parameters, lr=0.1).step()
        freezing.write_back()
    changed = 0
    for spec, block in blocks(manifest, mask):
        if not spec.trainable:
            continue
        moved = dict(network.named_parameters())[spec.name].detach().numpy() != before[spec.name]
        changed += moved.sum()
        inside = np.zeros(spec.shape, dtype=bool)
        block.put(inside, np.ones(block.shape, dtype=bool))
        assert not (moved & ~inside).any()
    assert changed > 0.2 * count_values(manifest, mask)


def mnist_file(folder):
    rng = np.random.default_rng(0)
    path = folder / "mnist.npz"
    x = rng.integers(0, 256, (200, 28, 28), dtype=np.uint8)
    np.savez(path, x_train=x, y_train=np.arange(200) % 10)
    return path


def load(name, data):
    return load_task(name, data, device="device-1", seed=0, batch_size=8)


def test_a_name_may_carry_a_model(tmp_path):
    path = f"{mnist_file(tmp_path)},of=2"
    for name, called, parameters in (
        ("mnist", "mnist", 21_840),
        ("mnist:small", "mnist", 21_840),
        ("mnist:fedsgc", "mnist:fedsgc", 261_840),
    ):
        task = load(name, path)
        assert task.name == called
        assert sum(parameter.numel() for parameter in task.seeded(0).model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "imagenet",
            "unknown task 'imagenet'; choose from cifar10, cifar100, digits, emnist, femnist, har, mnist, npz",
        ),
        ("imagenet:small", "unknown task 'imagenet'"),
        ("mnist:big", "no model 'big'; choose from mnist, mnist:fedsgc, mnist:dmpfl, mnist:leaf"),
        ("mnist:", "no model ''"),
        ("digits:small", "unknown task 'digits:small': digits has only one model; name it digits"),
    ],
)
def test_unknown_tasks_and_models_are_explained(name, message):
    with pytest.raises(UnknownTask, match=message):
        load(name, None)


def chosen(index, count=50):
    base = np.arange(count * 6).astype(np.uint8).reshape(count, 2, 3)
    return Chosen(base, np.arange(count), np.array(index, np.intp), Scale((10.0, 20.0), (2.0, 5.0)))


def test_a_share_is_scaled_per_batch_and_channel():
    samples = chosen([7, 3, 3])
    inputs, targets = samples.take(slice(0, 2))
    assert targets.tolist() == [7, 3]
    stored = samples.inputs[[7, 3]].astype(np.float64)
    wanted = (stored - np.array([10.0, 20.0])[:, None]) / np.array([2.0, 5.0])[:, None]
    np.testing.assert_allclose(inputs, wanted, rtol=1e-6)
    assert inputs.dtype == np.float32
    assert inputs.flags.c_contiguous
    assert samples.inputs.dtype == np.uint8


def test_scaling_leaves_floats_in_the_base_as_they_are():
    base = np.ones((4, 1, 2), np.float32)
    Chosen(base, np.arange(4), np.arange(4), Scale((1.0,), (1.0,))).take(slice(0, 4))
    assert (base == 1).all()


def test_batches_of_a_share_meet_every_sample_once():
    made = ArrayBatches(chosen(list(range(5, 38))), 8)
    seen = [targets for _, targets in made.shuffled(np.random.default_rng(1))]
    assert [len(targets) for targets in seen] == [8, 8, 8, 9]
    assert sorted(np.concatenate(seen).tolist()) == list(range(5, 38))
    whole = ArrayBatches(Arrays(np.zeros((33, 1)), np.arange(5, 38)), 8)
    alike = [targets.tolist() for _, targets in whole.shuffled(np.random.default_rng(1))]
    assert [targets.tolist() for targets in seen] == alike


def test_a_share_of_nothing_is_refused():
    with pytest.raises(DataError, match="no samples"):
        chosen([])


def test_hundreds_of_devices_hold_indices_only(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6000, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=np.arange(6000) % 10)
    tasks = [
        load_task("mnist", f"{tmp_path},partition=iid,of=300,index={index}", device="x", seed=0, batch_size=8)
        for index in range(300)
    ]
    shares = [part.arrays for task in tasks for part in (task.train, task.validation, task.test)]
    assert {share.inputs.ctypes.data for share in shares} == {shares[0].inputs.ctypes.data}
    assert {share.targets.ctypes.data for share in shares} == {shares[0].targets.ctypes.data}
    assert sum(share.index.nbytes for share in shares) == 6000 * 8
    assert shares[0].inputs.nbytes == x.nbytes


def test_the_page_on_tasks_has_every_model_and_its_size():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    for name in builtin_tasks():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {load_builtin(name).manifest.trainable_values:,} |" in row
    for task, model in ((task, model) for task, model in EVERY if task in BY_DEVICES):
        assert re.search(rf"^\| `{full_name(task, model)}` \|.*\| {MODELS[task][model].parameters:,} \|", page, re.M)


BLOCKED = """
import sys
sys.modules["torch"] = None
import numpy as np
from itertools import islice
from edge_sdk.tasks import as_arrays, load_task, passes
for name, data in zip(sys.argv[1::2], sys.argv[2::2]):
    task = load_task(name, data, device="d-0", seed=0, batch_size=4)
    for batches in (task.validation, task.held_out, islice(passes(task.train, 1), 2 * len(task.train))):
        for inputs, targets in map(as_arrays, batches):
            assert inputs.dtype == np.float32 and targets.dtype == np.int64, (inputs.dtype, targets.dtype)
            assert inputs.flags.c_contiguous and len(inputs) == len(targets), name
"""


@pytest.mark.integration
def test_every_built_in_task_gives_its_batches_without_pytorch(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 5
    given = {"digits": "index=0,of=9"}
    for name, shape, kind in (
        ("mnist", (28, 28), np.uint8),
        ("cifar10", (3, 32, 32), np.uint8),
        ("cifar100", (3, 32, 32), np.uint8),
        ("emnist", (28, 28), np.uint8),
        ("femnist", (28, 28), np.uint8),
        ("pacs", (3, 64, 64), np.uint8),
        ("har", (6, 64), np.float32),
        ("uci_har", (9, 128), np.float32),
        ("npz", (3,), np.float32),
    ):
        place = tmp_path / f"{name}.npz"
        np.savez(place, x_train=(255 * rng.random((60, *shape))).astype(kind), y_train=labels)
        given[name] = str(place) if name == "npz" else f"{place},partition=iid,index=0,of=2"
    said = np.arange(4000, dtype=np.uint8) % 65
    np.savez(tmp_path / "shakespeare.npz", text=said, start=[0, 2000, 4000], role=[0, 1], roles=["ANN", "BOB"])
    given["shakespeare"] = f"{tmp_path},index=0"
    table = "\n".join(["a,b,label", *(f"{number},{number % 7},{number % 3}" for number in range(60))])
    (tmp_path / "table.csv").write_text(table)
    arguments = [word for pair in [*given.items(), ("npz", f"{tmp_path / 'table.csv'},index=0,of=2")] for word in pair]
    ran = subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
