"""A user's own files as tasks: what is published of them, and how devices read theirs by it."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import own
from edge_sdk.tasks.models import build_model
from edge_sdk.tasks.own.making import prepared_shape
from sparrow.export.preparation import Preparer
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.reading.errors import BadOption, DataError

RANDOM = np.random.default_rng(0)


def images(count, *shape):
    return RANDOM.integers(0, 256, size=(count, *shape), dtype=np.uint8)


def labels(count, classes=4):
    return np.arange(count) % classes


def load(data, manifest=None, **publishing):
    given = own.Publishing(**publishing)
    return own.load(str(data), device="pi", seed=0, batch_size=8, manifest=manifest, publishing=given)


def load_arrays(folder, **arrays):
    np.savez(folder / "mine.npz", **arrays)
    return load(folder / "mine.npz")


def csv(path, rows, head):
    path.write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]) + "\n")
    return path


def readings(count, kinds, seed=0):
    """Rows of a temperature, a pressure, a room, and what somebody does."""
    random = np.random.default_rng(seed)
    means = {"idle": 20, "walk": 25, "fall": 32}
    rows = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        rows.append(
            (
                f"{random.normal(means[kind], 1):.2f}",
                f"{random.normal(1000, 5):.1f}",
                "bath" if number % 3 else "hall",
                kind,
            )
        )
    return rows


HEAD = ("temperature", "pressure", "room", "activity")


def sizes(task):
    return task.train.num_examples, task.validation.num_examples, task.test and task.test.num_examples


def raw_of(task):
    return [each.arrays.take(slice(0, None)) for each in (task.train, task.validation, task.test) if each is not None]


def prepared(task):
    return Preparer(task.preparation.graph)(raw_of(task)[0][0])


def published(task):
    """Return the manifest of a federation that was published with this task; its one tensor is a stand-in."""
    targets = task.targets
    return Manifest(
        task=task.name,
        input_shape=prepared_shape(task.preparation),
        output_shape=(max(1, len(targets.names) + targets.spare),),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=task.preparation.description,
        preparation_sha256=hashlib.sha256(task.preparation.graph).hexdigest(),
        targets=targets,
    )


# --- a device's own file ---------------------------------------------------------------------------------------------


def test_grey_bytes_stay_bytes_and_are_scaled_by_the_preparation(tmp_path):
    x = images(40, 12, 10)
    x[0, 0, :2] = 0, 255
    task = load_arrays(tmp_path, x_train=x, y_train=labels(40))
    inputs, targets = raw_of(task)[1]
    assert (inputs.dtype, inputs.shape[1:], targets.dtype) == (np.uint8, (12, 10), np.int64)
    made = Preparer(task.preparation.graph)(x)
    np.testing.assert_allclose(made, x[:, None] / np.float32(255), rtol=1e-6)
    assert task.seeded(0).model(torch.from_numpy(made)).shape == (40, 4)


def test_features_are_standardised_by_the_training_samples(tmp_path):
    values = RANDOM.normal([1000, 0.001, 7], [300, 0.0005, 0], (200, 3)).astype(np.float32)
    task = load_arrays(tmp_path, x_train=values, y_train=labels(200))
    made = prepared(task)
    np.testing.assert_allclose(made.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(made.std(0), [1, 1, 0], atol=1e-4)
    assert raw_of(task)[0][0][0] in values


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


def test_an_unbroken_recording_is_in_one_part(tmp_path):
    task = load_arrays(tmp_path, x=np.arange(90.0)[:, None], y=labels(90, 2), run=np.arange(90) // 9)
    parts = [{int(value) // 9 for value in inputs[:, 0]} for inputs, _ in raw_of(task)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 10


def test_classes_are_those_that_occur_or_that_the_file_declares(tmp_path):
    x = RANDOM.random((20, 5))
    assert load_arrays(tmp_path, x_train=x, y_train=labels(20) * 250_000).class_names == (
        "0",
        "250000",
        "500000",
        "750000",
    )
    assert load_arrays(tmp_path, x_train=x, y_train=labels(20), classes=7).class_names == tuple("0123456")
    named = load_arrays(tmp_path, x_train=x, y_train=labels(20), classes=list("abcde"))
    assert named.class_names == tuple("abcde")
    assert named.seeded(0).model.out.out_features == 5


def test_one_class_alone_is_no_classification(tmp_path):
    with pytest.raises(DataError, match="--classes"):
        load_arrays(tmp_path, x_train=RANDOM.random((20, 5)), y_train=np.zeros(20, int))


def test_numbers_become_a_regression_in_their_own_unit(tmp_path):
    price = RANDOM.normal(200_000, 50_000, 100).astype(np.float32)
    task = load_arrays(tmp_path, x_train=RANDOM.random((100, 5)), y_train=price)
    assert (task.classification, tuple(task.metrics)) == (False, ("rmse", "mae", "r2"))
    targets = raw_of(task)[0][1]
    assert targets.shape == (60, 1)
    outputs = task.seeded(0).model(torch.zeros(4, 5)).detach()
    assert 50_000 < float(outputs.mean()) < 400_000, "outputs are in the unit of the targets"
    everything = torch.from_numpy(price[:, None])
    assert float(task.loss(torch.full_like(everything, float(price.mean())), everything)) == pytest.approx(1, abs=1e-3)


# --- publisher and devices -------------------------------------------------------------------------------------------


def test_devices_number_classes_by_name(tmp_path):
    task = load(
        f"{csv(tmp_path / 'a.csv', readings(60, ['walk', 'idle']), HEAD)},label=activity",
        classes=("idle", "walk", "fall"),
    )
    manifest = published(task)
    other = load(csv(tmp_path / "b.csv", readings(60, ["fall", "walk"]), HEAD), manifest)
    found = np.concatenate([targets for _, targets in raw_of(other)])
    assert np.unique(found).tolist() == [1, 2]
    assert other.class_names == ("idle", "walk", "fall")
    assert other.preparation is None


def test_columns_are_found_by_name_in_any_order(tmp_path):
    rows = readings(60, ["walk", "idle"])
    task = load(f"{csv(tmp_path / 'a.csv', rows, HEAD)},label=activity")
    turned = csv(tmp_path / "b.csv", [row[::-1] for row in rows], HEAD[::-1])
    other = load(turned, published(task))
    for one, two in zip(raw_of(task), raw_of(other), strict=True):
        assert np.array_equal(one[0], two[0])
        assert np.array_equal(one[1], two[1])


def test_an_unknown_category_becomes_zeros(tmp_path):
    task = load(f"{csv(tmp_path / 'a.csv', readings(60, ['walk', 'idle']), HEAD)},label=activity")
    rows = [(temperature, pressure, "attic", kind) for temperature, pressure, _, kind in readings(60, ["walk", "idle"])]
    other = load(csv(tmp_path / "b.csv", rows, HEAD), published(task))
    raw = raw_of(other)[0][0]
    assert (raw[:, 2] == -1).all()
    assert not Preparer(task.preparation.graph)(raw)[:, 2:].any()
    assert "attic" in other.said[0]


def test_an_unknown_class_is_refused_with_the_list_or_takes_a_spare_output(tmp_path):
    first = f"{csv(tmp_path / 'a.csv', readings(60, ['walk', 'idle']), HEAD)},label=activity"
    second = csv(tmp_path / "b.csv", readings(60, ["walk", "fall"]), HEAD)
    with pytest.raises(DataError, match=r"'fall'.*idle, walk.*--spare-classes"):
        load(second, published(load(first)))
    task = load(first, spare=2)
    assert task.seeded(0).model.out.out_features == 4
    other = load(second, published(task))
    assert other.class_names[:2] == ("idle", "walk")
    assert sorted(other.class_names[2:]) == ["", "fall"]
    assert "fall" in other.said[0].partition("spare")[2]
    assert np.unique(np.concatenate([targets for _, targets in raw_of(other)])).tolist() == [
        1,
        other.class_names.index("fall"),
    ]


@pytest.mark.parametrize("classes", [("walk", "walk"), ("walk", "idle", "")])
def test_class_names_that_cannot_be_published_are_refused(tmp_path, classes):
    data = f"{csv(tmp_path / 'a.csv', readings(60, ['walk', 'idle']), HEAD)},label=activity"
    with pytest.raises(DataError, match=r"a\.csv.*--classes"):
        load(data, classes=classes)


def test_a_regression_has_no_classes_to_name(tmp_path):
    rows = [(*row[:3], float(row[0]) / 7) for row in readings(60, ["walk", "idle"])]
    data = f"{csv(tmp_path / 'a.csv', rows, HEAD)},label=activity"
    for publishing in ({"classes": ("walk", "idle")}, {"spare": 2}):
        with pytest.raises(BadOption, match="activity"):
            load(data, **publishing)


def test_parts_that_differ_are_refused_before_publishing(tmp_path):
    x, few = RANDOM.random((20, 5)), RANDOM.random((20, 4))
    with pytest.raises(DataError, match=r"mine\.npz.*alike"):
        load_arrays(tmp_path, x_train=x, y_train=labels(20), x_test=few, y_test=labels(20))


def test_devices_with_the_same_unknown_class_agree_on_its_output(tmp_path):
    targets = load(f"{csv(tmp_path / 'a.csv', readings(60, ['walk', 'idle']), HEAD)},label=activity", spare=5).targets
    assert targets.with_own(["walk", "fall"]).index("fall") == targets.with_own(["fall", "idle"]).index("fall")
    with pytest.raises(ValueError, match="a"):
        targets.with_own(list("abcdef"))


def test_labels_are_numbers_of_named_classes_only_if_the_publisher_s_were(tmp_path):
    task = load(f"{csv(tmp_path / 'a.csv', readings(60, ['walk', 'idle']), HEAD)},label=activity")
    rows = [(*row[:3], int(row[3] == "walk")) for row in readings(60, ["walk", "idle"])]
    numbers = csv(tmp_path / "b.csv", rows, HEAD)
    manifest = published(task)
    with pytest.raises(DataError, match=r"'0'.*idle, walk"):
        load(numbers, manifest)
    numbered = manifest.targets.model_copy(update={"numbered": True})
    other = load(numbers, manifest.model_copy(update={"targets": numbered}))
    assert [np.array_equal(one[1], two[1]) for one, two in zip(raw_of(task), raw_of(other), strict=True)] == [True] * 3


def test_a_federation_that_names_no_classes_takes_their_numbers(tmp_path):
    manifest = Manifest(task="mine", input_shape=(5,), output_shape=(3,), tensors=(TensorSpec(name="w", shape=(1,)),))
    np.savez(tmp_path / "a.npz", x_train=RANDOM.random((20, 5)), y_train=labels(20, 3))
    assert np.unique(raw_of(load(tmp_path / "a.npz", manifest))[0][1]).tolist() == [0, 1, 2]
    np.savez(tmp_path / "b.npz", x_train=RANDOM.random((20, 5)), y_train=labels(20, 4))
    with pytest.raises(DataError, match=r"'3'.*0 to 2"):
        load(tmp_path / "b.npz", manifest)


def test_a_line_says_what_was_read(tmp_path):
    (said,) = load(f"{csv(tmp_path / 'a.csv', readings(100, ['walk', 'idle']), HEAD)},label=activity").said
    for part in ("a.csv", "100 rows", "60 train", "10 check", "30 test", "idle 50", "walk 50", "temperature"):
        assert part in said


# --- one file for all ------------------------------------------------------------------------------------------------


def part(path, **options):
    return load(",".join([str(path), *(f"{key}={value}" for key, value in options.items())]))


def test_a_table_is_dealt_and_its_features_are_on_one_scale(tmp_path):
    values = RANDOM.normal([1000, 0.001, 7], [300, 0.0005, 0], (90, 3)).astype(np.float32)
    rows = [(*row, "ill" if number % 2 else "well") for number, row in enumerate(values.tolist())]
    table = csv(tmp_path / "t.csv", rows, ("a", "b", "c", "label"))
    tasks = [part(table, index=index, of=3, partition="iid") for index in range(3)]
    assert sum(sum(sizes(task)) for task in tasks) == 90
    train = np.concatenate([prepared(task) for task in tasks])
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(train.std(0), [1.0, 1.0, 0.0], atol=1e-3)
    assert len({task.preparation.graph for task in tasks}) == 1, "constants are of all devices' training samples"
    assert tasks[0].class_names == ("ill", "well")


def test_a_file_with_persons_is_dealt_by_person(tmp_path):
    x, who = images(60, 9, 9), np.array(["b", "a", "c"])[np.arange(60) % 3]
    np.savez(tmp_path / "m.npz", x=x, y=labels(60), device=who)
    of_a = part(tmp_path / "m.npz", index=0, of=3)
    assert sum(sizes(of_a)) == 20
    mine = {image.tobytes() for image in x[who == "a"]}
    assert all(image.tobytes() in mine for inputs, _ in raw_of(of_a) for image in inputs)
    by_name = part(tmp_path / "m.npz", person="a")
    assert [np.array_equal(one[0], two[0]) for one, two in zip(raw_of(of_a), raw_of(by_name), strict=True)] == [
        True
    ] * 3
    assert sum(sizes(part(tmp_path / "m.npz", index=0, of=2, partition="iid"))) == 30
    with pytest.raises(DataError, match=r"person=z.*a, b, c"):
        part(tmp_path / "m.npz", person="z")


def test_pairs_of_one_file_are_dealt_together(tmp_path):
    pairs = {f"{letter}_{use}": of(12) for use in ("train", "val", "test") for letter, of in PAIR.items()}
    np.savez(tmp_path / "m.npz", **pairs, classes=9)
    tasks = [part(tmp_path / "m.npz", index=index, of=2, partition="iid") for index in range(2)]
    assert sum(sum(sizes(task)) for task in tasks) == 36
    assert tasks[0].seeded(0).model.out.out_features == 9


PAIR = {"x": lambda count: RANDOM.random((count, 5)), "y": labels}


def test_numbers_have_no_classes_to_deal_by(tmp_path):
    rows = [(number, f"{number}.5") for number in range(60)]
    table = csv(tmp_path / "t.csv", rows, ("a", "y"))
    assert sum(sizes(part(table, index=0, of=3))) == 20
    with pytest.raises(BadOption, match="dirichlet"):
        part(table, index=0, of=3, partition="dirichlet")


def test_what_one_file_for_all_cannot_be_is_explained(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        part(tmp_path / "none.npz", index=0, of=2)
    with pytest.raises(DataError, match="holds no picture and no sound"):
        part(tmp_path, index=0, of=2)
    with pytest.raises(BadOption, match="--data FILE"):
        own.load(None, device="pi", seed=0, batch_size=8)


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "convolutions"), [((5,), 0), ((1, 7, 30), 0), ((1, 8, 8), 2), ((3, 32, 32), 4), ((1, 128, 9), 2)]
)
def test_the_model_follows_from_shape_and_outputs(shape, convolutions):
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


def test_every_part_has_recordings_of_each_class(tmp_path):
    rows = ["time_s,x,label"]
    for run in range(9):
        rows += [f"{run * 100 + row / 10:.1f},{row},{'abc'[run % 3]}" for row in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    for seed in range(4):
        task = own.load(f"{tmp_path / 't.csv'},window=20,step=10", device="d", seed=seed, batch_size=8)
        for batches in (task.train, task.validation, task.test):
            assert set(batches.arrays.all_targets().tolist()) == {0, 1, 2}
        assert "recordings: 3 train, 3 check, 3 test" in task.said[0]
