"""DM-PFL+: Algorithm 4 on samples worked out by hand, and a rule for one sample at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.methods.adaptive import BaseEntropies, entropy, prefers_personal
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks import load_task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from sparrow.graphs import Graphs
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values

BASE = BaseEntropies(personal=0.2, global_model=0.8)
SAMPLES = [
    ([4, 0, 0], [2, 0, 0], 0.177324, 0.665573, 1, True, 0),
    ([4, 0, 0], [0, 2, 0], 0.177324, 0.665573, 0, False, 1),
    ([1, 0.5, 0], [0, 3, 0], 1.020191, 0.366594, 0.447214, False, 1),
    ([2, 1, 0], [2, 1, 0], 0.832396, 0.832396, 1, False, 0),
    ([3, -3, 0], [-3, 3, 0], 0.207022, 0.207022, -1, False, 1),
    ([0, 0, 0], [1, 0, 0], 1.098612, 0.975328, 0, False, 0),
]


@pytest.mark.parametrize(("personal", "shared", "h_c", "h_g", "alike", "prefers", "chosen"), SAMPLES)
def test_rows_of_the_card(personal, shared, h_c, h_g, alike, prefers, chosen):
    one, other = np.array([personal], np.float32), np.array([shared], np.float32)
    assert entropy(one).item() == pytest.approx(h_c, abs=1e-6)
    assert entropy(other).item() == pytest.approx(h_g, abs=1e-6)
    assert prefers_personal(one, other, BASE).tolist() == [prefers]
    assert (one if prefers else other).argmax().item() == chosen
    assert slow(personal, shared, BASE, "logits") == (prefers, pytest.approx(alike, abs=1e-6))


def test_all_rows_in_one_batch():
    personal, shared = (np.array([row[column] for row in SAMPLES], np.float32) for column in (0, 1))
    assert prefers_personal(personal, shared, BASE).tolist() == [row[5] for row in SAMPLES]


def test_probabilities_instead_of_logits():
    prefers, alike = slow([4, 0, 0], [0, 2, 0], BASE, "probabilities")
    assert (prefers, alike) == (False, pytest.approx(0.153295, abs=1e-6))
    one, other = np.array([[4, 0, 0]], np.float32), np.array([[0, 2, 0]], np.float32)
    assert prefers_personal(one, other, BASE, "probabilities").tolist() == [False]
    left = entropy(one).item() - (1 - alike) * BASE.personal
    right = entropy(other).item() - (1 - alike) * BASE.global_model
    assert (left, right) == (pytest.approx(0.007983, abs=1e-6), pytest.approx(-0.011791, abs=1e-6))


def slow(personal, shared, base, similarity):
    """(whether the personal model is chosen, the similarity) of one sample, in plain floats."""

    def softmax(scores):
        top = max(scores)
        parts = [math.exp(score - top) for score in scores]
        return [part / sum(parts) for part in parts]

    def of(scores):
        return -sum(p * math.log(p) for p in softmax(scores) if p > 0)

    one, other = (personal, shared) if similarity == "logits" else (softmax(personal), softmax(shared))
    norms = [math.sqrt(sum(value * value for value in each)) for each in (one, other)]
    alike = 0.0 if min(norms) < 1e-12 else sum(a * b for a, b in zip(one, other, strict=True)) / math.prod(norms)
    left = of(personal) - (1 - alike) * base.personal
    return left < of(shared) - (1 - alike) * base.global_model, alike


@given(data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_choice_is_that_of_a_rule_for_one_sample(data):
    classes, samples = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 6))
    rows = st.lists(
        st.lists(st.integers(-40, 40).map(lambda value: value / 4), min_size=classes, max_size=classes),
        min_size=samples,
        max_size=samples,
    )
    personal, shared = data.draw(rows), data.draw(rows)
    base = BaseEntropies(*(data.draw(st.integers(0, 8)) / 4 + 0.013 * place for place in (1, 2)))
    similarity = data.draw(st.sampled_from(["logits", "probabilities"]))
    found = prefers_personal(np.array(personal, np.float64), np.array(shared, np.float64), base, similarity).tolist()
    for mine, theirs, chosen in zip(personal, shared, found, strict=True):
        prefers, alike = slow(mine, theirs, base, similarity)
        close = abs(1 - alike) < 1e-9  # nearly equal models, equal but for rounding
        assert chosen == prefers or close


def test_certain_models_have_no_entropy_and_scores_may_be_large():
    scores = np.array([[1e4, 0, -1e4], [0, 0, 0]], np.float32)
    assert entropy(scores).tolist() == pytest.approx([0.0, math.log(3)])


def test_scores_are_those_of_evaluation_and_judged_like_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    arrays = Arrays(torch.randn(21, 4), torch.arange(21) % 3)
    task = classification("t", model, arrays, arrays, None, batch_size=8)
    model.train()
    model[0].eval()
    engine = TorchEngine(task, describe_whole(model, torch.from_numpy(arrays.inputs), task="t"))
    scores, targets = engine.scores(task.held_out)
    assert scores.shape == (21, 3)
    assert [module.training for module in (model, model[0], model[1])] == [True, False, True]
    model.eval()
    np.testing.assert_allclose(scores, model(torch.from_numpy(arrays.inputs)).detach().numpy(), rtol=1e-5, atol=1e-6)
    wanted = engine.evaluate(task.held_out)
    assert wanted.num_examples == 21
    assert (scores.argmax(axis=1) == targets).mean() == pytest.approx(wanted.accuracy)
    assert engine.loss(scores, targets) == pytest.approx(wanted.loss, rel=1e-5)


def test_scores_of_onnx_runtime_are_each_batchs_own():
    task, builtin = load_task("digits", "index=0,of=4", device="d", seed=0, batch_size=8), load_builtin("digits")
    graphs = Graphs(builtin.graphs["step"], builtin.graphs["evaluation"])
    engine = OnnxEngine(Network(builtin.manifest, Sessions(graphs)), classification=True)
    engine.load(initial_values(builtin.manifest, 0))
    scores, targets = engine.scores(task.held_out)
    assert len(np.unique(scores, axis=0)) > len(scores) / 2
    found = engine.evaluate(task.held_out)
    assert (scores.argmax(axis=1) == targets).mean() == pytest.approx(found.accuracy)
    assert engine.loss(scores, targets) == pytest.approx(found.loss, rel=1e-5)
