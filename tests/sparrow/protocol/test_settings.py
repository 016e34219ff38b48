"""Settings of a federation: bounds, groups that check themselves, and what holds between groups."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from pydantic import ValidationError

from sparrow.protocol.settings import GROUPS, FederationSettings, Robustness, SecureSums, Training


def test_defaults_are_valid_and_survive_json():
    settings = FederationSettings()
    assert FederationSettings.model_validate_json(settings.model_dump_json()) == settings
    assert FederationSettings.model_validate(json.loads(json.dumps(settings.model_dump(mode="json")))) == settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", 0),
        ("cohort", 0),
        ("min_devices", 0),
        ("quorum", 0),
        ("quorum", 1.01),
        ("quorum", math.nan),
        ("deadline_seconds", 0),
        ("deadline_seconds", math.inf),
        ("learning_rate", 0),
        ("learning_rate", -0.1),
        ("learning_rate", math.nan),
        ("learning_rate_decay", 1.1),
        ("momentum", 1),
        ("weight_decay", -1),
        ("batch_size", 0),
        ("local_epochs", 0),
        ("local_steps", 0),
        ("clip", 0),
        ("clip", math.inf),
        ("patience", 0),
        ("min_improvement", -1),
        ("min_improvement", math.inf),
        ("stop_weight", 1.5),
        ("evaluation_interval", -1),
        ("optimizer", "sdg"),
        ("precision", "fp8"),
        ("seed", -1),
        ("seed", 2**63),
        ("rounds", "many"),
    ],
)
def test_settings_have_bounds_and_name_the_field(field, value):
    with pytest.raises(ValidationError) as refused:
        FederationSettings(**{field: value})
    assert refused.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize(
    ("field", "value"),
    [("quorum", 1), ("momentum", 0.99), ("stop_weight", 0), ("stop_weight", 1), ("clip", 1e-6), ("local_steps", 1)],
)
def test_bounds_include_what_is_allowed(field, value):
    assert getattr(FederationSettings(**{field: value}), field) == value


def test_momentum_belongs_to_sgd():
    assert FederationSettings(momentum=0.9).momentum == 0.9
    with pytest.raises(ValidationError, match=r"\bmomentum\b.*\bsgd\b.*\badam\b"):
        FederationSettings(momentum=0.9, optimizer="adam")


def test_a_relative_clip_that_shortens_every_round_is_refused():
    assert FederationSettings(relative_clip=0).relative_clip == 0
    for share in (0.5, 1):
        with pytest.raises(ValidationError, match=r"\b1, or 0\b"):
            FederationSettings(relative_clip=share)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        FederationSettings().rounds = 3


def test_the_learning_rate_decays_from_the_second_round_on():
    settings = FederationSettings(learning_rate=0.1, learning_rate_decay=0.5)
    assert [settings.learning_rate_of(number) for number in (1, 2, 3)] == [0.1, 0.05, 0.025]
    assert FederationSettings(learning_rate=0.1).learning_rate_of(1000) == 0.1


def test_every_setting_belongs_to_one_group():
    counts = Counter(name for group in GROUPS for name in group.model_fields)
    assert counts.keys() == FederationSettings.model_fields.keys()
    assert set(counts.values()) == {1}
    assert list(counts) == list(FederationSettings.model_fields), "in the same order"


@pytest.mark.parametrize(
    ("group", "given", "said"),
    [
        (Training, {"optimizer": "adam", "momentum": 0.9}, "momentum belongs to the optimizer sgd"),
        (Robustness, {"relative_clip": 0.5}, "would shrink updates from round to round"),
        (SecureSums, {"secure_metrics": True}, "set secure as well"),
    ],
)
def test_a_group_checks_itself_and_all_settings_check_their_groups(group, given, said):
    for kind in (group, FederationSettings):
        with pytest.raises(ValidationError, match=said):
            kind(**given)


def test_all_settings_serve_where_those_of_a_group_are_wanted():
    settings = FederationSettings(learning_rate=0.5, secure=True)
    assert all(isinstance(settings, group) for group in GROUPS)
    assert Training.learning_rate_of(settings, 1) == 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_updates": 3, "cohort": 2}, "min_updates: 3 is more than cohort, 2"),
        ({"buffer": 3, "cohort": 2}, "set a smaller buffer or a larger cohort"),
        ({"buffer": 2, "quorum": 0.5}, "a round closes when the buffer is full"),
        ({"logit_adjustment_from": 0.1, "noise_multiplier": 1.0}, "which conflicts with noise_multiplier"),
    ],
)
def test_what_holds_between_groups_is_checked_of_all_settings(given, said):
    with pytest.raises(ValidationError, match=said):
        FederationSettings(**given)
