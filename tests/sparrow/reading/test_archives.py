"""Files of numpy: labels, declared classes, axes, types, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from sparrow.protocol.preparation import Preparation, Targets
from sparrow.reading import ReadOptions, read_file
from sparrow.reading.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.array([0, 1, 0, 1, 0, 1])


@pytest.fixture
def read(tmp_path):
    def read(arrays, options=None, **more):
        if isinstance(arrays, bytes):
            (tmp_path / "s.npz").write_bytes(arrays)
        else:
            np.savez(tmp_path / "s.npz", **arrays)
        return read_file(tmp_path / "s.npz", ReadOptions(**(options or {})), **more)

    return read


@pytest.fixture
def refused(read):
    def refused(arrays, *words, **more):
        with pytest.raises(DataError) as error:
            read(arrays, **more)
        said = str(error.value)
        assert "s.npz" in said
        assert all(word in said for word in words), said
        assert "\n" not in said

    return refused


# --- labels


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (np.array([0, 2, 5, 0, 2, 5]), ["0", "2", "5", "0", "2", "5"]),
        (np.array([0, 1_000_000] * 3), ["0", "1000000"] * 3),
        (np.array([-1, 1] * 3, np.int8), ["-1", "1"] * 3),
        (np.array([1, 2] * 3, ">i4"), ["1", "2"] * 3),
        (np.array([True, False] * 3), ["True", "False"] * 3),
        (np.array(["sit", "walk "] * 3), ["sit", "walk"] * 3),
        (np.array([b"sit", b"NA"] * 3), ["sit", "NA"] * 3),
        (Y[:, None], ["0", "1"] * 3),
        (np.eye(2)[Y], ["0", "1"] * 3),
        (np.eye(3, dtype=np.int64)[Y], ["0", "1"] * 3),
        (np.eye(2, dtype=bool)[Y], ["0", "1"] * 3),
    ],
)
def test_labels_are_classes_by_name(read, labels, found):
    raw = read({"x": X, "y": labels})[""]
    assert (raw.kind, raw.labels.tolist(), raw.labels.dtype.kind) == ("classes", found, "U")
    assert bool(raw.said) == (labels.ndim == 2 or "walk " in labels.tolist())


@pytest.mark.parametrize("labels", [np.array([1.0, 0] * 3), np.array([0.5, 2] * 3, ">f8"), np.array([[1.0], [3]] * 3)])
def test_floats_are_numbers(read, labels):
    raw = read({"x": X, "y": labels})[""]
    assert raw.kind == "numbers"
    assert raw.labels.tolist() == labels.reshape(-1).tolist()
    assert raw.labels.dtype == np.float32


def test_the_target_may_be_said(read, refused):
    whole = {"x": X, "y": Y.astype(float)}
    assert read(whole, {"target": "class"})[""].labels.tolist() == ["0", "1"] * 3
    assert read({"x": X, "y": Y}, {"target": "number"})[""].kind == "numbers"
    refused({"x": X, "y": Y + 0.5}, "y[0]", "0.5", "target=class", options={"target": "class"})
    refused({"x": X, "y": np.array(list("ababab"))}, "y[0]", "'a'", options={"target": "number"})


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.ones((6, 2)), ["y", "(6, 2)", "one-hot"]),
        (np.ones((6, 2, 2), int), ["y", "(6, 2, 2)"]),
        (Y[:4], ["y", "(4,)", "6 samples"]),
        (np.array([0, 1, np.nan, 1, 0, 1]), ["y[2]", "missing=drop"]),
        (np.array([0, 1, np.inf, 1, 0, 1]), ["y[2]", "inf"]),
        (np.array(["a", "", "b", "a", "b", "a"]), ["y[1]", "missing=drop"]),
        (np.array([b"\xff"] * 6), ["y", "UTF-8"]),
        (Y.astype(complex), ["y", "complex128"]),
        (np.array([None] * 6), ["pickled"]),
    ],
)
def test_labels_that_cannot_be_used(refused, labels, words):
    refused({"x": X, "y": labels}, *words)


def test_integers_that_are_measurements(refused):
    refused({"x": np.ones((20, 1)), "y": np.arange(20)}, "target=number", "target=class")


@pytest.mark.parametrize(
    ("classes", "labels", "found", "declared"),
    [
        (3, Y, ["0", "1"] * 3, ("0", "1", "2")),
        (["sit", "walk"], Y, ["sit", "walk"] * 3, ("sit", "walk")),
        ([b"sit", b"walk"], np.eye(2)[Y], ["sit", "walk"] * 3, ("sit", "walk")),
        (["walk", "sit"], np.array(["sit", "walk"] * 3), ["sit", "walk"] * 3, ("walk", "sit")),
        ([1, 5], np.array([1, 5] * 3), ["1", "5"] * 3, ("1", "5")),
    ],
)
def test_declared_classes_name_the_labels(read, classes, labels, found, declared):
    raw = read({"x": X, "y": labels, "classes": classes})[""]
    assert raw.labels.tolist() == found
    assert raw.classes == declared


@pytest.mark.parametrize(
    ("classes", "labels", "words"),
    [
        (["a", "b"], Y + 1, ["y[1]", "2", "classes", "a, b"]),
        (2, Y + 1, ["y[1]", "2", "0 to 1"]),
        (["a", "b"], np.array(["a", "c"] * 3), ["y[1]", "'c'", "a, b"]),
        (["a", "b", "c"], np.eye(2)[Y], ["rows of 2", "3"]),
        (["a", "a"], Y, ["classes", "repeats"]),
        (1, Y, ["classes", "1"]),
        (np.ones((2, 2)), Y, ["classes", "(2, 2)"]),
    ],
)
def test_labels_outside_the_declared_classes(refused, classes, labels, words):
    refused({"x": X, "y": labels, "classes": classes}, *words)


# --- uses, people, runs


def test_pairs_are_read_by_use(read, refused):
    pairs = {f"{letter}_{use}": each for use in ("train", "val", "test") for letter, each in (("x", X), ("y", Y))}
    found = read({**pairs, "person_train": np.array([1] * 6), "run_test": Y})
    assert list(found) == ["train", "val", "test"]
    assert found["train"].people.tolist() == ["1"] * 6
    assert found["val"].people is None
    assert found["test"].runs.tolist() == Y.tolist()
    refused({"x_train": X, "y_train": Y, "x_val": X}, "no y_val")
    refused({"x_val": X, "y_val": Y}, "no x_train")
    refused({"a": X, "y": Y}, "a, y", "no x")


def test_all_parts_have_labels_of_the_kind_of_the_training_samples(read):
    twenty = np.ones((20, 1))
    found = read({"x_train": X, "y_train": Y, "x_test": twenty, "y_test": np.arange(20)})
    assert found["test"].kind == "classes"
    found = read({"x_train": X, "y_train": Y + 0.5, "x_test": X, "y_test": Y})
    assert found["test"].labels.tolist() == [0, 1] * 3


def test_people_are_named(read, refused):
    raw = read({"x": X, "y": Y, "Subject": Y, "Subjects": ["ann", "bo"], "run": np.arange(6)})[""]
    assert raw.people.tolist() == ["ann", "bo"] * 3
    assert raw.runs.tolist() == list(range(6))
    refused({"x": X, "y": Y, "person": Y, "device": Y}, "person", "device")
    refused({"x": X, "y": Y, "person": Y[:2]}, "person", "(2,)", "6 samples")
    refused({"x": X, "y": Y, "person": Y + 1, "persons": ["ann", "bo"]}, "persons")
    refused({"x": X, "y": Y, "run": X[:, 0]}, "run", "float32")


def test_samples_without_labels(read, refused, tmp_path):
    raw = read({"x": X, "y": Y}, labelled=False)[""]
    assert raw.labels is None
    assert "y" in raw.said[0]
    np.save(tmp_path / "x.npy", X)
    assert read_file(tmp_path / "x.npy", labelled=False)[""].inputs.tolist() == X.tolist()
    with pytest.raises(DataError, match=r"x\.npy: holds one array and no labels"):
        read_file(tmp_path / "x.npy")


# --- types and values


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("float64", "float32"),
        ("float16", "float32"),
        (">f4", "float32"),
        (">i2", "int16"),
        ("uint8", "uint8"),
        ("uint16", "uint16"),
        ("uint32", "int64"),
        (">u8", "int64"),
        ("bool", "uint8"),
    ],
)
def test_samples_keep_their_type_if_it_is_a_raw_one(read, stored, wanted):
    values = np.array([[0, 1], [1, 1]], stored)
    raw = read({"x": np.asfortranarray(values), "y": [0, 1]})[""]
    assert raw.inputs.dtype == np.dtype(wanted)
    assert raw.inputs.dtype.isnative
    assert raw.inputs.flags.c_contiguous
    assert raw.inputs.tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([[1, 2], [3, 1e39]]), ["x[1, 1]", "1e+39", "float32"]),
        (np.array([[1, 2], [2**64 - 1, 1]], np.uint64), ["x[1, 0]", "18446744073709551615", "int64"]),
        (np.array([[1, 2], [3, np.nan]]), ["x", "1 sample", "missing=drop", "missing=mean"]),
        (np.array([[1, 2], [3, np.inf]]), ["x", "1 sample: 1", "infinite", "missing=drop"]),
        (np.array([["a", "b"], ["c", "d"]]), ["x", "<U1"]),
        (np.ones((2, 0)), ["x", "(2, 0)"]),
        (np.ones(2), ["x", "(2,)"]),
    ],
)
def test_samples_that_cannot_be_used(refused, values, words):
    refused({"x": values, "y": [0, 1]}, *words)


def test_samples_without_a_value(read, refused):
    x = X.copy()
    x[1, 0] = np.nan
    dropped = read({"x": x, "y": Y, "person": Y}, {"missing": "drop"})[""]
    assert (len(dropped.inputs), len(dropped.labels), len(dropped.people)) == (5, 5, 5)
    assert "1 sample" in dropped.said[0]
    assert np.isnan(read({"x": x, "y": Y}, {"missing": "mean"})[""].inputs[1, 0])
    x[2, 0] = np.inf
    refused({"x": x, "y": Y}, "infinite", options={"missing": "mean"})


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04hello", b"\x93NUMPY\x01\x00hello"])
def test_damaged_files(refused, content):
    refused(content, "npz")


def test_a_cut_file(refused, tmp_path):
    np.savez(tmp_path / "whole.npz", x=X, y=Y)
    refused((tmp_path / "whole.npz").read_bytes()[:-60], "cannot be read")


def test_an_npz_file_of_another_name_is_read_by_its_content(tmp_path):
    with open(tmp_path / "samples.dat", "wb") as file:
        np.savez(file, x=X, y=Y)
    assert read_file(tmp_path / "samples.dat")[""].inputs.shape == (6, 2)


# --- axes


def of(shape, kind=np.float32):
    return {"x": np.ones((2, *shape), kind), "y": [0, 1]}


@pytest.mark.parametrize(
    ("shape", "kind", "axes", "said"),
    [((8, 8), np.uint8, "HW", "NHW"), ((3, 8, 8), np.float32, "CHW", "NCHW"), ((4, 8, 9), np.uint8, "CHW", "NCHW")],
)
def test_axes_that_are_plain_are_said(read, shape, kind, axes, said):
    raw = read(of(shape, kind))[""]
    assert raw.axes == axes
    assert said in raw.said[0]


@pytest.mark.parametrize(
    ("shape", "kind", "word"),
    [
        ((16, 16, 4), np.uint8, "axes=NHWC"),
        ((8, 8, 1), np.float32, "axes=NHWC"),
        ((6, 8, 8), np.float32, "axes=NCHW"),
        ((3, 4, 4), np.uint8, "axes=NCHW"),
        ((128, 6), np.float32, "axes=NTC"),
        ((8, 8), np.int16, "axes=NHW"),
        ((5, 3, 8, 8), np.uint8, "axes=NTCHW"),
    ],
)
def test_other_axes_are_asked_for(read, refused, shape, kind, word):
    refused(of(shape, kind), "x has shape", str((2, *shape)), word)
    letters = {2: "NTC", 3: "NHWC", 4: "NTCHW"}[len(shape)]
    assert read(of(shape, kind), {"axes": letters})[""].axes == letters[1:]


def test_axes_that_do_not_fit(refused):
    refused(of((8, 8)), "(2, 8, 8)", "axes=NHWC", options={"axes": "NHWC"})


# --- a federation's samples


IMAGES = Preparation(dtype="uint8", shape=(8, 8, 3), axes="HWC")


def test_samples_of_the_federation(read, refused):
    assert read(of((8, 8, 3), np.int64), preparation=IMAGES)[""].inputs.dtype == np.uint8
    assert read(of((8, 8, 3), np.uint8), preparation=IMAGES)[""].axes == "HWC"
    refused(of((3, 8, 8), np.uint8), "(3, 8, 8)", "(8, 8, 3)", "transpose", preparation=IMAGES)
    refused(of((9, 9, 3), np.uint8), "(9, 9, 3)", "(8, 8, 3)", preparation=IMAGES)
    refused(of((8, 8, 3)), "float32", "uint8", preparation=IMAGES)
    refused(of((8, 8, 3), np.uint8), "NCHW", "NHWC", options={"axes": "NCHW"}, preparation=IMAGES)
    large = of((8, 8, 3), np.int64)
    large["x"][1, 2, 3, 0] = 300
    refused(large, "x[1, 2, 3, 0]", "300", "uint8", preparation=IMAGES)


@pytest.mark.parametrize("kind", ["float64", "uint8", "int32", "bool"])
def test_a_federation_of_numbers_takes_bytes_and_doubles(read, kind):
    raw = read({"x": X.astype(kind), "y": Y}, preparation=Preparation(shape=(2,)))[""]
    assert raw.inputs.dtype == np.float32


def test_labels_of_the_federation(read, refused):
    numbers = Targets(kind="numbers")
    assert read({"x": X, "y": Y}, targets=numbers)[""].labels.tolist() == [0, 1] * 3
    refused({"x": X, "y": np.array(list("ababab"))}, "y[0]", "'a'", targets=numbers)
    classes = Targets(names=("0", "1"))
    assert read({"x": X, "y": Y.astype(float)}, targets=classes)[""].labels.tolist() == ["0", "1"] * 3
    refused({"x": X, "y": Y + 0.5}, "y[0]", "0.5", "classes", targets=classes)
    with pytest.raises(DataError, match="target=number"):
        read({"x": X, "y": Y}, {"target": "number"}, targets=classes)
