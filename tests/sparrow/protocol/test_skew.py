"""The label skew of devices, from eight numbers of each."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from sparrow.protocol.skew import TOLD, VECTORS, LabelSketch, skew, skew_of


def sketches(concentration, *, devices=50, samples=60, classes=10, seed=0):
    chance = np.random.default_rng(seed)
    shares = chance.dirichlet([concentration] * classes, devices)
    return [LabelSketch.of(chance.multinomial(samples, share)) for share in shares]


@pytest.mark.parametrize("classes", [2, 10, 62])
@pytest.mark.parametrize("concentration", [0.1, 0.5, 2.0])
def test_it_is_the_intraclass_correlation_of_a_dirichlet_partition(concentration, classes):
    found = [skew_of(sketches(concentration, classes=classes, seed=seed)) for seed in range(10)]
    assert np.mean(found) == pytest.approx(1 / (1 + concentration * classes), abs=0.03)


@pytest.mark.parametrize("samples", [8, 40, 400])
def test_chance_alone_is_no_skew_however_unequal_the_classes_are(samples):
    chance = np.random.default_rng(0)
    share = [0.6, 0.2, 0.1, 0.05, 0.05]
    found = [skew_of(LabelSketch.of(chance.multinomial(samples, share)) for _ in range(10)) for _ in range(20)]
    assert np.mean(found) < 0.02
    assert max(found) < 0.12 if samples == 8 else max(found) < 0.06


def test_one_class_on_each_device_is_all_the_skew_that_there_is():
    assert skew_of(LabelSketch.of(20 * np.eye(10, dtype=int)[label]) for label in range(10)) == pytest.approx(
        1, abs=0.02
    )


def test_one_device_is_no_fleet_and_one_sample_tells_nothing():
    assert skew_of(sketches(1.0, devices=1)) is None
    assert skew_of([]) is None
    assert skew(5, {"label 0": 0.0}) is None
    assert LabelSketch.of([0, 1, 0]) is None


def test_what_is_told_has_bounds():
    told = LabelSketch.of([5, 1, 0]).told()
    assert told.keys() == TOLD.keys()
    assert all(abs(number) <= TOLD[name] for name, number in told.items())
    for wrong in ({"sketch": (2.0,) * VECTORS}, {"sketch": (0.0,)}, {"samples": 1}):
        with pytest.raises(ValidationError):
            LabelSketch.model_validate({"sketch": (0.0,) * VECTORS, "samples": 5, **wrong})
