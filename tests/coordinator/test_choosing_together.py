"""At the end devices choose their models together, and outputs are adjusted where labels differ: with real devices."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.device import result as results
from edge_sdk.methods import DeviceState
from edge_sdk.methods.alone import alone_of
from sparrow.protocol.evidence import CANDIDATES, GLOBAL, Pool
from sparrow.protocol.messages import Kind

from .sessions import CoordinatorWithDevices

FLEET = {"personal_model": "fleet", "finetune_epochs": 1, "rounds": 2, "local_steps": 2}


@pytest.fixture
def coordinator(tmp_path, clock):
    coordinator = CoordinatorWithDevices(tmp_path, clock)
    yield coordinator
    coordinator.close()


def play(coordinator, names="abcd", method="fedspu", **settings):
    coordinator.create(method, min_devices=len(names), cohort=len(names), **{**FLEET, **settings})
    sessions = [coordinator.open_device(name) for name in names]
    return sessions, coordinator.play(*sessions)


def last(work):
    return [each for each in work if each.round == 2 and each.kind is not Kind.train]


def test_devices_compare_first_and_are_then_told_what_all_have_found(coordinator):
    sessions, worked = play(coordinator)
    for work in worked:
        compared, judged = last(work)
        assert (compared.kind, judged.kind) == (Kind.compare, Kind.evaluate)
        assert compared.payload is not None
        assert Pool.from_plan(compared.plan) is None
        pool = Pool.from_plan(judged.plan)
        assert pool.devices == 4
        told = [receipt.evidence["gains"] for receipt in coordinator.receipts("compare")]
        np.testing.assert_allclose(pool.mean, np.mean(told, axis=0), rtol=1e-6)
    assert {session.progress.best.taken for session in sessions} <= {GLOBAL, *CANDIDATES}
    assert coordinator.info().status.value == "finished"


def test_what_is_judged_is_what_the_device_keeps(coordinator):
    sessions, _ = play(coordinator)
    reported = sorted(receipt.personal["accuracy"] for receipt in coordinator.receipts())
    assert sorted(session.evaluate(dict(session.best)).accuracy for session in sessions) == reported


def test_reports_name_what_is_usual_and_have_every_candidate_on_test_data(coordinator):
    sessions, _ = play(coordinator, method_settings={"alone": True})
    reports = coordinator.receipts()
    assert len({report.usual for report in reports}) == 1
    for report in reports:
        assert report.others.keys() == {GLOBAL, *CANDIDATES}
        assert report.others[report.taken]["accuracy"] == report.personal["accuracy"]
    assert {report.taken for report in reports} == {session.progress.best.taken for session in sessions}


def test_two_devices_are_too_few_to_tell_each_other(coordinator):
    sessions, worked = play(coordinator, "ab")
    assert [Pool.from_plan(last(work)[1].plan) for work in worked] == [None, None]
    assert all(session.progress.best.taken for session in sessions)


def test_a_device_that_comes_too_late_to_compare_chooses_by_the_others(coordinator):
    coordinator.create("fedspu", min_devices=4, cohort=4, **FLEET)
    sessions = [coordinator.open_device(name) for name in "abcd"]
    away, there = sessions[0], sessions[1:]
    while coordinator.info().round < 2:
        coordinator.rounds.advance()
        for session in sessions:
            session.step()
    coordinator.play(*there)
    assert coordinator.info().status.value == "running", "it is waited for"
    coordinator.clock.now += 10_000
    coordinator.play(*there)
    assert coordinator.info().status.value == "finished"
    assert {session.progress.best.taken for session in there} <= {GLOBAL, *CANDIDATES}
    assert away.progress.best.taken == ""


def test_methods_that_mix_nothing_and_other_choices_compare_nothing(coordinator):
    _, worked = play(coordinator, "abc", "fedavg", personal_model="fleet")
    assert not any(each.kind is Kind.compare for work in worked for each in work)


def test_a_local_only_model_is_not_sent_and_doubles_the_cost(coordinator):
    sessions, _ = play(coordinator, "abc", method_settings={"alone": True})
    for session in sessions:
        alone = alone_of(DeviceState(own=session.folder.own))
        assert alone.keys() == session.personal.keys()
        assert any((alone[name] != session.personal[name]).any() for name in alone)
    assert {report.steps for report in coordinator.receipts("train")} == {4}
    assert coordinator.receipts("compare")[0].evidence["gains"][CANDIDATES.index("alone")] != 0


@pytest.mark.parametrize(("least", "adjusts"), [(0.001, True), (0.999, False)])
def test_outputs_are_adjusted_from_a_label_skew_on_which_the_first_round_tells(coordinator, least, adjusts):
    settings = {"logit_adjustment": 1.0, "logit_adjustment_from": least, "rounds": 3}
    _, worked = play(coordinator, **settings)
    for work in worked:
        told = {each.round: each.plan.get("adjusts_logits") for each in work if each.kind is Kind.train}
        assert told == {1: None, 2: adjusts, 3: adjusts}
        assert {each.plan.get("adjusts_logits") for each in work if each.round == 3} == {adjusts}
    reports = coordinator.receipts("train")
    assert [report.labels is not None for report in reports].count(True) == 4, "in the first round alone"


def test_labels_are_reported_only_if_needed(coordinator):
    play(coordinator, logit_adjustment=1.0)
    assert {report.labels for report in coordinator.receipts("train")} == {None}


def test_what_the_federation_brings_a_device_is_known_after_each_evaluation(coordinator):
    """It is on the page, and in the device's own result, which needs no coordinator for it."""
    names = "abc"
    settings = {"method_settings": {"alone": True}, "evaluation_interval": 1, "local_steps": 1}
    coordinator.create("fedspu", min_devices=3, cohort=3, **{**FLEET, **settings})
    sessions = [coordinator.open_device(name) for name in names]
    while coordinator.info().round < 2:
        coordinator.rounds.advance()
        for session in sessions:
            session.step()
    first = [receipt.others["alone"]["accuracy"] for receipt in coordinator.receipts() if receipt.others]
    assert len(first) == 3, "of the first round, before devices compare candidates"
    coordinator.play(*sessions)
    listed = {device.name: device for device in coordinator.device_lists.list("f")[0]}
    for name, session in zip(names, sessions, strict=True):
        result = results.result_of(session, name, None, False, None)
        assert result.accuracy_alone == listed[name].accuracy_alone
        assert listed[name].gain == result.gain == listed[name].accuracy - listed[name].accuracy_alone
        assert f"{100 * result.gain:+.1f} points" in results.report(result, "none")
