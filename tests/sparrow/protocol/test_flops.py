"""FLOPs from a manifest, against PyTorch's own counter of what a model really computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk.publishing.coupling import describe
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask, everything
from sparrow.protocol.flops import forward_flops, growth_flops, nonzero_flops, training_flops
from sparrow.protocol.masks import NeuronMask, merge_in_place, pack


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, bias=False),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(12 * 2 * 2, 20),
        nn.Linear(20, 5, bias=False),
    ), (3, 18, 18)


def one_dimensional():
    return nn.Sequential(
        nn.Conv1d(6, 10, 5),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Conv1d(10, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(24, 3),
    ), (6, 17)


def linear():
    return nn.Sequential(nn.Linear(9, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)), (9,)


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 16, 3, padding=1, groups=8),
        nn.PReLU(),
        nn.Conv2d(16, 6, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    ), (3, 7, 7)


DIGITS = load_builtin("digits").manifest
MODELS = [convolutions, one_dimensional, linear, depthwise]


def counted(model, inputs, *, backward):
    with FlopCounterMode(display=False) as counter:
        outputs = model(inputs)
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("samples", [1, 4])
def test_the_forward_pass_costs_what_pytorch_counts(make, samples):
    model, shape = make()
    inputs = torch.zeros(samples, *shape)
    manifest = describe(model, inputs, task="t")
    assert samples * forward_flops(manifest) == counted(model.eval(), inputs, backward=False)


@pytest.mark.parametrize("make", MODELS)
def test_training_costs_what_pytorch_counts(make):
    model, shape = make()
    inputs = torch.randn(4, *shape)
    manifest = describe(model, inputs, task="t")
    # PyTorch counts a grouped convolution's weight gradient as if it had one group: here 8 times instead of once.
    excess = 7 * 4 * 2 * 49 * 16 * 9 if make is depthwise else 0
    assert training_flops(manifest, 4) == counted(model.train(), inputs, backward=True) - excess


def test_the_digits_by_hand():
    """Two convolutions 3x3 on 8x8 and 4x4 pixels, 128-64-10."""
    layers = [64 * 16 * 9, 16 * 32 * 16 * 9, 64 * 128, 10 * 64]
    assert forward_flops(DIGITS) == 2 * sum(layers)
    assert training_flops(DIGITS, 5) == 5 * 2 * (3 * sum(layers) - layers[0])
    assert training_flops(DIGITS, 0) == 0


def test_under_a_mask_the_forward_pass_is_that_of_the_narrow_network():
    mask = NeuronMask({group: np.arange(size // 2) for group, size in DIGITS.group_sizes.items()})
    layers = [64 * 8 * 9, 16 * 16 * 8 * 9, 32 * 64, 10 * 32]
    assert forward_flops(DIGITS, mask) == 2 * sum(layers)


def test_skipped_weight_gradients_save_their_third_and_nothing_else():
    mask = NeuronMask({group: np.arange(size // 2) for group, size in DIGITS.group_sizes.items()})
    saved = training_flops(DIGITS, 7) - training_flops(DIGITS, 7, weight_gradients=mask)
    assert saved == 7 * (forward_flops(DIGITS) - forward_flops(DIGITS, mask))


def test_look_ups_and_norms_cost_nothing():
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm((6, 8)), nn.Linear(8, 2))
    tokens = torch.zeros(1, 6, dtype=torch.long)
    assert forward_flops(describe(model, tokens, task="t")) == 2 * 6 * 8 * 2


def test_weights_of_zero_cost_nothing_to_answer_with():
    """A narrow network that is kept whole costs what it costs cut out, a sparse one what exists of it."""
    values = {spec.name: np.ones(spec.shape, np.float32) for spec in DIGITS.tensors}
    assert nonzero_flops(DIGITS, values) == forward_flops(DIGITS)
    narrow = NeuronMask({group: np.arange(size // 3) for group, size in DIGITS.group_sizes.items()})
    for mask in (narrow, half(DIGITS)):
        kept = {spec.name: np.zeros(spec.shape, np.float32) for spec in DIGITS.tensors}
        merge_in_place(DIGITS, kept, pack(DIGITS, values, mask), mask)
        assert nonzero_flops(DIGITS, kept) == forward_flops(DIGITS, mask)


# --- elements ----------------------------------------------------------------------------------------------------


def half(manifest):
    """Every second element of every maskable weight, and one less where they are odd."""
    return ElementMask({spec.name: (np.arange(spec.size) % 2 == 1).reshape(spec.shape) for spec in manifest.maskable})


def test_elements_that_do_not_exist_cost_nothing_forward_and_back():
    mask = half(DIGITS)
    layers = [64 * 16 * 9, 16 * 32 * 16 * 9, 64 * 128, 10 * 64]
    assert forward_flops(DIGITS, mask) == sum(layers), "half of two FLOPs for each"
    assert training_flops(DIGITS, 5, weight_gradients=mask) == 5 * (3 * sum(layers) - layers[0])


@pytest.mark.parametrize("make", MODELS)
def test_with_every_element_it_is_the_whole_network(make):
    model, shape = make()
    manifest = describe(model, torch.zeros(1, *shape), task="t")
    mask = everything(manifest)
    assert forward_flops(manifest, mask) == forward_flops(manifest)
    assert training_flops(manifest, 3, weight_gradients=mask) == training_flops(manifest, 3)
    assert growth_flops(manifest, 3, mask) == training_flops(manifest, 3)


def test_growth_adds_the_gradients_of_whole_weights_to_a_sparse_pass():
    """Forward and input gradients of what exists, weight gradients of everything."""
    mask = half(DIGITS)
    layers = [64 * 16 * 9, 16 * 32 * 16 * 9, 64 * 128, 10 * 64]
    sparse, dense = sum(layers), 2 * sum(layers)
    assert growth_flops(DIGITS, 7, mask) == 7 * (sparse + (sparse - layers[0]) + dense)
    assert growth_flops(DIGITS, 0, mask) == 0


def test_only_what_is_maskable_is_left_out():
    """An embedding behind which a linear layer lies: the mask has one tensor, and the look-up costs nothing."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2))
    manifest = describe(model, torch.zeros(1, 6, dtype=torch.long), task="t")
    mask = half(manifest)
    assert list(mask.exists) == ["1.weight"]
    assert forward_flops(manifest, mask) == 2 * 6 * 8
