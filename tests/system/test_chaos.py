"""The small form of ``make chaos`` (``tests.system.chaos``): some of every kind of fault, in every scenario.

``CHAOS_SEED=7 pytest -m integration tests/system/test_chaos.py`` draws others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from .chaos import SCENARIOS, Machines, World, machines, run
from .faults import FAMILIES, KINDS, draw_strikes
from .recompute import Differs, Sent, check_kept, check_same, mean_of

SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("chaos")) as found:
        yield found


def holds(shared: Machines, scenario: str, store: str, strikes: int) -> None:
    row = run(shared, SCENARIOS[scenario], store, seed=SEED, strikes=strikes, families=FAMILIES)
    if row["failed"] is not None:
        # In full: an assertion's message is cut.
        pytest.fail(f"seed {SEED}: {row['failed']}")
    assert row["models"] > 0
    assert row["kills"] > 0


# --- federations -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_one_coordinator_and_five_devices(shared):
    holds(shared, "fedspu", "sqlite", 8)


@pytest.mark.timeout(300)
def test_three_coordinators_on_one_database(shared):
    holds(shared, "three", "postgresql", 6)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scenario", "store"),
    [
        ("fedsgc", "sqlite"),
        ("dmpfl", "postgresql"),
        ("pfedgate", "sqlite"),
        ("buffered", "postgresql"),
        ("quorum", "sqlite"),
        ("fleet", "postgresql"),
    ],
)
def test_methods_deadlines_and_fleets(shared, scenario, store):
    holds(shared, scenario, store, 7)


@pytest.mark.timeout(600)
def test_undisturbed_each_method_does_what_is_its_own(shared):
    """What would go unnoticed if two runs were alike in doing nothing."""
    sparse = shared.peace(SCENARIOS["fedsgc"]).rounds
    assert [each["round"] for each in sparse if each["notes"]["positions_replaced"]] == [2, 4]
    staged = shared.peace(SCENARIOS["dmpfl"]).rounds
    stages = ("masks", "masks", "global", "personal") * 2
    for stage, record in zip(stages, staged, strict=True):
        assert (record["parts_up"] == {}) == (stage == "personal")
        assert ("private" in record["counts"]) == (stage != "global")
        assert ("replaced" in record["counts"]) == (stage == "masks")
    gated = shared.peace(SCENARIOS["pfedgate"]).rounds
    assert gated[-1]["parts_down"]["values"] < gated[0]["parts_down"]["values"]


# --- the harness -------------------------------------------------------------------------------------------------


def world_of(scenario: str, database: str | None) -> World:
    found = SCENARIOS[scenario]
    coordinators = [None] * found.processes
    return SimpleNamespace(scenario=found, coordinators=coordinators, database=database, own_disk=True)  # type: ignore


def test_a_seed_draws_the_same_strikes_again_and_every_kind_comes_up():
    everywhere = set()
    for name, database in (("fedspu", None), ("fedspu", "url"), ("quorum", None), ("three", "url")):
        world = world_of(name, database)
        strikes = draw_strikes(1, 200, world, FAMILIES)
        assert strikes == draw_strikes(1, 200, world, FAMILIES)
        assert strikes != draw_strikes(2, 200, world, FAMILIES)
        assert {each.kind for each in strikes} == {kind.name for kind in KINDS if kind.possible(world)}
        everywhere |= {each.kind for each in strikes}
    assert everywhere == {kind.name for kind in KINDS}


def sent(value: float, flags: tuple[bool, ...], examples: int) -> Sent:
    values = np.where(flags, np.float32(value), np.float32(0))
    return Sent({"w": values}, {"w": np.array(flags)}, examples)


def test_a_mean_is_over_those_who_sent_a_value():
    former = {"w": np.full(3, 7, np.float32)}
    mean = mean_of([sent(1, (True, True, False), 1), sent(4, (True, False, False), 3)], former)
    assert mean.values["w"].tolist() == [3.25, 1, 7]
    assert mean.weights["w"].tolist() == [4, 1, 0]


def test_what_differs_by_more_than_is_said_is_found():
    one = {"w": np.ones(2, np.float32)}
    last_bit = {"w": np.nextafter(one["w"], np.float32(2))}
    assert check_same(one, one, ulps=0) == 0
    assert check_same(one, last_bit, ulps=1) == 2
    with pytest.raises(Differs):
        check_same(one, last_bit, ulps=0)
    mean, held = np.array([3.0, 2.0, 1.0]), np.array([True, True, False])
    check_kept("w", mean, np.array([True, False, False]), held, 1)
    for kept in ([False, True, False], [True, True, False], [False, False, True]):
        with pytest.raises(Differs):
            check_kept("w", mean, np.array(kept), held, 1)
