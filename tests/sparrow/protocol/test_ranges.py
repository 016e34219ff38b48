"""Ranges of settings: how they are written, what lies within, and what a publication signs by default."""

from __future__ import annotations

import pytest

from edge_sdk.publishing.signing import terms_of
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.ranges import (
    Range,
    binding,
    default_ranges,
    faults,
    least_of,
    read_ranges,
)
from sparrow.protocol.settings import FederationSettings

DIGITS = load_builtin("digits").manifest


def settings(**given):
    return FederationSettings.model_validate(given)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("cohort>=10", {"cohort": 10}, {"cohort": 9}),
        ("learning_rate<=0.1", {"learning_rate": 0.1}, {"learning_rate": 0.2}),
        ("precision=fp32, int8", {"precision": "int8"}, {"precision": "fp16"}),
        ("secure=true", {"secure": True}, {"secure": False}),
        ("clip=none", {}, {"clip": 1.0}),
        ("noise_multiplier>=0.5", {"noise_multiplier": 1.0}, {}),
        ("batch_size>=8", {"batch_size": 8}, {"batch_size": 7}),
        ("method_settings.share=0.5", {"method_settings": {"share": 0.5}}, {"method_settings": {"share": 1}}),
        ("method_settings.on=true", {"method_settings": {"on": True}}, {"method_settings": {"on": 1}}),
    ],
)
def test_a_range_holds_what_lies_within(text, inside, outside):
    ranges = read_ranges([text])
    assert faults(ranges, settings(**inside)) == []
    (said,) = faults(ranges, settings(**outside))
    assert "allowed is" in said


def test_bounds_of_one_setting_come_together():
    ranges = read_ranges(["cohort>=5", "cohort<=20", "cohort>=8"])
    assert ranges["cohort"] == Range(least=8, most=20)
    assert ranges["cohort"].text("cohort") == "cohort>=8 and cohort<=20"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cohort", "is not a range"),
        ("rounds>=5", "rounds has no range"),
        ("cohort>=many", "'many' is not a number"),
        ("cohort>=nan", "finite"),
        ("cohort=many", "many is not a valid value of cohort"),
        ("precision=fp32,int7", "int7 is not a valid value of precision"),
    ],
)
def test_what_is_no_range_is_refused_by_name(text, why):
    with pytest.raises(ProtocolError, match=why):
        read_ranges([text])


def test_an_empty_range_is_refused():
    with pytest.raises(ProtocolError, match="is empty"):
        read_ranges(["cohort>=10", "cohort<=5"])


def test_settings_that_do_not_lie_within_their_own_ranges_are_refused():
    with pytest.raises(ProtocolError, match=r"cohort is 5, allowed is cohort>=10"):
        terms_of("f", DIGITS, settings(cohort=5), graphs={}, weights={}, ranges=read_ranges(["cohort>=10"]))


def test_by_default_settings_stay_or_become_more_private_and_two_devices_federate():
    first = settings(local_epochs=5, batch_size=16, update_clip=2.0, noise_multiplier=1.0, method_settings={"a": 1})
    ranges = default_ranges(first)
    assert faults(ranges, first) == []
    allowed = {
        "cohort": 2,
        "local_epochs": 9,
        "batch_size": 32,
        "update_clip": 1.0,
        "noise_multiplier": 2.0,
        "rounds": 99,
        "secure": True,
    }
    for name, value in allowed.items():
        assert faults(ranges, first.model_copy(update={name: value})) == [], name
    refused = {
        "cohort": 1,
        "local_epochs": 1,
        "batch_size": 1,
        "update_clip": 9.0,
        "noise_multiplier": 0.1,
        "method": "fedsgc",
        "precision": "fp16",
        "learning_rate": 1.0,
        "method_settings": {"a": 2},
        "local_steps": 1,
    }
    for name, value in refused.items():
        assert len(faults(ranges, first.model_copy(update={name: value}))) == 1, name


def test_a_secure_federation_may_not_become_a_plain_one():
    first = settings(secure=True)
    assert binding(first)["secure_metrics"] is True
    ranges = default_ranges(first)
    said = faults(ranges, settings(secure=False))
    assert len(said) == 2
    assert any("secure is false" in each for each in said)


def test_the_least_steps_and_cohort_are_those_of_the_ranges():
    assert (least_of({}, "local_steps"), least_of({}, "cohort")) == (0, 0)
    ranges = read_ranges(["local_steps>=5", "cohort>=10"])
    assert (least_of(ranges, "local_steps"), least_of(ranges, "cohort")) == (5, 10)
    assert faults(ranges, settings()) == []
