from __future__ import annotations

import sys

import numpy as np
import pytest

from edge_sdk.tasks.datasets import Dataset
from edge_sdk.tasks.dealing import Dealing, deal, find_partition, read_dealing
from sparrow.reading.errors import DataError


def dataset(count=600, published=None, people=None, sources=None, **more):
    targets = np.arange(count) % 10
    published = count if published is None else published
    return Dataset(np.zeros((count, 2), np.uint8), targets, people, 10, published, sources, **more)


def read(data, **options):
    return read_dealing(data, **{"task": "mnist", "seed": 9, **options})


def everything(parts):
    return np.concatenate([parts.train, parts.validation, parts.test])


def test_the_defaults():
    assert read(None) == read("") == Dealing(path=None, seed=9)
    assert read(None, partition="person").partition == "person"


def test_every_entry_is_read():
    text = (
        " /my data/x=1 , partition=shards,shards=3,index=2, of=5 ,seed=3,held_out=0.25,validation=0.1,part=all,shift=.4"
    )
    assert read(text) == Dealing("/my data/x=1", 3, 2, 5, "shards", (("shards", 3),), 0.25, 0.1, "all", 0.4)
    assert read("alpha=0.5,minimum=3,of=7") == Dealing(None, 9, of=7, options=(("alpha", 0.5), ("minimum", 3)))
    assert read("data").path == "data"
    assert read("test=published,validation=0.1") == Dealing(None, 9, validation=0.1, test="published")
    found = read("corruption=contrast,severity=3,train_on=phone,test_on=watch", corruptible=True)
    assert found == Dealing(None, 9, corruption="contrast", severity=3, train_on="phone", test_on="watch")
    assert read("corruption=fog,severity=1,test=published", corruptible=True).corruption == "fog"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("here,there", "unknown entry 'there'; mnist takes PATH, index, of"),
        ("of=5,here", "unknown entry 'here'"),
        (
            "here,indx=2",
            r"unknown entry 'indx=2' \(did you mean index\?\); .* partition=dirichlet takes alpha, minimum",
        ),
        ("partition=iid,alpha=1", "partition=iid takes no options"),
        (
            "partition=banana",
            "unknown partition 'banana'; choose from classes, dirichlet, grouped, iid, person, quantity, sh",
        ),
        ("partition=shards,shards=1.5", "shards must be an integer"),
        ("alpha=inf", "alpha must be a number"),
        ("of=5,of=6", "of is set twice"),
        ("of=0", "of=0; give at least 1 device"),
        ("part=test", "part=test; choose train or all"),
        ("shift=2", "shift=2; give a share from 0 to 1"),
        ("test=all", "test=all; choose own or published"),
        ("test=published,part=all", "part=all trains on the published test part, .* leave one of them out"),
        ("test=published,shift=0.5", "shift=0.5 replaces the devices' own test samples, .* leave one of them out"),
        ("severity=3", "give corruption and severity together, as in corruption=contrast,severity=3"),
        ("corruption=contrast,severity=1", "corruption=contrast needs images of bytes, which mnist does not have"),
        ("test=published,held_out=0.2", "held_out has no effect with test=published"),
    ],
)
def test_misspelt_data_is_explained(data, message):
    with pytest.raises(DataError, match=message):
        read(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("corruption=contrast", "give corruption and severity together"),
        ("corruption=contrast,severity=6", "severity=6; choose 1 to 5"),
        ("corruption=contrast,severity=1.5", "severity must be an integer"),
        ("corruption=blur,severity=1", "unknown corruption 'blur'; choose from gaussian_noise, "),
        (
            "corruption=fog,severity=1",
            "corruption=fog exists only for the published test images; add test=published, or choose",
        ),
        ("corruption=contrast,severity=1,shift=0.5", "shift=0.5 replaces them; leave one of them out"),
    ],
)
def test_a_corruption_that_cannot_be_had_is_explained(data, message):
    with pytest.raises(DataError, match=message):
        read(data, corruptible=True)


def test_the_place_follows_from_index_number_or_name():
    assert read("index=3").place("pi-7", 10) == 3
    assert read("").place("pi-7", 10) == 7
    assert read("").place("device-017", 100) == 17
    hashed = read("").place("pi-7", 7)
    assert hashed == read("").place("pi-7", 7)
    assert {read("").place(f"pi{number}", 10) for number in range(200)} == set(range(10))
    with pytest.raises(DataError, match="index=7 of 7 parts; choose 0 to 6"):
        read("index=7").place("pi", 7)


def test_each_device_computes_its_own_part_and_together_they_hold_all():
    data = dataset()
    parts = [everything(deal(data, read(f"index={index},of=6"), device="any")) for index in range(6)]
    assert sorted(np.concatenate(parts)) == list(range(600))
    alone = deal(dataset(), read("index=4,of=6"), device="other")
    assert np.array_equal(everything(alone), parts[4])


def test_a_part_has_training_validation_and_test_of_its_own():
    parts = deal(dataset(), read("of=6,held_out=0.25,validation=0.2"), device="pi-1")
    mine = everything(parts)
    assert len(np.unique(mine)) == len(mine)
    count = len(mine)
    assert len(parts.test) == count - int(0.75 * count)
    assert len(parts.validation) == int(0.2 * int(0.75 * count))


def test_the_published_test_part_is_dealt_only_if_asked_for():
    data = dataset(600, published=500)
    assert max(everything(deal(data, read(f"index={index},of=3"), device="x")).max() for index in range(3)) == 499
    pooled = [everything(deal(data, read(f"index={index},of=3,part=all"), device="x")) for index in range(3)]
    assert sorted(np.concatenate(pooled)) == list(range(600))


def test_published_test_samples_are_sliced_and_all_of_the_own_part_is_trained_or_validated_on():
    data = dataset(600, published=500)
    text = "index={},of=7,validation=0.2,test=published"
    parts = [deal(data, read(text.format(index)), device="x") for index in range(7)]
    own = [everything(deal(data, read(f"index={index},of=7"), device="x")) for index in range(7)]
    for index, part in enumerate(parts):
        assert part.test.tolist() == list(range(500 + index, 600, 7))
        assert len(part.validation) == int(0.2 * len(own[index]))
        assert sorted([*part.train, *part.validation]) == sorted(own[index])
    assert sorted(np.concatenate([part.test for part in parts])) == list(range(500, 600)), "each published sample once"
    again = deal(data, read(text.format(3)), device="other")
    assert all(np.array_equal(getattr(again, use), getattr(parts[3], use)) for use in ("train", "validation", "test"))


def test_devices_weighted_by_published_test_samples_have_the_accuracy_on_the_whole_set():
    data = dataset(600, published=500)
    right = np.random.default_rng(0).random(600) < 0.7
    tests = [deal(data, read(f"index={index},of=7,test=published"), device="x").test for index in range(7)]
    weighted = np.average([right[test].mean() for test in tests], weights=[len(test) for test in tests])
    assert weighted == pytest.approx(right[500:].mean())


@pytest.mark.parametrize(
    ("count", "published", "data", "message"),
    [
        (600, 600, "of=3", "the data have no published test part; add one, or leave it out"),
        (600, 595, "of=6", "5 published test samples are too few for 6 devices; use fewer devices"),
        (600, 500, "of=3,validation=1", "validation=1; it must lie between 0 and 1"),
        (1100, 500, "of=500,partition=iid", "1 samples cannot be split into training and validation"),
    ],
)
def test_a_published_test_part_that_cannot_be_sliced_is_explained(count, published, data, message):
    with pytest.raises(DataError, match=message):
        deal(dataset(count, published), read(f"index=0,test=published,{data}"), device="x")


def test_people_are_devices_and_of_may_be_left_out():
    data = dataset(people=np.repeat([4, 2, 9], 200))
    parts = deal(data, read("partition=person"), device="phone-1")
    assert set(everything(parts)) == set(range(200))
    with pytest.raises(DataError, match="5 devices for 3 people"):
        deal(data, read("partition=person,of=5"), device="phone-1")
    with pytest.raises(DataError, match="does not name who"):
        deal(dataset(), read("partition=person"), device="phone-1")


def test_people_with_few_samples_may_be_left_out():
    data = dataset(people=np.repeat([4, 2, 9], [300, 9, 291]))
    parts = deal(data, read("partition=person,minimum=10"), device="phone-1")
    assert set(everything(parts)) == set(range(309, 600))
    with pytest.raises(DataError, match="3 devices for 2 people"):
        deal(data, read("partition=person,minimum=10,of=3"), device="phone-1")


def test_people_without_a_training_sample_are_dealt_with_all_samples_alone():
    data = dataset(published=400, people=np.repeat([0, 1, 2], 200))
    with pytest.raises(DataError, match="3 devices for 2 people"):
        deal(data, read("partition=person,of=3"), device="phone-1")
    assert set(everything(deal(data, read("partition=person"), device="phone-1"))) == set(range(200, 400))
    parts = deal(data, read("partition=person,part=all"), device="phone-2")
    assert set(everything(parts)) == set(range(400, 600))


# --- one person or domain left out


def domains(**options):
    return dataset(people=np.arange(600) % 3, names=("photo", "art", "sketch"), **options)


@pytest.mark.parametrize("part", ["train", "all"])
def test_who_is_left_out_is_what_all_are_tested_on(part):
    data = domains(published=500)
    sketch = np.arange(600) % 3 == 2
    parts = [deal(data, read(f"partition=person,leave_out=sketch,part={part},index={i}"), device="x") for i in (0, 1)]
    for index, found in enumerate(parts):
        own = np.sort([*found.train, *found.validation])
        assert np.array_equal(own, np.flatnonzero(np.arange(600 if part == "all" else 500) % 3 == index))
    assert sorted(np.concatenate([found.test for found in parts])) == np.flatnonzero(sketch).tolist()
    for index in range(4):  # whatever the partition
        assert not sketch[deal(data, read(f"leave_out=sketch,index={index},of=4"), device="x").train].any()


def test_devices_may_be_tested_on_their_own_samples_without_who_is_left_out():
    found = deal(domains(), read("partition=person,leave_out=art,test=own,index=1"), device="x")
    assert set(everything(found)) == set(range(2, 600, 3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dataset(), "leave_out=skech, but the data do not name who made a sample"),
        (domains(), r"leave_out=skech \(did you mean sketch\?\); choose from photo, art, sketch"),
    ],
)
def test_nobody_who_is_not_there_can_be_left_out(data, message):
    with pytest.raises(DataError, match=message):
        deal(data, read("leave_out=skech,index=0"), device="x")


# --- unbroken recordings


@pytest.mark.parametrize("data", ["", "test=published"])
def test_no_recording_is_in_two_sets_of_a_device(data):
    runs = np.arange(600) // 7
    everybodys = dataset(published=500 if data else None, people=np.arange(600) // 210, runs=runs)
    for index in range(3):
        found = deal(everybodys, read(f"partition=person,index={index},{data}"), device="x")
        own = [set(runs[each]) for each in (found.train, found.validation, *([] if data else [found.test]))]
        assert all(own)
        assert sum(map(len, own)) == len(set.union(*own))


def test_a_shift_mixes_everybodys_test_samples_in_and_no_training_sample():
    data = dataset()
    tests = [deal(data, read(f"index={index},of=6"), device="x").test for index in range(6)]
    own = deal(data, read("index=2,of=6"), device="x")
    mixed = deal(data, read("index=2,of=6,shift=1"), device="x")
    assert np.array_equal(mixed.train, own.train)
    assert len(mixed.test) == len(own.test)
    assert not np.isin(mixed.test, own.test).all()
    assert np.isin(mixed.test, np.concatenate(tests)).all()


# --- what samples were recorded with


def recorded(**options):
    return dataset(sources=np.where(np.arange(600) % 3 == 0, "watch", "phone"), **options)


@pytest.mark.parametrize("data", ["", "test=published"])
def test_a_device_trains_on_one_source_and_is_tested_on_another_of_the_same_split(data):
    everybodys = recorded(published=500 if data else None)
    own = deal(everybodys, read(f"of=4,index=1,{data}"), device="x")
    watch = np.arange(600) % 3 == 0
    found = deal(everybodys, read(f"of=4,index=1,train_on=phone,test_on=watch,{data}"), device="x")
    assert np.array_equal(found.train, own.train[~watch[own.train]])
    assert np.array_equal(found.validation, own.validation[~watch[own.validation]])
    assert np.array_equal(found.test, own.test[watch[own.test]])
    home = deal(everybodys, read(f"of=4,index=1,train_on=phone,test_on=phone,{data}"), device="x")
    assert np.array_equal(home.train, found.train), "whatever it is tested on"
    assert sorted([*home.test, *found.test]) == sorted(own.test)


def test_a_shift_draws_from_everybodys_test_samples_of_the_source_that_is_tested_on():
    data = recorded()
    own = deal(data, read("of=3,index=1,test_on=watch"), device="x").test
    mixed = deal(data, read("of=3,index=1,test_on=watch,shift=1"), device="x").test
    assert len(mixed) == len(own)
    assert not np.isin(mixed, own).all()
    assert (mixed % 3 == 0).all()


@pytest.mark.parametrize(
    ("sources", "data", "message"),
    [
        (
            None,
            "test_on=watch",
            "test_on=watch, but the data do not name the recording device of a sample; leave it out",
        ),
        ("phone", "train_on=ring", "train_on=ring; choose from phone"),
        ("one", "test_on=watch", "test_on=watch, but this device has no test sample of a watch; leave it out"),
        ("one", "train_on=watch", "train_on=watch, but this device has no training sample of a watch"),
    ],
)
def test_a_source_that_is_not_there_is_explained(sources, data, message):
    # The one watch's sample is somebody else's.
    texts = {"phone": np.full(600, "phone"), "one": np.where(np.arange(600) == 599, "watch", "phone"), None: None}
    everybodys = dataset(people=np.repeat([0, 1, 2], 200), sources=texts[sources])
    with pytest.raises(DataError, match=message):
        deal(everybodys, read(f"partition=person,index=0,{data}"), device="x")


def test_all_devices_of_a_process_deal_once(monkeypatch):
    dealt = []

    def own_rule(labels, people, *, of, seed):
        dealt.append(of)
        return np.array_split(np.arange(len(labels)), of)

    monkeypatch.setattr("edge_sdk.tasks.dealing.find_partition", lambda name: own_rule)
    data = dataset()
    for index in range(50):
        deal(data, Dealing(None, 0, index, 50, shift=0.5), device="x")
    assert dealt == [50]


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1, 2], [2, 3, 4]], [[0, 1, 2], [-1, 3, 4]], [[0, 1], [600]]])
def test_a_partition_that_deals_wrongly_is_refused(monkeypatch, parts):
    dealt = [np.array(part) for part in parts]
    monkeypatch.setattr("edge_sdk.tasks.dealing.find_partition", lambda name: lambda *_, **__: dealt)
    with pytest.raises(DataError, match=r"partition=mine\b.*\b2 devices"):
        deal(dataset(), Dealing(None, 0, 0, 2, partition="mine"), device="x")


def test_a_package_brings_its_own_partition(tmp_path, monkeypatch):
    (tmp_path / "sparrow_halves.py").write_text(
        "import numpy as np\n"
        "def halves(labels, people, *, of, seed, turn: int = 0, share: float = 0.5):\n"
        "    parts = np.array_split(np.arange(len(labels)), of)\n"
        "    return parts[turn:] + parts[:turn]\n"
    )
    info = tmp_path / "sparrow_halves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparrow-halves\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparrow.partitions]\nhalves = sparrow_halves:halves\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        dealing = read("partition=halves,turn=1,of=2,index=0,share=0.25")
        assert dealing.options == (("share", 0.25), ("turn", 1))
        assert set(everything(deal(dataset(), dealing, device="x"))) == set(range(300, 600))
        assert find_partition("halves").__name__ == "halves"
        with pytest.raises(DataError, match="turn must be an integer"):
            read("partition=halves,turn=half")
    finally:
        sys.modules.pop("sparrow_halves", None)
