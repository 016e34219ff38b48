from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from edge_sdk.tasks import passes
from edge_sdk.tasks.digits import load
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from edge_sdk.tasks.models import DigitsNet
from sparrow.reading.errors import DataError


def everything(task):
    batches = [task.train, task.validation, task.test]
    return [np.concatenate([getattr(part.arrays, of) for part in batches]) for of in ("inputs", "targets")]


def test_the_network_maps_images_to_scores():
    assert DigitsNet()(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert list(dict(DigitsNet().named_children())) == ["conv1", "bn1", "conv2", "bn2", "fc1", "out"]


def test_parts_of_all_devices_are_the_whole_set():
    tasks = [load(f"index={index},of=4", device="any", seed=0, batch_size=16) for index in range(4)]
    images = np.concatenate([everything(task)[0] for task in tasks])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0, 1)
    whole = load("index=0,of=1", device="any", seed=0, batch_size=16)
    assert images.sum() == pytest.approx(everything(whole)[0].sum())


def test_a_device_loads_the_same_part_again_and_the_same_initial_weights():
    one, two = (load("index=1,of=3", device="pi", seed=5, batch_size=16) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(everything(one), everything(two), strict=True))
    one, two = (task.seeded(5).model.state_dict() for task in (one, two))
    for (name, a), b in zip(one.items(), two.values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("indx=2,of=5", r"unknown entry 'indx=2' \(did you mean index\?\); digits takes index, of, seed"),
        ("2", "unknown entry '2'"),
        ("index=two", "index=two; index must be an integer"),
        ("index=1.5", "index must be an integer"),
        ("alpha=much", "alpha must be a number"),
        ("index=5,of=5", "choose 0 to 4"),
        ("index=-1,of=5", "index=-1; parts are counted from 0"),
        ("of=0", "at least 1 device"),
        ("of=5,of=6", "of is set twice"),
        ("alpha=0", "alpha is 0"),
        ("alpha=nan", "alpha must be a number"),
        ("seed=-1", "seed is -1"),
    ],
)
def test_misspelt_data_is_explained(data, message):
    with pytest.raises(DataError, match=message):
        load(data, device="pi", seed=0, batch_size=16)


def test_the_task_is_registered_by_its_signature():
    task = load("index=0,of=5", device="pi", seed=0, batch_size=16)
    assert task.name == "digits"
    assert task.classification
    outputs = task.seeded(0).model(torch.from_numpy(next(iter(task.train))[0]))
    assert task.loss(outputs, torch.zeros(16, dtype=torch.int64)).ndim == 0


def batches(count, size):
    arrays = Arrays(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count))
    return ArrayBatches(arrays, size)


def order(pass_):
    return np.concatenate([targets for _, targets in pass_]).tolist()


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(8, 4, [4, 4]), (10, 4, [4, 4, 2]), (9, 4, [4, 5]), (3, 4, [3]), (1, 4, [1]), (3, 1, [1, 1, 1]), (5, 4, [5])],
)
def test_batches_leave_nobody_out_and_nobody_alone(count, size, sizes):
    made = batches(count, size)
    assert len(made) == len(sizes)
    for seen in (list(made), list(made.shuffled(np.random.default_rng(0)))):
        assert [len(targets) for _, targets in seen] == sizes
        assert sorted(order(seen)) == list(range(count))
    assert made.num_examples == count


def test_each_pass_has_another_order_and_the_seed_decides_all():
    def orders(seed):
        endless = passes(batches(20, 6), seed)
        return [order(islice(endless, 4)) for _ in range(3)]

    found = orders(3)
    assert found == orders(3) != orders(4)
    assert all(sorted(each) == list(range(20)) != each for each in found)
    assert len(set(map(tuple, found))) == 3
    assert order(batches(20, 6)) == list(range(20))


def test_what_cannot_be_shuffled_is_taken_as_it_comes():
    given = [(np.zeros(1), np.array([number])) for number in range(3)]
    assert order(islice(passes(given, 0), 7)) == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="no batches"):
        next(passes([], 0))


def test_inputs_and_targets_stay_together():
    for inputs, targets in batches(20, 6).shuffled(np.random.default_rng(0)):
        np.testing.assert_array_equal(inputs[:, 0], targets)


def test_batches_of_nothing_are_refused():
    with pytest.raises(DataError, match="no samples"):
        batches(0, 4)
    with pytest.raises(DataError, match="batch size 0"):
        batches(3, 0)
    with pytest.raises(DataError, match="one target per input"):
        Arrays(torch.zeros(3, 1), torch.zeros(2))
