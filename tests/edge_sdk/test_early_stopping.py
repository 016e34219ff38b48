"""The stop rule against vector V5 of FedSPU's method card."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks import Task
from edge_sdk.training.early_stopping import StopState, judge, judge_round, stop_loss


def play(pairs, patience=1, min_improvement=0.0):
    """Stop-rule losses and verdicts of one device's successive participations."""
    state, losses, verdicts = StopState(), [], []
    for train, validation in pairs:
        loss = stop_loss(train, validation, 0.7)
        state, stopped = judge(state, loss, patience, min_improvement)
        losses.append(round(loss, 12))
        verdicts.append(stopped)
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


def test_the_comparison_is_with_the_last_loss_not_with_the_best():
    assert play([(loss, loss) for loss in (1.0, 1.5, 1.4)], patience=2)[1] == [False, False, False]


def test_a_fall_below_the_minimum_counts_as_a_rise():
    assert play([(1.0, 1.0), (0.95, 0.95)], min_improvement=0.1)[1] == [False, True]
    assert play([(1.0, 1.0), (0.75, 0.75)], min_improvement=0.25)[1] == [False, False]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_verdict(loss):
    with pytest.raises(ValueError, match="round has failed"):
        judge(StopState(1.0), loss, 1, 0.0)


def test_a_round_is_judged_on_validation_data_where_the_federation_asks_for_it():
    """Losses: 1 in training, (2 - 0)² = 4 in validation."""
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    validation = [(torch.ones(1, 1), torch.full((1, 1), 2.0))]
    task = Task("t", model, F.mse_loss, [], validation, classification=False)
    memory = {"last_loss": 1.8, "increases": 1, "theirs": [1]}
    settings = FederationSettings(stop_weight=0.7, patience=2)
    found = judge_round(model, task, settings, memory, 1.0)
    assert (found.validation_loss, found.stop_loss) == (4.0, pytest.approx(0.7 + 0.3 * 4))
    assert found.stopped
    assert found.memory == {"last_loss": found.stop_loss, "increases": 2, "theirs": [1]}
    assert not judge_round(model, task, settings, {}, 1.0).stopped, "the first participation never stops"
    off = judge_round(model, task, FederationSettings(early_stopping=False), memory, 1.0)
    assert (off.memory, off.validation_loss, off.stop_loss, off.stopped) == (memory, None, None, False)
