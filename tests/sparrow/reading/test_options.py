"""The reading options of ``--data``, and the order of classes."""

from __future__ import annotations

import pytest

from sparrow.reading import ReadOptions, class_order, read_options
from sparrow.reading.errors import BadOption


@pytest.mark.parametrize(
    ("data", "path", "options", "rest"),
    [
        ("t.csv", "t.csv", ReadOptions(), ""),
        ("t.csv,label=walk,index=0,of=5", "t.csv", ReadOptions(label="walk"), "index=0,of=5"),
        ("t.csv,index=0,drop=id+time,of=5", "t.csv", ReadOptions(drop=("id", "time")), "index=0,of=5"),
        ("~/t.csv,alpha=0.1, shift=2", "~/t.csv", ReadOptions(), "alpha=0.1, shift=2"),
        ("index=0,missing=mean", "", ReadOptions(missing="mean"), "index=0"),
        ("t.csv,decimal=comma,delimiter=Tab", "t.csv", ReadOptions(decimal=",", delimiter="\t"), ""),
        ("t.csv,delimiter=space,skip=2", "t.csv", ReadOptions(delimiter=" ", skip=2), ""),
        ("x.npz,axes=nhwc,target=number", "x.npz", ReadOptions(axes="NHWC", target="number"), ""),
        (
            "t.csv,categories=my city+b,encoding=cp1251",
            "t.csv",
            ReadOptions(categories=("my city", "b"), encoding="cp1251"),
            "",
        ),
        ("t.csv,oops", "t.csv", ReadOptions(), "oops"),
    ],
)
def test_options_are_split_from_path_and_dealing(data, path, options, rest):
    assert read_options(data) == (path, options, rest)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("target=classes", ["target", "class", "number"]),
        ("missing=zero", ["missing=zero", "drop", "mean"]),
        ("decimal=,", ["decimal"]),
        ("delimiter=;", ["delimiter=;", "comma", "semicolon", "tab", "pipe", "space"]),
        ("encoding=utf-7000", ["encoding=utf-7000", "cp1252"]),
        ("encoding=base64", ["encoding=base64"]),
        ("axes=HWC", ["axes=HWC", "N", "axes=NHWC"]),
        ("axes=NHH", ["axes=NHH"]),
        ("axes=NXY", ["axes=NXY"]),
        ("skip=one", ["skip=one"]),
        ("skip=-1", ["skip=-1"]),
        ("drop=a++b", ["drop=a++b"]),
        ("label=a,label=b", ["label", "twice"]),
        ("label=a,drop=a", ["drop=a"]),
        ("delimiter=comma,decimal=comma", ["delimiter=comma", "decimal=comma"]),
    ],
)
def test_values_that_cannot_work_are_named_with_the_choices(entry, words):
    with pytest.raises(BadOption) as refused:
        read_options(f"t.csv,{entry}")
    assert all(word in str(refused.value) for word in words), refused.value


def test_options_made_in_python_are_checked():
    with pytest.raises(BadOption, match="delimiter"):
        ReadOptions(delimiter="comma")


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["10", "9", "9", "-1"], ("-1", "9", "10")),
        (["b", "a", "10", "9"], ("10", "9", "a", "b")),
        (["1", "01", "0"], ("0", "01", "1")),
        ([], ()),
    ],
)
def test_classes_are_ordered_by_number_or_name(names, order):
    assert class_order(names) == order
