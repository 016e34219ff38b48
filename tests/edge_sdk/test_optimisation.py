"""Optimisation whose model changes on the way, against dense loops with masks written out."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.training import Change
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.active import ActiveBlock
from edge_sdk.training.elements import Elements, SparseRows, run_of, tensors_of
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import train_locally
from edge_sdk.training.optimisation import Optimisation, Pull
from sparrow.protocol.settings import FederationSettings


class Net(nn.Module):
    """A convolution (run in channels last) and a linear layer large enough for every way to run sparse weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(12, 16, 3, stride=2)
        self.fc = nn.Linear(256, 260)
        self.out = nn.Linear(260, 3)

    def forward(self, x):
        return self.out(torch.relu(self.fc(torch.relu(self.conv(x)).flatten(1))))


def scattered(density):
    return lambda shape: torch.rand(shape) < density


def with_empty_lines(shape):
    exists = torch.rand(shape) < 0.7
    exists[::2] = False
    exists[:, 1::2] = False
    return exists


PATTERNS = {
    "compressed rows": scattered(0.08),
    "packed": with_empty_lines,
    "an index": scattered(0.2),
    "bits": scattered(0.6),
    "everything": scattered(1.1),
}
TRAINED = {"compressed rows": SparseRows, "packed": ActiveBlock, "an index": Elements}
SETTINGS = {
    "sgd": {},
    "clip and decay": {"weight_decay": 0.05, "clip": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05},
    "adam": {"optimizer": "adam", "weight_decay": 0.05},
    "adamw": {"optimizer": "adamw"},
}
MASKED = ("conv.weight", "fc.weight")


def change(elements, renewed=None):
    return Change(*({name: flags.numpy() for name, flags in each.items()} for each in (elements, renewed or {})))


def made(pattern, seed=0):
    """(model with zeros, manifest, elements)"""
    torch.manual_seed(seed)
    model = Net()
    manifest = describe(model, torch.zeros(2, 12, 9, 9), task="net")
    elements = {name: PATTERNS[pattern](model.get_parameter(name).shape) for name in MASKED}
    with torch.no_grad():
        for name, exists in elements.items():
            model.get_parameter(name).mul_(exists)
    return model, manifest, elements


def task_of(model, count=24):
    generator = torch.Generator().manual_seed(0)
    arrays = Arrays(torch.randn(count, 12, 9, 9, generator=generator), torch.arange(count) % 3)
    return classification("net", model, arrays, arrays, None, batch_size=8)


@dataclass
class At:
    """An adjustment at these steps that decides what it is told to."""

    steps: tuple[int, ...]
    decide: object
    batches: int = 1


def test_the_patterns_cover_every_way_to_run_a_weight():
    for pattern in PATTERNS:
        model, _, elements = made(pattern)
        _, trained = run_of(model.fc, model.fc.weight, elements["fc.weight"], 1)
        assert type(trained) is TRAINED.get(pattern, type(None)), pattern


# --- a change that changes nothing -------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_change_that_changes_nothing_changes_no_bit(pattern, settings):
    def trained(steps):
        model, manifest, elements = made(pattern)
        result = train_locally(
            model,
            task_of(model),
            FederationSettings(local_epochs=2, **settings),
            learning_rate=0.05,
            freezing=Freezing(model, manifest, None, elements),
            seed=3,
            proximal_weight=0.5 if "momentum" in settings else 0.0,
            adjustment=At(steps, lambda step, batches: change(elements)),
        )
        return model.state_dict(), result

    (plain, one), (changed, other) = trained(()), trained((1, 3, 4, 6))
    assert one == other
    for name, tensor in plain.items():
        assert torch.equal(changed[name], tensor), name


# --- changes -----------------------------------------------------------------------------------------------------


def replaced(elements, seed):
    """Other elements, as many: (new elements, what is new or gone)."""
    generator, new = torch.Generator().manual_seed(seed), {}
    for name, exists in elements.items():
        flat = exists.flatten().clone()
        there, free = flat.nonzero().flatten(), (~flat).nonzero().flatten()
        count = min(len(there), len(free)) // 3
        flat[there[torch.randperm(len(there), generator=generator)[:count]]] = False
        flat[free[torch.randperm(len(free), generator=generator)[:count]]] = True
        new[name] = flat.view(exists.shape)
    return new, {name: new[name] != exists for name, exists in elements.items()}


def reference_optimizer(settings, parameters):
    decay = settings.get("weight_decay", 0)
    if settings.get("optimizer") == "adam":
        return torch.optim.Adam(parameters, lr=0.05, weight_decay=decay)
    if settings.get("optimizer") == "adamw":
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0)
    return torch.optim.SGD(parameters, lr=0.05, momentum=settings.get("momentum", 0), weight_decay=decay)


def dense_reference(model, elements, changes, settings, proximal_weight, batches):
    """Everything is dense: gradients, pull and the optimiser's memory are masked by hand, step after step."""
    optimizer = reference_optimizer(settings, list(model.parameters()))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step, (inputs, targets) in enumerate(batches, start=1):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for name, value in model.named_parameters():
            if proximal_weight:
                value.grad.add_(value.detach() - start[name], alpha=proximal_weight)
            if name in elements:
                value.grad.mul_(elements[name])
        if "clip" in settings:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        if step in changes:
            elements, renewed = changes[step]
            with torch.no_grad():
                for name, exists in elements.items():
                    value = model.get_parameter(name)
                    value.mul_(exists)
                    for slot in optimizer.state[value].values():
                        if isinstance(slot, torch.Tensor) and slot.dim():
                            slot.mul_(~renewed[name])


@pytest.mark.integration
@pytest.mark.parametrize("proximal_weight", [0.0, 0.5])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("pattern", ["compressed rows", "packed", "an index", "bits"])
def test_training_with_changes_is_masked_dense_training(pattern, settings, proximal_weight):
    """In float64, with batches in channels last: weights to 1e-10, and nothing outside of what exists."""
    model, manifest, elements = made(pattern)
    model = model.double().to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    images = torch.randn(7, 6, 12, 9, 9, dtype=torch.float64)
    batches = [(each.to(memory_format=torch.channels_last), torch.arange(6) % 3) for each in images]
    second = replaced(elements, 1)
    third = replaced(second[0], 2)
    changes = {2: second, 5: third}
    reference = copy.deepcopy(model)
    dense_reference(reference, elements, changes, settings, proximal_weight, batches)

    def decided(number):
        new, renewed = changes[number]
        with torch.no_grad():
            for name, exists in new.items():
                model.get_parameter(name).mul_(exists)
        return change(new, renewed)

    exists = elements
    freezing = Freezing(model, manifest, None, elements)
    with Optimisation(
        freezing, FederationSettings(**settings), learning_rate=0.05, proximal_weight=proximal_weight
    ) as optimisation:
        for step, (inputs, targets) in enumerate(batches, start=1):
            optimisation.forget_gradients()
            F.cross_entropy(model(inputs), targets).backward()
            optimisation.step()
            if step in changes:
                optimisation.change(lambda number=step: decided(number))
                exists = changes[step][0]
            for name, flags in exists.items():
                assert not model.get_parameter(name)[~flags].any(), f"{name} at step {step}"
    for name, wanted in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), wanted, rtol=0, atol=1e-10, msg=name)
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
    assert not [module for module in model.modules() if "forward" in vars(module)]
    grown = third[0]["fc.weight"] & ~elements["fc.weight"]
    assert model.fc.weight[grown].any(), "what is new has been trained"


@pytest.mark.parametrize(
    ("before", "after"),
    [("compressed rows", "bits"), ("bits", "packed"), ("an index", "everything"), ("everything", "compressed rows")],
)
def test_memory_follows_from_one_way_to_run_a_weight_to_another(before, after):
    model, manifest, elements = made(before)
    others = made(after, seed=1)[2]
    new = {name: exists & others[name] if after != "everything" else others[name] for name, exists in elements.items()}
    if after == "bits":
        new = {name: exists | others[name] for name, exists in elements.items()}
    model = model.double()
    torch.manual_seed(1)
    batches = [(torch.randn(6, 12, 9, 9, dtype=torch.float64), torch.arange(6) % 3) for _ in range(5)]
    changes = {2: (new, {name: exists != elements[name] for name, exists in new.items()})}
    reference = copy.deepcopy(model)
    dense_reference(reference, elements, changes, {"optimizer": "adam"}, 0.0, batches)

    def decide():
        with torch.no_grad():
            for name, exists in new.items():
                model.get_parameter(name).mul_(exists)
        return change(*changes[2])

    freezing = Freezing(model, manifest, None, elements)
    settings = FederationSettings(optimizer="adam")
    with Optimisation(freezing, settings, learning_rate=0.05, proximal_weight=0.0) as optimisation:
        for step, (inputs, targets) in enumerate(batches, start=1):
            optimisation.forget_gradients()
            F.cross_entropy(model(inputs), targets).backward()
            optimisation.step()
            if step == 2:
                optimisation.change(decide)
    for name, wanted in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), wanted, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("pattern", ["compressed rows", "packed", "an index", "bits"])
def test_the_proximal_term_pulls_to_received_values_and_new_ones_to_zero(pattern):
    """The loss asks for nothing (a learning rate of 0.1, μ = 1): each step leaves 0.9 of the distance."""
    model, manifest, elements = made(pattern)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    new, renewed = replaced(elements, 1)

    def decide():
        with torch.no_grad():
            for name, exists in new.items():
                weight = model.get_parameter(name)
                weight.mul_(exists)
                weight[renewed[name] & exists] = 1.0
        return change(new, renewed)

    freezing = Freezing(model, manifest, None, elements)
    with Optimisation(freezing, FederationSettings(), learning_rate=0.1, proximal_weight=1.0) as optimisation:
        for step in range(3):
            optimisation.forget_gradients()
            (model(torch.randn(2, 12, 9, 9)).sum() * 0).backward()
            if step == 0:
                optimisation.change(decide)
            else:
                optimisation.step()
    for name, exists in new.items():
        weight, fresh = model.get_parameter(name).detach(), renewed[name] & exists
        torch.testing.assert_close(weight[fresh], torch.full((int(fresh.sum()),), 0.81))
        stayed = exists & ~fresh
        torch.testing.assert_close(weight[stayed], start[name][stayed])
        assert not weight[~exists].any(), "what was taken away is not pulled back to life"


def test_what_is_new_has_no_memory_and_what_stays_has_its_own():
    """One weight of momentum 0.5 and constant gradient 1: 1, then 1.5; from scratch it is 1 again."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    manifest = describe(copy.deepcopy(model), torch.zeros(1, 4), task="line")
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    before, after = torch.tensor([[True, True, False, True]]), torch.tensor([[True, False, True, True]])
    renewed = torch.tensor([[False, True, True, True]])  # the last was dropped and taken back: its value stays

    def decide():
        with torch.no_grad():
            model[0].weight.mul_(after)
        return change({"0.weight": after}, {"0.weight": renewed})

    freezing = Freezing(model, manifest, None, {"0.weight": before})
    settings = FederationSettings(momentum=0.5)
    with Optimisation(freezing, settings, learning_rate=0.1, proximal_weight=0.0) as optimisation:
        for step in range(2):
            optimisation.forget_gradients()
            model(torch.ones(1, 4)).sum().backward()
            optimisation.step()
            if step == 0:
                optimisation.change(decide)
    torch.testing.assert_close(model[0].weight.detach(), torch.tensor([[1 - 0.1 - 0.15, 0.0, -0.1, 0.9 - 0.1]]))


# --- when a change fails -----------------------------------------------------------------------------------------


def fails():
    raise ArithmeticError("no idea")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("how", ["decide raises", "the elements do not fit"])
def test_a_change_that_fails_says_why_and_leaves_a_model_that_can_be_used(pattern, how):
    model, manifest, elements = made(pattern)
    inputs = torch.randn(2, 12, 9, 9)
    wrong = change({name: torch.zeros_like(exists) for name, exists in elements.items()}, {})
    error, said = (ArithmeticError, "no idea") if how == "decide raises" else (ValueError, "must be zero; multiply")
    freezing = Freezing(model, manifest, None, elements)
    optimisation = Optimisation(freezing, FederationSettings(), learning_rate=0.05, proximal_weight=0.1)

    def train():
        with optimisation:
            model(inputs).sum().backward()
            optimisation.step()
            optimisation.change(fails if how == "decide raises" else lambda: wrong)

    with pytest.raises(error, match=said):
        train()
    assert all(value.grad is None and value.requires_grad and value.is_leaf for value in model.parameters())
    assert not [module for module in model.modules() if "forward" in vars(module)]
    plain = copy.deepcopy(model)
    torch.testing.assert_close(model(inputs), plain(inputs))
    with Optimisation(
        Freezing(model, manifest, None, elements), FederationSettings(), learning_rate=0.05, proximal_weight=0.0
    ) as again:
        model(inputs).sum().backward()
        again.step()
    assert not torch.equal(model.fc.weight, plain.fc.weight)


# --- what train_locally shows an adjustment ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_adjustment_sees_the_last_batches_trained_on_oldest_first(count):
    model, manifest, elements = made("bits")
    seen, trained = [], []

    def decide(step, batches):
        seen.append((step, [targets.tolist() for _, targets in batches]))
        assert all(inputs.is_contiguous(memory_format=torch.channels_last) for inputs, _ in batches)
        return change(elements)

    task = task_of(model)
    loss = task.loss

    def noted(outputs, targets):
        trained.append(targets.tolist())
        return loss(outputs, targets)

    train_locally(
        model,
        type(task)("net", model, noted, task.train, task.validation),
        FederationSettings(local_epochs=2),
        learning_rate=0.05,
        freezing=Freezing(model, manifest, None, elements),
        seed=0,
        adjustment=At((1, 5), decide, batches=count),
    )
    trained = trained[-6:]  # before the first step the layout is tried
    assert seen == [(1, trained[:1]), (5, trained[max(0, 5 - count) : 5])]


def test_flags_are_copies():
    exists = np.array([[True, False]])
    flags = tensors_of({"w": exists})
    assert flags["w"].dtype == torch.bool
    flags["w"][0, 0] = False
    assert exists.tolist() == [[True, False]]


# --- the pull to where training begins ------------------------------------------------------------------------------


def test_the_pull_adds_its_weight_times_the_distance():
    model = nn.Linear(2, 1)
    start = model.weight.detach().clone()
    pull = Pull([model.weight], [start], 0.5)
    with torch.no_grad():
        model.weight.add_(torch.tensor([[1.0, -2.0]]))
    model.weight.grad = torch.ones(1, 2)
    pull.add_to_gradients()
    torch.testing.assert_close(model.weight.grad, 1 + 0.5 * (model.weight.detach() - start))
    assert model.bias.grad is None


def test_a_parameter_without_gradient_is_left_alone():
    model = nn.Linear(2, 1)
    Pull([model.weight], [model.weight.detach().clone()], 0.5).add_to_gradients()
    assert model.weight.grad is None
