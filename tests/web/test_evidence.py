"""A page chooses its model at the end, and tells of its labels, as the SDK does."""

from __future__ import annotations

import numpy as np
import pytest

from sparrow.protocol.evidence import CANDIDATES, GLOBAL, Evidence, choice, pool_of
from sparrow.protocol.skew import LabelSketch

pytestmark = pytest.mark.integration


def fleet(seed, devices=12, parts=6):
    """Gains [candidates, parts] of each device."""
    chance = np.random.default_rng(seed)
    truth = chance.normal(0, 0.3, (devices, len(CANDIDATES), 1))
    return np.clip(truth + chance.normal(0, 0.6, (devices, len(CANDIDATES), parts)), -1, 1)


def evidence(gains):
    shared = np.zeros(gains.shape[1])
    return Evidence.of({GLOBAL: shared, **{name: -gain for name, gain in zip(CANDIDATES, gains, strict=True)}})


def test_a_page_reports_and_chooses_as_the_sdk(modules):
    fleets = [fleet(seed) for seed in range(5)]
    pools = [pool_of(map(evidence, each)) for each in fleets]
    found = modules(
        """({ momentsOf, poolOf, choice, CANDIDATES }, fleets) => fleets.map(({ gains, plan }) => gains.map((each) => {
          const told = momentsOf(each), there = new Map(CANDIDATES.map((name) => [name, 1]));
          return { told, taken: choice(poolOf(plan), told, there), alone: choice(poolOf({}), told, there) };
        }))""",
        module="evidence.js",
        argument=[{"gains": gains.tolist(), "plan": pool.as_plan()} for gains, pool in zip(fleets, pools, strict=True)],
    )
    for gains, pool, of_page in zip(fleets, pools, found, strict=True):
        for each, page in zip(gains, of_page, strict=True):
            ours, theirs = evidence(each), Evidence.model_validate(page["told"])
            assert theirs.parts == ours.parts
            np.testing.assert_allclose(theirs.gains, ours.gains, atol=1e-9)
            np.testing.assert_allclose(theirs.within, ours.within, atol=1e-9)
            assert page["taken"] == choice(pool, ours)
            assert page["alone"] == choice(None, ours)
    assert len({page["taken"] for of_page in found for page in of_page}) > 2, "not all alike"


def test_a_page_tells_the_same_of_its_labels(modules):
    chance = np.random.default_rng(0)
    counts = [chance.integers(0, 20, classes).tolist() for classes in (2, 10, 62)]
    found = modules("({ sketchOf }, counts) => counts.map(sketchOf)", module="prior.js", argument=[*counts, [1, 0]])
    for each, page in zip(counts, found, strict=False):
        np.testing.assert_allclose(page["sketch"], LabelSketch.of(each).sketch, atol=1e-12)
        assert page["samples"] == sum(each)
    assert found[-1] is None
