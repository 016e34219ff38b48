"""Model, gate and budget together: what a batch may use, how gates learn, and the ways to predict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_sdk.publishing.modes import evaluating
from edge_sdk.tasks.public import BY_DEVICES, MODELS
from edge_sdk.training.gates.gated import (
    PROBE,
    Budget,
    Gated,
    GatedOptimisation,
    gate_tensors,
    load_gate,
)
from edge_sdk.training.gates.gating import GatingLayer
from sparrow.protocol.blocks import BlockTable
from sparrow.protocol.settings import FederationSettings

from .networks import convolutions, perceptron


class Fixed(nn.Module):
    """A gate that says what it is told."""

    def __init__(self, scales, importances):
        super().__init__()
        self.scales = nn.Parameter(torch.tensor(scales))
        self.importances = nn.Parameter(torch.tensor(importances))

    def forward(self, inputs):
        return self.importances, self.scales


class Random(nn.Module):
    """A gate whose importances nobody foresees."""

    def __init__(self, length, seed):
        super().__init__()
        self.scales = nn.Parameter(torch.full((length,), 0.9))
        self._length, self._chance = length, np.random.default_rng(seed)

    def forward(self, inputs):
        return torch.from_numpy(self._chance.random(self._length).astype(np.float32)), self.scales


def table_of(model, **how):
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return BlockTable.of(shapes, **{"align_rows": True, **how})


def make(model, table, gate, budget, **more):
    return Gated(model, table, gate, budget, flops=table.sizes, **more)


def gate_for(shape, table, **more):
    return GatingLayer(shape, len(table.sizes), seed=0, **more)


def randomise(*modules, seed=0):
    """Parameters and running statistics that nothing has set to 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point():
                    noise = torch.rand(buffer.shape, generator=generator)
                    buffer.copy_(0.5 + noise if "var" in name else noise - 0.5)


# --- straight through -------------------------------------------------------------------------------------------------

V4 = {"M": [0.6, 0.5, 0.8], "G": [0.9, 0.4, 0.7], "sizes": (2, 2, 2)}


def v4_model():
    model = nn.Linear(6, 1, bias=False)
    model.weight.data = torch.tensor([[1, 2, -1, 3, 0.5, -2]])
    return model, torch.tensor([[0.1, -0.2, 0.3, 0.4, -0.5, 0.25]] * 2)


class NothingForced(BlockTable):
    """V4 has no block that is always on."""

    @property
    def forced(self):
        return np.zeros(len(self.sizes), dtype=bool)


def test_v4_through_the_choice_of_a_knapsack():
    model, inputs = v4_model()
    gate = Fixed(V4["M"], V4["G"])
    gated = make(model, NothingForced({"weight": V4["sizes"]}), gate, Budget(0.67))
    seen = []
    model.register_forward_hook(lambda module, given, outputs: seen.append(outputs))
    output = gated(inputs)
    assert gated.touched.tolist() == [True, False, True]
    output[0].backward()
    assert gate.scales.grad.tolist() == pytest.approx([-0.3, 0, -0.75])
    assert gate.importances.grad.tolist() == pytest.approx([-0.18, 0.45, -0.6])
    assert [None if leaf.grad is None else leaf.grad.tolist() for leaf in gated.leaves] == [
        pytest.approx([0.06, -0.12]),
        None,
        pytest.approx([-0.4, 0.2]),
    ]


def test_a_dropped_block_learns_its_importance_and_a_forced_one_does_not():
    """V4 again, with the first block always on: its G is never used."""
    model, inputs = v4_model()
    gate = Fixed(V4["M"], V4["G"])
    gated = make(model, BlockTable({"weight": V4["sizes"]}), gate, Budget(0.67))
    gated(inputs)[0].backward()
    assert gate.scales.grad.tolist() == pytest.approx([-0.3, 0, -0.75])
    assert gate.importances.grad.tolist() == pytest.approx([0, 0.45, -0.6])


def test_where_everything_is_on_nothing_is_chosen():
    model, inputs = v4_model()
    gate = Fixed(V4["M"], V4["G"])
    gated = make(model, BlockTable({"weight": V4["sizes"]}), gate, Budget(1.0))
    gated(inputs)[0].backward()
    assert gated.touched.all()
    assert gate.scales.grad.tolist() == pytest.approx([-0.3, 0.9, -0.75])
    assert gate.importances.grad is None


@pytest.mark.parametrize("paths", [1, 2])
def test_gradients_of_gate_and_model_are_those_of_the_dense_formula(paths):
    """θ ⊛ M(I - G + G) by plain autograd, with whatever blocks the knapsack chose."""
    torch.manual_seed(0)
    model, shape = perceptron(7, 10, 6)
    table = table_of(model, align_rows=False)
    gate, other = (gate_for(shape, table, paths=paths) for _ in range(2))
    randomise(gate, seed=3)
    other.load_state_dict(gate.state_dict())
    gated, inputs = make(model, table, gate, Budget(0.5)), torch.randn(9, *shape)
    targets = torch.arange(9) % 6
    nn.functional.cross_entropy(gated(inputs), targets).backward()
    on = torch.from_numpy(gated.touched)
    assert 0 < on.sum() < len(on)

    importances, scales = other(inputs)
    chosen = on.float() - importances.detach() + importances
    gates = scales * torch.where(torch.from_numpy(table.forced), on.float(), chosen)
    parts = iter(gates.split([len(sizes) for sizes in table.tensors.values()]))
    dense = {
        name: parameter * next(parts).repeat_interleave(torch.tensor(table.tensors[name])).view(parameter.shape)
        for name, parameter in model.named_parameters()
    }
    output = torch.func.functional_call(model, dense, (inputs,))
    wanted = torch.autograd.grad(nn.functional.cross_entropy(output, targets), list(other.parameters()))
    for parameter, gradient in zip(gate.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


# --- budgets ----------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 999),
    share=st.floats(0.15, 1.0),
    count=st.integers(1, 8),
    first=st.floats(0.02, 0.15),
    costs=st.sampled_from(["values", "random", "few"]),
    limit=st.sampled_from([1.0, 0.8, 0.5]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_batch_ever_exceeds_the_budget(seed, share, count, first, costs, limit):
    chance = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model, shape = perceptron(*chance.integers(2, 14, chance.integers(2, 5)).tolist())
    table = table_of(model, count=count, smallest_share=first, align_rows=bool(seed % 2))
    of = {"values": None, "random": chance.integers(0, 1000, len(table.sizes)), "few": (table.sizes > 5) * table.sizes}
    budget = Budget(share, of[costs], limit)
    taken = table.sizes if budget.costs is None else budget.costs
    gate = Random(len(table.sizes), seed)
    if taken.sum() and table.smallest_share(taken) > share + 1e-3:
        with pytest.raises(ValueError, match="raise the budget"):
            make(model, table, gate, budget)
        return
    try:
        gated = make(model, table, gate, budget)
    except ValueError:
        return
    used, gates = [], []
    run = gated.network
    gated.network = lambda inputs, given, on: gates.append(given.detach().numpy()) or run(inputs, given, on)
    for _ in range(4):
        gated(torch.randn(3, *shape))
        on = gated.chosen
        used.append(on)
        assert taken[on].sum() <= share * taken.sum() + 1e-6
        assert on[table.forced].all()
        assert not gates[-1][~on].any()
    union = np.logical_or.reduce(used)
    assert (gated.touched == union).all()
    assert table.sizes[union].sum() <= max(limit * table.sizes.sum() + 1e-6, table.sizes[used[0]].sum())
    assert (gated.used == 3 * np.sum(used, axis=0)).all()
    assert gated.worked == gated.used @ table.sizes
    assert len(gated.masks) == len(np.unique(used, axis=0))
    if share == 1.0:
        assert union.all()
    with evaluating(model):
        gated(torch.randn(2, *shape))
    assert taken[gated.chosen].sum() <= share * taken.sum() + 1e-6
    assert (gated.touched == union).all(), "judging touches nothing"


def test_the_limit_holds_the_union_and_leaves_the_first_choice():
    model, shape = perceptron(8, 40, 5)
    table = table_of(model, count=10)
    torch.manual_seed(0)

    def union(limit):
        gated = make(model, table, Random(len(table.sizes), 0), Budget(0.4, limit=limit))
        for _ in range(12):
            gated(torch.randn(2, *shape))
        return table.sizes[gated.touched].sum() / table.sizes.sum()

    assert union(1.0) > 0.8
    assert 0.4 < union(0.6) <= 0.6
    assert union(0.01) <= 0.4, "the first batch's blocks, and no others"


def test_a_budget_that_is_too_small_names_the_smallest():
    model, shape = perceptron(8, 20, 5)
    table = table_of(model)
    with pytest.raises(ValueError, match=r"budget of 0\.1\b.*\b0\.2\d*"):
        make(model, table, gate_for(shape, table), Budget(0.1))


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adamw"}, {"clip": 0.01}])
def test_untouched_blocks_keep_their_bits_and_off_ones_their_momentum(more):
    torch.manual_seed(0)
    model, shape = convolutions(6, 3, 10)
    table = table_of(model, count=6)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gated = make(model, table, gate_for(shape, table), Budget(0.4, limit=0.55))
    rates = {"model_rate": 0.1, "gate_rate": 0.5}
    with GatedOptimisation(gated, FederationSettings(**more), **rates) as optimisation:
        for step in range(8):
            before_step, used = [leaf.detach().clone() for leaf in gated.leaves], gated.used.copy()
            gated.used[:] = 0
            optimisation.forget_gradients()
            nn.functional.cross_entropy(gated(torch.randn(7, *shape)), torch.arange(7) % 4).backward()
            optimisation.step()
            for on, old, leaf in zip(gated.touched, before_step, gated.leaves, strict=True):
                assert on or torch.equal(old, leaf), "no weight decay, no momentum"
            assert step > 2 or any(
                on and not torch.equal(old, leaf)
                for on, old, leaf in zip(gated.touched, before_step, gated.leaves, strict=True)
            )
            gated.used += used
    assert not gated.touched.all()
    flat = torch.cat([(old != new).flatten() for old, new in zip(before, model.parameters(), strict=True)])
    for on, changed in zip(gated.touched, flat.split(table.sizes.tolist()), strict=True):
        assert on or not changed.any()
    assert all(parameter.grad is None for parameter in (*gated.gate.parameters(), *gated.leaves))


def test_the_gate_alone_can_be_trained():
    torch.manual_seed(0)
    model, shape = perceptron(6, 12, 4)
    table = table_of(model)
    gated = make(model, table, gate_for(shape, table), Budget(0.6))
    before, gate = [p.detach().clone() for p in model.parameters()], gate_tensors(gated.gate)
    with GatedOptimisation(gated, FederationSettings(momentum=0.9), model_rate=None, gate_rate=0.3) as optimisation:
        for _ in range(3):
            optimisation.forget_gradients()
            nn.functional.cross_entropy(gated(torch.randn(8, *shape)), torch.arange(8) % 4).backward()
            optimisation.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert any((gate_tensors(gated.gate)[name] != tensor).any() for name, tensor in gate.items())


def test_gate_and_model_are_clipped_apart():
    torch.manual_seed(0)
    model, shape = perceptron(6, 12, 4)
    table = table_of(model)
    gated = make(model, table, gate_for(shape, table), Budget(0.6))
    start = [[p.detach().clone() for p in part] for part in (gated.gate.parameters(), model.parameters())]
    with GatedOptimisation(gated, FederationSettings(clip=1e-3), model_rate=1.0, gate_rate=2.0) as optimisation:
        optimisation.forget_gradients()
        (100 * nn.functional.cross_entropy(gated(torch.randn(8, *shape)), torch.arange(8) % 4)).backward()
        optimisation.step()
    for before, now, norm in zip(start, (gated.gate.parameters(), model.parameters()), (2e-3, 1e-3), strict=True):
        moved = torch.cat([(new - old).flatten() for old, new in zip(before, now, strict=True)])
        assert moved.norm().item() == pytest.approx(norm, rel=1e-2)


def test_a_batch_of_one_goes_by_what_the_gate_remembers():
    torch.manual_seed(0)
    model, shape = perceptron(6, 12, 4)
    table = table_of(model)
    gated = make(model.train(), table, gate_for(shape, table), Budget(0.6))
    gated(torch.randn(8, *shape))
    kept = gate_tensors(gated.gate)
    one = torch.randn(1, *shape)
    output = gated(one)
    assert all(kept[name].tobytes() == tensor.tobytes() for name, tensor in gate_tensors(gated.gate).items())
    output.sum().backward()
    assert gated.gate.linear.weight.grad.abs().sum() > 0, "it learns, all the same"
    torch.testing.assert_close(gated.each(one), output)


# --- the ways to predict ----------------------------------------------------------------------------------------------

ROWS = {
    **{
        f"{task}:{name}": (choice.build, choice.shape)
        for task, models in MODELS.items()
        for name, choice in models.items()
        if task not in ("har", "uci_har", *BY_DEVICES) or name == "dmpfl"
    },
    "batch-norm": (lambda: convolutions(7, 3, 9, dropout=True)[0], (2, 6, 6)),
    "no-bias": (
        lambda: nn.Sequential(
            *(nn.Conv1d(3, 5, 3, bias=False), nn.BatchNorm1d(5, affine=False), nn.GELU(), nn.Flatten()),
            *(nn.Linear(30, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, 4)),
        ),
        (3, 8),
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 6, 2, groups=6), nn.Flatten()),
        (4, 6, 6),
    ),
}


def one_by_one(gated, inputs):
    """Every sample alone, as a device in use does it."""
    with evaluating(gated.model), torch.inference_mode():
        return torch.cat([gated(inputs[i : i + 1]) for i in range(len(inputs))])


@pytest.mark.integration
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gates_in_one_pass_equal_gates_per_sample(name, share, monkeypatch):
    build, shape = ROWS[name]
    torch.manual_seed(1)
    model = build()
    table = table_of(model, count=6, smallest_share=0.15)
    gated = make(model, table, gate_for(shape, table, pool=4), Budget(share))
    randomise(gated.gate)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            randomise(module)
    inputs = torch.randn(5, *shape)
    wanted = one_by_one(gated, inputs)
    with torch.inference_mode():
        assert len(np.unique(gated.gate.eval().each(inputs)[1].numpy(), axis=0)) == 5
        monkeypatch.setattr(gated, "network", None)  # in one pass: no sample is run by itself
        found = gated.each(inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert model.training
    assert not gated.touched.any()


class Shared(nn.Module):
    """Folds positions into the batch: a layer's outputs are not one for each sample."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 6)
        self.out = nn.Linear(18, 3)

    def forward(self, x):
        return self.out(self.mix(x.reshape(-1, 4)).relu().view(-1, 18))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.fc(x) * self.scale


OTHERS = {
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (4,), True),
    "a parameter of its own": (Scaled, (4,), True),
    "har": (MODELS["har"]["small"].build, MODELS["har"]["small"].shape, True),
    "folded": (Shared, (3, 4), True),
    "cut rows": (lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)), (4,), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_run_sample_by_sample(name):
    build, shape, aligned = OTHERS[name]
    torch.manual_seed(0)
    model = build()
    table = table_of(model, align_rows=aligned)
    gated = make(model, table, gate_for(shape, table), Budget(0.6))
    randomise(gated.gate)
    ran = []
    run = gated.network
    gated.network = lambda inputs, gates, on: ran.append(len(inputs)) or run(inputs, gates, on)
    inputs = torch.randn(6, *shape)
    with torch.inference_mode():
        found = gated.each(inputs)
    assert ran == [1] * 6
    torch.testing.assert_close(found, one_by_one(gated, inputs))


def test_static_gates_are_the_mean_of_the_samples_trained_on_and_need_no_gate():
    torch.manual_seed(0)
    model, shape = convolutions(6, 3, 10)
    table = table_of(model)
    gated = make(model.train(), table, gate_for(shape, table), Budget(0.5))
    randomise(gated.gate, model)
    seen = []
    gated.gate.register_forward_hook(lambda module, given, outputs: seen.append((len(given[0]), *outputs)))
    batches = [torch.randn(count, *shape) for count in (8, 8, 3, 1)]
    for inputs in batches:
        gated(inputs)
    importances, scales = (sum(each[0] * each[part].detach().double() for each in seen) / 20 for part in (1, 2))
    with evaluating(model):
        gated(torch.randn(9, *shape))  # judging does not count
    found = gated.static()
    on = table.select(importances.numpy(), 0.5)
    np.testing.assert_allclose(found, np.where(on, scales.numpy(), 0), rtol=1e-5)
    assert table.sizes[found > 0].sum() <= 0.5 * table.sizes.sum()
    tensors = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    other = np.ones(3, np.float32)
    table.scale_in_place({**tensors, "other": other}, found)
    assert other.tolist() == [1, 1, 1]
    model.eval()
    with torch.no_grad():
        for name, tensor in tensors.items():
            scales_of = np.repeat(found[table.places[name]], table.tensors[name]).astype(np.float32)
            assert tensor.tobytes() == (before[name].reshape(-1) * scales_of).tobytes()
        named = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        wanted = gated.network(batches[0], torch.from_numpy(found).float(), on)
        torch.testing.assert_close(torch.func.functional_call(model, named, (batches[0],)), wanted)
    gated.model.train()
    gated(batches[1])
    np.testing.assert_allclose(gated.static()[gated.chosen], seen[-1][2].detach()[gated.chosen], rtol=1e-6)


def test_estimated_gate_gradients_reach_off_blocks_too():
    """From an eighth of the batch; those of scales are exact."""
    assert PROBE == 0.125
    torch.manual_seed(0)
    model, shape = perceptron(6, 16, 4)
    table = table_of(model)
    inputs, found = torch.randn(16, *shape), {}
    for probe in (1.0, PROBE):
        gate = Fixed([0.8] * len(table.sizes), np.linspace(0.9, 0.1, len(table.sizes)).astype(np.float32).tolist())
        gated = make(model, table, gate, Budget(0.5), probe=probe)
        nn.functional.cross_entropy(gated(inputs), torch.arange(16) % 4).backward()
        found[probe] = gate.importances.grad.clone(), gate.scales.grad.clone()
        on = torch.from_numpy(gated.touched)
    off = ~on
    assert (found[1.0][0][off] != 0).any()
    assert (found[PROBE][0][off] != 0).any()
    assert not torch.allclose(found[1.0][0][off], found[PROBE][0][off])
    torch.testing.assert_close(found[PROBE][0][on], found[1.0][0][on])
    torch.testing.assert_close(found[PROBE][1], found[1.0][1])


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_gate_comes_back_from_its_tensors():
    table = table_of(perceptron(6, 12, 4)[0])
    one, other = gate_for((6,), table), gate_for((6,), table)
    randomise(one)
    assert load_gate(other, gate_tensors(one))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    smaller = gate_for((6,), table, paths=1)
    before = gate_tensors(smaller)
    assert not load_gate(smaller, gate_tensors(one))
    assert not load_gate(smaller, {})
    assert all(before[name].tobytes() == tensor.tobytes() for name, tensor in gate_tensors(smaller).items())
