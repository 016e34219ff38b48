"""Gated models against a masked dense model under plain autograd, in float64: equal to 1e-10, whatever is left out."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk.tasks.models import cifar10_fedspu, har_small, mnist_small
from edge_sdk.training.gates.network import GatedModel
from sparrow.protocol.blocks import BlockTable

pytestmark = pytest.mark.integration  # traces many models

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        x = self.relu(self.norm(self.conv1(x)))
        y = self.conv2(x)
        y += x
        pooled = F.adaptive_avg_pool2d(self.relu(y), 1)
        return self.out(torch.cat([pooled.view(x.size(0), -1), x.mean((2, 3))], dim=1))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.fc = nn.Linear(45, 7)
        self.out = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x), inplace=True), 2)
        x = F.dropout(x, 0.3, self.training).view(x.shape[0], -1)
        return self.out(torch.tanh(self.fc(x) + 0.5)) * self.scale


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = self.words(x)
        x = self.norm(x + self.back(F.gelu(self.mix(x))))
        return self.out((x + self.attention(x, x, x)[0]).mean(1))


def chain(*layers):
    return lambda: nn.Sequential(*layers)


def images(*layers, size=9):
    """Layers on [N, 2, size, size], flattened, with a linear layer behind."""
    body = nn.Sequential(*layers, nn.Flatten())
    width = copy.deepcopy(body).eval()(torch.zeros(2, 2, size, size)).shape[1]
    return chain(*copy.deepcopy(body), nn.Linear(width, 5)), (2, size, size)


NETWORKS = {
    "linear": (chain(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9, bias=False), nn.LeakyReLU(), nn.Linear(9, 4)), (7,)),
    "conv": images(nn.Conv2d(2, 7, 3), nn.ReLU(), nn.Conv2d(7, 6, 3), nn.GELU()),
    "padding": images(nn.Conv2d(2, 7, 3, padding=1), nn.Sigmoid(), nn.Conv2d(7, 6, 5, padding=2), nn.ReLU()),
    "stride": images(nn.Conv2d(2, 7, 3, padding=2, stride=2), nn.Tanh(), nn.Conv2d(7, 6, 2, padding=1, stride=3)),
    "dilation": images(nn.Conv2d(2, 7, 3, dilation=2), nn.ELU(), nn.Conv2d(7, 6, (1, 3), padding=(0, 2), dilation=2)),
    "same": images(nn.Conv2d(2, 6, 3, padding="same"), nn.Conv2d(6, 5, 2, padding="valid"), nn.SiLU()),
    "groups": images(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 3, groups=3), nn.Conv2d(9, 4, 2)),
    "circular": images(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular")),
    "batch-norm": images(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 5, 3)
    ),
    "flat-norm": images(
        nn.Conv2d(2, 4, 3), nn.Flatten(), nn.BatchNorm1d(196, momentum=None), nn.Linear(196, 9), nn.ELU()
    ),
    "norm-alone": images(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5, affine=False), nn.Conv2d(5, 6, 3, padding=1), nn.ReLU()),
    "no-statistics": images(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5, track_running_stats=False), nn.ReLU()),
    "group-norm": images(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.PReLU(5)),
    "pools": images(
        *(nn.Conv2d(2, 6, 2), nn.MaxPool2d(3, 1, padding=1), nn.AvgPool2d(2), nn.Conv2d(6, 5, 2, padding=1)),
        *(nn.AvgPool2d(3, 2, padding=1), nn.AdaptiveAvgPool2d(2)),
    ),
    "ties": images(nn.Conv2d(2, 6, 3, bias=False), nn.MaxPool2d(2), nn.Hardtanh(), nn.Conv2d(6, 5, 2), nn.MaxPool2d(2)),
    "dropout": images(
        nn.Conv2d(2, 6, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(6, 5, 3), nn.Dropout(0.2)
    ),
    "sequence": (
        chain(
            *(nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), nn.AvgPool1d(2), nn.Conv1d(6, 5, 3, stride=2), nn.MaxPool1d(2)),
            *(nn.Flatten(), nn.Linear(15, 4)),
        ),
        (2, 27),
    ),
    "residual": (Residual, (2, 6, 6)),
    "functional": (Functional, (2, 8, 8)),
    "mnist-small": (mnist_small, (1, 28, 28)),
    "fedspu": (cifar10_fedspu, (3, 32, 32)),
    "har-small": (har_small, (6, 64)),
    "words": (Words, (5,)),
}


def build(name, *, seed=0):
    """The network with random parameters (no norm's scale is 1, no bias 0), and a batch of six samples."""
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    model = copy.deepcopy(make()).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    inputs = torch.randint(11, (6, *shape)) if name == "words" else torch.randn(6, *shape, dtype=torch.float64)
    return model, inputs


def table_of(model, *, aligned=True, count=4):
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return BlockTable.of(shapes, count=count, align_rows=aligned)


def draw(table, *, seed=0, share=0.4, on=()):
    """(gates, selected): about ``share`` of the blocks, any of them, and all of tensors ``on``; gates in (0, 1)."""
    generator = np.random.default_rng(seed)
    selected = generator.random(len(table.sizes)) < share
    selected |= np.array([name in on for name, sizes in table.tensors.items() for _ in sizes])
    gates = torch.from_numpy(generator.random(len(selected)) * selected)
    return gates.requires_grad_(), selected


def adapted(model, table, gates):
    """Name -> parameter times its blocks' gates: dense, differentiable."""
    scales = iter(gates.split([len(sizes) for sizes in table.tensors.values()]))
    return {
        name: parameter * next(scales).repeat_interleave(torch.tensor(table.tensors[name])).view(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def reference(model, table, inputs, gates):
    torch.manual_seed(7)
    return torch.func.functional_call(model, adapted(model, table, gates), (inputs,))


def gated_output(gated, inputs, gates, selected):
    torch.manual_seed(7)
    return gated(inputs, gates, selected)


def weigh(output):
    """A loss that tells samples and classes apart."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return (output * weights).sum() + (output**2 * weights.flip(0)).sum()


def by_block(model, table):
    """The dense gradients, cut into blocks."""
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in flat]).split(table.sizes.tolist())


def assert_same(model, inputs, *, aligned, seed, batches=2):
    table = table_of(model, aligned=aligned)
    dense = copy.deepcopy(model)
    # Batch norm makes exact zeros of constants whose shift is off; those of the dense model have rounding errors, whose
    # sign would decide whether its ReLU lets gradients pass.
    shifts = [name + ".bias" for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    gated = GatedModel(model, table)
    for batch in range(batches):  # how the second is run follows from what the first one showed
        gates, selected = draw(table, seed=seed + 10 * batch, on=shifts)
        dense_gates = gates.detach().clone().requires_grad_()
        for tensor in (*gated.leaves, *dense.parameters()):
            tensor.grad = None

        output = gated_output(gated, inputs, gates, selected)
        expected = reference(dense, table, inputs, dense_gates)
        torch.testing.assert_close(output, expected, **TOLERANCE)
        weigh(output).backward()
        weigh(expected).backward()
        torch.testing.assert_close(gates.grad, dense_gates.grad, **TOLERANCE)
        for leaf, gradient, on in zip(gated.leaves, by_block(dense, table), selected, strict=True):
            assert on or leaf.grad is None
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, gradient, **TOLERANCE)
            elif on:  # autograd may know that nothing depends on it
                assert not gradient.any()
    for buffer, dense_buffer in zip(model.buffers(), dense.buffers(), strict=True):
        torch.testing.assert_close(buffer, dense_buffer, **TOLERANCE)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "cut"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gated_is_masked_dense(name, aligned):
    for seed in range(3):
        model, inputs = build(name, seed=seed)
        assert_same(model, inputs, aligned=aligned, seed=seed)


@pytest.mark.parametrize("name", ["batch-norm", "flat-norm", "norm-alone", "residual", "dropout", "functional"])
def test_gated_is_masked_dense_in_evaluation_mode(name):
    for seed in range(3):
        model, inputs = build(name, seed=seed)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
        assert_same(model.eval(), inputs, aligned=False, seed=seed)


@pytest.mark.parametrize("name", ["padding", "batch-norm", "dropout"])
def test_gated_is_masked_dense_in_channels_last(name):
    model, inputs = build(name)
    # One batch: with other gates an activation may have another layout, in which dropout draws in another order.
    assert_same(model, inputs.to(memory_format=torch.channels_last), aligned=True, seed=1, batches=1)


def test_a_mode_may_change_between_batches():
    model, inputs = build("functional")
    table = table_of(model)
    gated, (gates, selected) = GatedModel(model, table), draw(table)
    gated_output(gated, inputs, gates, selected)
    model.eval()
    torch.testing.assert_close(
        gated_output(gated, inputs, gates, selected), reference(model, table, inputs, gates), **TOLERANCE
    )


@pytest.mark.parametrize("selected", [False, True], ids=["none", "all"])
def test_all_blocks_or_none(selected):
    model, inputs = build("batch-norm")
    table = table_of(model)
    gates = torch.full((len(table.sizes),), 0.5 * selected, dtype=torch.float64)
    output = GatedModel(model, table)(inputs, gates, np.full(len(table.sizes), selected))
    torch.testing.assert_close(output, reference(model, table, inputs, gates), **TOLERANCE)


def test_nothing_but_the_output_without_gradients():
    model, inputs = build("conv")
    table = table_of(model)
    gated, (gates, selected) = GatedModel(model, table), draw(table)
    expected = reference(model, table, inputs, gates)
    with torch.inference_mode():
        torch.testing.assert_close(gated(inputs, gates, selected), expected, **TOLERANCE)


def test_straight_through_as_on_the_card():
    """Three blocks of two weights, of which the second is off and still learns."""
    model = nn.Linear(6, 1, bias=False).double()
    model.weight.data = torch.tensor([[1, 2, -1, 3, 0.5, -2]], dtype=torch.float64)
    scales = torch.tensor([0.6, 0.5, 0.8], dtype=torch.float64, requires_grad=True)
    importances = torch.tensor([0.9, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    selected = np.array([True, False, True])
    gates = scales * (torch.from_numpy(selected).double() - importances.detach() + importances)
    gated = GatedModel(model, BlockTable({"weight": (2, 2, 2)}))
    gated(torch.tensor([[0.1, -0.2, 0.3, 0.4, -0.5, 0.25]], dtype=torch.float64), gates, selected).sum().backward()
    assert scales.grad.tolist() == pytest.approx([-0.3, 0, -0.75])
    assert importances.grad.tolist() == pytest.approx([-0.18, 0.45, -0.6])
    assert [None if leaf.grad is None else leaf.grad.tolist() for leaf in gated.leaves] == [
        pytest.approx([0.06, -0.12]),
        None,
        pytest.approx([-0.4, 0.2]),
    ]


OPTIMISERS = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda leaves: torch.optim.Adam(leaves, lr=0.01, weight_decay=0.1, eps=1e-3),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.01, weight_decay=0.1, eps=1e-3),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", ["padding", "batch-norm", "residual"])
def test_training_moves_what_is_on_and_nothing_else(name, optimiser):
    """Ten batches, each with other gates, against dense leaves of which the optimiser steps those that are on."""
    model, inputs = build(name)
    table = table_of(model, aligned=name != "residual")
    dense = copy.deepcopy(model)
    gated = GatedModel(model, table)
    flat = torch.cat([parameter.detach().flatten() for parameter in dense.parameters()])
    leaves = [part.clone().requires_grad_() for part in flat.split(table.sizes.tolist())]
    one, other = OPTIMISERS[optimiser](gated.leaves), OPTIMISERS[optimiser](leaves)
    for step in range(10):
        gates, selected = draw(table, seed=step)
        one.zero_grad()
        weigh(gated(inputs, gates, selected)).backward()
        one.step()

        other.zero_grad()
        values = torch.cat([gate * leaf for gate, leaf in zip(gates, leaves, strict=True)])
        parts = values.split([parameter.numel() for parameter in dense.parameters()])
        weights = {
            name: part.view(parameter.shape)
            for (name, parameter), part in zip(dense.named_parameters(), parts, strict=True)
        }
        weigh(torch.func.functional_call(dense, weights, (inputs,))).backward()
        for leaf, gated_leaf, on in zip(leaves, gated.leaves, selected, strict=True):
            if not on or gated_leaf.grad is None:
                leaf.grad = None
        other.step()
    trained = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(trained, torch.cat(leaves).detach(), **TOLERANCE)
    assert not torch.equal(trained, flat)


def test_a_block_that_is_never_on_keeps_its_bits():
    model, inputs = build("conv")
    table = table_of(model)
    gated = GatedModel(model, table)
    before = [leaf.detach().clone() for leaf in gated.leaves]
    optimiser = OPTIMISERS["adamw"](gated.leaves)
    gates, selected = draw(table)
    for _ in range(3):
        optimiser.zero_grad()
        weigh(gated(inputs, gates, selected)).backward()
        optimiser.step()
    same = [torch.equal(old, leaf) for old, leaf in zip(before, gated.leaves, strict=True)]
    assert not any(on and kept for on, kept in zip(selected, same, strict=True))
    assert all(on or kept for on, kept in zip(selected, same, strict=True))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "cut"])
def test_estimated_gate_gradients_are_those_of_the_first_samples(aligned):
    """Off rows: the sum over the first half of the batch, doubled. Rows that are computed: exact."""
    model, inputs = build("stride")
    table = table_of(model, aligned=aligned)
    dense = copy.deepcopy(model)
    gates, selected = draw(table, seed=4)
    dense_gates = gates.detach().clone().requires_grad_()
    weigh(GatedModel(model, table, probe=0.4)(inputs, gates, selected)).backward()  # 0.4 * 6 samples, rounded up: 3

    seen = {}

    def remember(module, arguments, output):
        output.retain_grad()
        seen[module] = (arguments[0], output)

    hooks = [module.register_forward_hook(remember) for module in dense if isinstance(module, nn.Conv2d | nn.Linear)]
    parameters = adapted(dense, table, dense_gates)
    weigh(torch.func.functional_call(dense, parameters, (inputs,))).backward()
    [hook.remove() for hook in hooks]
    exact, start = dense_gates.grad, 0
    for name, sizes in table.tensors.items():
        blocks = slice(start, start + len(sizes))
        start += len(sizes)
        if name.endswith("bias"):
            torch.testing.assert_close(gates.grad[blocks], exact[blocks], **TOLERANCE)
            continue
        module = dense.get_submodule(name.removesuffix(".weight"))
        layer_input, output = seen[module]
        weight = module.weight.detach().clone().requires_grad_()
        result = torch.func.functional_call(module, {"weight": weight}, (layer_input[:3].detach(),))
        (part,) = torch.autograd.grad(result, weight, output.grad[:3])
        result = torch.func.functional_call(module, {"weight": weight}, (layer_input.detach(),))
        (whole,) = torch.autograd.grad(result, weight, output.grad)
        on = torch.from_numpy(np.repeat(selected[blocks], sizes)).view(len(weight), -1).any(dim=1)
        on[0] |= not on.any()  # a layer without any computes its first row
        gradient = torch.where(on.view(-1, *(1,) * (weight.dim() - 1)), whole, 2 * part)
        expected = [piece.sum() for piece in (gradient * weight.detach()).flatten().split(list(sizes))]
        torch.testing.assert_close(gates.grad[blocks], torch.stack(expected), **TOLERANCE)


def first_blocks(table):
    """Gates of 1/2 for the first block of every tensor, of every second tensor's biases none."""
    selected = table.forced.copy()
    place = 0
    for name, sizes in table.tensors.items():
        if name.endswith("bias"):
            selected[place] = False
        place += len(sizes)
    return torch.from_numpy(0.5 * selected).requires_grad_(), selected


def test_off_rows_and_columns_are_not_computed():
    """A step costs what it costs on a network of the rows that are on; estimates cost the output layer's rows only."""
    torch.manual_seed(0)
    model, inputs = mnist_small().double(), torch.randn(4, 1, 28, 28, dtype=torch.float64)
    table = table_of(model, count=5)
    gates, selected = first_blocks(table)
    gated = GatedModel(model, table, probe=0.5)
    with FlopCounterMode(display=False) as counted:
        weigh(gated(inputs, gates, selected)).backward()
    small = nn.Sequential(
        *(nn.Conv2d(1, 2, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 4, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 2)),
    ).double()
    with FlopCounterMode(display=False) as expected:
        weigh(small(inputs)).backward()
    probed = 2 * 2 * 8 * 10  # two samples, eight off classes, ten columns
    assert counted.get_total_flops() == expected.get_total_flops() + probed


class Largest(TorchDispatchMode):
    """The most values that any tensor made inside has."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.made = max([self.made, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_no_tensor_of_a_weights_size_is_allocated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    table = table_of(model, count=10)
    gated = GatedModel(model, table, probe=0.5)
    gates, selected = first_blocks(table)
    gates = gates.detach().float().requires_grad_()
    with Largest() as largest:
        weigh(gated(torch.randn(4, 40), gates, selected)).backward()
    assert largest.made <= 0.1 * 200 * 100
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_are_traced_and_run_in_many_threads_at_once():
    """fx patches what all threads call; each of these traces its model anew while the others run theirs."""

    def work(seed):
        outputs = []
        for _ in range(12):
            model, inputs = made[seed]
            table = table_of(model)
            gates, selected = draw(table, seed=seed)
            outputs.append((GatedModel(model, table)(inputs, gates, selected), reference(model, table, inputs, gates)))
        return outputs

    made = [build("conv", seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for outputs in pool.map(work, range(4)):
            for output, expected in outputs:
                torch.testing.assert_close(output, expected, **TOLERANCE)


def test_leaves_are_the_model():
    model, inputs = build("conv")
    table = table_of(model)
    gated = GatedModel(model, table)
    gates, selected = draw(table)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(gated(inputs, gates, selected), reference(model, table, inputs, gates), **TOLERANCE)
    assert sum(leaf.numel() for leaf in gated.leaves) == sum(parameter.numel() for parameter in model.parameters())


def test_what_does_not_fit_is_refused():
    model, _ = build("conv")
    table = table_of(model)
    with pytest.raises(ValueError, match="block table does not match the model"):
        GatedModel(nn.Linear(3, 2), table)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="contiguous"):
        GatedModel(model, table)
