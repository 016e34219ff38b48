"""Data as applications hold them: taken as they are, converted, or refused in a line that names the loader."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from edge_sdk.errors import BadArgument
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task, as_arrays, count_examples, passes
from edge_sdk.tasks.intake import Taken, suited, take_in
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from edge_sdk.training.checking import check_task, suited_to_model
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.failures import in_words
from sparrow.protocol.manifest import Constant, Manifest, TensorSpec
from sparrow.protocol.preparation import Targets
from sparrow.simulation import in_process as inprocess

INPUTS = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
LABELS = np.arange(12) % 2
PAIRS = [(INPUTS[start : start + 4], LABELS[start : start + 4]) for start in (0, 4, 8)]


def manifest(
    outputs: tuple[int, ...] = (2,), targets: Targets | None = None, inputs: tuple[int, ...] = (8,)
) -> Manifest:
    weight = TensorSpec(name="w", shape=(2, 8), init=Constant(value=0))
    return Manifest(task="t", input_shape=inputs, output_shape=outputs, tensors=(weight,), targets=targets)


def taken(train, found: Manifest | None = None, **more):
    return take_in(Task("t", None, None, train, PAIRS, **more), found or manifest())


def converted(change):
    return [change(*pair) for pair in PAIRS]


class Again:
    """Batches that can be read again and again, and whose number is not known."""

    def __iter__(self):
        return iter(PAIRS)


class Counted(Again):
    def __len__(self):
        return len(PAIRS)


WORK = {
    "float64": lambda: converted(lambda x, y: (x.astype("f8"), y)),
    "big-endian": lambda: converted(lambda x, y: (x.astype(">f4"), y.astype(">i8"))),
    "Fortran": lambda: converted(lambda x, y: (np.asfortranarray(x), y)),
    "int32 labels": lambda: converted(lambda x, y: (x, y.astype("i4"))),
    "uint8 labels": lambda: converted(lambda x, y: (x, y.astype("u1"))),
    "uint64 labels": lambda: converted(lambda x, y: (x, y.astype("u8"))),
    "bool labels": lambda: converted(lambda x, y: (x, y.astype(bool))),
    "float labels": lambda: converted(lambda x, y: (x, y.astype("f4"))),
    "column of labels": lambda: converted(lambda x, y: (x, y[:, None])),
    "lists": lambda: converted(lambda x, y: [x.tolist(), y.tolist()]),
    "pandas": lambda: converted(lambda x, y: (pandas.DataFrame(x), pandas.Series(y))),
    "nullable": lambda: converted(
        lambda x, y: (pandas.DataFrame(x).astype("Float64"), pandas.Series(y, dtype="Int64"))
    ),
    "tensors": lambda: converted(lambda x, y: (torch.tensor(x), torch.tensor(y))),
    "tensors with gradients": lambda: converted(lambda x, y: (torch.tensor(x, requires_grad=True), torch.tensor(y))),
    "unmasked": lambda: converted(lambda x, y: (np.ma.masked_greater(x, 100), y)),
    "generator": lambda: (pair for pair in PAIRS),
    "zip": lambda: zip(INPUTS.reshape(3, 4, 8), LABELS.reshape(3, 4), strict=True),
    "map": lambda: map(tuple, PAIRS),
    "empty batches": lambda: [(INPUTS[:0], LABELS[:0]), *PAIRS],
    "no length": Again,
    "length": Counted,
    "another axis of length 1": lambda: converted(lambda x, y: (x[:, None], y)),
    "float64 arrays": lambda: ArrayBatches(Arrays(INPUTS.astype("f8"), LABELS.astype("u1")), 4),
    "DataLoader": lambda: DataLoader(TensorDataset(torch.tensor(INPUTS), torch.tensor(LABELS)), 4),
    "float64 DataLoader": lambda: DataLoader(TensorDataset(torch.tensor(INPUTS).double(), torch.tensor(LABELS)), 4),
}


@pytest.mark.parametrize("given", WORK.values(), ids=WORK)
def test_what_applications_hold_becomes_the_same_data(given):
    train = taken(given()).train
    assert len(train) == 3
    for _ in range(2):
        found = list(map(as_arrays, train))
        assert [(x.dtype, y.dtype) for x, y in found] == [(np.float32, np.int64)] * 3
        assert np.array_equal(np.concatenate([x for x, _ in found]), INPUTS)
        assert np.array_equal(np.concatenate([y for _, y in found]), LABELS)


def test_data_that_engines_can_use_stay_themselves():
    arrays = ArrayBatches(Arrays(INPUTS, LABELS), 4)
    found = take_in(Task("t", None, None, PAIRS, arrays), manifest())
    assert found.train is PAIRS
    assert found.validation is arrays


def with_value(value, dtype=np.float32):
    inputs = INPUTS.astype(dtype)
    inputs[5, 3] = value
    return [(inputs[start : start + 4], LABELS[start : start + 4]) for start in (0, 4, 8)]


WRONG = {
    "an empty list": (list, "no batch"),
    "a dictionary": (lambda: {"x": INPUTS, "y": LABELS}, "dict"),
    "dictionaries": (lambda: [{"x": INPUTS, "y": LABELS}], "batch 0.*'x', 'y'"),
    "triples": (lambda: [*PAIRS, (INPUTS, LABELS, LABELS)], "batch 3.*tuple of 3"),
    "a pair of whole arrays": (lambda: (INPUTS, LABELS), r"\(12, 8\).*ArrayBatches"),
    "samples": (lambda: zip(INPUTS, LABELS, strict=True), "one sample"),
    "a data set": (lambda: TensorDataset(torch.tensor(INPUTS), torch.tensor(LABELS)), "one sample"),
    "an array": (lambda: INPUTS, r"\(12, 8\)"),
    "None": (lambda: None, "NoneType"),
    "ragged lists": (lambda: [([[1.0] * 8, [1.0]], [0, 1])], "batch 0.*one array"),
    "texts": (lambda: [(INPUTS.astype(str), LABELS)], "batch 0.*<U"),
    "other lengths": (lambda: [(INPUTS, LABELS[:3])], "12 inputs have 3 targets"),
    "another shape": (lambda: [(INPUTS[:, :7], LABELS)], r"\(7,\).*\(8,\)"),
    "NaN": (lambda: with_value(np.nan), "batch 1.*sample 1"),
    "beyond float32": (lambda: with_value(1e300, np.float64), "batch 1.*infinite"),
    "masked": (lambda: [(np.ma.masked_greater(INPUTS, 1), LABELS)], "masked"),
    "a label too large": (lambda: [*PAIRS, (INPUTS, LABELS + 1)], "batch 3.*label 2.*count from 1|batch 3.*label 2"),
    "a label below 0": (lambda: [(INPUTS, LABELS - 1)], "label -1"),
    "a broken label": (lambda: [(INPUTS, LABELS + 0.5)], "label is 0.5"),
    "one-hot": (lambda: [(INPUTS, np.eye(2)[LABELS])], "argmax"),
    "a failing generator": (lambda: (1 / 0 for _ in range(2)), "ZeroDivisionError"),
}


@pytest.mark.parametrize(("given", "named"), WRONG.values(), ids=WRONG)
def test_what_cannot_work_is_named(given, named):
    with pytest.raises(BadArgument, match=rf"train.*({named})") as raised:
        taken(given())
    assert "\n" not in str(raised.value)


def test_an_empty_validation_is_named():
    with pytest.raises(BadArgument, match="validation"):
        take_in(Task("t", None, None, PAIRS, []), manifest())


def test_classes_are_numbered_as_the_federation_does():
    known = manifest((3,), Targets(names=("x", "y", "z")))
    pairs = converted(lambda x, y: (x, y))
    for names in (("z", "y", "x"), ("x", "y")):
        with pytest.raises(BadArgument, match="x, y, z"):
            taken(pairs, known, class_names=names)
    assert tuple(taken(pairs, known, class_names=("x", "y", "z")).class_names) == ("x", "y", "z")


def test_a_stream_without_an_end_is_not_counted():
    class Stream(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.tensor(INPUTS[0]), 0

    with pytest.raises(BadArgument, match="Stream has no length"):
        taken(DataLoader(Stream(), 4))


def test_a_wrong_batch_that_comes_later_is_named_when_it_is_read():
    class Later(Counted):
        def __iter__(self):
            yield from PAIRS[:2]
            yield INPUTS[:, :3], LABELS

    train = taken(Later()).train
    with pytest.raises(BadArgument, match=r"train data, batch 2: .*\(3,\)"):
        list(train)


def test_looking_at_data_draws_no_random_numbers():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.tensor(INPUTS), torch.tensor(LABELS))
    loader = DataLoader(data, 4, shuffle=True, generator=generator)
    before = generator.get_state(), torch.get_rng_state(), np.random.get_state()[1].copy()
    taken(loader)
    after = generator.get_state(), torch.get_rng_state(), np.random.get_state()[1]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_converted_loader_is_shuffled_and_counted_as_before():
    class Shuffled(Counted):
        num_examples = 12
        targets = LABELS.astype("u1")

        def shuffled(self, generator):
            return (PAIRS[each] for each in generator.permutation(3))

    train = taken(Shuffled()).train
    batches = passes(train, seed=3)
    first = [next(batches)[1][0] for _ in range(3)]
    wanted = [PAIRS[each][1][0] for each in np.random.Generator(np.random.PCG64(3)).permutation(3)]
    assert first == wanted
    assert count_examples(train) == 12
    assert train.targets.dtype == np.int64


def test_samples_without_a_label_are_left_out():
    labels = np.where(np.arange(12) < 5, -100, LABELS)
    batches = [(INPUTS[start : start + 4], labels[start : start + 4]) for start in (0, 4, 8)]
    known = manifest(targets=Targets(ignored=-100))
    loader = DataLoader(TensorDataset(torch.tensor(INPUTS), torch.tensor(labels)), 4)
    for given in (batches, ArrayBatches(Arrays(INPUTS, labels), 4), loader):
        found = [as_arrays(each) for each in taken(given, known).train]
        assert np.array_equal(np.concatenate([y for _, y in found]), labels[5:])
        assert np.array_equal(np.concatenate([x for x, _ in found]), INPUTS[5:])
    with pytest.raises(BadArgument, match="label -100"):
        taken(batches)


def test_labels_of_pixels_are_checked_where_the_targets_are_classes():
    known = manifest((3, 2, 2), Targets(ignored=255), inputs=(1, 2, 2))
    images = np.zeros((4, 1, 2, 2), np.float32)
    labels = np.full((4, 2, 2), 255)
    labels[:2, 0, 0] = 1
    found = take_in(Task("t", None, None, [(images, labels)], [(images, labels)]), known)
    assert not found.classification
    assert len(next(iter(found.train))[0]) == 2, "two images have no pixel that counts"
    labels[1, 0, 1] = 3
    with pytest.raises(BadArgument, match="label 3"):
        take_in(Task("t", None, None, [(images, labels)], [(images, labels)]), known)


def test_a_regression_needs_no_word_of_the_device():
    found = taken(converted(lambda x, y: (x, y[:, None])), manifest((1,), Targets(kind="numbers")))
    assert not found.classification
    assert {targets.dtype for _, targets in found.train} == {np.dtype(np.float32)}


def test_integers_become_what_a_training_step_takes():
    data = converted(lambda x, y: (np.abs(x * 20).astype("u1"), y))
    task = taken(data)
    floats = suited(task, Taken(np.dtype(np.float32), np.dtype(np.int64), ()))
    assert np.array_equal(next(iter(floats.train))[0], data[0][0].astype(np.float32))
    with pytest.raises(BadArgument, match="takes integers"):
        suited(taken(PAIRS), Taken(np.dtype(np.int64)))
    with pytest.raises(BadArgument, match="targets have the shape"):
        suited(task, Taken(np.dtype(np.float32), np.dtype(np.int64), (3,)))


def test_pytorch_trains_with_integers_too():
    data = converted(lambda x, y: (np.abs(x * 20).astype("u2"), y[:, None]))
    task = take_in(Task("t", nn.Linear(8, 2), F.cross_entropy, data, data), manifest())
    check_task(suited_to_model(task), manifest())
    words = nn.Sequential(nn.Embedding(300, 4), nn.Flatten(), nn.Linear(32, 2))
    task = suited_to_model(take_in(Task("t", words, F.cross_entropy, data, data), manifest()))
    check_task(task, manifest())
    assert np.asarray(next(iter(task.train))[0]).dtype.kind == "i"


@pytest.mark.integration  # plays a federation
def test_a_wrong_batch_while_training_ends_the_device_in_a_line(tmp_path):
    training: list[int] = []

    class Later(Counted):
        def __iter__(self):
            yield from PAIRS[:1]
            yield (INPUTS, LABELS + 7) if training else PAIRS[1]

    def task(train):
        return Task("t", nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), F.cross_entropy, train, PAIRS)

    tensors = [(torch.tensor(x), torch.tensor(y)) for x, y in PAIRS]
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "c", default_task=""))) as client:
        publish(inprocess.ADDRESS, "f", task(tensors), client=client, rounds=2, min_devices=1, cohort=1)
        with pytest.raises(BadArgument, match="train data, batch 1: label"):
            join(
                inprocess.ADDRESS,
                task(Later()),
                federation="f",
                name="pi",
                state_dir=tmp_path / "s",
                options=JoinOptions(budget=1.0),
                client=client,
                quiet=True,
                on_progress=lambda moment: training.append(moment.step) if moment.steps else None,
            )
        (device,) = client.get("/v1/federations/f/devices").json()
    assert not device["present"]
    assert device["failure"]["reason"] == in_words("data-unusable")
