"""The page reads npz files and tables as the SDK does, and refuses what is damaged or does not fit, in words."""

from __future__ import annotations

import base64
import io
import struct
import zipfile
import zlib

import numpy as np
import pytest

from edge_sdk.tasks import npz
from edge_sdk.tasks.formats import number_classes, read_table
from edge_sdk.tasks.loading import DataError, Scale
from edge_sdk.tasks.partition import split
from edge_sdk.tasks.public import MODELS

pytestmark = pytest.mark.integration

ARRAYS = """async ({ readArchive }, content) => {
  try {
    const found = await readArchive(Uint8Array.from(atob(content), (character) => character.charCodeAt(0)));
    return Object.fromEntries(Array.from(found, ([name, { shape, type, data }]) => (
      [name, [shape, type, data && Array.from(data, (value) => typeof value === "number" ? String(value) : value)]]
    )));
  } catch ({ name, message }) {
    return [name, message];
  }
}"""

SAMPLES = """async ({ fromArchive, fromTable }, [content, { seed, ...wanted }]) => {
  const { readArchive } = await import("/web/archive.js");
  const { readTable } = await import("/web/table.js");
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const full = { ...wanted, seed: BigInt(seed) };
  try {
    const table = () => fromTable(readTable(new TextDecoder().decode(bytes)), full);
    const parts = bytes[0] === 80 && bytes[1] === 75 ? fromArchive(await readArchive(bytes), full) : table();
    return Object.fromEntries(Object.entries(parts).map(([use, part]) => (
      [use, part && [[...part.inputs], [...part.targets], part.count]]
    )));
  } catch ({ name, message }) {
    return [name, message];
  }
}"""

TABLE = """({ readTable }, text) => {
  try {
    const { inputs, ...rest } = readTable(text);
    return { inputs: Array.from(inputs, String), ...rest };
  } catch ({ name, message }) {
    return [name, message];
  }
}"""

random = np.random.Generator(np.random.PCG64(7))


def saved(arrays, compressed=False):
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def in_base64(content):
    return base64.b64encode(content).decode()


def npy(array, version):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def zipped(entries, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


# --- archive.js --------------------------------------------------------------------------------------------------

TYPES = ("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")


def numbers(kind, order):
    values = random.normal(size=(2, 3, 4)) * 40
    return np.asarray(np.abs(values) if "u" in kind else values, order=order).astype(kind, order=order)


ALL = {f"{end}{kind}{order}": numbers(f"{end}{kind}", order) for end in "<>" for kind in TYPES for order in "CF"} | {
    "bool": np.array([True, False]),
    "scalar": np.int64(10),
    "largest": np.array([2**53 - 1, -(2**53) + 1]),
    "nothing": np.zeros((0, 3), np.float32),
    "halves": np.array([0.0, -1.5, 5.96e-8, 6.1e-5, 65504.0, np.inf, -np.inf, np.nan], np.float16),
    "names": np.array(["walking", "böc", "\U0001f600d", ""]),
    "foreign names": np.array(["b", "aß"], ">U5"),
    "dates": np.array(["2026-01-01"], "M8[D]"),
    "bytes": np.array([b"ab"]),
    "complex": np.zeros(2, complex),
    "record": np.zeros(2, [("a", "f4"), ("b", "i2")]),
}


def listed(array):
    array = np.asarray(array)
    kind = "V0" if array.dtype.names else array.dtype.str[1:].split("[")[0]
    if array.dtype.kind == "U":
        return [list(array.shape), kind, array.ravel().tolist()]
    if array.dtype.kind not in "fiub":
        return [list(array.shape), kind, None]
    return [list(array.shape), kind, [float(value) for value in array.ravel().tolist()]]


def read_numbers(found):
    def one(value):
        try:
            return float(value.replace("Infinity", "inf"))
        except ValueError:
            return value

    return {
        name: [shape, kind, values if values is None or kind[0] == "U" else list(map(one, values))]
        for name, (shape, kind, values) in found.items()
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_of_every_kind(modules, compressed):
    found = read_numbers(modules(ARRAYS, module="archive.js", argument=in_base64(saved(ALL, compressed))))
    np.testing.assert_equal(found, {name: listed(array) for name, array in ALL.items()})


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_the_format(modules, version):
    content = zipped({"x.npy": npy(np.arange(3.0), version), "readme.txt": b"no array"}, zipfile.ZIP_DEFLATED)
    assert modules(ARRAYS, module="archive.js", argument=in_base64(content)) == {"x": [[3], "f8", ["0", "1", "2"]]}


def test_a_zip_file_may_have_a_comment_and_no_arrays(modules):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = b"PK\5\6 is no second end"
    assert modules(ARRAYS, module="archive.js", argument=in_base64(file.getvalue())) == {}


def test_a_message_names_the_file(modules):
    found = modules(
        """async ({ readArchive }) => {
          try { await readArchive(new File(["PK"], "mine.npz")); } catch (error) { return error.message; }
        }""",
        module="archive.js",
    )
    assert found.startswith("mine.npz: ")


PLAIN = saved({"x": np.arange(100.0)})
PACKED = saved({"x": np.arange(100.0)}, compressed=True)


MARKS = {"directory": b"PK\1\2", "end": b"PK\5\6", "array": b"\x93NUMPY"}


def changed(content, where, offset, fmt, value):
    """Return ``content`` with the number at ``offset`` after the first of these marks replaced."""
    found = bytearray(content)
    struct.pack_into(fmt, found, content.index(MARKS[where]) + offset, value)
    return bytes(found)


def rewritten(header, values=b"\0" * 8, version=b"\1\0"):
    """An archive with one array of this header."""
    text = header.encode()
    return zipped({"x.npy": b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + values})


def header(descr="'<f8'", order="False", shape="(1,)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def squeezed(size, says):
    """An archive of one entry that deflate made of ``size`` zeros, and that announces ``says`` bytes."""
    content = zipped({"x.npy": b"\0" * size}, zipfile.ZIP_DEFLATED)
    return changed(content, "directory", 24, "<I", says)


def lying_inside(content):
    """A compressed archive whose deflated data were damaged."""
    found = bytearray(content)
    at = 30 + struct.unpack_from("<H", content, 26)[0] + struct.unpack_from("<H", content, 28)[0]
    found[at : at + 4] = b"\xff\xff\xff\xff"
    return bytes(found)


def announcing_gibibytes():
    """Twenty entries of 64 MiB zeros each, a kilobyte packed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(b"\0" * 2**26) + packer.flush()
    name = b"%02d.npy"
    local, central = b"", b""
    for number in range(20):
        sizes = (0, len(packed), 2**26, len(name % number))
        central += b"PK\1\2" + struct.pack("<6H3I5H2I", 20, 20, 0, 8, 0, 0, *sizes, 0, 0, 0, 0, 0, len(local))
        central += name % number
        local += b"PK\3\4" + struct.pack("<5H3I2H", 20, 0, 8, 0, 0, *sizes, 0) + name % number + packed
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 20, 20, len(central), len(local), 0)
    return local + central + end


HOSTILE = {
    "empty": (b"", "holds pickled objects or is not an npz file"),
    "text": (b"x_train,y_train", "holds pickled objects or is not an npz file"),
    "a pickle": (b"\x80\x04K\x01.", "holds pickled objects or is not an npz file"),
    "one array": (npy(np.arange(3), (1, 0)), "holds one array; name several"),
    "no more than a beginning": (b"PK\3\4", "ends too early"),
    "truncated": (PLAIN[:-30], "ends too early"),
    "cut in front": (b"PK" + PLAIN[100:], "directory is not where it says"),
    "changed values": (changed(PLAIN, "array", 200, "<B", 77), "check sum"),
    "another check sum": (changed(PACKED, "directory", 16, "<I", 5), "check sum"),
    "more bytes than there are": (changed(PLAIN, "directory", 24, "<I", 10_000), "announces 10000 bytes"),
    "more than deflate can make": (squeezed(1000, 900_000_000), "announces 900000000 bytes"),
    "more than a page takes": (announcing_gibibytes(), "more than 1 GiB"),
    "fewer than it inflates to": (squeezed(100_000, 1000), "more than the 1000 bytes"),
    "more than it inflates to": (squeezed(100_000, 100_001), "has 100000 bytes, and announces 100001"),
    "not deflated": (lying_inside(PACKED), "is no deflated data"),
    "encrypted": (changed(PLAIN, "directory", 8, "<H", 1), "encrypted"),
    "another compression": (zipped({"x.npy": b"abc"}, zipfile.ZIP_BZIP2), "compressed by method 12"),
    "an entry outside": (changed(PLAIN, "directory", 42, "<I", 900), "lies outside"),
    "an entry elsewhere": (changed(PLAIN, "directory", 42, "<I", 1), "is not where the directory says"),
    "more entries than there are": (changed(PLAIN, "end", 10, "<H", 2), "directory lacks entries"),
    "fewer entries than there are": (changed(PLAIN, "end", 10, "<H", 0), "another length"),
    "a longer name than there is": (changed(PLAIN, "directory", 28, "<H", 60_000), "directory ends too early"),
    "a directory elsewhere": (changed(PLAIN, "end", 16, "<I", 2**31), "directory is not where it says"),
    "pickled objects": (saved({"x": np.array([{}, None], object)}), "x holds pickled objects"),
    "beyond 2^53": (saved({"x": np.array([2**53 + 1])}), "9007199254740993, which is beyond 2^53"),
    "below -2^53": (saved({"x": np.array([-(2**60)])}), "beyond 2^53"),
    "no array inside": (zipped({"x.npy": b"x" * 200}), "x is no array"),
    "no byte inside": (zipped({"x.npy": b""}), "x is no array"),
    "a version to come": (rewritten(header(), version=b"\4\0"), "version 4.0"),
    "a shape beyond the values": (rewritten(header(shape="(1000000000, 1000)")), "has 8 bytes of values"),
    "a shape beyond numbers": (rewritten(header(shape=f"({'9' * 40},)")), "has the shape (999"),
    "fewer values than there are": (rewritten(header(), b"\0" * 16), "has 16 bytes of values"),
    "a negative shape": (rewritten(header(shape="(-1,)")), "header of another kind"),
    "code for a shape": (rewritten(header(shape="(print(1),)")), "header of another kind"),
    "no header": (rewritten(""), "header of another kind"),
    "a long header": (rewritten(header() + " " * 20_000), "a header of 200"),
    "a header longer than the file": (changed(PLAIN, "array", 8, "<H", 60_000), "check sum"),
    "many empty texts": (rewritten(header("'<U0'", shape="(1000000000000,)"), b""), "1000000000000 texts"),
    "a text of no characters": (rewritten(header("'<U1'"), b"\xff\xff\xff\xff"), "no character"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives(modules, case):
    content, said = HOSTILE[case]
    name, message = modules(ARRAYS, module="archive.js", argument=in_base64(content))
    assert name == "DataError"
    assert message.startswith("the file: ")
    assert said in message


def test_two_entries_of_one_name(modules):
    content = saved({"xa": np.zeros(1), "xb": np.zeros(1)}).replace(b"xb.npy", b"xa.npy")
    assert "two entries xa.npy" in modules(ARRAYS, module="archive.js", argument=in_base64(content))[1]


# --- fromArchive -------------------------------------------------------------------------------------------------


def samples(count, *shape, kind=np.float32):
    values = random.integers(0, 256, (count, *shape)) if kind == np.uint8 else random.normal(size=(count, *shape))
    return values.astype(kind)


def labels(count, classes=3):
    return np.arange(count) % classes


def named(use, count):
    return {f"x_{use}": samples(count, 4), f"y_{use}": labels(count)}


FILES = {
    "features": named("train", 20),
    "double precision": {"x_train": samples(20, 4, kind=np.float64), "y_train": labels(20).astype(np.uint8)},
    "half precision": {"x_train": samples(20, 4, kind=np.float16), "y_train": labels(20).astype("i2")},
    "whole numbers": {"x_train": np.arange(80).reshape(20, 4), "y_train": labels(20)},
    "true and false": {"x_train": samples(20, 4) > 0, "y_train": labels(20)},
    "grey images": {"x_train": samples(20, 8, 8, kind=np.uint8), "y_train": labels(20)},
    "images with their channels": {"x_train": samples(20, 2, 8, 8, kind=np.uint8), "y_train": labels(20)},
    "images of floats": {"x_train": samples(20, 8, 8), "y_train": labels(20)},
    "its own test": named("train", 20) | named("test", 5),
    "its own validation": named("train", 20) | named("val", 5),
    "all three": named("train", 20) | named("val", 5) | named("test", 2),
    "a number of classes": named("train", 20) | {"classes": 3},
    "names of classes": named("train", 20) | {"classes": np.array(["a", "b", "c"])},
    "Fortran's order": {"x_train": np.asfortranarray(samples(20, 8, 8)), "y_train": labels(20)},
    "the fewest": named("train", 3),
}


def plain(batches):
    if batches is None:
        return None
    inputs, targets = batches.arrays.take(slice(None))
    return [inputs.ravel().tolist(), targets.tolist(), len(targets)]


def read_samples(modules, content, **wanted):
    wanted = {"seed": "0", **wanted}
    return modules(SAMPLES, module="samples.js", argument=[in_base64(content), wanted])


@pytest.mark.parametrize("seed", [0, 2**62 + 3])
@pytest.mark.parametrize("case", FILES)
def test_samples_are_those_of_the_sdk(modules, tmp_path, case, seed):
    path = tmp_path / "mine.npz"
    path.write_bytes(saved(FILES[case]))
    task = npz.load(str(path), device="d", seed=seed, batch_size=8)
    found = read_samples(
        modules, path.read_bytes(), inputShape=list(task.train.arrays.inputs.shape[1:]), classes=3, seed=str(seed)
    )
    assert found == {use: plain(getattr(task, use)) for use in ("train", "validation", "test")}


def test_x_and_y_are_taken_as_training_samples(modules):
    inputs, targets = samples(9, 4), labels(9)
    wanted = {"inputShape": [4], "classes": 3}
    named = read_samples(modules, saved({"x_train": inputs, "y_train": targets}), **wanted)
    assert read_samples(modules, saved({"x": inputs, "y": targets, "person": targets}), **wanted) == named


def test_samples_of_the_models_own_shape_get_no_channel(modules):
    inputs = samples(9, 6, 64)
    found = read_samples(modules, saved({"x": inputs, "y": labels(9)}), inputShape=[6, 64], classes=3)
    assert found["train"][0] == inputs[split(9, 0).train].ravel().tolist()


def test_sensors_values_are_put_on_the_scale_of_their_task(modules):
    inputs, choice = samples(5, 6, 64), MODELS["har"]["small"]
    found = read_samples(modules, saved({"x": inputs, "y": labels(5)}), inputShape=[6, 64], classes=5, task="har")
    scaled = Scale(choice.mean, choice.deviation)(inputs)
    assert found["train"][0] == scaled[split(5, 0).train].ravel().tolist()


@pytest.mark.parametrize("kind", [np.uint8, np.float64, np.int64])
def test_grey_levels_for_a_task_of_ours_are_put_on_its_scale(modules, kind):
    inputs, choice = samples(5, 28, 28, kind=np.uint8), MODELS["mnist"]["small"]
    wanted = {"inputShape": [1, 28, 28], "classes": 10, "task": "mnist:leaf"}
    found = read_samples(modules, saved({"x": inputs.astype(kind), "y": labels(5)}), **wanted)
    scaled = Scale(choice.mean, choice.deviation)(inputs[:, None])
    assert found["train"][0] == scaled[split(5, 0).train].ravel().tolist()


def test_images_on_another_scale_are_taken_as_they_are(modules):
    inputs = samples(5, 28, 28)
    wanted = {"inputShape": [1, 28, 28], "classes": 10, "task": "mnist"}
    found = read_samples(modules, saved({"x": inputs, "y": labels(5)}), **wanted)
    assert found["train"][0] == inputs[split(5, 0).train].ravel().tolist()


GOOD = named("train", 6)
PAIR = named("val", 2)

REFUSED_BY_BOTH = {
    "no labels": ({"x_train": GOOD["x_train"]}, "the file holds x_train, but no y_train; add it"),
    "nothing": ({}, "the file holds nothing, but no x_train; add it"),
    "half a pair": (GOOD | {"x_val": samples(2, 4)}, "no y_val; add it"),
    "one-hot rows": (GOOD | {"y_train": np.eye(6, dtype=int)}, "y_train: has shape (6, 6) beside x_train of (6, 4)"),
    "labels of others": (GOOD | {"y_train": labels(5)}, "y_train: has shape (5,) beside x_train of (6, 4)"),
    "no samples": ({"x_train": np.zeros((0, 4)), "y_train": labels(0)}, "and at least one sample"),
    "labels of floats": (GOOD | {"y_train": np.zeros(6, np.float32)}, "y_train: is of float32; number the classes"),
    "labels of texts": (GOOD | {"y_train": np.array(list("abcdef"))}, "y_train: is of "),
    "truths for labels": (GOOD | {"y_train": np.zeros(6, bool)}, "y_train: is of bool; number the classes"),
    "negative labels": (GOOD | {"y_train": np.array([0, -1, -2, 1, 0, -1])}, "y_train: has labels -2, -1; number"),
    "texts": (GOOD | {"x_train": np.full((6, 4), "a")}, "x_train: is of "),
    "complex numbers": (GOOD | {"x_train": np.zeros((6, 4), complex)}, "x_train: is of complex128; store numbers"),
    "one axis": (GOOD | {"x_train": np.zeros(6)}, "x_train: has shape (6,); give features [N,F] or images"),
    "five axes": (GOOD | {"x_train": np.zeros((6, 1, 1, 1, 1))}, "has shape (6, 1, 1, 1, 1); give features"),
    "samples of nothing": (GOOD | {"x_train": np.zeros((6, 0))}, "x_train: has shape (6, 0); give features"),
    "channels last": (GOOD | {"x_train": np.zeros((6, 8, 8, 3))}, "store x_train.transpose(0, 3, 1, 2)"),
    "a value missing": (GOOD | {"x_train": np.full((6, 4), np.nan)}, "x_train: a value is missing or not finite"),
    "too large a value": (GOOD | {"x_train": np.full((6, 4), 1e300)}, "not finite in float32"),
    "other samples": (GOOD | PAIR | {"x_val": samples(2, 5)}, "x_val: samples have shape (5,), those of x_train (4,)"),
    "too few": (named("train", 2), "2 samples cannot be split into"),
    "one class": (GOOD | {"classes": 1}, "classes: there are 1, at least 2 are needed"),
    "odd classes": (GOOD | {"classes": np.zeros((2, 2))}, "classes: has shape (2, 2) of float64; give their number"),
    "labels beyond its own classes": (
        GOOD | {"classes": 2},
        "y_train: has label 2, but there are 2 classes, 0 to 1; every device's file must agree",
    ),
    "pickled classes": (GOOD | {"classes": np.array([None], object)}, "holds pickled objects"),
}


@pytest.mark.parametrize("case", REFUSED_BY_BOTH)
def test_wrong_archives(modules, tmp_path, case):
    arrays, said = REFUSED_BY_BOTH[case]
    path = tmp_path / "wrong.npz"
    path.write_bytes(saved(arrays))
    with pytest.raises(DataError) as refused:
        npz.load(str(path), device="d", seed=0, batch_size=8)
    assert said in str(refused.value)
    name, message = read_samples(modules, path.read_bytes(), inputShape=[4], classes=3)
    assert name == "DataError"
    assert said in message


UNFIT = {
    "another shape": (GOOD, [1, 2, 2], 3, "x_train: samples have shape (4,), the federation's model takes (1, 2, 2)"),
    "other images": (
        {"x": samples(6, 8, 8), "y": labels(6)},
        [1, 28, 28],
        3,
        "x: samples have shape (1, 8, 8), the federation's model takes (1, 28, 28)",
    ),
    "labels beyond": (
        GOOD,
        [4],
        2,
        "y_train: has label 2 in 2 of 6 samples, but the federation's model has 2 classes, 0 to 1; correct them",
    ),
    "many labels beyond": (
        GOOD | {"y_train": np.arange(6) + 5},
        [4],
        5,
        "y_train: has labels 5, 6, 7, 8, 9, ... in 6 of 6 samples",
    ),
    "huge labels": (GOOD | {"y_train": np.full(6, 2**40)}, [4], 5, "has label 1099511627776 in 6 of 6"),
    "labels beyond in the validation": (
        GOOD | PAIR | {"y_val": np.array([0, 9])},
        [4],
        3,
        "y_val: has label 9 in 1 of",
    ),
    "other classes": (GOOD | {"classes": 4}, [4], 3, "classes: the file has 4, the federation's model 3; every device"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_archives_that_do_not_fit_the_model(modules, case):
    arrays, shape, classes, said = UNFIT[case]
    name, message = read_samples(modules, saved(arrays), inputShape=shape, classes=classes)
    assert name == "DataError"
    assert said in message


# --- table.js and fromTable --------------------------------------------------------------------------------------

TABLES = {
    "plain": "a,b,label\n1,2.5,0\n3,-4e-3,1\n5,.5,2\n",
    "CRLF and no last line end": "a,b,y\r\n1,2,0\r\n3,4,1\r\n5,6,1",
    "the label first": "target,a,b\n0,1,2\n1,3,4\n1,+5,1e3\n",
    "a person": "a,subject,b,label\n1,anna,2,0\n3,otto,4,1\n5,anna,6,1\n",
    "quotes": '"a","b, and ""more""",label\n"1","2",0\n3,"4",1\n5,6,"1"\n',
    "empty lines": "a,b,label\n\n1,2,0\n3,4,1\n\n5,6,1\n\n",
    "missing values": "a,b,label\n1,,0\nNaN,4,1\n5,NA,1\n",
    "an empty last cell": "a,label,b\n1,0,2\n3,1,4\n5,1,",
    "names of classes": "a,label\n1,walking\n3,sitting\n5,walking\n",
    "classes of floats": "a,label\n1,0.0\n3,1.0\n5,2.0\n",
    "two that could be labels": "y,label\n1,0\n3,1\n5,2\n",
    "truths": "a,label\nTrue,0\nFalse,1\nTrue,2\n",
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(modules, tmp_path, case):
    pytest.importorskip("pandas")
    path = tmp_path / "samples.csv"
    path.write_text(TABLES[case], newline="")
    wanted = read_table(path)
    found = modules(TABLE, module="table.js", argument=TABLES[case])
    inputs = np.array(list(map(float, found["inputs"])), np.float32).reshape(-1, found["features"])
    np.testing.assert_array_equal(inputs, wanted.inputs.astype(np.float32))
    assert found["people"] == (None if wanted.people is None else wanted.people.tolist())
    if wanted.labels.dtype.kind in "iuf":
        assert list(map(float, found["labels"])) == wanted.labels.tolist()
    else:
        assert found["labels"] == wanted.labels.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffa,b,label\n1.5,2,0\n3,4,1\n5,6,1\n",
        "a;b;label\r\n1,5;2;0\r\n3;4;1\r\n5;6;1\r\n",
        '\ufeff"a";"b";label\n1.5;2;0\n3;4;1\n5;6;1\n',
        " a , b , label \n 1.5 , 2 , 0 \n3,4,1\n5,6,1",
    ],
)
def test_tables_of_spreadsheets(modules, text):
    found = modules(TABLE, module="table.js", argument=text)
    assert found == {
        "columns": ["a", "b", "label"],
        "inputs": ["1.5", "2", "3", "4", "5", "6"],
        "features": 2,
        "labels": ["0", "1", "1"],
        "people": None,
    }


WRONG_TABLES = {
    "empty": ("", "the table is empty"),
    "no label": ("a,b,c,d,e\n1,2,3,4,5\n", "has the columns a, b, c, d, ..., but none called label or y or target"),
    "an index": (
        ",a,label\n0,1,0\n",
        "its column 1 has no name, as an index has none; write it with to_csv(index=False)",
    ),
    "texts": ("a,b,label\n1,high,0\n", "the column b holds no numbers (high); replace its values by numbers"),
    "hexadecimal numbers": ("a,b,label\n1,0x10,0\n", "the column b holds no numbers (0x10)"),
    "a label missing": ("a,label\n1,0\n2,\n", "the column label lacks a value; remove such rows"),
    "a person missing": ("a,person,label\n1,,0\n", "the column person lacks a value"),
    "two people": ("a,person,device,label\n1,2,3,0\n", "both person and device say who made a sample"),
    "two labels": ("a,label,label\n1,2,3\n", "two columns are called label"),
    "a short row": ("a,b,label\n1,2,0\n1,2\n", "row 2 below the names has 2 cells, there are 3 columns"),
    "a long row": ("a,b,label\n1,2,0,5\n", "row 1 below the names has 4 cells"),
    "an open quote": ('a,b,label\n1,"2,0\n', "opened and never closed"),
    "text behind a quote": ('a,b,label\n1,"2"3,0\n', "text follows a closing quotation mark"),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_wrong_tables(modules, case):
    text, said = WRONG_TABLES[case]
    name, message = modules(TABLE, module="table.js", argument=text)
    assert name == "DataError"
    assert said in message


NAMED = ["b", "a", "\U0001f600", "\uff5e", "ab", "b", "a", "a"]


@pytest.mark.parametrize(
    ("given", "classes"), [(["0", "2", "1", "1.0", "01"], 3), (["3", "2"] * 3, 4), (["1e0", "+1", "0"], 2), (NAMED, 5)]
)
def test_rows_are_split_as_the_sdk_splits(modules, given, classes):
    values = np.arange(4 * len(given), dtype=np.float32).reshape(-1, 4) / 3
    rows = [",".join(map(repr, row.tolist())) + f",{label}" for row, label in zip(values, given, strict=True)]
    table = "\n".join(["a,b,c,d,label", *rows])
    found = read_samples(modules, table.encode(), inputShape=[1, 2, 2], classes=classes, seed="5")
    targets, _ = number_classes("", np.array([float(label) for label in given]) if given != NAMED else np.array(given))
    parts = split(len(given), 5)
    for use in ("train", "validation", "test"):
        index = getattr(parts, use)
        assert found[use] == [values[index].ravel().tolist(), targets[index].tolist(), len(index)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,label\n", "the table has no rows; give at least one sample"),
        ("a,b,label\n1,2,0\n3,4,1\n5,6,1\n", "samples have shape (2,), the federation's model takes (1,)"),
        ("a,label\n1,0\n,1\n5,1\n", "a value is missing or not finite in float32; replace or remove such samples"),
        ("a,label\n1,0\n1e60,1\n5,1\n", "a value is missing or not finite in float32"),
        ("a,label\n1,0\n2,1.5\n5,1\n", "a label is no whole number; number the classes from 0"),
        ("a,label\n1,0\n2,-1\n5,1\n", "has label -1; number the classes from 0"),
        ("a,label\n1,0\n2,3\n5,1\n", "has label 3 in 1 of 3 samples, but the federation's model has 3 classes, 0 to 2"),
        ("a,label\n1,up\n2,down\n5,up\n", "has 2 names of classes, the federation's model has 3 classes; number them"),
        ("a,label\n1,0\n2,1\n", "2 samples cannot be split"),
    ],
)
def test_tables_that_do_not_fit_the_model(modules, text, said):
    name, message = read_samples(modules, text.encode(), inputShape=[1], classes=3)
    assert name == "DataError"
    assert said in message


def test_a_large_archive_is_read_in_a_moment(modules):
    """As large as MNIST: sixty thousand images."""
    content = saved(
        {"x_train": np.zeros((60_000, 28, 28), np.uint8), "y_train": np.zeros(60_000, int)}, compressed=True
    )
    found = modules(
        """async ({ fromArchive }, content) => {
          const { readArchive } = await import("/web/archive.js");
          const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
          const start = performance.now();
          const wanted = { inputShape: [1, 28, 28], classes: 10, seed: 1, task: "mnist" };
          const { train } = fromArchive(await readArchive(bytes), wanted);
          return [train.count, performance.now() - start];
        }""",
        module="samples.js",
        argument=in_base64(content),
    )
    assert found[0] == len(split(60_000, 1).train)
    assert found[1] < 30_000
