"""Devices judge what they keep, for which nothing goes down; a sample of them judges the global model, seldom."""

from __future__ import annotations

import pytest

from .sessions import CoordinatorWithDevices


@pytest.fixture
def coordinator(tmp_path, clock):
    coordinator = CoordinatorWithDevices(tmp_path, clock)
    yield coordinator
    coordinator.close()


def evaluations(worked):
    """Round and whether the global model came along, of each evaluation that one device was asked for."""
    return [(each.round, each.payload is not None) for each in worked if each.kind.value == "evaluate"]


def play(coordinator, names, method, **settings):
    coordinator.create(method, min_devices=len(names), local_steps=1, **{"local_epochs": 1, **settings})
    return dict(
        zip(names, map(evaluations, coordinator.play(*(coordinator.open_device(name) for name in names))), strict=True)
    )


def test_a_personal_model_is_judged_alone_and_the_global_one_at_the_end(coordinator):
    found = play(coordinator, "ab", "fedspu", rounds=4, evaluation_interval=2)
    assert found == {name: [(2, False), (4, True)] for name in "ab"}, "the fourth is the last: once, not twice"


@pytest.mark.integration
def test_the_global_model_is_judged_by_few_and_in_between_where_asked_for(coordinator):
    found = play(
        coordinator,
        "abcd",
        "fedspu",
        rounds=5,
        evaluation_interval=2,
        global_evaluation_interval=3,
        global_evaluation_devices=1,
    )
    assert {number for asked in found.values() for number, _ in asked} == {2, 3, 4, 5}
    assert all([number for number, _ in asked] == [2, 3, 4, 5] for asked in found.values())
    judges = {number: [name for name, asked in found.items() if (number, True) in asked] for number in (2, 3, 4, 5)}
    assert [len(judges[number]) for number in (2, 3, 4, 5)] == [0, 1, 0, 4], "everybody may mix it in at the end"


def test_few_devices_evaluate_a_finished_model_without_mixtures(coordinator):
    settings = {"rounds": 2, "evaluation_interval": 0, "global_evaluation_devices": 1}
    found = play(coordinator, "abc", "fedspu", personal_model="last", **settings)
    assert sorted(found.values()) == [[(2, False)], [(2, False)], [(2, True)]]


def test_where_nobody_keeps_a_model_only_the_sample_is_asked(coordinator):
    found = play(coordinator, "abc", "fedavg", rounds=4, evaluation_interval=2, global_evaluation_devices=2)
    for number in (2, 4):
        assert sum((number, True) in asked for asked in found.values()) == 2
    assert not any(payload is False for asked in found.values() for _, payload in asked)


def test_a_device_that_keeps_no_model_yet_has_nothing_to_judge(coordinator):
    settings = {"global_evaluation_devices": 0, "personal_model": "last"}
    coordinator.create("fedspu", rounds=1, cohort=1, min_devices=2, local_steps=1, **settings)
    worked = coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    asked = [evaluations(each) for each in worked]
    trained = [any(each.kind.value == "train" for each in work) for work in worked]
    assert sorted(zip(trained, asked, strict=True)) == [(False, []), (True, [(1, False)])]


def test_everything_that_devices_move_is_in_the_records(coordinator):
    play(coordinator, "ab", "fedspu", rounds=2)
    coordinator.costs.write()
    for name in "ab":
        told = coordinator.device(name).everything
        assert told.bytes_down > 0
        assert told.bytes_up > 0
