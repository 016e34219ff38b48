"""Tables as people have them: dialects, labels, what is missing, and what is refused."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from sparrow.protocol.preparation import Column, Preparation, Targets
from sparrow.reading import ReadOptions, read_file
from sparrow.reading.errors import DataError, NoData

PLAIN = "temp,hum,label\n20.5,1,0\n17.25,2,1\n-3e1,3,0\n"
VALUES = [[20.5, 1.0], [17.25, 2.0], [-30.0, 3.0]]


def of(columns):
    """A table of CSV text from name -> cells."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(",".join(map(str, row)) for row in rows) + "\n"


@pytest.fixture
def read(tmp_path):
    def read(content, name="t.csv", options=None, **more):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_file(path, ReadOptions(**(options or {})), **more)[""]

    return read


@pytest.fixture
def refused(read):
    def refused(content, *words, **more):
        with pytest.raises(DataError) as error:
            read(content, **more)
        said = str(error.value)
        assert more.get("name", "t.csv") in said
        assert all(word in said for word in words), said
        assert "\n" not in said
        return said

    return refused


# --- dialects


SEMICOLON = PLAIN.replace(",", ";")
POINTED = [
    ("t.csv", PLAIN.encode(), ""),
    ("T.CSV", PLAIN.replace("\n", "\r\n").encode(), ""),
    ("t.txt", PLAIN.encode(), ""),
    ("t", PLAIN.replace("\n", "\r").encode(), ""),
    ("t.csv.gz", gzip.compress(PLAIN.encode(), mtime=0), ""),
    ("T.TSV.GZ", gzip.compress(PLAIN.replace(",", "\t").encode(), mtime=0), "tab"),
    ("t.tsv", PLAIN.replace(",", "\t").encode(), "tab"),
    ("t.csv", SEMICOLON.encode(), "semicolon"),
    ("t.csv", f"sep=;\r\n{SEMICOLON}".encode(), "semicolon"),
    ("t.dat", PLAIN.replace(",", "|").encode(), "pipe"),
    ("t.csv", SEMICOLON.replace(".", ",").encode(), "decimal comma"),
    ("t.csv", PLAIN.replace(",", "\t").replace(".", ",").encode(), "decimal comma"),
    ("t.csv", PLAIN.encode("utf-8-sig"), ""),
    ("t.csv", PLAIN.encode("utf-16"), ""),
    ("t.csv", PLAIN.encode("utf-16-be"), ""),
    ("t.csv", PLAIN.encode("utf-16-le"), ""),
    ("t.csv", PLAIN.replace(",", " , ").encode(), ""),
    ("t.csv", PLAIN.replace("\n", "\n\n").encode(), ""),
    ("t.csv", PLAIN.replace("20.5", '"20.5"').replace("temp", '"temp"').encode(), ""),
]


@pytest.mark.parametrize(("name", "content", "said"), POINTED)
def test_a_table_is_read_as_what_it_is(read, name, content, said):
    raw = read(content, name)
    np.testing.assert_array_equal(raw.inputs, np.array(VALUES, np.float32))
    assert raw.inputs.dtype == np.float32
    assert raw.inputs.flags.c_contiguous
    assert raw.labels.tolist() == ["0", "1", "0"]
    assert (raw.kind, raw.label) == ("classes", "label")
    assert [column.name for column in raw.columns] == ["temp", "hum"]
    assert said in " ".join(raw.said)
    assert bool(raw.said) == bool(said)


def test_text_that_is_not_utf8_is_read_as_cp1252_with_a_remark(read):
    raw = read(PLAIN.replace("temp", "température").encode("cp1252"))
    assert raw.columns[0].name == "température"
    assert "cp1252" in raw.said[0]
    assert "encoding=" in raw.said[0]
    late = PLAIN + "1,1,0\n" * 30_000 + "1,1,é\n"
    assert read(late.encode("cp1252")).labels[-1] == "é"
    russian = read(PLAIN.replace("temp", "темп").encode("cp1251"), options={"encoding": "cp1251"})
    assert russian.columns[0].name == "темп"


def test_blanks_separate_cells_if_an_option_says_so(read, refused):
    text = PLAIN.replace(",", "   ")
    assert read(text, options={"delimiter": " "}).inputs.tolist() == VALUES
    refused(text, "delimiter=space")


def test_a_quoted_cell_may_hold_the_delimiter_and_a_line_break(read):
    raw = read('a;"b;c";label\n1;2;"x;y"\n3;4;"two\nlines"\n')
    assert [column.name for column in raw.columns] == ["a", "b;c"]
    assert raw.labels.tolist() == ["x;y", "two\nlines"]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (("1,5", "2.5"), ["line 3", "column a", "'2.5'", "decimal=comma", "decimal=point"]),
        (("1.5", "2,5"), ["line 3", "column a", "'2,5'", "decimal=comma", "decimal=point"]),
        (("1,234", "2,345"), ["line 2", "column a", "'1,234'", "decimal=comma", "decimal=point"]),
        (("1'234", "5'678"), ["line 2", "column a", '"1\'234"', "thousands separator"]),
        (("1\u2009234", "5"), ["line 2", "column a", "thousands separator"]),
        (("1\u00a0234", "5"), ["line 2", "column a", "thousands separator"]),
        (("1.234,5", "5,5"), ["line 2", "column a", "'1.234,5'", "thousands separator"]),
    ],
)
def test_doubtful_numbers_are_refused(refused, cells, words):
    refused(f"a;label\n{cells[0]};0\n{cells[1]};1\n", *words)


@pytest.mark.parametrize(("decimal", "value"), [(",", 1.234), (".", None)])
def test_the_option_decides_what_a_comma_is(read, refused, decimal, value):
    text = "a;label\n1,234;0\n7;1\n"
    if value is None:
        refused(text, "'1,234'", "thousands", options={"decimal": decimal})
    else:
        assert read(text, options={"decimal": decimal}).inputs[0] == np.float32(value)


def test_quoted_decimal_commas_between_commas(read, refused):
    text = 'a,label\n"20,63",0\n"1,5",1\n'
    refused(text, "line 2", "column a", "'20,63'", "decimal=comma")
    assert read(text, options={"decimal": ","}).inputs.tolist() == [[np.float32(20.63)], [1.5]]


def test_python_numbers_that_are_none(refused):
    refused("a,label\n1_000,0\n2,1\n3,1\n", "line 2", "column a", "'1_000'")
    refused("a,label\n0x10,0\n2,1\n3,1\n", "line 2", "'0x10'")


# --- files that are no tables


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"PK\x03\x04" + bytes(40), "xlsx"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1" + bytes(40), "Excel"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
        (bytes(range(256)) * 4, "binary"),
        (gzip.compress(b"PAR1" + bytes(40), mtime=0), "parquet"),
        (gzip.compress(PLAIN.encode(), mtime=0)[:-12], "cannot be read"),
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"a,label\n", "no rows"),
        (b"1,2,0\n3,4,1\n", "the first line holds numbers"),
        (b"1.5,2,on\n3,4,off\n", "first line is a row"),
        (b"# of a logger\na,b,label\n1,2,on\n3,4,off\n", "line 1 has one cell"),
        (b"a,a,label\n1,2,0\n", "two columns are called a"),
        (b"a,,label\n1,2,0\n", "column 2 has no name"),
        (b"a,label\n1,0\n\n1,0,3\n", "line 4 has 3 cells"),
        (b"a,b,label\n1,2,0\n1,2\n", "line 3 has 2 cells"),
        (b'a,b,label\n1,"2,0\n', "line 2"),
        (b'a,label\n"2"3,0\n', "line 2"),
        (b"label\n1\n", "no column besides"),
        (b"a,b\n1,2\n", "label=NAME"),
        (b"a,y,label\n1,2,3\n", "label=y"),
    ],
)
def test_what_is_no_table_is_refused(refused, content, word):
    refused(content, word)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(NoData, match=r"none\.csv"):
        read_file(tmp_path / "none.csv")
    with pytest.raises(DataError, match="folder"):
        read_file(tmp_path)


# --- cells that are no numbers


MARKS = ["", "?", "NA", "n/a", "NaN", "NULL", "None", "-"]


@pytest.mark.parametrize("mark", MARKS)
def test_missing_values_are_refused_with_the_options(read, refused, mark):
    text = f"a,b,label\n1,2,0\n3,{mark},1\n{mark},6,1\n5,6,0\n"
    refused(text, "line 4", "column a", repr(mark), "2 in this file", "missing=drop", "missing=mean")
    dropped = read(text, options={"missing": "drop"})
    assert dropped.inputs.tolist() == [[1, 2], [5, 6]]
    assert dropped.labels.tolist() == ["0", "0"]
    assert "2 rows" in " ".join(dropped.said)
    kept = read(text, options={"missing": "mean"})
    assert np.isnan(kept.inputs).tolist() == [[False, False], [False, True], [True, False], [False, False]]


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e39", "1e999"])
@pytest.mark.parametrize("options", [{}, {"missing": "drop"}])
def test_values_beyond_float32(refused, cell, options):
    refused(f"a,label\n1,0\n{cell},1\n", "line 3", "column a", cell, options=options)


def test_a_row_of_units(read, refused):
    text = "temp,hum,p,label\nC,%,-,-\n1,2,3,0\n4,5,6,1\n"
    refused(text, "line 2", "column temp", "'C'", "skip=1")
    assert read(text, options={"skip": 1}).inputs.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_one_odd_cell(refused):
    refused("a,b,label\n1,2,0\n3,high,1\n5,6,1\n", "line 3", "column b", "'high'", "drop=b", "categories=b")


def test_lines_are_counted_as_an_editor_does(refused):
    refused('a,note,label\n1,"x\ny",0\n\n\n2,z,0\nodd,z,1\n', "line 7", "column a", "'odd'")


TIMES = {"time": [f"2026-01-01 00:00:{i:02}" for i in range(60)], "a": range(60), "label": [0, 1] * 30}


def test_a_column_of_texts_that_all_differ(read, refused):
    refused(of(TIMES), "line 2", "column time", "'2026-01-01 00:00:00'", "drop=time", "categories=time")
    assert read(of(TIMES), options={"drop": ("time",)}).inputs.shape == (60, 1)
    assert len(read(of(TIMES), options={"categories": ("time",)}).columns[0].categories) == 60
    refused(of({**TIMES, "time": [f"id{i}" for i in range(60)]}), "line 2", "column time", "'id0'")
    many = {"city": [f"c{i}" for i in range(1_001)], "a": range(1_001), "label": [0] * 1_001}
    refused(of(many), "column city", "1,000", options={"categories": ("city",)})


CITY = {"city": ["Rome", "Oslo", "Rome", "?", "Rome"] * 3, "a": range(15), "label": [0, 1, 1] * 5}


def test_a_column_of_few_names_becomes_categories(read):
    raw = read(of(CITY))
    assert raw.columns == (Column(name="city", categories=("Oslo", "Rome")), Column(name="a"))
    assert raw.inputs[:5, 0].tolist() == [1, 0, 1, -1, 1]
    assert "Oslo, Rome" in " ".join(raw.said)


def test_numbers_that_are_names(read):
    raw = read(of({"zone": [10, 9, 10], "a": [1, 2, 3], "label": "xyx"}), options={"categories": ("zone",)})
    assert raw.columns[0].categories == ("9", "10")
    assert raw.inputs[:, 0].tolist() == [1, 0, 1]


def test_truths_are_categories_of_a_table_of_any_length(read):
    raw = read(of({"on": ["True", "FALSE"], "label": [0, 1]}))
    assert raw.columns[0].categories == ("false", "true")
    assert raw.inputs[:, 0].tolist() == [1, 0]


# --- columns that are no features


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_an_index_of_pandas_is_left_out(read, refused, first, name):
    raw = read(of({name: range(first, 5000 + first), "a": range(5000), "label": [0, 1] * 2500}))
    assert [column.name for column in raw.columns] == ["a"]
    assert "left out" in " ".join(raw.said)
    refused(of({name: [0, 2, 3], "a": [1, 2, 3], "label": [0, 1, 1]}), "index=False")


@pytest.mark.parametrize("name", ["person", "Person", " SUBJECT ", "device"])
def test_who_made_a_sample_is_no_feature(read, name):
    raw = read(of({"a": [1, 2, 3], name: ["ann", "bo ", "ann"], "label": [0, 1, 1]}))
    assert raw.people.tolist() == ["ann", "bo", "ann"]
    assert [column.name for column in raw.columns] == ["a"]
    clean = name.strip()
    assert f"categories={clean}" in " ".join(raw.said)
    raw = read(of({"a": [1, 2, 3], name: "xyx", "label": [0, 1, 1]}), options={"categories": (clean,)})
    assert raw.people is None
    assert raw.columns[1].categories == ("x", "y")


def test_people_that_are_not_clear(read, refused):
    refused(of({"a": [1], "person": [1], "device": [2], "label": [0]}), "person", "device", "drop=device")
    text = of({"a": [1, 2], "person": ["x", ""], "label": [0, 1]})
    refused(text, "line 3", "column person", "missing=drop")
    assert read(text, options={"missing": "drop"}).people.tolist() == ["x"]


def test_runs(read):
    raw = read(of({"a": [1, 2, 3], "Run": [7, 7, 8], "label": [0, 1, 1]}))
    assert raw.runs.tolist() == [7, 7, 8]
    assert [column.name for column in raw.columns] == ["a"]
    raw = read(of({"a": [1, 2, 3], "run": [0.5, 7, 8], "label": [0, 1, 1]}))
    assert raw.runs is None
    assert raw.inputs[:, 1].tolist() == [0.5, 7, 8]


def test_columns_are_dropped_by_name(read, refused):
    text = of({"id": ["a", "b"], "a": [1, 2], "label": [0, 1]})
    assert [column.name for column in read(text, options={"drop": ("ID",)}).columns] == ["a"]
    refused(text, "drop=idd", "did you mean id", options={"drop": ("idd",)})


# --- labels


@pytest.mark.parametrize(
    ("labels", "kind", "found"),
    [
        (["0", "2", "5"], "classes", ["0", "2", "5"]),
        (["1", "2", "1000000"], "classes", ["1", "2", "1000000"]),
        (["01", "1", "1"], "classes", ["01", "1", "1"]),
        (["NA", "US", "None"], "classes", ["NA", "US", "None"]),
        (["-", "?", "null"], "classes", ["-", "?", "null"]),
        (["1.5", "walk", "2"], "classes", ["1.5", "walk", "2"]),
        (["True", "False", "True"], "classes", ["True", "False", "True"]),
        (["1.0", "0.0", "1.0"], "numbers", [1, 0, 1]),
        (["1", "0", "2.5"], "numbers", [1, 0, 2.5]),
        (["1", "0", "-2e3"], "numbers", [1, 0, -2000]),
    ],
)
def test_labels_are_names_or_numbers(read, labels, kind, found):
    raw = read(of({"a": [1, 2, 3], "label": labels}))
    assert raw.kind == kind
    assert raw.labels.tolist() == found
    assert raw.labels.dtype.kind == ("U" if kind == "classes" else "f")


def test_blanks_around_labels_are_said(read):
    raw = read("a,label\n1,walk \n2,walk\n3, sit\n")
    assert raw.labels.tolist() == ["walk", "walk", "sit"]
    assert "'walk ' was read as 'walk'" in " ".join(raw.said)


def test_the_target_may_be_said(read, refused):
    whole = of({"a": [1, 2], "label": ["1.0", "0.0"]})
    assert read(whole, options={"target": "class"}).labels.tolist() == ["1", "0"]
    assert read(of({"a": [1, 2], "label": [1, 3]}), options={"target": "number"}).labels.tolist() == [1, 3]
    fraction = of({"a": [1, 2], "label": ["1.0", "0.5"]})
    refused(fraction, "line 3", "column label", "0.5", "target=class", options={"target": "class"})
    words = of({"a": [1, 2], "label": ["1.0", "walk"]})
    refused(words, "line 3", "column label", "'walk'", "target=number", options={"target": "number"})


def test_labels_that_are_missing(read, refused):
    text = of({"a": [1, 2, 3], "label": ["x", "", "y"]})
    refused(text, "line 3", "column label", "missing=drop")
    assert read(text, options={"missing": "drop"}).labels.tolist() == ["x", "y"]
    numbers = of({"a": [1, 2, 3], "label": ["1.5", "nan", "2"]})
    refused(numbers, "line 3", "column label", "missing=drop", options={"missing": "mean"})
    assert read(numbers, options={"missing": "drop"}).labels.tolist() == [1.5, 2]
    refused(of({"a": [1, 2], "label": ["1.5", "inf"]}), "line 3", "column label", "inf")


def test_integers_that_are_measurements(read, refused):
    text = of({"a": range(20), "label": range(100, 120)})
    refused(text, "target=number", "target=class", "100")
    assert read(text, options={"target": "class"}).kind == "classes"
    assert read(of({"a": range(19), "label": range(19)})).kind == "classes"
    refused(of({"a": range(1500), "label": [f"n{i}" for i in range(1500)]}), "1,000", "label=NAME")


def test_the_label_is_named(read, refused):
    text = of({"a": [1, 2], "Activity": ["x", "y"], "b": [3, 4]})
    assert read(text, options={"label": "activity"}).label == "Activity"
    refused(text, "label=actvity", "did you mean Activity", "a, Activity, b", options={"label": "actvity"})
    assert read(of({"a": [1], "CLASS": ["x"]})).label == "CLASS"


def test_samples_to_predict_have_no_labels(read):
    raw = read(PLAIN, labelled=False)
    assert (raw.labels, raw.kind, raw.inputs.tolist()) == (None, None, VALUES)
    assert "label" in " ".join(raw.said)
    assert read("a,b\n1,2\n", labelled=False).inputs.tolist() == [[1, 2]]


# --- a federation's columns


PREPARATION = Preparation(
    shape=(3,), columns=(Column(name="hum"), Column(name="city", categories=("Oslo", "Rome")), Column(name="temp"))
)
TARGETS = Targets(column="act", names=("sit", "walk"))


def test_columns_are_matched_by_name(read):
    text = of({"TEMP ": [1, 2, 3], "act": ["sit"] * 3, "city": ["Rome", "Bonn", ""], "hum": [4, 5, 6], "id": "abc"})
    raw = read(text, preparation=PREPARATION, targets=TARGETS)
    assert raw.columns == PREPARATION.columns
    assert raw.inputs.tolist() == [[4, 1, 1], [5, -1, 2], [6, -1, 3]]
    assert raw.label == "act"
    said = " ".join(raw.said)
    assert all(word in said for word in ("TEMP", "Bonn (1 times)", "id")), said


def test_a_column_serves_once(refused):
    both = Preparation(shape=(2,), columns=(Column(name="p"), Column(name="P")))
    refused(of({"p": [1, 2], "q": [3, 4], "act": ["sit", "walk"]}), "no column P", preparation=both, targets=TARGETS)


def test_what_does_not_fit_the_federation(read, refused):
    whole = {"hum": [1, 2], "city": ["Rome", "Oslo"], "temp": [3, 4], "act": ["sit", "walk"]}
    given = {"preparation": PREPARATION, "targets": TARGETS}
    refused(of({k: v for k, v in whole.items() if k != "temp"}), "temp", "hum, city, act", **given)
    refused(of({**whole, "temp": ["warm", "cold"]}), "column temp", "'warm'", "line 2", **given)
    refused(of({**whole, "temp": [3, ""]}), "line 3", "column temp", "missing=drop", **given)
    refused(of({k: v for k, v in whole.items() if k != "act"}), "act", "label=NAME", **given)
    fractions = {**whole, "act": ["0.5", "1.5"]}
    refused(of(fractions), "line 2", "column act", "0.5", **given)
    numbers = Targets(kind="numbers", column="act")
    refused(of(whole), "line 2", "column act", "'sit'", preparation=PREPARATION, targets=numbers)
    refused(of(whole), "(2, 2)", preparation=Preparation(shape=(2, 2)), options={"label": "act"})
    assert read(of({**whole, "act": [1, 2]}), preparation=PREPARATION, targets=numbers).labels.tolist() == [1, 2]


def test_a_feature_may_be_called_as_people_or_labels_are(read):
    preparation = Preparation(shape=(2,), columns=(Column(name="y"), Column(name="device")))
    raw = read(of({"device": [1, 2], "y": [3, 4], "label": [0, 1]}), preparation=preparation)
    assert raw.inputs.tolist() == [[3, 1], [4, 2]]
    assert (raw.people, raw.label) == (None, "label")


# --- parquet


def parquet(path, arrays):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({name: arrow.array(*each) for name, each in arrays.items()}), path)
    return path


def test_parquet_follows_the_same_rules(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from decimal import Decimal

    path = parquet(
        tmp_path / "T.PARQUET",
        {
            "a": ([1.5, None, 3.0],),
            "whole": ([1, 2, 3], arrow.int8()),
            "on": ([True, False, None],),
            "exact": ([Decimal("1.25")] * 3,),
            "person": (["x", "y", "x"],),
            "label": ([2, 1, 2], arrow.int64()),
        },
    )
    with pytest.raises(DataError, match=r"row 2, column a: .*missing=drop"):
        read_file(path)
    raw = read_file(path, ReadOptions(missing="drop"))[""]
    assert raw.inputs.tolist() == [[1.5, 1, 1, 1.25], [3, 3, -1, 1.25]]
    assert raw.labels.tolist() == ["2", "2"]
    assert raw.people.tolist() == ["x", "x"]
    assert raw.columns[2].categories == ("false", "true")


def test_parquet_labels_of_floats_are_numbers_and_dictionaries_are_texts(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    names = arrow.array(["up", "down", "up"]).dictionary_encode()
    path = parquet(tmp_path / "t.parquet", {"a": ([1, 2, 3],), "label": ([1.0, 0.0, 1.0],)})
    assert read_file(path)[""].kind == "numbers"
    path = parquet(tmp_path / "u.parquet", {"a": ([1, 2, 3],), "label": (names,)})
    assert read_file(path)[""].labels.tolist() == ["up", "down", "up"]


def test_parquet_columns_that_are_no_values_are_refused_by_name(tmp_path):
    import datetime

    when = [datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)]
    for cells, word in (([[1, 2]], "list"), (when, "times"), ([{"x": 1}], "struct")):
        path = parquet(tmp_path / "t.parquet", {"odd": (cells,), "a": ([1],), "label": (["x"],)})
        with pytest.raises(DataError, match=rf"column odd .*{word}.*drop=odd"):
            read_file(path)
        assert read_file(path, ReadOptions(drop=("odd",)))[""].inputs.tolist() == [[1]]
    (tmp_path / "t.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"t\.parquet: "):
        read_file(tmp_path / "t.parquet")


# --- cost


def test_memory_stays_bounded(tmp_path):
    rows = 80_000
    line = "1.5,2,3,4,5,6,7,8,9,10,0\n"
    (tmp_path / "t.csv").write_text(",".join("abcdefghij") + ",label\n" + line * rows)
    tracemalloc.start()
    try:
        raw = read_file(tmp_path / "t.csv")[""]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raw.inputs.shape == (rows, 10)
    # 3.2 MB of float32, twice while blocks are joined, and one block of cells; all cells as texts would be 45 MB
    assert peak < 16e6


def test_reading_imports_neither_torch_nor_pandas_nor_pyarrow():
    code = "import sys, sparrow.reading; print({'torch', 'pandas', 'pyarrow', 'onnx'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
