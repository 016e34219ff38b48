"""Messages check themselves: bounds, misspelt fields, and rules between fields."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from sparrow.protocol import fields
from sparrow.protocol.messages import (
    ChangeDevice,
    ChangeFederation,
    CompareFederation,
    Conditions,
    CreateFederation,
    DeviceProfile,
    Enrol,
    Enrolled,
    Evaluation,
    HandBack,
    Phase,
    Receipt,
    UpdateReport,
    UploadCost,
)
from sparrow.protocol.settings import FederationSettings

REQUESTS = (CreateFederation, CompareFederation, ChangeFederation, Enrol, ChangeDevice, HandBack, UpdateReport, Receipt)
KEY = "k" * 32


@pytest.mark.parametrize("model", [FederationSettings, CreateFederation, Enrol, Phase, UpdateReport, ChangeDevice])
def test_requests_refuse_fields_they_do_not_know(model):
    with pytest.raises(ValidationError, match="learning_rte"):
        model.model_validate({"learning_rte": 0.1})


def test_answers_ignore_fields_they_do_not_know():
    """An old device must live with a newer coordinator."""
    assert Enrolled.model_validate({"device_id": "1", "token": "t", "news": 1}) == Enrolled(device_id="1", token="t")


@pytest.mark.parametrize("name", ["", "a" * 65, "../up", "-first", "a b", "a/b", "a|b", "naïve", "a\n"])
def test_names_are_safe_in_paths_urls_and_draws(name):
    with pytest.raises(ValidationError):
        CreateFederation(name=name)
    with pytest.raises(ValidationError):
        Enrol(name=name, enrolment_key=KEY)


@pytest.mark.parametrize("name", ["a", "Pi-4.kitchen_2", "a" * 64])
def test_usual_names_are_allowed(name):
    assert Enrol(name=name, enrolment_key=KEY).name == name


@pytest.mark.parametrize("budget", [0, -1, 1.1, math.nan, math.inf])
def test_a_budget_is_a_share(budget):
    with pytest.raises(ValidationError):
        Enrol(name="pi", enrolment_key=KEY, budget=budget)
    with pytest.raises(ValidationError):
        ChangeDevice(budget=budget)


def test_an_enrolment_key_cannot_be_guessed():
    with pytest.raises(ValidationError, match="at least 32"):
        Enrol(name="pi", enrolment_key="k" * 31)


def test_profiles_and_reasons_are_bounded():
    for make in (
        lambda: DeviceProfile(board="b" * 201),
        lambda: DeviceProfile(sensors=("s",) * 33),
        lambda: DeviceProfile(sensors=("s" * 301,)),
        lambda: DeviceProfile(memory_bytes=-1),
        lambda: HandBack(reason=""),
        lambda: HandBack(reason="r" * 501),
        lambda: Conditions(reason="r" * 501),
        lambda: ChangeDevice(revoked=False),
    ):
        with pytest.raises(ValidationError):
            make()


def test_joules_are_given_exactly_when_there_is_a_source_for_them():
    assert Phase().joules is None
    assert Phase(joules=1.5, quality="measured", source="ina3221").joules == 1.5
    assert Phase(joules=0, quality="estimated").joules == 0
    for wrong in ({"joules": 1.5}, {"quality": "measured"}, {"joules": 1.5, "quality": "unavailable"}):
        with pytest.raises(ValidationError, match="unless their quality is 'unavailable'"):
            Phase(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1}, {"seconds": math.inf}, {"bytes_up": -1}, {"joules": math.nan, "quality": "measured"}]
)
def test_what_a_phase_cost_is_a_number_from_zero_on(wrong):
    with pytest.raises(ValidationError):
        Phase(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"num_examples": 0}, {"num_examples": 2**41}, {"train_loss": math.nan}, {"status": "tired"}, {"steps": -1}],
)
def test_a_report_that_would_spoil_the_mean_is_refused(wrong):
    fine = {"num_examples": 10, "steps": 1, "train_loss": 0.5}
    UpdateReport(**fine)
    with pytest.raises(ValidationError):
        UpdateReport(**{**fine, **wrong})


def test_json_cannot_smuggle_in_what_is_not_finite():
    with pytest.raises(ValidationError):
        UpdateReport.model_validate_json('{"num_examples": 1, "steps": 1, "train_loss": NaN}')
    with pytest.raises(ValidationError):
        Evaluation.model_validate_json('{"num_examples": 1, "loss": Infinity}')


@pytest.mark.parametrize("accuracy", [-0.1, 1.1, math.nan])
def test_an_accuracy_is_a_share(accuracy):
    assert Evaluation(num_examples=1, loss=0).accuracy is None
    with pytest.raises(ValidationError):
        Evaluation(num_examples=1, loss=0, accuracy=accuracy)


def parts(schema, at=""):
    """Every part of a JSON schema, with where it is."""
    if isinstance(schema, dict):
        yield at, schema
    for key, inner in (
        schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    ):
        yield from parts(inner, f"{at}/{key}")


@pytest.mark.parametrize("model", [*REQUESTS, UploadCost])
def test_every_number_and_text_of_a_request_has_an_end(model):
    for at, part in parts(model.model_json_schema()):
        if part.get("type") in ("integer", "number") and not at.endswith("/anyOf/2"):  # a method's own float
            assert {"maximum", "exclusiveMaximum", "enum"} & set(part), f"{model.__name__}{at}"
        if part.get("type") == "string" and "default" not in at:
            assert {"maxLength", "pattern", "enum", "const"} & set(part), f"{model.__name__}{at}"


def test_what_the_largest_fleet_reports_adds_up_to_a_finite_number():
    devices = rounds = 10**6
    report = UpdateReport(num_examples=2**40, steps=0, train_loss=fields.LARGEST_SCORE)
    assert math.isfinite(report.train_loss * report.num_examples * devices * rounds)
    for most in (fields.MOST_SECONDS, fields.MOST_JOULES, float(fields.MOST_FLOPS)):
        assert math.isfinite(most * devices * rounds * 1e6)
    assert fields.MOST_COUNT * devices < 2**63
    assert 2**40 * devices < 2**63


@pytest.mark.parametrize("value", [1.7e308, -1, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "field", ["seconds", "paused_seconds", "throttled_seconds", "bytes_up", "joules", "celsius_peak"]
)
def test_a_cost_that_no_device_can_have_is_refused(field, value):
    more = {"quality": "measured"} if field == "joules" else {}
    if (field, value) == ("celsius_peak", -1):
        value = -300
    with pytest.raises(ValidationError, match=field):
        Phase.model_validate({field: value, **more})


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x\udfff"])
def test_text_that_cannot_be_stored_is_refused_wherever_it_stands(text):
    report = {"num_examples": 1, "steps": 1, "train_loss": 0.5}
    profile = {"sensors": ["ok", text]}
    for model, value in (
        (HandBack, {"reason": text}),
        (ChangeDevice, {"conditions": {"reason": text}}),
        (DeviceProfile, {"board": text}),
        (Enrol, {"name": "a", "enrolment_key": KEY, "profile": profile}),
        (CreateFederation, {"name": "f", "task": text}),
        (FederationSettings, {"method_settings": {"x": text}}),
        (FederationSettings, {"method_settings": {text: 1}}),
        (UpdateReport, {**report, "counts": {text: 1}}),
        (UpdateReport, {**report, "telemetry": {"train": {"source": text}}}),
    ):
        for read in (model.model_validate, lambda value, model=model: model.model_validate_json(json.dumps(value))):
            with pytest.raises(ValidationError):
                read(value)
