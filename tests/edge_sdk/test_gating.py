"""The gating layer against slow definitions: switchable normalisation, heads, sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from edge_sdk.training.gates.gating import LARGEST_SHARE, GatingLayer, SwitchNorm, fitting_pool, size, width

SAMPLES = torch.tensor([[[0.0, 2, 4, 6]], [[1.0, 1, 1, 1]]])
"""V6: two samples of one channel, four positions each."""


def normed(norm, inputs):
    factor, summand = norm(inputs)
    return inputs * factor + summand


# --- switchable normalisation -----------------------------------------------------------------------------------------


def test_v6_in_training():
    norm = SwitchNorm(1, flat=False)
    y = normed(norm, SAMPLES)
    assert y[0, 0].tolist() == pytest.approx([-1.098884, -0.274721, 0.549442, 1.373604], abs=2e-6)
    assert y[1, 0].tolist() == pytest.approx([-0.277349] * 4, abs=2e-6)
    assert norm.running_mean.tolist() == pytest.approx([0.2])
    assert norm.running_var.tolist() == pytest.approx([0.433333], abs=1e-6)


def test_v6_in_evaluation_after_that_step():
    norm = SwitchNorm(1, flat=False)
    norm(SAMPLES)
    y = normed(norm.eval(), SAMPLES)
    assert y[0, 0].tolist() == pytest.approx([-0.964753, -0.031121, 0.902511, 1.836143], abs=2e-6)
    assert normed(norm, SAMPLES[:1])[0, 0].tolist() == pytest.approx(y[0, 0].tolist()), "one sample is enough"
    assert norm.running_mean.tolist() == pytest.approx([0.2]), "evaluating moves nothing"


def dense(norm, inputs, mean_bn, var_bn):
    """Switchable normalisation written out: of [N, C, HW], or flat [N, f]."""
    a, v = norm.mean_logits.softmax(0), norm.var_logits.softmax(0)
    mean, var = inputs.mean(-1, keepdim=True), inputs.var(-1, keepdim=True)
    if inputs.dim() == 2:
        blended = a[0] * mean + a[1] * mean_bn
        spread = v[0] * var + v[1] * var_bn
        return (inputs - blended) / (spread + 1e-5).sqrt() * norm.weight + norm.bias
    t = var + mean**2
    mean_ln = mean.mean(1, keepdim=True)
    var_ln = t.mean(1, keepdim=True) - mean_ln**2
    blended = a[0] * mean + a[1] * mean_ln + a[2] * mean_bn.view(1, -1, 1)
    spread = v[0] * var + v[1] * var_ln + v[2] * var_bn.view(1, -1, 1)
    return (inputs - blended) / (spread + 1e-5).sqrt() * norm.weight.view(-1, 1) + norm.bias.view(-1, 1)


def moved(norm):
    """``norm`` with other parameters than it begins with, in float64."""
    norm = norm.double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.linspace(-0.5, 0.7, parameter.numel(), dtype=torch.float64))
    return norm


@pytest.mark.parametrize("shape", [(5, 3, 7), (5, 1, 4), (6, 9)])
def test_the_norm_is_the_cards_formula_with_gradients(shape):
    torch.manual_seed(0)
    inputs = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    flat = len(shape) == 2
    norm = moved(SwitchNorm(shape[1], flat=flat))
    if flat:
        mean_bn, var_bn = inputs.mean(0), inputs.var(0)
    else:
        mean, var = inputs.mean(-1), inputs.var(-1)
        mean_bn = mean.mean(0)
        var_bn = (var + mean**2).mean(0) - mean_bn**2
    weights = torch.linspace(-1, 1, inputs.numel(), dtype=torch.float64).view(shape)
    found, wanted = normed(norm, inputs), dense(norm, inputs, mean_bn, var_bn)
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad((found * weights).sum(), [inputs, *norm.parameters()])
    expected = torch.autograd.grad((wanted * weights).sum(), [inputs, *norm.parameters()])
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)
    momentum = 0.997 if flat else 0.9
    torch.testing.assert_close(norm.running_mean, (1 - momentum) * mean_bn.detach())
    torch.testing.assert_close(norm.running_var, (1 - momentum) * var_bn.detach())
    norm.eval()
    torch.testing.assert_close(normed(norm, inputs), dense(norm, inputs, norm.running_mean, norm.running_var))


# --- heads ------------------------------------------------------------------------------------------------------------


def column(values, *, training=True):
    """The gates of samples whose one logit is ``values``: BN (scale 1, shift 0), sigmoid, then the batch's mean."""
    gate = GatingLayer((1,), 1, seed=0, paths=1, bias=0.0)
    assert gate.norm is None
    gate.linear.weight.data.fill_(1.0)
    gate.linear.bias.data.zero_()
    return gate.train(training), torch.tensor(values).view(-1, 1)


@pytest.mark.parametrize(
    ("values", "gate"), [((1.0, 3.0), 0.5), ((0.0, 4.0), 0.5), ((0.0, 0, 0, 4), 0.482076), ((0.0, 4, 4, 4), 0.517924)]
)
def test_v6_heads(values, gate):
    layer, inputs = column(values)
    importances, scales = layer(inputs)
    assert importances.tolist() == scales.tolist() == pytest.approx([gate], abs=2e-6)


def test_v6_heads_in_evaluation():
    layer, inputs = column((1.0, 2.0, 5.0), training=False)
    layer.batch_norm.running_mean.fill_(2.0)
    _, scales = layer.each(inputs)
    assert scales[:, 0].tolist() == pytest.approx([0.268942, 0.5, 0.952573], abs=2e-6)
    assert layer(inputs)[1].item() == pytest.approx(scales.mean().item())


@pytest.mark.parametrize("paths", [1, 2])
def test_at_first_a_batch_has_the_gates_of_its_bias(paths):
    """4.9: the batch's mean of a normed logit is its shift, so M begins near sigmoid(3) and G at one half."""
    gate = GatingLayer((3, 8, 8), 12, seed=0, paths=paths)
    importances, scales = gate(torch.randn(128, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert (scales - 1 / (1 + math.exp(-3))).abs().max() < 0.03
    if paths == 1:
        assert torch.equal(importances, scales)
    else:
        assert (importances - 0.5).abs().max() < 0.01


def test_the_two_paths_begin_as_copies():
    gate = GatingLayer((2, 6, 6), 5, seed=3)
    for tensor in (gate.linear.weight, gate.linear.bias, gate.batch_norm.weight):
        assert torch.equal(*tensor.chunk(2))
    assert gate.batch_norm.bias.tolist() == [3.0] * 5 + [0.0] * 5


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "shape", "length", "one", "two"),
    [
        (2_278_334, (1, 28, 28), 40, 31_488, 62_968),
        (256_830, (3, 32, 32), 50, 153_762, 307_512),
        (3_537_444, (3, 32, 32), 40, 123_012, 246_012),
    ],
)
def test_gate_sizes(parameters, shape, length, one, two):
    for paths, wanted in ((1, one), (2, two)):
        gate = GatingLayer(shape, length, seed=0, paths=paths)
        assert sum(parameter.numel() for parameter in gate.parameters()) == wanted
        assert size(math.prod(shape), length, paths) == wanted - 2 * shape[0] - 6
    assert (fitting_pool(shape, length, 2, parameters) == 1) == (two < LARGEST_SHARE * parameters)


def test_a_gate_that_would_outgrow_the_model_is_pooled():
    assert width((3, 32, 32), 4) == 192
    gate = GatingLayer((3, 32, 32), 50, seed=0, pool=4)
    assert sum(parameter.numel() for parameter in gate.parameters()) == 19_512
    pool = fitting_pool((3, 32, 32), 50, 2, 256_830)
    assert size(width((3, 32, 32), pool), 50, 2) <= 25_683 < size(width((3, 32, 32), pool - 1), 50, 2)
    assert fitting_pool((3, 32, 32), 50, 2, 10) == 32, "as small as can be"
    assert [fitting_pool(shape, 50, 2, 10) for shape in ((9,), (2, 3, 3, 3, 3))] == [1, 1]


@pytest.mark.parametrize("shape", [(2, 9, 7), (4, 30), (2, 4, 5, 3)])
@pytest.mark.parametrize("pool", [2, 4])
def test_pooling_first_is_pooling_what_is_normed(shape, pool):
    """Edges that the pool does not divide are means of what there is; a side may be shorter than the pool."""
    torch.manual_seed(1)
    inputs = torch.randn(4, *shape, dtype=torch.float64)
    gate = GatingLayer(shape, 6, seed=0, pool=pool).double()
    moved(gate.norm)
    importances, _ = gate.each(inputs)
    gate.norm.running_mean.zero_()
    gate.norm.running_var.zero_()
    seen = normed(gate.norm, inputs.flatten(2)).view(inputs.shape)
    for axis in range(2, inputs.dim()):
        seen = torch.stack([part.mean(axis) for part in seen.split(pool, axis)], axis)
    seen = seen.flatten(1)
    assert seen.shape[1] == width(shape, pool) == gate.linear.in_features
    wanted = torch.sigmoid(nn.functional.batch_norm(gate.linear(seen), None, None, training=True))
    torch.testing.assert_close(importances, wanted[:, 6:], rtol=1e-9, atol=1e-9)


# --- seeds, switches --------------------------------------------------------------------------------------------------


def test_devices_of_one_seed_begin_with_the_same_gate():
    torch.manual_seed(1)
    one = GatingLayer((3, 8, 8), 9, seed=5)
    torch.manual_seed(2)
    other, another = GatingLayer((3, 8, 8), 9, seed=5), GatingLayer((3, 8, 8), 9, seed=6)
    state = other.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
    assert not torch.equal(one.linear.weight, another.linear.weight)


@pytest.mark.parametrize(
    "switches",
    [
        {"input_norm": False},
        {"batch_norm": False},
        {"input_norm": False, "batch_norm": False, "paths": 1},
        {"squashes": False},
        {"sees": "nothing"},
        {"sees": "nothing", "paths": 1, "squashes": False},
    ],
)
def test_parts_can_be_left_out(switches):
    torch.manual_seed(0)
    gate = GatingLayer((2, 5, 5), 7, seed=0, **switches)
    inputs = torch.randn(6, 2, 5, 5)
    importances, scales = gate(inputs)
    assert importances.shape == scales.shape == (7,)
    sees = switches.get("sees") != "nothing"
    if not sees:
        assert torch.equal(scales, gate(inputs + 1)[1])
        assert [name for name, _ in gate.named_parameters()] == ["logits"]
        wanted = 3.0 if not switches.get("squashes", True) else 1 / (1 + math.exp(-3))
        assert scales.tolist() == pytest.approx([wanted] * 7)
    assert (gate.norm is None) == (not (switches.get("input_norm", True) and sees))
    (importances * scales).sum().backward()
    assert all(parameter.grad is not None for parameter in gate.parameters())
    names = {name.split(".")[0] for name in gate.state_dict()}
    assert ("batch_norm" in names) == (switches.get("batch_norm", True) and sees)


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1), (2, 1, 1), (4, 6), (1, 2, 2), (2, 3, 3, 3), (2, 2, 2, 2, 2)])
def test_inputs_of_every_shape(shape):
    torch.manual_seed(0)
    gate = GatingLayer(shape, 4, seed=0, pool=2)
    inputs = torch.randn(5, *shape)
    for _ in range(2):
        (sum(gate(inputs)).sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in gate.parameters())
    gate.eval()
    importances, scales = gate(inputs[:1])
    assert torch.isfinite(torch.cat([importances, scales])).all()
    assert ((scales > 0) & (scales < 1)).all()


def test_inputs_that_are_whole_numbers_are_taken_as_such():
    gate = GatingLayer((6,), 4, seed=0)
    words = torch.randint(9, (5, 6), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gate.eval()(words)[0], gate(words.float())[0])
