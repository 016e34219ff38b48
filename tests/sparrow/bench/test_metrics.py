"""A trial's figures against sums done by hand."""

import math

import pytest

from edge_sdk.methods import Evaluated
from sparrow.bench.metrics import (
    Accuracy,
    Point,
    accuracy_of,
    idle,
    own,
    point_after,
    rounds_to,
    shifted,
)
from sparrow.protocol.messages import DeviceReport, Evaluation, Kind, Phase, PhaseSum, Receipt, RoundRecord


def judged(accuracy, examples=1):
    return Evaluation(num_examples=examples, loss=0.5, accuracy=accuracy)


def points(*means):
    made = []
    for number, mean in enumerate(means, start=1):
        accuracy = None if mean is None else Accuracy(1, mean, mean, 0.0, mean)
        made.append(Point(10 * number, accuracy, None, None, None, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0))
    return made


def test_accuracy_is_unweighted_and_weighted_and_knows_its_spread():
    found = accuracy_of([judged(0.5, 10), judged(0.9, 30), judged(None, 1000)])
    assert (found.devices, found.mean, found.weighted) == (2, pytest.approx(0.7), pytest.approx(0.8))
    assert found.std == pytest.approx(0.2)  # of the population


@pytest.mark.parametrize(("devices", "place"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10), (109, 10)])
def test_the_bottom_decile_is_the_floor_of_a_tenth_worst(devices, place):
    accuracies = [index / devices for index in range(devices, 0, -1)]
    assert accuracy_of([judged(each) for each in accuracies]).bottom_decile == pytest.approx(place / devices)


def test_no_accuracy_where_nobody_was_judged():
    assert accuracy_of([]) is None
    assert accuracy_of([judged(None)]) is None


@pytest.mark.parametrize(("share", "number"), [(0.5, 10), (0.8, 20), (0.9, 30), (1.0, 30)])
def test_rounds_to_a_share_of_the_own_best(share, number):
    assert rounds_to(points(0.45, 0.65, 0.8, 0.7), share) == number


def test_rounds_to_where_little_or_nothing_was_judged():
    assert rounds_to(points(None, 0.5, None), 0.8) == 20
    assert rounds_to(points(None, None), 0.8) is None
    assert rounds_to([], 0.8) is None


def test_a_devices_own_model_counts_before_the_global_one():
    assert own(Receipt(personal=judged(0.9), global_model=judged(0.1))).accuracy == 0.9
    assert own(Receipt(global_model=judged(0.1))).accuracy == 0.1
    assert own(Receipt()) is None


def test_other_test_sets_list_each_kind_of_model_separately():
    found = shifted(
        {"shift": 0.2},
        [
            Evaluated(judged(0.9, 10), judged(0.5, 10), others={"adaptive": judged(0.8, 10)}),
            Evaluated(None, judged(0.7, 30)),
            Evaluated(judged(0.5, 10), None),
            Evaluated(None, None),
        ],
    )
    assert found.test_set == {"shift": 0.2}
    assert found.devices == (0.9, 0.7, 0.5, None)
    assert found.devices_global == (0.5, 0.7, None, None)
    assert (found.accuracy.devices, found.accuracy.mean) == (3, pytest.approx(0.7))
    assert found.accuracy.std == pytest.approx(math.sqrt(0.08 / 3)), "of the population"
    assert found.accuracy.weighted == pytest.approx((9 + 21 + 5) / 50)
    assert (found.accuracy_personal.devices, found.accuracy_personal.mean) == (2, pytest.approx(0.7))
    assert (found.accuracy_global.devices, found.accuracy_global.mean) == (2, pytest.approx(0.6))
    other = shifted({}, [Evaluated(judged(0.9, 10), None, others={"adaptive": judged(0.8, 10)})], "adaptive")
    assert (other.devices, other.accuracy_personal.mean) == ((0.8,), 0.9), "another way to predict counts"
    nobody = shifted({}, [Evaluated(None, None)])
    assert (nobody.accuracy, nobody.accuracy_personal, nobody.accuracy_global) == (None, None, None)


def record(number, **changes):
    phase = {"seconds": 2.0, "joules_measured": 1.0, "joules_estimated": 0.5, "seconds_without_joules": 0.25}
    return RoundRecord.model_validate(
        {
            "round": number,
            "status": "closed",
            "cohort": ("a", "b"),
            "updates": 2,
            "stopped": (),
            "handed_back": 0,
            "expired": 0,
            "num_examples": 20,
            "training_flops": 1000,
            "train_loss": 1.0 / number,
            "accuracy_personal": None,
            "accuracy_global": None,
            "loss_personal": None,
            "loss_global": None,
            "evaluated_devices": 2,
            "bytes_down": 30,
            "bytes_up": 10,
            "evaluation_bytes_down": 7,
            "evaluation_bytes_up": 3,
            "download": PhaseSum(**phase),
            "train": PhaseSum(**phase),
            "upload": PhaseSum(**phase),
            "evaluation": PhaseSum(seconds=100.0),
            "opened_at": "",
            "closed_at": "",
            "seconds": 4.0,
            "model_sha256": None,
            **changes,
        }
    )


def test_a_point_sums_the_rounds_so_far_and_judges_the_last():
    def report(device, personal, shared, validation):
        receipt = Receipt(personal=judged(personal), global_model=judged(shared), validation=judged(validation))
        return DeviceReport(device=device, kind=Kind.evaluate, report=receipt, upload=Phase())

    adapted = report("c", 0.0, 0.0, 0.0).model_copy(update={"kind": Kind.adapt})
    records = [record(1, stopped=("a",)), record(2, stopped=("b",), seconds=None), record(3)]
    found = point_after(records, [report("a", 0.9, 0.3, 0.6), report("b", 0.7, 0.1, 0.4), adapted])
    assert found.accuracy.mean == pytest.approx(0.8)
    assert found.accuracy_global.mean == pytest.approx(0.2)
    assert found.accuracy_validation.mean == pytest.approx(0.5)
    assert (found.round, found.stopped, found.train_loss) == (3, 2, pytest.approx(1 / 3))
    assert (found.bytes_up, found.bytes_down, found.training_flops) == (30, 90, 3000)
    assert (found.evaluation_bytes_up, found.evaluation_bytes_down) == (9, 21)
    # Three phases in three rounds; evaluation is not among them.
    assert (found.seconds, found.joules_measured, found.joules_estimated) == (18.0, 9.0, 4.5)
    assert (found.seconds_without_joules, found.wall_seconds) == (2.25, 8.0)


def test_a_point_sums_what_was_counted_and_what_its_own_copies_took():
    def report(name, flops):
        receipt = Receipt(personal=judged(0.5), finetune_flops=flops)
        return DeviceReport(device=name, kind=Kind.evaluate, report=receipt, upload=Phase())

    records = [
        record(1, counts={"replaced": 0, "drawn": 3}, notes={"union": 5}),
        record(2, counts={"replaced": 0, "drawn": 4}, notes={"union": 6, "drawn": 1}),
    ]
    found = point_after(records, [report("a", 70), report("b", 30)])
    assert found.counts == {"replaced": 0, "drawn": 7}, "a count of zero is there"
    assert found.notes == {"union": 11, "drawn": 1}
    assert found.counted == {"replaced": 0, "drawn": 8, "union": 11}
    assert (found.training_flops, found.finetune_flops, found.flops) == (2000, 100, 2100)


def test_a_mechanism_is_idle_if_its_counts_stay_zero():
    records = [record(1, counts={"replaced": 0, "guided": 0}), record(2, counts={"guided": 1}, notes={"positions": 2})]
    assert idle(("guided", "positions"), records) == ()
    assert idle(("replaced", "guided", "never"), records) == ("replaced", "never")
    assert idle((), records) == ()
