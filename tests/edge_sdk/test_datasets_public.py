"""The tasks on the real public sets; skipped where their files are missing."""

from __future__ import annotations

import itertools
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_sdk.tasks import load_task, passes
from edge_sdk.training.local import as_tensors
from sparrow.reading.errors import DataError

FOLDER = Path(os.environ.get("SPARROW_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


def load(name, data, batch_size=50):
    return load_task(name, data, device="device-3", seed=0, batch_size=batch_size)


def real(file):
    return pytest.mark.skipif(
        not (FOLDER / file).is_file(), reason=f"{file} is not in SPARROW_TEST_DATA or ../shared/data"
    )


def moments(batches):
    values = np.concatenate([inputs for inputs, _ in batches]).swapaxes(0, 1)
    values = values.reshape(len(values), -1).astype(np.float64)
    return values.mean(1), values.std(1)


@real("mnist.npz")
def test_mnist_is_dealt_and_scaled():
    tasks = [load("mnist", f"{FOLDER},of=100,alpha=0.1,index={index}") for index in range(100)]
    counts = [task.train.num_examples + task.validation.num_examples + task.test.num_examples for task in tasks]
    assert sum(counts) == 60_000
    assert min(counts) >= 10
    mean, deviation = moments(max(tasks, key=lambda task: task.train.num_examples).train)
    assert abs(mean) < 0.2
    assert abs(deviation - 1) < 0.2
    pooled = load("mnist:leaf", f"{FOLDER},of=1,part=all")
    assert pooled.train.num_examples == 41_650


@real("mnist.npz")
def test_the_devices_share_mnists_published_test_part_and_keep_all_of_the_rest():
    data = f"{FOLDER},of=100,partition=shards,test=published,validation=0.1,index="
    tasks = [load("mnist:fedsgc", f"{data}{index}") for index in range(100)]
    assert [task.test.num_examples for task in tasks] == [100] * 100
    assert {(task.train.num_examples, task.validation.num_examples) for task in tasks} == {(540, 60)}
    with np.load(FOLDER / "mnist.npz") as published:
        counts = np.bincount(published["y_test"])
    targets = np.concatenate([labels for task in tasks for _, labels in task.test])
    assert np.bincount(targets).tolist() == counts.tolist()


@real("har_watch_phone.npz")
def test_activities_have_no_published_test_part():
    with pytest.raises(DataError, match="no published test part"):
        load("har", f"{FOLDER},index=0,test=published")


@real("mnist.npz")
def test_mnist_is_learnt():
    task = load("mnist", f"{FOLDER},of=40,partition=iid").seeded(0)
    torch.manual_seed(0)
    optimiser = torch.optim.SGD(task.model.parameters(), lr=0.1)
    for inputs, targets in map(as_tensors, islice(passes(task.train, 0), 3 * len(task.train))):
        optimiser.zero_grad()
        task.loss(task.model(inputs), targets).backward()
        optimiser.step()
    with torch.no_grad():
        right = [
            (task.model(inputs).argmax(1) == targets).float() for inputs, targets in map(as_tensors, task.held_out)
        ]
    assert torch.cat(right).mean() > 0.7


@real("har_watch_phone.npz")
def test_activities_belong_to_people_and_are_standardised():
    tasks = [load("har", f"{FOLDER},index={index}") for index in range(23)]
    batches = [part for task in tasks for part in (task.train, task.validation, task.test)]
    assert sum(part.num_examples for part in batches) == 7226
    mean, deviation = moments(sample for part in batches for sample in part)
    np.testing.assert_allclose(mean, 0, atol=2e-3)
    np.testing.assert_allclose(deviation, 1, atol=2e-3)
    inputs, _ = as_tensors(next(iter(tasks[0].train)))
    assert tasks[0].seeded(0).model(inputs).shape == (50, 5)


@real("har_watch_phone.npz")
def test_everybody_can_train_on_a_phone_and_be_tested_on_a_watch():
    """A person wore both at once, so half of everything is of each."""
    for index in range(23):
        usual = load("har", f"{FOLDER},index={index}")
        tasks = {on: load("har", f"{FOLDER},index={index},train_on=phone,test_on={on}") for on in ("phone", "watch")}
        phone, watch = tasks["phone"], tasks["watch"]
        assert phone.test.num_examples + watch.test.num_examples == usual.test.num_examples
        assert (
            phone.train.num_examples == watch.train.num_examples == pytest.approx(usual.train.num_examples / 2, rel=0.2)
        )
        np.testing.assert_array_equal(phone.train.arrays.index, watch.train.arrays.index)


@real("cifar10.npz")
@pytest.mark.integration  # 60,000 images are decoded into the cache the first time
def test_cifar10_is_dealt_and_scaled():
    task = load("cifar10:dmpfl", f"{FOLDER},of=100,partition=classes,part=all")
    inputs, _ = next(iter(task.train))
    assert inputs.shape == (50, 3, 32, 32)
    everything = load("cifar10:fedsgc", f"{FOLDER},of=1,held_out=0.99")
    mean, deviation = moments(everything.train)
    np.testing.assert_allclose(mean, 0, atol=0.15)
    np.testing.assert_allclose(deviation, 1.2, atol=0.1)  # the usual constants are means of deviations per image


@real("mnist_writers.npz")
@real("mnist.npz")
def test_mnist_has_writers():
    tasks = [load("mnist", f"{FOLDER},partition=person,index={index}") for index in range(539)]
    assert (
        sum(task.train.num_examples + task.validation.num_examples + task.test.num_examples for task in tasks) == 60_000
    )
    assert load("mnist", f"{FOLDER},partition=person,part=all,index=835,of=836").test.num_examples == 6


@real("femnist.npz")
def test_writers_of_whom_only_a_tenth_is_there_come_last():
    sizes = []
    for index in range(176):
        task = load("femnist", f"{FOLDER},part=all,minimum=10,index={index}")
        sizes.append(task.train.num_examples + task.validation.num_examples + task.test.num_examples)
    assert sum(sizes) == 18_690 - 42, "eight writers have fewer than ten pictures"
    assert sum(sizes[:101]) == 16_288 - 19
    with pytest.raises(DataError, match="105 parts"):
        load("femnist", f"{FOLDER},index=105")


@real("emnist.npz")
def test_emnist_has_62_classes():
    task = load("emnist", f"{FOLDER},of=1,test=published")
    assert task.test.num_examples == 9_392
    assert set(task.test.targets) == set(range(62))


@real("har_uci.npz")
def test_recordings_are_whole_and_the_published_test_subjects_are_new_people():
    tasks = [load("uci_har", f"{FOLDER},index={index},part=all") for index in range(30)]
    assert (
        sum(task.train.num_examples + task.validation.num_examples + task.test.num_examples for task in tasks) == 10_299
    )
    published = load("uci_har", f"{FOLDER},index=0,of=21,test=published")
    assert published.test.num_examples == -(-2_947 // 21)
    mean, deviation = moments(
        batch for task in tasks for part in (task.train, task.validation, task.test) for batch in part
    )
    np.testing.assert_allclose(mean, 0, atol=2e-3)
    np.testing.assert_allclose(deviation, 1, atol=2e-3)
    for task in tasks:  # neighbours share half of their samples
        for one, other in itertools.permutations((task.train, task.validation, task.test), 2):
            first, second = (part.arrays.inputs[part.arrays.index] for part in (one, other))
            heads = {window[:, :64].tobytes() for window in first}
            assert not heads & {window[:, 64:].tobytes() for window in second}


@real("pacs.npz")
@pytest.mark.integration  # pictures are decoded into the cache the first time
def test_a_domain_is_left_out():
    tasks = [load("pacs", f"{FOLDER},leave_out=sketch,index={index}") for index in range(3)]
    assert [task.train.num_examples + task.validation.num_examples for task in tasks] == [1670, 2048, 2344]
    assert sum(task.test.num_examples for task in tasks) == 3929


@real("shakespeare.npz")
def test_99_roles_say_enough():
    task = load("shakespeare", f"{FOLDER},index=98")
    inputs, _ = next(iter(task.train))
    assert inputs.shape == (50, 80)
    assert inputs.max() < 65
    with pytest.raises(DataError, match="99 parts"):
        load("shakespeare", f"{FOLDER},index=99")
