"""Folders of pictures as people have them, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from sparrow.protocol.preparation import Preparation, Targets
from sparrow.reading import Decoded, join
from sparrow.reading.errors import BadOption, DataError, NoData

CHANCE = np.random.default_rng(0)


def pixels(height=6, width=8, channels=3):
    shape = (height, width, channels) if channels else (height, width)
    return CHANCE.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def save(tmp_path):
    """Save an image or an array below the folder."""

    def save(name, image=None, **more):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = pixels() if image is None else image
        (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **more)
        return path

    return save


def said(raw):
    return "; ".join(raw.said)


# --- folders


def test_folders_of_classes_are_read_in_order_of_name(save, read):
    stored = {name: pixels() for name in ("dog/b.png", "dog/a.PNG", "cat/10.png", "cat/9.bmp")}
    for name, image in stored.items():
        save(name, image)
    raw = read()[""]
    assert raw.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert (raw.kind, raw.axes, raw.reader) == ("classes", "HWC", "images")
    assert isinstance(raw.inputs, Decoded)
    assert (raw.inputs.dtype, raw.inputs.shape, raw.inputs.free) == ("uint8", (6, 8, 3), ())
    for place, name in enumerate(("cat/10.png", "cat/9.bmp", "dog/a.PNG", "dog/b.png")):
        assert np.array_equal(raw.inputs[place], stored[name])
        assert raw.inputs[place].flags.c_contiguous
    assert raw.said == ()


def test_parts_are_read_by_use_and_have_one_shape(save, read):
    save("train/a/1.png", pixels(4, 4))
    save("train/b/1.png", pixels(4, 4))
    save("val/a/1.png", pixels(5, 4))
    save("test/b/1.png", pixels(4, 9))
    parts = read()
    assert list(parts) == ["train", "val", "test"]
    assert {raw.inputs.shape for raw in parts.values()} == {(5, 9, 3)}
    assert {raw.inputs.free for raw in parts.values()} == {(0, 1)}
    assert parts["test"].labels.tolist() == ["b"]
    assert parts["test"].inputs[0].shape == (4, 9, 3)


def test_train_may_be_a_class(save, read):
    for name in ("train/1.png", "bus/1.png"):
        save(name)
    assert read()[""].labels.tolist() == ["bus", "train"]


def test_hidden_files_and_those_of_systems_are_no_samples(save, read, tmp_path):
    save("a/1.png")
    save("b/1.png")
    for name in (".DS_Store", "a/.DS_Store", "a/Thumbs.db", "b/desktop.ini", "a/._1.png", "__MACOSX/a/1.png", ".git/x"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0\1")
    raw = read()[""]
    assert (len(raw.inputs), raw.said) == (2, ())


def test_other_files_are_said_by_suffix(save, read, tmp_path):
    save("a/1.png")
    save("b/1.png")
    (tmp_path / "readme.md").write_text("words")
    for name in ("a/1.txt", "b/2.TXT", "b/notes"):
        (tmp_path / name).write_text("words")
    (tmp_path / "empty").mkdir()
    words = said(read()[""])
    assert "2 .txt, 1 without suffix" in words
    assert "1 .md" in words
    assert "not used as classes: empty" in words


def test_content_decides_on_the_format(save, read, tmp_path):
    save("a/1.png").rename(tmp_path / "a/1.jpg")
    save("a/2.png").rename(tmp_path / "a/2")
    assert len(read()[""].inputs) == 2


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["1.png", "2.png"], ["2 files", "CLASS/FILE", "file and label"]),
        (["alice/walk/1.png", "bob/walk/1.png"], ["alice holds only folders", "CLASS/FILE"]),
        (["val/a/1.png", "test/a/1.png"], ["no train"]),
        (["train/a/1.png", "valid/a/1.png"], ["valid", "train, val and test"]),
    ],
)
def test_other_folders_are_refused_with_what_is_wanted(save, refused, names, words):
    for name in names:
        save(name)
    refused(*words)


def test_folders_without_pictures_are_refused_with_what_they_hold(refused, tmp_path):
    refused("it is empty")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.txt").write_text("x")
    refused("1 folder and 1 .txt")


def test_pictures_beside_sounds_are_refused(save, refused, tmp_path):
    save("a/1.png")
    (tmp_path / "a/1.wav").write_bytes(b"RIFF")
    refused("1 picture, such as a/1.png", "1 sound, such as a/1.wav")


def test_options_of_tables_are_refused(save, refused):
    save("a/1.png")
    refused("label=", error=BadOption, options={"label": "x"})
    refused("window=", error=BadOption, options={"window": 1.0})
    refused("target=number", error=BadOption, options={"target": "number"})
    refused("predicts numbers", targets=Targets(kind="numbers"))


# --- pictures


def test_sixteen_bits_are_scaled_and_said(save, read):
    deep = np.array([[0, 128, 129], [257 * 7, 65_535, 65_406]], np.uint16)
    save("a/1.png", Image.fromarray(deep))
    save("a/2.tif", Image.fromarray(deep))
    save("a/3.tif", Image.fromarray(deep.astype(np.int32)))
    save("b/4.tif", Image.fromarray(deep.astype(np.float32)))
    save("b/5.png", pixels(2, 3, 0))
    raw = read()[""]
    wanted = np.repeat(np.rint(deep / 257).astype(np.uint8)[:, :, None], 3, axis=2)
    for place in range(4):
        assert np.array_equal(raw.inputs[place], wanted)
    assert "4 pictures of 16 bit were scaled to 8" in said(raw)


def test_floats_up_to_1_are_scaled_by_255(save, read):
    save("a/1.tif", Image.fromarray(np.array([[0, 0.5, 1]], np.float32)))
    assert read()[""].inputs[0][0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("values", [[-1, 5], [0, 70_000]])
def test_values_beyond_16_bits_are_refused(save, refused, values):
    save("a/1.tif", Image.fromarray(np.array([values], np.int32)))
    refused("1.tif", f"{values[0]:g} to {values[1]:g}")


def test_floats_that_are_no_numbers_are_refused(save, refused):
    save("a/1.tif", Image.fromarray(np.array([[0, np.nan]], np.float32)))
    refused("1.tif", "not a number")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_all_modes_become_rgb(save, read, mode):
    image = Image.fromarray(pixels()).convert(mode)
    save("a/1.tif" if mode in ("CMYK", "YCbCr") else "a/1.png", image)
    raw = read()[""]
    assert np.abs(raw.inputs[0].astype(int) - np.asarray(image.convert("RGB"))).max() <= (4 if mode == "YCbCr" else 0)
    assert ("transparency" in said(raw)) == (mode in ("LA", "RGBA"))


def test_jpegs_of_print_are_converted(save, read):
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    save("a/1.jpg", image, quality=95)
    assert np.abs(read()[""].inputs[0].astype(int) - (255, 0, 0)).max() < 12


@pytest.mark.parametrize("transparency", [0, bytes([0, 255])])
def test_transparency_of_a_palette_is_left_out(save, read, transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    save("a/1.png", image, transparency=transparency)
    raw = read()[""]
    assert raw.inputs[0].tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert "transparency is left out (1 picture)" in said(raw)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_pictures_are_turned_upright(save, read, suffix):
    image = np.zeros((16, 32, 3), np.uint8)
    image[:, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    save(f"a/1.{suffix}", image, exif=exif)
    raw = read()[""]
    assert raw.inputs.shape == (32, 16, 3)
    assert raw.inputs[0][:12].min() > 240
    assert raw.inputs[0][20:].max() < 16


def test_the_first_frame_of_an_animation_counts(save, read):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    save("a/1.gif", frames[0], save_all=True, append_images=frames[1:])
    assert read()[""].inputs[0][0, 0].tolist() == [255, 0, 0]


# --- broken ones


def _truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN = {
    "truncated": _truncated,
    "is empty": lambda path: path.write_bytes(b""),
    "is not a picture": lambda path: path.write_text("words"),
}


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif", "gif"])
def test_truncated_pictures_are_named(save, refused, read, suffix):
    save("a/good.png", pixels(64, 64))
    _truncated(save(f"a/bad.{suffix}", pixels(64, 64)))
    refused(f"bad.{suffix}", "--skip-unreadable")
    raw = read({"unreadable": "skip"})[""]
    assert len(raw.inputs) == 1
    assert raw.labels.tolist() == ["a"]
    assert "1 picture file left out" in said(raw)


@pytest.mark.parametrize("word", BROKEN)
def test_broken_pictures_are_named_with_the_reason(save, refused, word):
    save("a/good.png", pixels(64, 64))
    BROKEN[word](save("b/bad.png", pixels(64, 64)))
    assert "object at" not in refused("bad.png", word)


def test_if_all_are_broken_none_are_left(save, refused):
    BROKEN["is empty"](save("a/bad.png"))
    refused("none of 1 picture file can be read", options={"unreadable": "skip"})


def test_pictures_that_are_too_large_are_named(save, refused):
    save("a/1.png", Image.new("1", (4_097, 2)))
    refused("1.png", "4,097 x 2", "make it smaller")


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_bombs_are_refused(save, refused, side):
    save("a/1.png", Image.new("1", (side, side)))
    refused("1.png", "make it smaller")


def test_a_picture_that_changes_later_is_named(save, read):
    path = save("a/1.png")
    raw = read()[""]
    save("a/1.png", pixels(9, 9))
    with pytest.raises(DataError, match=r"1\.png.*start again"):
        raw.inputs[0]
    path.unlink()
    with pytest.raises(DataError, match=r"1\.png"):
        raw.inputs[0]


# --- samples


def test_digests_follow_names_sizes_and_times(save, read):
    path = save("a/1.png")
    save("b/1.png")
    first = read()[""].inputs
    assert read()[""].inputs.digest == first.digest
    assert first.take(np.array([1])).digest not in (first.digest, first.take(np.array([0])).digest)
    os.utime(path, ns=(1, 1))
    assert read()[""].inputs.digest != first.digest


def test_samples_are_taken_and_joined(save, read):
    for number in range(4):
        save(f"a/{number}.png", pixels(3 + number, 4))
    samples = read()[""].inputs
    taken = samples.take(np.array([3, 0]))
    assert [sample.shape[0] for sample in taken] == [6, 3]
    assert len(samples.take(np.array([True, False, False, True]))) == 2
    both = join([taken, samples])
    assert (len(both), both.shape, both.free) == (6, (6, 4, 3), (0, 1))
    assert np.array_equal(both[0], samples[3])


def test_one_picture_or_a_flat_folder_can_be_read_without_labels(save, read, refused):
    stored = [pixels(), pixels()]
    save("b.png", stored[1])
    save("a.png", stored[0])
    raw = read(labelled=False)[""]
    assert raw.labels is None
    assert [np.array_equal(*pair) for pair in zip(raw.inputs, stored, strict=True)] == [True, True]
    assert np.array_equal(read(name="b.png", labelled=False)[""].inputs[0], stored[1])
    refused("without a class", name="b.png")


# --- the federation


def federation(**more):
    return Preparation(**{"reader": "images", "dtype": "uint8", "axes": "HWC", "shape": (6, 8, 3), **more})


def test_a_federation_of_one_size_refuses_others(save, read, refused):
    save("a/1.png")
    assert len(read(preparation=federation())[""].inputs) == 1
    save("a/2.png", pixels(4, 8))
    refused("2.png", "8 x 4 pixels", "8 x 6", preparation=federation())
    assert len(read(preparation=federation(free=(0, 1)))[""].inputs) == 2
    save("a/3.png", pixels(9, 9))
    refused("3.png", "at most 8 x 6", preparation=federation(free=(0, 1)))


@pytest.mark.parametrize(
    ("preparation", "word"),
    [
        (Preparation(shape=(3,)), "arrays"),
        (Preparation(reader="rows", shape=(3,)), "rows of a table"),
        (Preparation(reader="audio", shape=(3,), rate=8_000, axes="T"), "sounds"),
        (Preparation(reader="recordings", shape=(3,), rate=8_000, axes="T"), "recordings"),
    ],
)
def test_a_federation_of_other_samples_refuses_pictures(save, refused, preparation, word):
    save("a/1.png")
    refused("holds pictures", word, preparation=preparation)


def test_a_table_does_not_fit_a_federation_of_pictures(refused, tmp_path):
    (tmp_path / "t.csv").write_text("x,label\n1,a\n")
    refused("pictures", name="t.csv", preparation=federation())


def test_an_npz_file_fits_free_axes(tmp_path, read, refused):
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 4, 8, 3), np.uint8), y=np.array(["a", "b"]))
    assert read(name="x.npz", preparation=federation(free=(0, 1)))[""].axes == "HWC"
    refused("(4, 8, 3)", name="x.npz", preparation=federation())
    refused("window=", error=BadOption, name="x.npz", options={"window": 3})


# --- tables of files


@pytest.mark.parametrize("column", ["file", "Path", "filename", "image"])
@pytest.mark.parametrize("slash", ["/", "\\"])
def test_a_table_lists_pictures(save, read, tmp_path, column, slash):
    stored = [pixels(), pixels()]
    save("sub/b.png", stored[0])
    save("sub/a.JPG", stored[1], quality=100)
    (tmp_path / "t.csv").write_text(f"{column},label,person\nsub{slash}b.png,x,al\nsub{slash}a.JPG,y,bo\n")
    raw = read(name="t.csv")[""]
    assert raw.labels.tolist() == ["x", "y"]
    assert raw.people.tolist() == ["al", "bo"]
    assert (raw.label, raw.reader) == ("label", "images")
    assert np.array_equal(raw.inputs[0], stored[0])


def test_labels_of_listed_pictures_may_be_numbers(save, read, tmp_path):
    save("1.png")
    (tmp_path / "t.tsv").write_text("age\tfile\tcamera\n1.5\t1.png\tx\n")
    raw = read({"label": "age"}, name="t.tsv")[""]
    assert (raw.kind, raw.labels.tolist()) == ("numbers", [1.5])
    assert "1 column left out: camera" in said(raw)


def test_rows_without_a_label_are_left_out_on_demand(save, read, refused, tmp_path):
    save("1.png")
    save("2.png")
    (tmp_path / "t.csv").write_text("file,label\n1.png,\n2.png,a\n")
    refused("line 2", "label is missing", name="t.csv")
    assert len(read({"missing": "drop"}, name="t.csv")[""].inputs) == 1


def test_a_file_that_is_listed_twice_is_named(save, refused, tmp_path):
    save("1.png")
    (tmp_path / "t.csv").write_text("file,label\n1.png,a\n1.png,b\n")
    refused("line 3", "1.png", "start and end", name="t.csv")


def test_missing_files_are_named_by_line(save, refused, tmp_path):
    save("1.png")
    (tmp_path / "t.csv").write_text("file,label\n1.png,a\n2.png,a\n3.png,b\n")
    refused("line 3", "2.png", "2 missing", name="t.csv")


def test_a_table_with_other_names_is_a_table(read, tmp_path):
    (tmp_path / "t.csv").write_text("file,x,label\n1.png,1,a\nrest,2,b\n")
    assert read({"drop": ("file",)}, name="t.csv")[""].reader == "rows"


def test_a_missing_folder_is_not_found(read):
    with pytest.raises(NoData):
        read(name="none")


def test_pillow_is_imported_for_pictures_alone():
    code = "import sys, sparrow.reading; print(*{'PIL', 'soundfile', 'soxr'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
