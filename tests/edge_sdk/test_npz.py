from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import DataError
from edge_sdk.tasks.models import build_model
from edge_sdk.tasks.npz import SAME_CLASSES, load

RANDOM = np.random.default_rng(0)


def images(count, *shape):
    return RANDOM.integers(0, 256, size=(count, *shape), dtype=np.uint8)


def labels(count, classes=4):
    return np.arange(count) % classes


def load_arrays(folder, **arrays):
    np.savez(folder / "mine.npz", **arrays)
    return load(str(folder / "mine.npz"), device="pi", seed=0, batch_size=8)


def sizes(task):
    return task.train.num_examples, task.validation.num_examples, task.test and task.test.num_examples


def test_grey_bytes_become_images_between_0_and_1(tmp_path):
    x = images(40, 12, 10)
    x[0, 0, :2] = 0, 255
    task = load_arrays(tmp_path, x_train=x, y_train=labels(40))
    inputs, targets = next(iter(task.validation))
    assert inputs.shape[1:] == (1, 12, 10)
    assert inputs.dtype == np.float32
    assert targets.dtype == np.int64
    held = [task.train.arrays.inputs, task.validation.arrays.inputs, task.test.arrays.inputs]
    assert np.concatenate(held).min() == 0
    assert np.concatenate(held).max() == 1
    assert task.seeded(0).model(torch.from_numpy(inputs)).shape == (len(inputs), 4)


def test_features_are_taken_as_they_are(tmp_path):
    x = np.full((10, 3), 7.5)
    task = load_arrays(tmp_path, x_train=x, y_train=labels(10).astype(np.uint8))
    assert np.array_equal(task.train.arrays.inputs, np.full((6, 3), 7.5))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (60, 10, 30)),
        ({"val": 20}, (100, 20, None)),
        ({"test": 20}, (90, 10, 20)),
        ({"val": 20, "test": 30}, (100, 20, 30)),
    ],
)
def test_what_is_not_given_is_split_off(tmp_path, given, wanted):
    extra = {}
    for name, count in given.items():
        extra |= {f"x_{name}": RANDOM.random((count, 5)), f"y_{name}": labels(count)}
    task = load_arrays(tmp_path, x_train=RANDOM.random((100, 5)), y_train=labels(100), **extra)
    assert sizes(task) == wanted
    assert task.held_out is (task.test or task.validation)


def test_classes_are_counted_or_given(tmp_path):
    x, y = RANDOM.random((20, 5)), labels(20)
    for classes, wanted in ((None, 4), (7, 7), (["a", "b", "c", "d", "e"], 5)):
        extra = {} if classes is None else {"classes": classes}
        assert load_arrays(tmp_path, x_train=x, y_train=y, **extra).seeded(0).model.out.out_features == wanted


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((9, 5))}, "holds x, but no x_train; add it"),
        ({"x_train": np.zeros((9, 5))}, "no y_train"),
        ({"x_train": np.zeros((9, 5)), "y_train": labels(8)}, r"y_train: has shape \(8,\) beside x_train of \(9, 5\)"),
        ({"x_train": np.zeros((4, 5)), "y_train": np.eye(4, dtype=int)}, r"argmax\(axis=1\)"),
        ({"x_train": np.zeros((9, 5)), "y_train": np.zeros(9)}, "y_train: is of float64; number the classes from 0"),
        ({"x_train": np.zeros((9, 5)), "y_train": np.array(["a"] * 9)}, "number the classes from 0"),
        ({"x_train": np.zeros((9, 5)), "y_train": labels(9) - 1}, "y_train: has label -1; number the classes from 0"),
        ({"x_train": np.zeros(9), "y_train": labels(9)}, "x_train: has shape"),
        ({"x_train": np.array([["a"]] * 9), "y_train": labels(9)}, "x_train: is of <U1; store numbers"),
        ({"x_train": np.full((9, 2), np.nan), "y_train": labels(9)}, "not finite"),
        ({"x_train": images(9, 16, 16, 3), "y_train": labels(9)}, r"transpose\(0, 3, 1, 2\)"),
        ({"x_train": np.zeros((2, 5)), "y_train": labels(2)}, "at least 3"),
        ({"x_train": np.zeros((9, 5)), "y_train": labels(9), "x_test": np.zeros((3, 5))}, "no y_test"),
        (
            {"x_train": np.zeros((9, 5)), "y_train": labels(9), "x_val": np.zeros((3, 4)), "y_val": labels(3)},
            r"x_val: samples have shape \(4,\), those of x_train \(5,\)",
        ),
        (
            {"x_train": np.zeros((9, 5)), "y_train": labels(9), "classes": 3},
            "y_train: has label 3, but there are 3 classes, 0 to 2; every device's",
        ),
        ({"x_train": np.zeros((9, 5)), "y_train": labels(9), "classes": np.zeros((2, 2))}, "give their number"),
        ({"x_train": np.array([{}] * 9), "y_train": labels(9)}, "plain arrays of numbers"),
    ],
)
def test_arrays_that_cannot_be_used_are_explained(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        load_arrays(tmp_path, **arrays)


def test_files_that_cannot_be_used_are_explained(tmp_path):
    def refused(path, message):
        with pytest.raises(DataError, match=message):
            load(path and str(path), device="pi", seed=0, batch_size=8)

    refused(None, "add --data path.npz")
    refused(tmp_path / "none.npz", "no such file")
    (tmp_path / "text.npz").write_text("hello")
    refused(tmp_path / "text.npz", "not an npz file")
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(tmp_path / "empty.npz", "cannot be read as an npz file")
    np.save(tmp_path / "one.npy", np.zeros(3))
    refused(tmp_path / "one.npy", "holds one array")
    np.savez(tmp_path / "cut.npz", x_train=RANDOM.random((50, 50)), y_train=labels(50))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:9000])
    refused(tmp_path / "cut.npz", "cannot be read as an npz file")


# --- one file for all devices


def part(path, index, of, **options):
    text = ",".join([str(path), f"index={index}", f"of={of}", *(f"{key}={value}" for key, value in options.items())])
    return load(text, device="pi", seed=0, batch_size=8)


def everything(task):
    used = [samples.arrays for samples in (task.train, task.validation, task.test)]
    return [each.take(slice(0, len(each))) for each in used]


def test_a_table_is_dealt_and_its_features_are_on_one_scale(tmp_path):
    values = RANDOM.normal([1000, 0.001, 7], [300, 0.0005, 0], (90, 3))
    label = np.where(RANDOM.random(90) < 0.5, "ill", "well")
    pandas.DataFrame(values, columns=["a", "b", "c"]).assign(label=label).to_csv(tmp_path / "t.csv", index=False)
    tasks = [part(tmp_path / "t.csv", index, 3, partition="iid") for index in range(3)]
    assert sum(sum(sizes(task)) for task in tasks) == 90
    train = np.concatenate([everything(task)[0][0] for task in tasks])
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(train.std(0), [1.0, 1.0, 0.0], atol=1e-4)
    assert tasks[0].seeded(0).model.out.out_features == 2, "two names of classes"
    assert all(torch.equal(a, b) for a, b in zip(*(tasks[i].seeded(0).model.parameters() for i in (0, 2)), strict=True))


def test_a_file_that_says_who_made_a_sample_is_dealt_by_person(tmp_path):
    np.savez(tmp_path / "m.npz", x=images(60, 9, 9), y=labels(60), device=np.array(["b", "a", "c"])[np.arange(60) % 3])
    of_a = part(tmp_path / "m.npz", 0, 3)
    assert sum(sizes(of_a)) == 20
    inputs, _ = everything(of_a)[0]
    assert inputs.shape[1:] == (1, 9, 9)
    assert 0 <= inputs.min() < inputs.max() <= 1, "bytes are divided by 255"
    with np.load(tmp_path / "m.npz") as file:
        mine = {image.tobytes() for image in file["x"][file["device"] == "a"]}
    assert all((255 * image).round().astype(np.uint8).tobytes() in mine for image in inputs)
    assert sum(sizes(part(tmp_path / "m.npz", 0, 2, partition="iid"))) == 30


def test_pairs_of_one_file_are_dealt_together(tmp_path):
    pairs = {f"{letter}_{use}": of(12) for use in ("train", "val", "test") for letter, of in PAIR.items()}
    np.savez(tmp_path / "m.npz", **pairs, classes=9)
    tasks = [part(tmp_path / "m.npz", index, 2, partition="iid") for index in range(2)]
    assert sum(sum(sizes(task)) for task in tasks) == 36
    assert tasks[0].seeded(0).model.out.out_features == 9


PAIR = {"x": lambda count: RANDOM.random((count, 5)), "y": labels}
TABLE = {"a": [1.0, 2.0, 3.0], "label": [0, 1, 0]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1, 2, 3]}, "none called label or y or target"),
        ({**TABLE, "person": [1, 2, 3], "device": [1, 2, 3]}, "both person and device say who made a sample"),
        ({**TABLE, "city": ["x", "y", "z"]}, "the column city holds no numbers"),
        ({**TABLE, "Unnamed: 0": [0, 1, 2]}, r"to_csv\(index=False\)"),
        ({**TABLE, "label": [0, None, 1]}, "the column label lacks a value"),
        ({**TABLE, "a": [1, None, 2]}, "a value is missing or not finite"),
        ({**TABLE, "label": [0.5, 1, 2]}, "number the classes from 0"),
        ({**TABLE, "label": [0, 1, 70000]}, "labels go from 0 to 70000, and there are 3 samples"),
    ],
)
def test_tables_that_cannot_be_used_are_explained(tmp_path, columns, message):
    pandas.DataFrame(columns).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match=message):
        part(tmp_path / "t.csv", 0, 1, partition="iid")


def test_what_one_file_for_all_cannot_be_is_explained(tmp_path):
    pandas.DataFrame(TABLE).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match=r"say which part is meant, as in .*t\.csv,index=0,of=5"):
        load(str(tmp_path / "t.csv"), device="pi", seed=0, batch_size=8)
    with pytest.raises(DataError, match="no such file"):
        part(tmp_path / "none.npz", 0, 2)
    with pytest.raises(DataError, match="is a folder; name one file"):
        part(tmp_path, 0, 2)
    np.savez(tmp_path / "m.npz", x=RANDOM.random((9, 5)), y=labels(8))
    with pytest.raises(DataError, match=r"9 samples have labels of shape \(8,\)"):
        part(tmp_path / "m.npz", 0, 2)


def test_the_advice_shows_how_to_name_the_classes():
    assert "classes=10" in SAME_CLASSES


@pytest.mark.parametrize(
    ("shape", "convolutions"), [((5,), 0), ((1, 7, 30), 0), ((1, 8, 8), 2), ((3, 32, 32), 4), ((1, 128, 9), 2)]
)
def test_the_model_follows_from_shape_and_classes(shape, convolutions):
    model = build_model(shape, 6)
    assert sum(isinstance(module, nn.Conv2d) for module in model) == convolutions
    assert model(torch.zeros(2, *shape)).shape == (2, 6)
    again = build_model(shape, 6)
    assert [(n, t.shape) for n, t in model.state_dict().items()] == [
        (n, t.shape) for n, t in again.state_dict().items()
    ]
    manifest = describe(model, torch.zeros(1, *shape), task="npz")
    assert len(manifest.groups) == convolutions + (1 if convolutions else 2)


def test_equal_seeds_give_equal_initial_weights(tmp_path):
    one, two = (load_arrays(tmp_path, x_train=images(20, 9, 9), y_train=labels(20)) for _ in range(2))
    for a, b in zip(*(task.seeded(0).model.parameters() for task in (one, two)), strict=True):
        assert torch.equal(a, b)
