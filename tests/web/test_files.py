"""The page reads npz files and tables as the SDK does, and refuses what is damaged or does not fit, in words."""

from __future__ import annotations

import base64
import io
import re
import struct
import zipfile
import zlib

import numpy as np
import pytest

from edge_sdk.tasks import own
from edge_sdk.tasks.loading import Scale
from edge_sdk.tasks.partition import split
from edge_sdk.tasks.public import MODELS
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.preparation import Column, Preparation, Targets
from sparrow.reading.errors import DataError

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

SAMPLES = """async ({ readSamples }, [content, name, manifest, seed]) => {
  const { Manifest } = await import("/web/manifest.js");
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const listed = (part) => part && [
    part.inputs.constructor.name, Array.from(part.inputs, Number), [...part.targets], part.count,
  ];
  try {
    const { names, said, ...parts } = await readSamples(new File([bytes], name), new Manifest(manifest), BigInt(seed));
    return { names, said, ...Object.fromEntries(Object.entries(parts).map(([use, part]) => [use, listed(part)])) };
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
    "bytes": np.array([b"ab", "böc".encode(), b""]),
    "complex": np.zeros(2, complex),
    "record": np.zeros(2, [("a", "f4"), ("b", "i2")]),
}


def listed(array):
    array = np.asarray(array)
    kind = "V0" if array.dtype.names else array.dtype.str[1:].split("[")[0]
    if array.dtype.kind in "US":
        return [
            list(array.shape),
            kind,
            np.strings.decode(array).ravel().tolist() if kind[0] == "S" else array.ravel().tolist(),
        ]
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
        name: [shape, kind, values if values is None or kind[0] in "US" else list(map(one, values))]
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
    "not deflated": (lying_inside(PACKED), "is not deflated data"),
    "encrypted": (changed(PLAIN, "directory", 8, "<H", 1), "encrypted"),
    "another compression": (zipped({"x.npy": b"abc"}, zipfile.ZIP_BZIP2), "compressed by method 12"),
    "an entry outside": (changed(PLAIN, "directory", 42, "<I", 900), "lies outside"),
    "an entry elsewhere": (changed(PLAIN, "directory", 42, "<I", 1), "is not where the directory says"),
    "more entries than there are": (changed(PLAIN, "end", 10, "<H", 2), "directory lacks entries"),
    "fewer entries than there are": (changed(PLAIN, "end", 10, "<H", 0), "another length"),
    "a longer name than there is": (changed(PLAIN, "directory", 28, "<H", 60_000), "directory ends too early"),
    "a directory elsewhere": (changed(PLAIN, "end", 16, "<I", 2**31), "directory is not where it says"),
    "pickled objects": (saved({"x": np.array([{}, None], object)}), "x holds pickled objects"),
    "bytes that are no text": (saved({"x": np.array([b"\xff"])}), "x holds bytes that are not UTF-8"),
    "beyond 2^53": (saved({"x": np.array([2**53 + 1])}), "9007199254740993, which is beyond 2^53"),
    "below -2^53": (saved({"x": np.array([-(2**60)])}), "beyond 2^53"),
    "no array inside": (zipped({"x.npy": b"x" * 200}), "x is not an array"),
    "no byte inside": (zipped({"x.npy": b""}), "x is not an array"),
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
    "a text of no characters": (rewritten(header("'<U1'"), b"\xff\xff\xff\xff"), "invalid character"),
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


# --- files of a federation ---------------------------------------------------------------------------------------

USES = ("train", "validation", "test")


def federation(preparation=None, targets=None, shape=(4,), outputs=3, task="own"):
    """A manifest of one tensor, with this description of its data."""
    return Manifest(
        task=task,
        input_shape=shape,
        output_shape=(outputs,),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=preparation,
        preparation_sha256=preparation and "ab" * 32,
        targets=targets,
    )


def on_the_page(modules, path, manifest, seed=0):
    argument = [in_base64(path.read_bytes()), path.name, manifest.text, str(seed)]
    return modules(SAMPLES, module="files.js", argument=argument)


def of_the_sdk(path, manifest, seed=0):
    """What the page must read of a file, by the SDK."""
    task = own.load(str(path), device="d", seed=seed, batch_size=8, manifest=manifest)
    found = {"names": list(task.class_names) or None, "said": task.said[0].replace(str(path), path.name)}
    for use in USES:
        batches = getattr(task, use)
        if batches is None:
            found[use] = None
            continue
        inputs, targets = batches.arrays.take(slice(None))
        kind = {"float32": "Float32Array", "int64": "BigInt64Array"}.get(
            inputs.dtype.name, f"{inputs.dtype.name.capitalize()}Array"
        )
        found[use] = [kind, inputs.ravel().tolist(), targets.tolist(), len(targets)]
    return found


def check_alike(modules, path, manifest, seed=0):
    """Return what page and SDK read of a file, which must be the same."""
    found, wanted = on_the_page(modules, path, manifest, seed), of_the_sdk(path, manifest, seed)
    assert isinstance(found, dict), found
    advice = "; for another encoding add encoding=NAME"
    wanted["said"] = wanted["said"].replace(advice, "; save the file as UTF-8 if its letters are others")
    wanted["said"] = re.sub("(all used as this device's); person=NAME[^;]*", r"\1", wanted["said"])
    wanted["said"] = wanted["said"].replace("; categories=person makes it one", "")
    assert found == wanted
    return found


def written(folder, content, name="mine.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


KITCHEN = Preparation(
    shape=(3,), columns=(Column(name="Heat"), Column(name="fuel", categories=("gas", "wood")), Column(name="load"))
)
ROOMS = Targets(column="room", names=("kitchen", "hall", "attic"))
PLAIN_ROWS = (
    "Heat,fuel,load,room\n1.5,gas,2,hall\n-4e-3,wood,.5,kitchen\n5,gas,7.,hall\n+6,wood,8,attic\n9,gas,1e1,hall\n"
)


def rows(*lines, header="Heat,fuel,load,room"):
    return "\n".join([header, *lines]) + "\n"


GOOD_ROWS = ["1.5,gas,2,hall", "2,wood,3,hall", "3,gas,4,kitchen", "4,gas,5,kitchen"]

TABLES = {
    "plain": PLAIN_ROWS,
    "CRLF and no last line end": PLAIN_ROWS.replace("\n", "\r\n")[:-2],
    "CR": PLAIN_ROWS.replace("\n", "\r"),
    "a byte order mark": "\ufeff" + PLAIN_ROWS,
    "UTF-16": PLAIN_ROWS.encode("utf-16"),
    "UTF-16 from the other end": b"\xfe\xff" + PLAIN_ROWS.encode("utf-16-be"),
    "tabs": PLAIN_ROWS.replace(",", "\t"),
    "bars": PLAIN_ROWS.replace(",", "|"),
    "semicolons": PLAIN_ROWS.replace(",", ";"),
    "Excel's line": "sep=;\n" + PLAIN_ROWS.replace(",", ";"),
    "decimal commas": PLAIN_ROWS.replace(",", ";").replace(".", ","),
    "decimal commas and tabs": PLAIN_ROWS.replace(",", "\t").replace(".", ","),
    "quotation marks": rows('"1.5",gas,"2","hall"', *GOOD_ROWS, header='"Heat","fuel","load",room'),
    "line ends in a cell": rows('1,"ga\ns",2,hall', *GOOD_ROWS),
    "blanks and empty lines": rows(" 1 , gas , 2 , hall ", "", *GOOD_ROWS, ""),
    "another order and case": rows(*(f"hall,gas,{n},{n}" for n in range(5)), header=" ROOM ,FUEL,heat,Load"),
    "further columns": rows(*(f"{line},x,7" for line in GOOD_ROWS), header="Heat,fuel,load,room,note,"),
    "people": rows(*(f"{line},anna" for line in GOOD_ROWS), header="Heat,fuel,load,room,person"),
    "unknown and missing categories": rows("1,oil,2,hall", "1,oil,2,hall", "1,,2,hall", "1,GAS,2,hall", *GOOD_ROWS),
    "recordings": rows(
        *(f"{line},{run}" for line, run in zip(GOOD_ROWS * 2, [3, 3, 1, 1, 2, 5, 9, 5], strict=True)),
        header="Heat,fuel,load,room,run",
    ),
    "people who are several": rows(
        *(f"{line},{name}" for line, name in zip(GOOD_ROWS, ["anna", "bo", "bo", "cy"], strict=True)),
        header="Heat,fuel,load,room,person",
    ),
    "runs that are no numbers": rows(*(f"{line},a" for line in GOOD_ROWS), header="Heat,fuel,load,room,run"),
    "numbers of classes": rows(*(f"{n},gas,1,{n % 3}" for n in range(7))),
    "numbers of classes as floats": rows(*(f"{n},gas,1,{n % 3}.0" for n in range(7))),
}


@pytest.mark.parametrize("seed", [0, 2**62 + 3])
@pytest.mark.parametrize("case", TABLES)
def test_tables_are_read_as_by_the_sdk(modules, tmp_path, case, seed):
    path = written(tmp_path, TABLES[case])
    targets = ROOMS.model_copy(update={"numbered": case.startswith("numbers of classes")})
    check_alike(modules, path, federation(KITCHEN, targets), seed)


def test_the_line_about_a_table(modules, tmp_path):
    path = written(tmp_path, TABLES["further columns"])
    assert on_the_page(modules, path, federation(KITCHEN, ROOMS))["said"] == (
        "mine.csv: 4 rows (1 train, 1 check, 2 test); room: hall 2, kitchen 2; columns Heat, fuel, load; the "
        "federation does not use 2 columns, left out: note, (without a name)"
    )


def test_a_table_in_an_old_encoding(modules, tmp_path):
    preparation = Preparation(shape=(1,), columns=(Column(name="größe"),))
    path = written(tmp_path, "größe;art\n1,5;Bär\n2,5;Bär\n3;Öl\n4;Öl\n".encode("cp1252"))
    found = check_alike(modules, path, federation(preparation, Targets(column="art", names=("Bär", "Öl", "x"))))
    assert "read as cp1252" in found["said"]


def test_truths_are_categories_in_any_case(modules, tmp_path):
    preparation = Preparation(shape=(1,), columns=(Column(name="on", categories=("false", "true")),))
    path = written(tmp_path, "on,label\nTrue,0\nFALSE,1\ntrue,2\nno,0\n")
    found = check_alike(modules, path, federation(preparation))
    assert sorted(value for use in USES for value in found[use][1]) == [-1, 0, 1, 1]


COLUMNS_ONLY = {
    "no names of columns": (Preparation(shape=(2,)), "a,b,label\n1,2,0\n3,4,1\n5,6,2\n7,8,0\n"),
    "an index": (Preparation(shape=(1,)), ",a,label\n0,2,0\n1,4,1\n2,6,2\n"),
    "another index": (Preparation(shape=(1,)), "Unnamed: 0,a,label\n1,2,0\n2,4,1\n3,6,2\n"),
    "a run among the features": (Preparation(shape=(2,)), "a,run,label\n1,0.5,0\n2,1.5,1\n3,2,2\n"),
}


@pytest.mark.parametrize("case", COLUMNS_ONLY)
def test_tables_of_a_federation_without_names_of_columns(modules, tmp_path, case):
    preparation, text = COLUMNS_ONLY[case]
    path, manifest = written(tmp_path, text), federation(preparation)
    found, wanted = on_the_page(modules, path, manifest), of_the_sdk(path, manifest)
    assert {use: found[use] for use in USES} == {use: wanted[use] for use in USES}


WRONG_TABLES = {
    "empty": ("", "the file is empty"),
    "only a header": ("Heat,fuel,load,room\n", "has a header and no rows; give a row for each sample"),
    "numbers for a header": ("1,2,3\n4,5,6\n", "the first line holds numbers (1, 2, 3)"),
    "a spreadsheet": (b"PK\3\4 or so", "is a zip archive or spreadsheet"),
    "a binary": (b"a,b\n\0\0\0\0", "is binary, not a text"),
    "no column": (
        "Heat,load,room\n1,2,hall\n",
        "has no column fuel, which the federation uses; it has the columns Heat",
    ),
    "no label": ("Heat,fuel,load,label\n1,gas,2,hall\n", "the federation's labels are called room, but it has the"),
    "two columns": ("Heat,fuel,load,room,load\n1,gas,2,hall,3\n", "two columns are called load"),
    "a short row": (rows(*GOOD_ROWS, "1,gas,2"), "line 6 has 3 cells, the header has 4; correct the line"),
    "a long row": (rows('1,"g\ns",2,hall', "1,gas,2,hall,5"), "line 4 has 5 cells, the header has 4"),
    "an open quote": (rows('1,"gas,2,hall'), "line 2 cannot be split into cells (unexpected end of data)"),
    "text behind a quote": (rows('1,"gas"x,2,hall'), "line 2 cannot be split into cells"),
    "text": (rows(*GOOD_ROWS, "high,gas,2,hall"), "line 6, column Heat: 'high' is not a number; the federation takes"),
    "hexadecimal numbers": (rows("0x10,gas,2,hall"), "line 2, column Heat: '0x10' is not a number"),
    "underscores": (rows("1_000,gas,2,hall"), "line 2, column Heat: '1_000' is not a number"),
    "a decimal comma in quotes": (
        rows('"1,5",gas,2,hall'),
        "column Heat: '1,5' is not a number; it has a decimal comma",
    ),
    "separated thousands": (rows("1 000,gas,2,hall"), "'1 000' is not a number; it has a thousands separator"),
    "another decimal sign": (
        rows(*GOOD_ROWS, '"2,5",gas,2,hall').replace(",", ";").replace('"2;5"', "2,5"),
        "line 6, column Heat: '2,5' has another decimal sign than '1.5' in line 2, column Heat",
    ),
    "commas of thousands": (
        "Heat;fuel;load;room\n1,500;gas;2;hall\n",
        "'1,500' has a decimal comma or a thousands sep",
    ),
    "a missing value": (rows(*GOOD_ROWS, ",gas,2,hall"), "line 6, column Heat: the value is missing (''; 1 in this"),
    "a missing number": (rows("1,gas,N/A,hall"), "line 2, column load: the value is missing ('N/A'; 1 in this"),
    "an infinite number": (rows("1,gas,-inf,hall"), "line 2, column load: '-inf' is infinite or beyond float32"),
    "too large a number": (rows("1e39,gas,1,hall"), "line 2, column Heat: '1e39' is infinite or beyond float32"),
    "a missing label": (rows(*GOOD_ROWS, "1,gas,2,"), "line 6, column room: the label is missing (1 in all)"),
    "another class": (rows(*GOOD_ROWS, "1,gas,2,cellar"), "has the class 'cellar'; the federation's are kitchen, hall"),
    "fractions": (
        rows("1,gas,2,0.5", "1,gas,2,1"),
        "column room: the label 0.5 is a fraction, not a class",
    ),
    "a person missing": (
        rows("1,gas,2,hall,", header="Heat,fuel,load,room,person"),
        "the person is missing",
    ),
    "two people": (
        rows("1,gas,2,hall,a,b", header="Heat,fuel,load,room,person,device"),
        "both person and device say who",
    ),
    "too few": (rows(*GOOD_ROWS[:2]), "2 samples cannot be split into training, validation and test; give 3 or more"),
    "too few recordings": (
        rows(*(f"{line},1" for line in GOOD_ROWS), header="Heat,fuel,load,room,run"),
        "1 unbroken recordings (run) cannot be split into",
    ),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_wrong_tables_are_refused_by_both(modules, tmp_path, case):
    content, said = WRONG_TABLES[case]
    path, manifest = written(tmp_path, content), federation(KITCHEN, ROOMS)
    with pytest.raises(DataError):
        of_the_sdk(path, manifest)
    name, message = on_the_page(modules, path, manifest)
    assert name == "DataError"
    assert said in message
    assert "=" not in message.replace("index=False", ""), "a page has no options"


def test_a_message_about_a_missing_value_says_what_to_do(modules, tmp_path):
    path = written(tmp_path, rows("1,gas,?,hall"))
    _, message = on_the_page(modules, path, federation(KITCHEN, ROOMS))
    assert message == (
        "mine.csv: line 2, column load: the value is missing ('?'; 1 in this column); leave such rows out of the file, "
        "or fill in the values"
    )


# --- names of classes --------------------------------------------------------------------------------------------

UNKNOWN_NAMES = ["cellar", "Bär", "\U0001f600", "\uff5e", "loft"]


@pytest.mark.parametrize("spare", [5, 7, 300])
def test_unknown_classes_take_the_spare_outputs_of_the_sdk(modules, tmp_path, spare):
    targets = Targets(column="room", names=("kitchen", "hall"), spare=spare)
    lines = [f"{place},gas,1,{name}" for place, name in enumerate([*UNKNOWN_NAMES, "hall", *UNKNOWN_NAMES])]
    found = check_alike(modules, written(tmp_path, rows(*lines)), federation(KITCHEN, targets, outputs=2 + spare))
    assert found["names"] == list(targets.with_own(UNKNOWN_NAMES))
    fewer = Targets(column="room", names=("kitchen", "hall"), spare=4)
    name, message = on_the_page(modules, tmp_path / "mine.csv", federation(KITCHEN, fewer, outputs=6))
    assert (name, "has the class 'Bär'; the federation's are kitchen, hall" in message) == ("DataError", True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["0", "1", "2", "1"], None),
        (["3", "1", "0"], "has the class '3'; the federation names no classes, its labels are the numbers 0 to 2"),
        (["-1", "1", "0"], "has the class '-1'"),
        (["up", "down", "off"], "has the class 'down'"),
    ],
)
def test_a_federation_without_names_takes_numbers(modules, tmp_path, given, said):
    path = written(tmp_path, "\n".join(["a,label", *(f"{n},{label}" for n, label in enumerate(given))]))
    for manifest in (federation(Preparation(shape=(1,))), federation(shape=(1,))):
        found = on_the_page(modules, path, manifest)
        if said is None:
            assert sorted(target for use in USES for target in found[use][2]) == [0, 1, 1, 2]
        else:
            assert found[0] == "DataError"
            assert said in found[1]


# --- npz ---------------------------------------------------------------------------------------------------------


def samples(count, *shape, kind=np.float32):
    values = (
        random.integers(0, 100, (count, *shape)) if np.dtype(kind).kind in "iu" else random.normal(size=(count, *shape))
    )
    return values.astype(kind)


def labels(count, classes=3):
    return np.arange(count) % classes


def named(use, count):
    return {f"x_{use}": samples(count, 4), f"y_{use}": labels(count)}


FLOATS = Preparation(shape=(4,))
NAMES = np.array(["attic", "hall", "kitchen"])

FILES = {
    "features": (named("train", 20), FLOATS),
    "x and y": ({"x": samples(20, 4), "y": labels(20)}, FLOATS),
    "double precision": ({"x": samples(20, 4, kind=np.float64), "y": labels(20).astype(np.uint8)}, FLOATS),
    "half precision": ({"x": samples(20, 4, kind=np.float16), "y": labels(20).astype("i2")}, FLOATS),
    "whole numbers as floats": ({"x": samples(20, 4, kind=np.int64), "y": labels(20)}, FLOATS),
    "bytes": (
        {"x": samples(20, 8, 8, kind=np.uint8), "y": labels(20)},
        Preparation(dtype="uint8", shape=(8, 8), axes="HW"),
    ),
    "channels last": (
        {"x": samples(20, 4, 5, 3, kind=np.uint8), "y": labels(20)},
        Preparation(dtype="uint8", shape=(4, 5, 3), axes="HWC"),
    ),
    "wider whole numbers": (
        {"x": samples(20, 4, kind=np.int64), "y": labels(20)},
        Preparation(dtype="uint8", shape=(4,)),
    ),
    "true and false": ({"x": samples(20, 4) > 0, "y": labels(20)}, Preparation(dtype="uint8", shape=(4,))),
    "64 bits": ({"x": samples(20, 4, kind=">i8"), "y": labels(20)}, Preparation(dtype="int64", shape=(4,))),
    "16 bits": ({"x": samples(20, 4, kind=np.int16), "y": labels(20)}, Preparation(dtype="int16", shape=(4,))),
    "Fortran's order": (
        {"x": np.asfortranarray(samples(20, 6, 64)), "y": labels(20)},
        Preparation(shape=(6, 64), axes="CT"),
    ),
    "its own test": (named("train", 20) | named("test", 5), FLOATS),
    "its own validation": (named("train", 20) | named("val", 5), FLOATS),
    "all three": (named("train", 20) | named("val", 5) | named("test", 2), FLOATS),
    "names": ({"x": samples(20, 4), "y": NAMES[labels(20)]}, FLOATS),
    "names in bytes": ({"x": samples(20, 4), "y": NAMES[labels(20)].astype("S")}, FLOATS),
    "one-hot rows": ({"x": samples(20, 4), "y": np.eye(3, dtype=np.float32)[labels(20)]}, FLOATS),
    "a column of labels": ({"x": samples(20, 4), "y": labels(20)[:, None]}, FLOATS),
    "labels as floats": ({"x": samples(20, 4), "y": labels(20).astype(np.float64)}, FLOATS),
    "its own order of classes": ({"x": samples(20, 4), "y": labels(20), "classes": NAMES[::-1]}, FLOATS),
    "a number of classes": ({"x": samples(20, 4), "y": labels(20), "classes": 3}, FLOATS),
    "recordings": ({"x": samples(20, 4), "y": labels(20), "run": np.arange(20) // 4 * 7 % 5}, FLOATS),
    "people": ({"x": samples(20, 4), "y": labels(20), "person": labels(20)}, FLOATS),
    "the fewest": (named("train", 3), FLOATS),
}


@pytest.mark.parametrize("seed", [0, 2**62 + 3])
@pytest.mark.parametrize("case", FILES)
def test_arrays_are_read_as_by_the_sdk(modules, tmp_path, case, seed):
    arrays, preparation = FILES[case]
    path = written(tmp_path, saved(arrays), "mine.npz")
    check_alike(modules, path, federation(preparation, Targets(names=tuple(NAMES.tolist()), numbered=True)), seed)


GOOD = named("train", 6)

WRONG_FILES = {
    "no labels": ({"x_train": GOOD["x_train"]}, "holds x_train, but no y_train; add it"),
    "nothing": ({}, "holds nothing, but no x and y or x_train"),
    "half a pair": (GOOD | {"x_val": samples(2, 4)}, "but no y_val; add it"),
    "only validation": (named("val", 6), "but no x_train; add it"),
    "rows of numbers": (GOOD | {"y_train": np.ones((6, 2))}, "has shape (6, 2), and its rows are not one-hot"),
    "labels of others": (GOOD | {"y_train": labels(5)}, "y_train has shape (5,) beside 6 samples"),
    "no samples": ({"x_train": np.zeros((0, 4)), "y_train": labels(0)}, "give at least one sample"),
    "fractions": (GOOD | {"y_train": np.full(6, 0.5)}, "y_train[0]: the label 0.5 is a fraction, not a class"),
    "truths for labels": (GOOD | {"y_train": np.zeros(6, bool)}, "has the class 'False'"),
    "another class": (GOOD | {"y_train": np.array(list("abcdef"))}, "has the class 'a'; the federation's are attic"),
    "numbers beyond": (GOOD | {"y_train": labels(6) + 1}, "has the class '1'; the federation's are attic"),
    "negative labels": (GOOD | {"y_train": np.array([0, -1, -2, 1, 0, -1])}, "has the class '-1'"),
    "a missing label": (GOOD | {"y_train": np.array([*"aaaaa", ""])}, "y_train[5]: the label is missing (1 in all)"),
    "texts": (GOOD | {"x_train": np.full((6, 4), "a")}, "x_train is of text; store numbers"),
    "complex numbers": (GOOD | {"x_train": np.zeros((6, 4), complex)}, "x_train is of complex128; store numbers"),
    "another shape": (GOOD | {"x_train": samples(6, 5)}, "samples of shape (5,), the federation's have (4,)"),
    "a value missing": (GOOD | {"x_train": np.full((6, 4), np.nan)}, "a missing value (NaN) in sample 0; leave such"),
    "too large a value": (GOOD | {"x_train": np.full((6, 4), 1e300)}, "an infinite value in sample 0"),
    "too few": (named("train", 2), "2 samples cannot be split into"),
    "one class": (GOOD | {"classes": 1}, "classes is 1; give the number of classes, 2 to 10,000"),
    "odd classes": (GOOD | {"classes": np.zeros((2, 2))}, "classes has shape (2, 2) of float64; give the number"),
    "a class twice": (GOOD | {"classes": np.array(["a", "a", "b"])}, "classes repeats a name"),
    "labels beyond its own classes": (GOOD | {"classes": 2}, "y_train[2] is 2, but classes declares 2, 0 to 1 (0, 1)"),
    "a name beyond its own classes": (
        GOOD | {"y_train": NAMES[labels(6)], "classes": NAMES[:2]},
        "y_train[2] is 'kitchen', which the entry classes does not name",
    ),
    "odd runs": (GOOD | {"run_train": np.zeros(6)}, "run_train has shape (6,) of float64; give an integer for each"),
    "pickled classes": (GOOD | {"classes": np.array([None], object)}, "holds pickled objects"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_arrays_are_refused_by_both(modules, tmp_path, case):
    arrays, said = WRONG_FILES[case]
    path, manifest = (
        written(tmp_path, saved(arrays), "wrong.npz"),
        federation(FLOATS, Targets(names=tuple(NAMES.tolist()), numbered=True)),
    )
    with pytest.raises(DataError):
        of_the_sdk(path, manifest)
    name, message = on_the_page(modules, path, manifest)
    assert name == "DataError"
    assert said in message


WRONG_TYPES = {
    "scaled images": (
        {"x": samples(6, 8, 8), "y": labels(6)},
        (8, 8),
        "HW",
        "give them as they were recorded, not scaled",
    ),
    "beyond bytes": ({"x": samples(6, 4, kind=np.int64) + 200, "y": labels(6)}, (4,), "", "beyond uint8; correct it"),
    "other axes": (
        {"x": samples(6, 3, 4, 5, kind=np.uint8), "y": labels(6)},
        (4, 5, 3),
        "HWC",
        "with axes=NHWC; its axes seem to be in another order: transpose it",
    ),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_arrays_of_another_type_than_the_federations(modules, tmp_path, case):
    arrays, shape, axes, said = WRONG_TYPES[case]
    path, manifest = (
        written(tmp_path, saved(arrays), "wrong.npz"),
        federation(Preparation(dtype="uint8", shape=shape, axes=axes)),
    )
    with pytest.raises(DataError, match=said.split(";")[0]):
        of_the_sdk(path, manifest)
    name, message = on_the_page(modules, path, manifest)
    assert (name, said in message) == ("DataError", True), message


# --- tasks of ours, whose samples are not described --------------------------------------------------------------


def trained_on(modules, folder, arrays, **how):
    found = on_the_page(modules, written(folder, saved(arrays), "mine.npz"), federation(**how))
    assert isinstance(found, dict), found
    return found["train"][1]


def test_pictures_of_an_undescribed_model_get_their_channel_and_go_from_0_to_1(modules, tmp_path):
    inputs = samples(9, 8, 8, kind=np.uint8)
    found = trained_on(modules, tmp_path, {"x": inputs, "y": labels(9)}, shape=(1, 8, 8))
    assert found == (inputs[split(9, 0).train] / np.float32(255)).ravel().tolist()


def test_sensors_values_are_put_on_the_scale_of_their_task(modules, tmp_path):
    inputs, choice = samples(5, 6, 64), MODELS["har"]["small"]
    found = trained_on(modules, tmp_path, {"x": inputs, "y": labels(5)}, shape=(6, 64), outputs=5, task="har")
    assert found == Scale(choice.mean, choice.deviation)(inputs)[split(5, 0).train].ravel().tolist()


@pytest.mark.parametrize("kind", [np.uint8, np.float64, np.int64])
def test_grey_levels_for_a_task_of_ours_are_put_on_its_scale(modules, tmp_path, kind):
    inputs, choice = samples(5, 28, 28, kind=np.uint8), MODELS["mnist"]["small"]
    arrays = {"x": inputs.astype(kind), "y": labels(5)}
    found = trained_on(modules, tmp_path, arrays, shape=(1, 28, 28), outputs=10, task="mnist:leaf")
    assert found == Scale(choice.mean, choice.deviation)(inputs[:, None])[split(5, 0).train].ravel().tolist()


def test_images_on_another_scale_are_taken_as_they_are(modules, tmp_path):
    inputs = samples(5, 28, 28)
    arrays = {"x": inputs, "y": labels(5)}
    found = trained_on(modules, tmp_path, arrays, shape=(1, 28, 28), outputs=10, task="mnist")
    assert found == inputs[split(5, 0).train].ravel().tolist()


UNFIT = {
    "another shape": (GOOD, (1, 2, 2), 3, "samples have shape (4,), but the federation's model takes (1, 2, 2)"),
    "labels beyond": (
        GOOD,
        (4,),
        2,
        "has the class '2'; the federation names no classes, its labels are the numbers 0 to 1",
    ),
    "other classes": (GOOD | {"classes": 4}, (4,), 3, "classes: the file has 4, the federation's model 3"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_arrays_that_do_not_fit_an_undescribed_model(modules, tmp_path, case):
    arrays, shape, outputs, said = UNFIT[case]
    path = written(tmp_path, saved(arrays), "mine.npz")
    name, message = on_the_page(modules, path, federation(shape=shape, outputs=outputs))
    assert (name, said in message) == ("DataError", True), message


def test_a_large_archive_is_read_in_a_moment(modules, tmp_path):
    """As large as MNIST: sixty thousand images."""
    content = saved(
        {"x_train": np.zeros((60_000, 28, 28), np.uint8), "y_train": np.zeros(60_000, int)}, compressed=True
    )
    found = modules(
        """async ({ readSamples }, [content, text]) => {
          const { Manifest } = await import("/web/manifest.js");
          const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
          const start = performance.now();
          const { train } = await readSamples(new File([bytes], "mine.npz"), new Manifest(text), 1n);
          return [train.count, performance.now() - start];
        }""",
        module="files.js",
        argument=[in_base64(content), federation(shape=(1, 28, 28), outputs=10, task="mnist").text],
    )
    assert found[0] == len(split(60_000, 1).train)
    assert found[1] < 30_000
