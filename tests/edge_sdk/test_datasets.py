from __future__ import annotations

import gzip
import io
import os
import struct

import numpy as np
import pandas
import pytest
from PIL import Image

from edge_sdk.tasks.formats import read_dataset
from edge_sdk.tasks.public import CIFAR10, HAR, MNIST, SHAKESPEARE
from sparrow.reading.errors import DataError

RANDOM = np.random.default_rng(0)
DIGITS = RANDOM.integers(0, 256, (24, 28, 28), dtype=np.uint8)
LABELS = np.arange(24) % 10
PHOTOS = RANDOM.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
WINDOWS = RANDOM.normal(size=(15, 6, 64)).astype(np.float16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sparrow"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def refused(path, wanted, message):
    with pytest.raises(DataError, match=message):
        read_dataset(str(path), wanted)


def check(dataset, images=DIGITS, labels=LABELS, published=24):
    np.testing.assert_array_equal(dataset.inputs.reshape(images.shape), images)
    assert dataset.inputs.dtype == np.uint8
    assert dataset.inputs.flags.writeable  # torch warns of arrays that are not
    assert dataset.targets.tolist() == labels.tolist()
    assert dataset.targets.dtype == np.int64
    assert dataset.published == published
    assert dataset.classes == 10
    assert dataset.people is None


# --- npz


def test_npz_with_and_without_a_test_part(folder):
    np.savez(folder / "mnist.npz", x_train=DIGITS, y_train=LABELS)
    check(read_dataset(str(folder), MNIST))
    np.savez(folder / "other.npz", x_train=DIGITS[:20], y_train=LABELS[:20], x_test=DIGITS[20:], y_test=LABELS[20:])
    dataset = read_dataset(str(folder / "other.npz"), MNIST)
    check(dataset, published=20)
    assert dataset.inputs.shape == (24, 1, 28, 28)


def test_a_process_reads_once_until_the_file_changes(folder):
    path = folder / "mnist.npz"
    np.savez(path, x_train=DIGITS, y_train=LABELS)
    first = read_dataset(str(path), MNIST)
    assert read_dataset(str(folder / ".." / "data" / "mnist.npz"), MNIST) is first
    np.savez(path, x_train=DIGITS[:12], y_train=LABELS[:12])
    os.utime(path, ns=(1, 1))
    assert read_dataset(str(path), MNIST).published == 12


def test_images_with_channels_last_or_as_whole_numbers(folder):
    np.savez(folder / "cifar10.npz", x_train=PHOTOS.transpose(0, 2, 3, 1).astype(np.int64), y_train=LABELS)
    check(read_dataset(str(folder), CIFAR10), PHOTOS)


def test_windows_of_watches_and_phones_are_told_apart(folder):
    watch = np.arange(15) % 3 == 0
    np.savez(folder / "har.npz", x=WINDOWS, y=LABELS[:15] % 5, watch=watch)
    assert read_dataset(str(folder), HAR).sources.tolist() == np.where(watch, "watch", "phone").tolist()
    np.savez(folder / "none.npz", x=WINDOWS, y=LABELS[:15] % 5)
    assert read_dataset(str(folder / "none.npz"), HAR).sources is None
    np.savez(folder / "short.npz", x=WINDOWS, y=LABELS[:15] % 5, watch=watch[:3])
    np.savez(folder / "number.npz", x=WINDOWS, y=LABELS[:15] % 5, watch=watch.astype(int))
    parts = {"x_train": WINDOWS[:9], "y_train": LABELS[:9] % 5, "x_test": WINDOWS[9:], "y_test": LABELS[9:15] % 5}
    np.savez(folder / "half.npz", **parts, watch_train=watch[:9])
    for name in ("short", "number", "half"):
        refused(folder / f"{name}.npz", HAR, "watch must be true or false for each sample, or left out")
    np.savez(folder / "whole.npz", **parts, watch_train=watch[:9], watch_test=watch[9:])
    assert (read_dataset(str(folder / "whole.npz"), HAR).sources == "watch").tolist() == watch.tolist()


def test_windows_have_people(folder):
    people = np.array([7, 3, 9] * 5)
    np.savez(folder / "har.npz", x=WINDOWS, y=np.arange(15) % 5, subject=people)
    dataset = read_dataset(str(folder), HAR)
    assert dataset.inputs.dtype == np.float16
    np.testing.assert_array_equal(dataset.inputs, WINDOWS)
    assert dataset.people.tolist() == [1, 0, 2] * 5
    assert dataset.classes == 5


@pytest.mark.parametrize("kind", ["person", "subject", "device", "writer", "speaker", "role", "domain"])
def test_people_may_be_called_otherwise_and_have_names(folder, kind):
    names = np.array(["zoe", "ann", "bob", "nobody"])
    np.savez(folder / "mnist.npz", x=DIGITS, y=LABELS, **{kind: np.arange(24) % 3, f"{kind}s": names})
    dataset = read_dataset(str(folder), MNIST)
    assert dataset.names == ("zoe", "ann", "bob"), "numbers keep their order"
    assert dataset.people.tolist() == [0, 1, 2] * 8
    np.savez(folder / "texts.npz", x=DIGITS, y=LABELS, **{kind: names[np.arange(24) % 3]})
    assert read_dataset(str(folder / "texts.npz"), MNIST).names == ("ann", "bob", "zoe")
    np.savez(folder / "few.npz", x=DIGITS, y=LABELS, **{kind: np.arange(24) % 3, f"{kind}s": names[:2]})
    refused(folder / "few.npz", MNIST, "people are 0 to 2, but there are 2 names")


def test_a_flag_marks_the_published_test_part(folder):
    test = np.arange(24) % 4 == 0
    writer = np.where(test, 3, np.arange(24) % 3 + 4)  # writer 3 has test samples only
    np.savez(folder / "mnist.npz", x=DIGITS, y=LABELS, test=test, writer=writer)
    dataset = read_dataset(str(folder), MNIST)
    order = [*np.flatnonzero(~test), *np.flatnonzero(test)]
    np.testing.assert_array_equal(dataset.inputs[:, 0], DIGITS[order])
    assert dataset.targets.tolist() == LABELS[order].tolist()
    assert dataset.published == 18
    assert dataset.names == ("4", "5", "6", "3")
    assert [dataset.names[code] for code in dataset.people] == [str(each) for each in writer[order]]
    for name, given, message in (
        ("all", np.full(24, True), "test is true for all samples"),
        ("number", test.astype(int), "test must be true or false for each sample, or left out"),
    ):
        np.savez(folder / f"{name}.npz", x=DIGITS, y=LABELS, test=given)
        refused(folder / f"{name}.npz", MNIST, message)


def test_recordings_are_of_their_person(folder):
    run = np.repeat([1, 0, 1], 5)
    np.savez(folder / "har.npz", x=WINDOWS, y=np.arange(15) % 5, subject=np.repeat([7, 7, 3], 5), run=run)
    assert read_dataset(str(folder), HAR).runs.tolist() == np.repeat([2, 1, 0], 5).tolist(), "3's run 1 is not 7's"
    np.savez(folder / "alone.npz", x=WINDOWS, y=np.arange(15) % 5, run=run)
    assert read_dataset(str(folder / "alone.npz"), HAR).runs.tolist() == run.tolist()
    np.savez(folder / "part.npz", x=WINDOWS, y=np.arange(15) % 5, run=run[:3])
    refused(folder / "part.npz", HAR, "run must be an integer for each sample")


def test_writers_may_lie_in_a_file_beside_the_samples(folder):
    np.savez(folder / "mnist.npz", x_train=DIGITS[:20], y_train=LABELS[:20], x_test=DIGITS[20:], y_test=LABELS[20:])
    writers = {"writer_train": np.arange(20) % 2 + 8, "writer_test": np.full(4, 5)}
    np.savez(folder / "mnist_writers.npz", **writers, y_train=LABELS[:20], y_test=LABELS[20:])
    dataset = read_dataset(str(folder), MNIST)
    assert dataset.names == ("8", "9", "5")
    assert dataset.people.tolist() == [*[0, 1] * 10, *[2] * 4]
    np.savez(folder / "mnist_writers.npz", **writers, y_train=LABELS[:20][::-1])
    os.utime(folder, ns=(1, 1))
    refused(folder, MNIST, "mnist_writers.npz: its y_train differs from that of mnist.npz")


def speeches(**changed):
    """Two roles that say enough, in turns, and one that does not."""
    text = np.arange(6000, dtype=np.int64) % 61
    given = {"start": [0, 1000, 3000, 4000, 5500, 6000], "role": [1, 0, 1, 1, 2], "roles": ["ANN", "BOB", "CLEO"]}
    return {"text": text.astype(np.uint8), **given, "place": [1, 2, 0, 3, 4], **changed}


def test_a_text_becomes_windows_and_the_next_character_by_role(folder):
    np.savez(folder / "shakespeare.npz", **speeches())
    dataset = read_dataset(str(folder), SHAKESPEARE)
    assert dataset.names == ("ANN", "BOB"), "CLEO says 500 characters"
    windows = len(range(0, 500 - 80, 10))
    assert np.bincount(dataset.people).tolist() == [4 * windows, 7 * windows]
    assert np.bincount(dataset.runs).tolist() == [windows] * 11
    bob = np.flatnonzero(dataset.people == 1)
    said = speeches()["text"][[*range(3000, 4000), *range(1000), *range(4000, 5500)]]  # in the order of place
    for row, at in ((0, 0), (1, 10), (windows, 500)):
        assert dataset.inputs[bob[row]].tolist() == said[at : at + 80].tolist()
        assert dataset.targets[bob[row]] == said[at + 80]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": np.zeros(6000)}, "text is float64"),
        ({"start": [0, 1000]}, "start: give 6 numbers for 5 speeches"),
        ({"place": [1]}, "place: 1 numbers for 5 speeches"),
        ({"start": [0, 10, 20, 30, 40, 50]}, "none of 3 roles has 2,000 characters"),
    ],
)
def test_texts_that_cannot_be_used_are_explained(folder, changed, message):
    np.savez(folder / "shakespeare.npz", **speeches(**changed))
    refused(folder, SHAKESPEARE, message)


def test_a_text_needs_roles(folder):
    np.savez(folder / "shakespeare.npz", **{name: each for name, each in speeches().items() if name != "role"})
    refused(folder, SHAKESPEARE, "no entry names the speakers")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": LABELS}, "contains a, but no x_train; add it, or give a folder or file with mnist.npz"),
        ({"x_train": DIGITS}, "contains x_train, but no y_train"),
        ({"x_train": DIGITS, "y_train": LABELS[:5]}, "24 samples have 5 labels"),
        ({"x_train": DIGITS[:0], "y_train": LABELS[:0]}, "at least one"),
        ({"x_train": DIGITS[:, :20], "y_train": LABELS}, r"samples have shape \(20, 28\), mnist wants \(1, 28, 28\)"),
        ({"x_train": DIGITS / 255, "y_train": LABELS}, "integer grey levels from 0 to 255; multiply"),
        ({"x_train": DIGITS.astype(int) - 9, "y_train": LABELS}, "integer grey levels"),
        ({"x_train": DIGITS.astype(str), "y_train": LABELS}, "contains values of <U"),
        ({"x_train": DIGITS, "y_train": LABELS - 1}, "has label -1 in 3 of 24 samples"),
        ({"x_train": DIGITS, "y_train": LABELS / 2}, "not an integer"),
        ({"x_train": DIGITS, "y_train": np.full(24, np.nan)}, "a label is missing"),
        ({"x_train": np.array([{}] * 3), "y_train": LABELS[:3]}, "pickled objects"),
        ({"x_train": DIGITS, "y_train": LABELS, "x_test": DIGITS}, "no y_test"),
        ({"x_train": DIGITS, "y_train": LABELS, "subject_train": LABELS[:3]}, "give one for each, or for none"),
    ],
)
def test_npz_files_that_cannot_be_used_are_explained(folder, arrays, message):
    np.savez(folder / "mnist.npz", **arrays)
    refused(folder, MNIST, message)


def test_broken_npz_files_are_explained(folder):
    (folder / "mnist.npz").write_bytes(b"PK\x03\x04 and then nothing")
    refused(folder, MNIST, "cannot be read as an npz file")
    (folder / "text.npz").write_text("hello")
    refused(folder / "text.npz", MNIST, "not an npz file")
    (folder / "empty.npz").write_bytes(b"")
    refused(folder / "empty.npz", MNIST, "cannot be read as an npz file")
    np.save(folder / "one.npy", np.zeros(3))
    (folder / "one.npy").rename(folder / "one.npz")
    refused(folder / "one.npz", MNIST, "not an npz file")


def test_values_that_float16_cannot_hold_are_refused(folder):
    np.savez(folder / "har.npz", x=np.full((2, 6, 64), 1e6), y=[0, 1])
    refused(folder, HAR, "too large for float16")


# --- images


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=95)
    return file.getvalue()


def save_jpegs(path, photos=PHOTOS, labels=LABELS):
    smooth = [np.full_like(photo, photo.mean()) for photo in photos]
    files = [jpeg(photo) for photo in smooth]
    offset = np.cumsum([0, *map(len, files)])
    joined = np.frombuffer(b"".join(files), np.uint8)
    cut = 20
    np.savez(
        path,
        jpeg_train=joined[: offset[cut]],
        offset_train=offset[: cut + 1],
        y_train=labels[:cut],
        jpeg_test=joined[offset[cut] :],
        offset_test=offset[cut:] - offset[cut],
        y_test=labels[cut:],
    )
    return np.array(smooth)


def test_jpegs_are_decoded_once_into_a_file_that_processes_share(folder, cache, monkeypatch):
    smooth = save_jpegs(folder / "cifar10.npz")
    dataset = read_dataset(str(folder), CIFAR10)
    assert np.abs(dataset.inputs.astype(int) - smooth).max() <= 2
    assert dataset.published == 20
    assert dataset.targets.tolist() == LABELS.tolist()
    (kept,) = cache.iterdir()
    assert kept.name.startswith("cifar10-")
    assert kept.suffix == ".npy"
    assert isinstance(dataset.inputs, np.memmap)
    monkeypatch.setattr("edge_sdk.tasks.decoding._write", None)  # whoever decodes again fails
    again = read_dataset(str(folder / "cifar10.npz"), CIFAR10)
    np.testing.assert_array_equal(again.inputs, dataset.inputs)


def test_jpegs_of_domains(folder):
    save_jpegs(folder / "cifar10.npz")
    with np.load(folder / "cifar10.npz") as stored:
        train = {name: stored[f"{name}_train"] for name in ("jpeg", "offset", "y")}
    count = len(train["y"])
    domains = {"domain": np.arange(count) % 2, "domains": ["photo", "sketch"]}
    np.savez(folder / "one.npz", **train, **domains)
    dataset = read_dataset(str(folder / "one.npz"), CIFAR10)
    assert (dataset.published, len(dataset.inputs)) == (count, count)
    np.testing.assert_array_equal(dataset.inputs, read_dataset(str(folder), CIFAR10).inputs[:count])
    assert dataset.names == ("photo", "sketch")
    assert dataset.people.tolist() == domains["domain"].tolist()


def test_a_jpeg_that_is_none_is_named_and_leaves_nothing_behind(folder, cache):
    np.savez(folder / "cifar10.npz", jpeg_train=DIGITS.ravel(), offset_train=np.array([0, 9, 30]), y_train=[1, 2])
    refused(folder, CIFAR10, "cifar10.npz, image 0: cannot be read as PNG or JPEG")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_explained(folder, tmp_path, monkeypatch):
    save_jpegs(folder / "cifar10.npz")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(
        folder, CIFAR10, "0 MB of decoded images cannot be stored there .*; set XDG_CACHE_HOME to a folder with room"
    )


def save_images(root, images, labels):
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / str(label) / f"{number:03}.png")


def test_folders_of_images_by_class(folder):
    save_images(folder / "train", DIGITS[:20], LABELS[:20])
    save_images(folder / "test", DIGITS[20:], LABELS[20:])
    order = np.argsort(LABELS[:20], kind="stable").tolist() + (20 + np.argsort(LABELS[20:], kind="stable")).tolist()
    check(read_dataset(str(folder), MNIST), DIGITS[order], LABELS[order], published=20)


def test_classes_may_have_names_if_all_are_there(folder):
    names = np.array(["zebra", "ant", "cat", "dog", "emu", "fox", "gnu", "hen", "ibis", "jay"])
    save_images(folder, DIGITS, names[LABELS])
    dataset = read_dataset(str(folder), MNIST)
    assert dataset.targets.tolist() == sorted((LABELS - 1) % 10)
    save_images(folder / "few", DIGITS[:4], names[:4])
    refused(folder / "few", MNIST, "has 4 folders of images, mnist has 10 classes; add the missing ones or name")


def test_images_of_another_size_are_refused(folder):
    save_images(folder, DIGITS[:3, :20], LABELS[:3])
    refused(folder, MNIST, r"000.png: has 20 x 28 pixels; scale it to 28 x 28")


# --- IDX and binary


def save_idx(path, array, header=None):
    content = (header or b"\0\0\x08" + bytes([array.ndim])) + struct.pack(f">{array.ndim}I", *array.shape)
    content += array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_idx_as_mnist_is_published(folder):
    save_idx(folder / "train-images-idx3-ubyte.gz", DIGITS[:20])
    save_idx(folder / "train-labels-idx1-ubyte", LABELS[:20])
    check(read_dataset(str(folder), MNIST), DIGITS[:20], LABELS[:20], published=20)
    save_idx(folder / "t10k-images.idx3-ubyte", DIGITS[20:])
    refused(folder, MNIST, "t10k-labels-idx1-ubyte or .* is missing beside t10k-images.idx3-ubyte")
    save_idx(folder / "t10k-labels.idx1-ubyte.gz", LABELS[20:])
    check(read_dataset(str(folder), MNIST), published=20)
    check(read_dataset(str(folder / "train-images-idx3-ubyte.gz"), MNIST), published=20)
    (folder / "train-labels-idx1-ubyte").unlink()
    refused(folder, MNIST, "train-labels-idx1-ubyte or .* is missing")
    (folder / "train-images-idx3-ubyte.gz").unlink()
    refused(folder, MNIST, "train-images-idx3-ubyte is missing beside t10k")


def test_broken_idx_files_are_explained(folder):
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    save_idx(labels, LABELS)
    for content, message in (
        (b"\0\0\x0d\x03" + bytes(12), "begins with 00000d03, so it is not an IDX"),
        (b"\0\0\x08\x03\0\0", "ends within its header"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 24, 28, 28) + bytes(100), "contains 100 values, its header says"),
        (b"\0\0\x08\x03" + struct.pack(">3I", *[2**32 - 1] * 3), "contains 0 values"),
    ):
        images.write_bytes(content)
        os.utime(folder, ns=(len(content), len(content)))
        refused(folder, MNIST, message)
    images.unlink()
    images.with_suffix(".gz").write_bytes(b"no gzip")
    refused(folder, MNIST, "cannot be read")


def test_cifar_as_it_is_published_in_binary(folder):
    rows = np.concatenate([LABELS[:, None].astype(np.uint8), PHOTOS.reshape(24, -1)], axis=1)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for number, name in enumerate(names):
        if number == 5:
            refused(folder, CIFAR10, "test_batch.bin is missing beside data_batch_1.bin")
        (folder / name).write_bytes(rows[4 * number : 4 * number + 4].tobytes())
    check(read_dataset(str(folder), CIFAR10), PHOTOS, published=20)
    (folder / names[0]).write_bytes(b"123")
    os.utime(folder, ns=(7, 7))
    refused(folder, CIFAR10, "3 bytes are not a multiple of 3073")


# --- tables


def table(images, labels, **columns):
    values = images.reshape(len(images), -1)
    return pandas.DataFrame({**columns, "label": labels, **{f"p{i}": values[:, i] for i in range(values.shape[1])}})


def test_tables_of_both_kinds(folder):
    table(DIGITS[:20], LABELS[:20]).to_csv(folder / "train.csv", index=False)
    table(DIGITS[20:], LABELS[20:]).to_parquet(folder / "test.parquet")
    check(read_dataset(str(folder), MNIST), published=20)
    check(read_dataset(str(folder / "train.csv"), MNIST), DIGITS[:20], LABELS[:20], published=20)


def test_a_table_with_people_and_names_of_classes(folder):
    names = np.array(["SEATED", "STANDING_UP", "WALKING", "TURNING", "SITTING_DOWN"])
    labels = np.arange(15) % 5
    table(WINDOWS.astype(np.float32), names[labels], person=["bo", "al", "cy"] * 5).to_csv(
        folder / "har.csv", index=False
    )
    dataset = read_dataset(str(folder / "har.csv"), HAR)
    np.testing.assert_allclose(dataset.inputs, WINDOWS, rtol=1e-3)
    assert dataset.targets.tolist() == np.searchsorted(np.sort(names), names[labels]).tolist()
    assert dataset.people.tolist() == [1, 0, 2] * 5
    table(WINDOWS.astype(np.float32)[:2], names[:2]).to_parquet(folder / "few.parquet")
    refused(folder / "few.parquet", HAR, "has 2 class names, har has 5; number them from 0")


def test_tables_that_cannot_be_used_are_explained(folder):
    (folder / "train.csv").write_text("a,b\n1,2\n")
    refused(folder, MNIST, "no column is called label, y.* it has the columns a, b")
    (folder / "train.csv").write_text("label,b\n1,2\n")
    refused(folder / "train.csv", MNIST, r"samples have shape \(1,\), mnist wants \(1, 28, 28\) or 784 values")
    (folder / "x.csv").write_text("")
    refused(folder / "x.csv", MNIST, "the file is empty")
    (folder / "x.parquet").write_text("no parquet")
    refused(folder / "x.parquet", MNIST, "cannot be read as a parquet file")


# --- nothing to read


def test_what_is_missing_is_named_with_where_to_find_it(folder):
    with pytest.raises(DataError, match=r"\bmnist\b.*--data PATH.*yann\.lecun"):
        read_dataset(None, MNIST)
    refused(folder / "none", CIFAR10, r"none: No such file or directory; give a folder or file with cifar10\.npz, IDX")
    refused(folder, HAR, r"the folder contains no files, but no samples of har; .* Matey-Sanz")
    (folder / "notes.txt").write_text("hello")
    refused(folder, MNIST, r"the folder contains .*notes\.txt, but no samples of mnist")
    refused(folder / "notes.txt", MNIST, "unknown file format")
