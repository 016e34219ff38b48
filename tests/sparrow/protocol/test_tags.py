"""Selections of devices by tags."""

import pytest

from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.tags import MOST_KEYS, BadSelection, Selection, check_form, check_tags

ALLOWED = {"board": ("orin", "pi5"), "site": ("lab", "field")}


@pytest.mark.parametrize(
    ("text", "tags", "selected"),
    [
        ("", {}, True),
        ("board=orin", {"board": "orin"}, True),
        ("board=orin", {"board": "pi5"}, False),
        ("board=orin", {}, False),
        ("board!=orin", {"board": "pi5"}, True),
        ("board!=orin", {}, True),
        ("board in (orin, pi5)", {"board": "pi5"}, True),
        ("board in (orin)", {"board": "pi5"}, False),
        ("board in (orin,pi5) and site != lab", {"board": "orin", "site": "field"}, True),
        ("board in(orin,pi5) and site!=lab", {"board": "orin", "site": "lab"}, False),
        ("  board = orin   and site=lab ", {"board": "orin", "site": "lab"}, True),
        ("board=and and site=in", {"board": "and", "site": "in"}, True),
    ],
)
def test_selections_compare_one_value_per_key(text, tags, selected):
    assert Selection.parse(text).matches(tags) is selected


@pytest.mark.parametrize(
    "text",
    [
        "board",
        "board=",
        "=orin",
        "board==orin",
        "board=orin site=lab",
        "board=orin or site=lab",
        "board=orin and",
        "and board=orin",
        "board in orin",
        "board in ()",
        "board in (orin,)",
        "board in (orin",
        "board=orin; drop table devices",
        "board=orin and " * 100 + "site=lab",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(BadSelection):
        Selection.parse(text)


def test_keys_and_values_must_be_listed():
    Selection.parse("board=orin and site in (lab, field)").check(ALLOWED)
    with pytest.raises(BadSelection, match="power"):
        Selection.parse("power=mains").check(ALLOWED)
    with pytest.raises(BadSelection, match="orin, pi5"):
        check_tags({"board": "nano"}, ALLOWED)
    with pytest.raises(BadSelection):
        check_tags({"board": "orin"}, {})


def test_tags_have_short_plain_names():
    check_form({"board": "Orin-NX_16.0"})
    for wrong in ({"Board": "x"}, {"board": ""}, {"board": "a b"}, {f"k{i}": "v" for i in range(MOST_KEYS + 1)}):
        with pytest.raises(BadSelection):
            check_form(wrong)


def test_a_federation_lists_tags_as_text_or_object():
    text = FederationSettings(tags="board=orin,pi5 site=lab,field")
    assert text == FederationSettings(tags=ALLOWED)
    assert text.tags == ALLOWED
    assert FederationSettings(tags=ALLOWED, cohort_where="board=orin").cohort_where == "board=orin"
    too_many = {"board": [f"v{i}" for i in range(51)]}
    for wrong in ("board", "board=a board=b", "Board=a", "board=a,,b", too_many, {"board": []}):
        with pytest.raises(ValueError, match="tags"):
            FederationSettings(tags=wrong)
    for wrong in ("board=nano", "power=mains", "board"):
        with pytest.raises(ValueError, match="cohort_where"):
            FederationSettings(tags=ALLOWED, cohort_where=wrong)
