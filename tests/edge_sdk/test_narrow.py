"""Physically narrow networks: they compute what the whole network does whose dropped neurons are zero."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.write_builtin import MODELS as BUILTIN
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.local import get_tensors, set_tensors
from edge_sdk.training.narrow import CannotNarrow, Narrow
from sparrow.protocol.flops import forward_flops
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, merge_in_place, pack
from sparrow.protocol.neurons import first_neurons, narrowed

from .test_tracing import NETS, group_norm

EVERY = {**BUILTIN, **NETS, "norms": (group_norm, (1, 8, 8))}


def zeroed(model, manifest, mask):
    """Let nothing but what is active be other than zero; running statistics are anything."""
    generator = np.random.default_rng(0)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(torch.from_numpy(generator.uniform(0.5, 2, buffer.shape)))
    tensors = get_tensors(model, manifest)
    left = {spec.name: np.zeros_like(tensors[spec.name]) for spec in manifest.kept}
    merge_in_place(manifest, left, pack(manifest, tensors, mask), mask)
    set_tensors(model, left)
    return model


def narrow_of(build, shape, ratio, name="device"):
    model = build()
    x = torch.randn(3, *shape)
    manifest = describe(model, x, task="test")
    mask = draw_neurons(manifest, NeuronDraw(name, ratio))
    return Narrow(zeroed(model, manifest, mask), manifest, mask, [(x, x)]), model, manifest, mask, x


@pytest.mark.integration
@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ratio=st.floats(0.1, 0.9))
def test_a_narrow_network_computes_what_the_whole_does_without_its_dropped_neurons(name, seed, ratio):
    torch.manual_seed(seed)
    narrow, model, manifest, mask, x = narrow_of(*EVERY[name], ratio, str(seed))
    for mode in (False, True):  # in training mode, too: batch statistics, not dropout, which these have none of
        torch.testing.assert_close(narrow.model.train(mode)(x), model.train(mode)(x), rtol=1e-4, atol=1e-5)
    values = sum(tensor.numel() for tensor in narrow.model.parameters())
    running = sum(tensor.numel() for key, tensor in narrow.model.named_buffers() if "running" in key)
    assert values + running == count_values(manifest, mask) == narrow.manifest.shared_values
    assert forward_flops(narrow.manifest) == forward_flops(manifest, mask)


@pytest.mark.parametrize("name", ["digits", "har", "resnet", "depthwise", "norms"])
def test_a_step_of_training_is_that_of_the_whole_network_for_what_is_there(name):
    """Error signals too: the gradients of active values are those that the whole network gives them."""
    narrow, model, manifest, mask, x = narrow_of(*EVERY[name], 0.5)
    for network in (narrow.model, model):
        network.train()
        network(x).square().sum().backward()
    grads = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    whole = {spec.name: grads.get(spec.name, np.zeros(spec.shape, np.float32)) for spec in manifest.shared}
    narrow_grads = {key: parameter.grad.numpy() for key, parameter in narrow.model.named_parameters()}
    part = {spec.name: narrow_grads.get(spec.name, np.zeros(spec.shape, np.float32)) for spec in narrow.manifest.shared}
    np.testing.assert_allclose(pack(narrow.manifest, part, None), pack(manifest, whole, mask), rtol=1e-3, atol=1e-4)


def test_what_it_becomes_is_written_back_where_it_came_from():
    narrow, model, manifest, mask, _ = narrow_of(*BUILTIN["cifar10"], 0.4)
    for tensor in [*narrow.model.parameters(), *narrow.model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_()
    inside = get_tensors(narrow.model, narrow.manifest)
    narrow.write_back()
    tensors = get_tensors(model, manifest)
    np.testing.assert_array_equal(pack(manifest, tensors, mask), pack(narrow.manifest, inside, None))
    zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.kept}
    merge_in_place(manifest, tensors, np.zeros(count_values(manifest, mask), np.float32), mask)
    for spec in manifest.kept:
        np.testing.assert_array_equal(tensors[spec.name], zeros[spec.name], err_msg=spec.name)


def test_the_whole_model_is_left_alone_and_never_copied():
    narrow, model, manifest, _, _ = narrow_of(*BUILTIN["mnist"], 0.3)
    before = copy.deepcopy(model.state_dict())
    for parameter in narrow.model.parameters():
        parameter.data.fill_(9.0)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert narrow.model.fc1.in_features == narrow.model.fc1.weight.shape[1]
    assert model.fc1.in_features == 320
    whole = Narrow(model, manifest, first_neurons(manifest, 1.0), None)
    assert whole.model is model
    whole.write_back()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_frozen_parameter_stays_frozen():
    model = DigitsNet()
    model.conv1.weight.requires_grad_(False)
    manifest = describe(model, torch.randn(2, 1, 8, 8), task="test")
    mask = first_neurons(manifest, 0.5)
    narrow = Narrow(zeroed(model, manifest, mask), manifest, mask, None)
    assert [key for key, parameter in narrow.model.named_parameters() if not parameter.requires_grad] == [
        "conv1.weight"
    ]


class HardCoded(nn.Module):
    """Its code knows how wide it is."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.conv, self.fc, self.out = nn.Conv2d(1, 4, 3), nn.Linear(16, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.conv(x)
        x = x.view(-1, 16) if self.how == "view" else x.view(x.size(0), 16) if self.how == "size" else x.flatten(1)
        x = self.fc(x)
        return self.out(x.softmax(1) if self.how == "softmax" else F.relu(x))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("view", r"(fc fails|it returns \(1, 2\), not \(2, 2\)).*x\.flatten\(1\), not x\.view\(-1, 320\)"),
        ("size", "conv fails .*make its code take sizes from its tensors"),
        ("softmax", "it returns other values .*mix neurons only in its layers.*fedspu"),
    ],
)
def test_code_that_knows_its_width_is_refused(how, said):
    with pytest.raises(CannotNarrow, match=said):
        narrow_of(lambda: HardCoded(how), (1, 4, 4), 0.5)


def test_a_grouped_convolution_is_refused_by_name():
    def build():
        return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 8, 1, groups=2), nn.Flatten(), nn.Linear(8 * 4, 2))

    with pytest.raises(CannotNarrow, match=r"^1: .*\bfedspu\b"):
        narrow_of(build, (1, 2, 2), 0.5)


def test_attention_is_refused():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention, self.out = nn.Linear(3, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 2)

        def forward(self, x):
            x = self.embed(x)
            return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))

    with pytest.raises(CannotNarrow, match="fewer neurons"):
        narrow_of(Attention, (5, 3), 0.5)


def test_widths_count_down_to_one_neuron():
    manifest = describe(DigitsNet(), torch.randn(2, 1, 8, 8), task="test")
    mask = NeuronMask({name: np.array([size - 1]) for name, size in manifest.group_sizes.items()})
    model = zeroed(DigitsNet(), manifest, mask)
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(Narrow(model, manifest, mask, [(x, x)]).model.eval()(x), model.eval()(x))
    assert set(narrowed(manifest, mask).group_sizes.values()) == {1}
