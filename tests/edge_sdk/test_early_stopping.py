"""The stop rules: the paper's against numbers worked out by hand, the smoothed one by what it promises."""

from __future__ import annotations

import math
from functools import partial

import pytest

from edge_sdk.methods.early_stopping import Rises, Smoothed, gives_way, judge_round, stop_loss
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings


def play(pairs, patience=1):
    """Stop-rule losses and verdicts of one device's successive participations, by the paper's rule."""
    state, losses, verdicts = Rises(), [], []
    for train, validation in pairs:
        loss = stop_loss(train, validation, 0.7)
        state = state.after(loss)
        losses.append(round(loss, 12))
        verdicts.append(state.increases >= patience)
    return losses, verdicts


@pytest.mark.parametrize(
    ("pairs", "losses", "verdicts"),
    [
        pytest.param([(2.0, 2.2), (1.5, 1.9), (1.4, 2.2)], [2.06, 1.62, 1.64], [False, False, True], id="X"),
        pytest.param([(1.0, 1.0), (1.0, 1.0)], [1.0, 1.0], [False, False], id="Y: a tie; the released code stops"),
        pytest.param([(3.0, 3.0)], [3.0], [False], id="Z: nothing to compare with"),
        pytest.param([(1.2, 1.0), (1.0, 1.4), (0.8, 1.6)], [1.14, 1.12, 1.04], [False] * 3, id="W: train dominates"),
    ],
)
def test_v5(pairs, losses, verdicts):
    assert play(pairs) == (losses, verdicts)


def test_patience_counts_rises_in_a_row():
    rising = [(loss, loss) for loss in (1.0, 1.1, 1.2, 1.3)]
    assert play(rising, patience=3)[1] == [False, False, False, True]
    interrupted = [(loss, loss) for loss in (1.0, 1.1, 1.0, 1.1, 1.2)]
    assert play(interrupted, patience=2)[1] == [False, False, False, False, True]


def test_the_papers_comparison_is_with_the_last_loss_not_with_the_best():
    assert play([(loss, loss) for loss in (1.0, 1.5, 1.4)], patience=2)[1] == [False, False, False]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_verdict(loss):
    with pytest.raises(ValueError, match="round has failed"):
        Rises(1.0).after(loss)
    with pytest.raises(ValueError, match="round has failed"):
        Smoothed(1, 1.0, 1.0, 1.0).after(loss, 0.0)


def participations(losses, **settings):
    """The participation, from 1, after which a device with these validation losses stops; None: it does not."""
    settings = FederationSettings(**settings)
    memory = {}
    for number, loss in enumerate(losses, start=1):
        found = judge_round(partial(judged, loss), settings, memory, 0.0)
        memory = found.memory
        if found.stopped:
            return number
    return None


def test_one_rise_stops_nobody_by_default():
    assert participations([1.0, 0.5, 0.6, *(0.5 * 0.95**k for k in range(60))]) is None


def test_a_device_whose_smoothed_loss_falls_no_more_stops_after_patience_participations():
    flat = [1.0, 0.5] + [0.4] * 60
    stopped = participations(flat, min_participations=1, patience=5)
    # Smoothed: 1, then 0.4 + 0.35 / 2^k from the second participation (k = 0) on. The last improvement by 1 % is that
    # of the tenth: 0.40137 below 0.99 times the eighth's 0.40547.
    assert stopped == 10 + 5
    assert participations(flat, min_participations=30, patience=5) == 30
    assert participations(flat, min_participations=1, patience=5, min_improvement=0.2) < stopped


def test_losses_below_zero_improve_too():
    assert participations([-1.0 - k for k in range(40)], min_participations=1, patience=2) is None
    assert participations([-1.0, -2.0] + [-1.5] * 10, min_participations=1, patience=2) == 4


def test_a_device_that_has_not_begun_to_learn_goes_on():
    plateau = [2.08 - 0.001 * number for number in range(60)]
    assert participations(plateau, min_participations=1, patience=3) is None
    assert participations([*plateau, 1.0, *[1.0] * 20], min_participations=1, patience=3) is not None


def test_a_round_is_judged_on_validation_data_where_the_federation_asks_for_it():
    """Losses: 1 in training, 4 in validation."""
    measure = partial(judged, 4.0)
    memory = {"last_loss": 1.8, "increases": 1, "theirs": [1]}
    settings = FederationSettings(early_stopping="paper", stop_weight=0.7, patience=2)
    found = judge_round(measure, settings, memory, 1.0)
    assert (found.validation.loss, found.stop_loss) == (4.0, pytest.approx(0.7 + 0.3 * 4))
    assert found.stopped
    assert found.memory == {"last_loss": found.stop_loss, "increases": 2, "theirs": [1]}
    assert not judge_round(measure, settings, {}, 1.0).stopped, "the first participation never stops"
    off = FederationSettings(early_stopping="off")
    found = judge_round(measure, off, memory, 1.0)
    assert (found.memory, found.validation, found.stop_loss, found.stopped) == (memory, None, None, False)
    assert judge_round(measure, off, memory, 1.0, validate=True).validation.loss == 4.0


def judged(loss, accuracy=None):
    return Evaluation(num_examples=10, loss=loss, accuracy=accuracy)


@pytest.mark.parametrize(
    ("loss", "lowest", "gives"),
    [
        (0.4, 0.4, False),
        (0.5, 0.4, False),
        (0.51, 0.4, True),
        (-1.6, -2.0, False),
        (-1.4, -2.0, True),
        (0.1, 0.0, True),
    ],
)
def test_a_model_with_a_loss_a_quarter_above_the_lowest_is_not_kept(loss, lowest, gives):
    assert gives_way(judged(loss), lowest) == gives
