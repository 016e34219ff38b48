"""Training of weights of which only some elements exist, against masked dense training in float64: equal to 1e-10."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk.publishing.coupling import describe
from edge_sdk.training.freezing import Freezing
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import NeuronDraw, draw_neurons


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 16, 3, stride=2)
        self.fc1 = nn.Linear(16 * 16, 500)
        self.fc2 = nn.Linear(500, 300, bias=False)
        self.out = nn.Linear(300, 4)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))))
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 12, 9, padding=4)
        self.conv2 = nn.Conv1d(12, 12, 9, groups=2)
        self.fc1 = nn.Linear(12, 80)
        self.out = nn.Linear(80, 4)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x)))).transpose(1, 2)
        return self.out(F.relu(self.fc1(x))).mean(1)


NETS = {"images": (Images, (6, 4, 9, 9)), "series": (Series, (6, 4, 120))}
OPTIMISERS = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": lambda leaves: torch.optim.Adam(leaves, lr=0.01, weight_decay=0.05),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.01, weight_decay=0.05),
}


def scattered(density):
    return lambda shape: torch.rand(shape) < density


def with_empty_lines(density):
    """Rows and columns, half of them, without any element."""

    def draw(shape):
        exists = torch.rand(shape) < density
        exists[torch.randperm(shape[0])[: shape[0] // 2]] = False
        exists[:, torch.randperm(shape[1])[: shape[1] // 2]] = False
        return exists

    return draw


PATTERNS = {
    "a few": scattered(0.05),
    "a fifth": scattered(0.2),
    "two thirds": scattered(0.67),
    "all but one": lambda shape: torch.arange(torch.Size(shape).numel()).view(shape) > 0,
    "empty lines": with_empty_lines(0.6),
    "full but for empty lines": with_empty_lines(1.1),
    "few and empty lines": with_empty_lines(0.2),
    "none": scattered(-1.0),
}


def made(name, pattern, *, channels_last=False):
    """(model in float64 with zeros, manifest, inputs, elements)"""
    torch.manual_seed(0)
    build, shape = NETS[name]
    model, inputs = build(), torch.randn(shape)
    manifest = describe(model, inputs[:2], task="t")
    elements = {key: PATTERNS[pattern](value.shape) for key, value in model.named_parameters() if value.dim() > 1}
    with torch.no_grad():
        for key, exists in elements.items():
            model.get_parameter(key).mul_(exists)  # which leaves negative zeros
    model, inputs = model.double(), inputs.double()
    if channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    return model, manifest, inputs, elements


def train(model, leaves, optimise, inputs, after_backward, after_step, steps=3):
    optimizer = optimise(leaves)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), torch.arange(len(inputs)) % 4).backward()
        after_backward()
        optimizer.step()
        after_step()
    return optimizer


@pytest.mark.integration
@pytest.mark.parametrize("optimise", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["images", "series", "channels last"])
def test_training_equals_masked_dense_training(name, pattern, optimise):
    channels_last = name == "channels last"
    model, manifest, inputs, elements = made("images" if channels_last else name, pattern, channels_last=channels_last)
    before, reference = copy.deepcopy(model.state_dict()), copy.deepcopy(model)

    def mask_gradients():
        for key, exists in elements.items():
            reference.get_parameter(key).grad.mul_(exists)

    train(reference, list(reference.parameters()), optimise, inputs, mask_gradients, lambda: None)
    with Freezing(model, manifest, None, elements) as freezing:
        train(model, freezing.parameters, optimise, inputs, freezing.collect_gradients, freezing.write_back)
    for key, wanted in reference.state_dict().items():
        value = model.state_dict()[key]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-10, msg=key)
        if key in elements:
            gone = ~elements[key]
            assert torch.equal(value[gone].view(torch.int64), before[key][gone].view(torch.int64)), "bit for bit"


def test_elements_and_frozen_neurons_together():
    model, manifest, inputs, elements = made("images", "two thirds")
    mask = draw_neurons(manifest, NeuronDraw("pi", 0.5))
    before = copy.deepcopy(model.state_dict())
    with Freezing(model, manifest, mask, elements) as freezing:
        train(model, freezing.parameters, OPTIMISERS["adamw"], inputs, freezing.collect_gradients, freezing.write_back)
    rows, columns = (torch.tensor(mask.active[name].tolist()) for name in ("fc2", "fc1"))
    moved = model.fc2.weight != before["fc2.weight"]
    may = torch.zeros_like(moved)
    may[rows.unsqueeze(1), columns] = True
    assert not (moved & ~(may & elements["fc2.weight"])).any()
    assert moved.sum() > 0.9 * (may & elements["fc2.weight"]).sum()


def test_the_optimiser_keeps_state_for_what_exists():
    model, manifest, inputs, elements = made("images", "a fifth")
    with Freezing(model, manifest, None, elements) as freezing:
        optimizer = train(
            *(
                model,
                freezing.parameters,
                OPTIMISERS["adam"],
                inputs,
                freezing.collect_gradients,
                freezing.write_back,
                1,
            )
        )
        kept = sum(optimizer.state[leaf]["exp_avg"].numel() for leaf in freezing.parameters)
    others = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert kept == others + sum(int(exists.sum()) for exists in elements.values())


def flops(model, manifest, inputs, elements):
    with Freezing(model, manifest, None, elements), FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    return counter.get_total_flops()


def test_empty_rows_and_columns_are_not_computed():
    """A step costs what it costs on a network without them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 40, 3), nn.Conv2d(40, 40, 3), nn.Flatten(), nn.Linear(40, 2000)).double()
    inputs = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    manifest = describe(copy.deepcopy(model).float(), inputs.float(), task="t")
    elements = {"1.weight": torch.zeros(40, 40, 3, 3, dtype=torch.bool), "3.weight": torch.zeros(2000, 40).bool()}
    elements["1.weight"][:10, 5:25] = True
    elements["3.weight"][::2, :10] = True
    with torch.no_grad():
        for key, exists in elements.items():
            model.get_parameter(key).mul_(exists)
    forward = 3 * 2 * (9 * 40 * 36 + 10 * 20 * 9 + 1000 * 10)
    assert flops(model, manifest, inputs, elements) == 3 * forward - 3 * 2 * 9 * 40 * 36


def test_infinite_gradients_of_missing_elements_count_as_zero():
    model, manifest, inputs, elements = made("images", "two thirds")
    with Freezing(model, manifest, None, elements) as freezing:
        model(inputs).sum().backward()
        model.fc2.weight.grad.fill_(torch.inf)
        freezing.collect_gradients()
        assert torch.equal(model.fc2.weight.grad == torch.inf, elements["fc2.weight"])
        assert not model.fc2.weight.grad[~elements["fc2.weight"]].any()


def test_elements_that_do_not_fit_are_refused():
    model, manifest, _, elements = made("images", "two thirds")
    assert isinstance(manifest, Manifest)
    exists = elements["fc2.weight"]
    with pytest.raises(ValueError, match=r"^fc2\.weight: .*booleans"):
        Freezing(model, manifest, None, {"fc2.weight": exists[1:]})
    with pytest.raises(ValueError, match=r"^fc2\.weight: .*booleans"):
        Freezing(model, manifest, None, {"fc2.weight": exists.float()})
    with pytest.raises(ValueError, match=r"^fc2\.weight: .*zero"):
        Freezing(model, manifest, None, {"fc2.weight": ~exists})
    with pytest.raises(ValueError, match=r"\bfc9\b"):
        Freezing(model, manifest, None, {"fc9": exists})
