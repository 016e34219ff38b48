"""Devices choose among models by what all of them have found, and by their own samples as far as these tell."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from sparrow.protocol.evidence import CANDIDATES, GLOBAL, LARGEST_GAIN, TOLD, Evidence, Pool, choice, pool_of

COUNT = len(CANDIDATES)


def told(chance, gains, parts=6, noise=1.0):
    """What a device tells whose candidates gain so much in truth, each part with noise of its own."""
    found = np.asarray(gains)[:, None] + noise * chance.normal(size=(COUNT, parts))
    shared = np.full(parts, 5.0)
    return Evidence.of({GLOBAL: shared, **{name: shared - gain for name, gain in zip(CANDIDATES, found, strict=True)}})


def fleet(devices=40, between=0.0, mean=(0.2, 0.1, -0.1, -0.3), parts=6, noise=0.7, seed=0):
    chance = np.random.default_rng(seed)
    truth = np.asarray(mean) + between * chance.normal(size=(devices, COUNT))
    return truth, [told(chance, gains, parts, noise) for gains in truth]


def worth(truth, names):
    """What devices have gained in the mean."""
    with_global = np.concatenate([truth, np.zeros((len(truth), 1))], axis=1)
    return np.mean([row[[*CANDIDATES, GLOBAL].index(name)] for row, name in zip(with_global, names, strict=True)])


def test_devices_that_do_not_differ_take_what_is_best_for_all():
    _, found = fleet(parts=6, noise=0.1)
    pool = pool_of(found)
    assert {choice(pool, each) for each in found} == {"personal"}
    np.testing.assert_allclose(pool.mean, (0.2, 0.1, -0.1, -0.3), atol=0.05)
    assert np.abs(pool.between).max() < 0.01


def test_nobody_departs_from_the_global_model_where_everything_else_is_worse():
    _, found = fleet(mean=(-0.4, -0.3, -0.5, -0.9), noise=1.0)
    alone = [choice(None, each) for each in found]
    assert {choice(pool_of(found), each) for each in found} == {GLOBAL}
    assert set(alone) <= {GLOBAL, *CANDIDATES}


def test_devices_that_differ_take_their_own():
    truth, found = fleet(between=0.4, mean=(0, 0, 0, 0), parts=40, noise=0.1)
    best = [[*CANDIDATES, GLOBAL][int(np.argmax([*row, 0]))] for row in truth]
    pool = pool_of(found)
    assert np.mean([choice(pool, each) == name for each, name in zip(found, best, strict=True)]) > 0.9


@pytest.mark.parametrize("between", [0.0, 0.1, 0.3, 1.0])
def test_the_choice_matches_the_better_of_own_and_pooled(between):
    """Over 20 fleets: what the choice gains, beside that by own samples alone and that of all alike."""
    gained = {"both": [], "own": [], "pooled": [], "oracle": []}
    for seed in range(20):
        truth, found = fleet(between=between, seed=seed, noise=1.0)
        pool = pool_of(found)
        everybody = choice(pool, None)
        own = [[*CANDIDATES, GLOBAL][int(np.argmax([*each.gains, 0]))] for each in found]
        gained["both"].append(worth(truth, [choice(pool, each) for each in found]))
        gained["own"].append(worth(truth, own))
        gained["pooled"].append(worth(truth, [everybody] * len(found)))
        gained["oracle"].append(np.mean(np.maximum(truth.max(axis=1), 0)))
    means = {name: np.mean(values) for name, values in gained.items()}
    # Departing with evidence alone costs a little where devices differ much and their own samples would do.
    assert means["both"] >= max(means["own"], means["pooled"]) - 0.02 - 0.03 * between
    assert means["both"] <= means["oracle"]


def test_a_pool_goes_through_a_plan_and_nothing_else_is_one():
    _, found = fleet(between=0.5)
    pool = pool_of(found)
    plan = {"finished": True, **pool.as_plan()}
    again = Pool.from_plan(plan)
    for each in found:
        for one, other in zip(again.expected(each), pool.expected(each), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    name = next(name for name in plan if name.startswith("pool between"))
    for wrong in ({}, {name: "1"}, {name: float("nan")}, {name: 1e9}):
        assert Pool.from_plan({**plan, **wrong} if wrong else {"finished": True}) is None
    odd = Pool.from_plan({**plan, **{key: -5.0 for key in plan if key.startswith("pool within")}})
    assert all(np.isfinite(each).all() for each in odd.expected(found[0])), "no covariance, but no harm"


def test_too_few_devices_make_no_pool_and_then_a_model_must_be_clearly_better():
    _, found = fleet(devices=2)
    assert pool_of(found) is None
    assert pool_of([]) is None
    chance = np.random.default_rng(1)
    assert choice(None, told(chance, (1, 0, 0, 0), noise=0.1)) == "personal"
    assert choice(None, told(chance, (0.1, 0.1, 0.1, 0.1), noise=3.0)) == GLOBAL
    assert choice(None, None) == GLOBAL


def test_a_candidate_that_a_device_has_not_is_not_taken():
    _, found = fleet(mean=(0.1, 0.1, 0.1, 1.0), noise=0.1)
    pool = pool_of(found)
    assert choice(pool, found[0]) == "alone"
    assert choice(pool, found[0], {GLOBAL: None, "personal": None}) in (GLOBAL, "personal")


def test_no_sample_and_no_device_moves_the_pool_further_than_the_largest_gain():
    wild = Evidence.of({GLOBAL: [0, 0, 0], **{name: [-1e30, 5.0, 1e30] for name in CANDIDATES}})
    assert all(abs(gain) <= LARGEST_GAIN for gain in wild.gains)
    assert all(abs(number) <= TOLD[name] + 1e-9 for name, number in wild.told().items())
    assert Evidence.of({GLOBAL: [1.0], **{name: [1.0] for name in CANDIDATES}}) is None, "one part has no spread"
    sound = wild.model_dump()
    for wrong in ({"gains": (4.0, 0, 0, 0)}, {"within": (99.0,) * 10}, {"parts": 1}, {"gains": (0.0,)}):
        with pytest.raises(ValidationError):
            Evidence.model_validate({**sound, **wrong})
