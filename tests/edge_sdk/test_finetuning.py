"""What fine-tuning may not change stays bit for bit, whatever the optimiser."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_sdk.engines.training import Part
from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.rounds import fine_tune
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import build_seeded
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors
from sparrow.protocol.masks import NeuronDraw, block_of, draw_neurons
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings

OPTIMISERS = [
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "weight_decay": 0.1, "clip": 0.5},
    {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1},
]
each_optimiser = pytest.mark.parametrize(
    "settings", OPTIMISERS, ids=lambda settings: "-".join(map(str, settings.values()))
)


@pytest.fixture
def digits():
    """(model, manifest, task): four weights in five are zero, half of these with a minus sign."""
    model = build_seeded(DigitsNet, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand(parameter.shape, generator=generator) < 0.2)
    arrays = Arrays(torch.rand(40, 1, 8, 8, generator=generator), torch.arange(40) % 10)
    task = classification("digits", model, arrays, arrays, None, batch_size=8)
    return model, describe(model, torch.zeros(1, 1, 8, 8), task="digits"), task


def tune(digits, *, epochs=2, mask=None, keep_zeros=False, **settings):
    model, manifest, task = digits
    elements = {
        name: each.detach().numpy() != 0 for name, each in model.named_parameters() if each.dim() > 1 and keep_zeros
    }
    settings = FederationSettings(finetune_epochs=epochs, learning_rate=0.05, **settings)
    assignment = Assignment(assignment_id="a", kind="adapt", round=1, deadline_seconds=60, settings=settings)
    job = Job(assignment, manifest, task, TorchEngine(task, manifest), DeviceState(), None)
    return fine_tune(job, Part(mask, elements))


def bits(tensor):
    return np.ascontiguousarray(tensor).view(np.uint32)


@each_optimiser
def test_zeros_stay_and_everything_else_moves(digits, settings):
    model, manifest, _ = digits
    before = get_tensors(model, manifest)
    tune(digits, keep_zeros=True, **settings)
    after = get_tensors(model, manifest)
    assert sum((tensor == 0).sum() for tensor in before.values()) > 1000
    for spec in manifest.tensors:
        if not spec.trainable:
            continue
        zero = before[spec.name] == 0
        if len(spec.shape) > 1:
            assert np.signbit(before[spec.name][zero]).any(), "-0.0 counts as zero, too"
            np.testing.assert_array_equal(bits(after[spec.name][zero]), bits(before[spec.name][zero]))
            assert (after[spec.name][~zero] != before[spec.name][~zero]).mean() > 0.5
        elif not spec.name.startswith("conv"):  # a norm behind it takes a convolution's bias out again: no gradient
            assert (after[spec.name] != before[spec.name]).any(), "biases and norms are not pruned: a zero may move"


@each_optimiser
def test_without_being_asked_zeros_move(digits, settings):
    model, manifest, _ = digits
    zero = get_tensors(model, manifest)["fc1.weight"] == 0
    tune(digits, **settings)
    assert get_tensors(model, manifest)["fc1.weight"][zero].any()


@each_optimiser
def test_zeros_and_frozen_neurons_together(digits, settings):
    model, manifest, _ = digits
    mask = draw_neurons(manifest, NeuronDraw("pi", 0.5))
    before = get_tensors(model, manifest)
    tune(digits, mask=mask, keep_zeros=True, **settings)
    after = get_tensors(model, manifest)
    for spec in manifest.tensors:
        if not spec.trainable:
            continue
        may_move = np.zeros(spec.shape, dtype=bool)
        block = block_of(manifest, spec, mask)
        block.put(may_move, np.ones(block.shape, dtype=bool))
        if len(spec.shape) > 1:
            may_move &= before[spec.name] != 0
        np.testing.assert_array_equal(bits(after[spec.name][~may_move]), bits(before[spec.name][~may_move]))
        assert (after[spec.name][may_move] != before[spec.name][may_move]).any()


def test_epochs_are_those_asked_for_or_a_rounds(digits):
    assert tune(digits, epochs=3, local_steps=2).steps == 15
    assert tune(digits, epochs=0, local_steps=2).steps == 2
    assert tune(digits, epochs=0, local_epochs=4).steps == 20
