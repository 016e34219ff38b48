"""Training steps for comparison: the same network and batch, dense, masked, skipped, and small.

    dense   autograd and torch.optim on the whole network
    hooks   as in the papers' code: the whole gradient times a mask, and frozen weights restored after the step
    small   a physically smaller network, of the active neurons alone: a lower bound for masked training
    ours    ``Freezing`` or ``GatedModel``

Functions of the same signature make them, and each is a callable that does one step. All run in the memory format in
which the product trains on a processor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.public import MODELS
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.gates.network import GatedModel
from edge_sdk.training.layout import gains
from sparrow.protocol.blocks import BlockTable, Selection
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_neurons

Step = Callable[[], None]
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """A network of the tasks, its manifest, and a batch of random samples."""

    model: nn.Module
    manifest: Manifest
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, name: str, batch: int) -> Setting:
        """Return the setting of ``name``, such as ``mnist:leaf``."""
        task, _, choice = name.partition(":")
        chosen = MODELS[task][choice]
        torch.manual_seed(0)
        model = chosen.build()
        inputs = torch.randn(batch, *chosen.shape)
        classes = model.eval()(inputs[:1]).shape[1]
        manifest = describe(model, inputs[:1], task=name)
        if gains(model):
            inputs = inputs.to(memory_format=torch.channels_last)
        return cls(_in_layout(model).train(), manifest, inputs, torch.randint(classes, (batch,)))

    def channels_first(self) -> Setting:
        """Return the same in torch's usual memory format, which is faster for networks of very few channels."""
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        return replace(self, model=model, inputs=self.inputs.contiguous())

    def mask(self, budget: float) -> NeuronMask:
        """Return FedSPU's mask at a budget."""
        return draw_neurons(self.manifest, NeuronDraw("device", budget))

    def network(self) -> nn.Module:
        """Return a copy to train."""
        return copy.deepcopy(self.model)


def _optimiser(parameters: Iterable[Tensor], momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=LEARNING_RATE, momentum=momentum)


def dense(setting: Setting, momentum: float = 0.0, network: nn.Module | None = None) -> Step:
    """Return a step that trains all of ``network``, by default the setting's."""
    model = network or setting.network()
    optimiser = _optimiser(model.parameters(), momentum)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(setting.inputs), setting.targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def hooks(setting: Setting, trained: Mapping[str, Tensor], momentum: float = 0.0) -> Step:
    """Return a step with gradients times ``trained`` (name -> bool), by a hook on every parameter; frozen values
    are restored.
    """
    model = setting.network()
    masks = {name: exists.to(torch.float32) for name, exists in trained.items()}
    frozen = {name: parameter.detach() * (1 - masks[name]) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradient * masks[name])  # type: ignore[no-untyped-call]
    step = dense(setting, momentum, model)

    def masked() -> None:
        step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(masks[name]).add_(frozen[name])

    return masked


def freezing(
    setting: Setting, mask: NeuronMask | None, elements: Mapping[str, Tensor] | None = None, momentum: float = 0.0
) -> Step:
    """Return our step: frozen neurons, or absent elements."""
    model = setting.network()
    with torch.no_grad():
        for name, exists in (elements or {}).items():
            model.get_parameter(name).mul_(exists)
    frozen = Freezing(model, setting.manifest, mask, elements).__enter__()
    optimiser = _optimiser(frozen.parameters, momentum)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(setting.inputs), setting.targets).backward()  # type: ignore[no-untyped-call]
        frozen.collect_gradients()
        optimiser.step()
        frozen.write_back()

    return step


def trained_values(setting: Setting, mask: NeuronMask) -> dict[str, Tensor]:
    """Return name -> bool: the values that a mask trains."""
    found = {}
    for spec in setting.manifest.tensors:
        where = np.zeros(spec.shape, dtype=bool)
        block = block_of(setting.manifest, spec, mask)
        block.put(where, np.ones(block.shape, dtype=bool))
        found[spec.name] = torch.from_numpy(where)
    return found


def small(setting: Setting, widths: Mapping[str, int], momentum: float = 0.0) -> Step:
    """Return a step of a network of ``widths`` (layer -> neurons); the output layer is whole."""
    model = smaller(setting.model, widths, setting.inputs)
    return dense(setting, momentum, model if setting.inputs.is_contiguous() else _in_layout(model))


def smaller(model: nn.Module, widths: Mapping[str, int], inputs: Tensor) -> nn.Module:
    """Return a chain of layers like ``model`` in which layer ``name`` has ``widths[name]`` neurons."""
    layers: dict[str, nn.Module] = {}
    channels = inputs.shape[1]
    spatial = True
    positions = 1
    value = inputs[:1].clone()
    for name, layer in model.named_children():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
            kind = type(layer)
            same = (layer.kernel_size, layer.stride, layer.padding)
            made: nn.Module = kind(channels, widths.get(name, layer.out_channels), *same, bias=layer.bias is not None)  # type: ignore[arg-type]
            channels = widths.get(name, layer.out_channels)
        elif isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            made = type(layer)(channels)
        elif isinstance(layer, nn.GroupNorm):
            made = nn.GroupNorm(math.gcd(layer.num_groups, channels), channels)
        elif isinstance(layer, nn.Linear):
            wide = channels * positions if spatial else channels
            made = nn.Linear(wide, widths.get(name, layer.out_features), bias=layer.bias is not None)
            spatial = False
            channels = widths.get(name, layer.out_features)
        else:
            made = copy.deepcopy(layer)
        with torch.no_grad():
            value = made.eval()(value)
        if isinstance(layer, nn.Flatten):
            positions = value.shape[1] // channels
        layers[name] = made.train()
    result = nn.Sequential()
    for name, layer in layers.items():
        result.add_module(name, layer)
    return result


def _in_layout(model: nn.Module) -> nn.Module:
    """Return the model in the memory format in which the product trains it."""
    return model.to(memory_format=torch.channels_last) if gains(model) else model  # type: ignore[call-overload]


def by_rows(table: BlockTable, share: float, generator: np.random.Generator) -> Selection:
    """Return about ``share`` of the blocks of every tensor, the first among them."""
    chosen = []
    for sizes in table.tensors.values():
        on = np.zeros(len(sizes), dtype=bool)
        on[0] = True
        more = min(len(sizes) - 1, max(0, round(share * len(sizes)) - 1))
        on[1 + generator.permutation(len(sizes) - 1)[:more]] = True
        chosen.append(on)
    return np.concatenate(chosen)


def gated(setting: Setting, table: BlockTable, selections: Sequence[Selection], probe: float) -> Step:
    """Return our step with block gates, other ones in every batch; both paths of a gating layer learn."""
    model = setting.network()
    for parameter in model.parameters():
        # Blocks are contiguous runs of values in memory.
        parameter.data = parameter.data.contiguous()
    gates = GatedModel(model, table, probe=probe)
    optimiser = _optimiser(gates.leaves, 0.9)
    scales = torch.rand(len(table.sizes))
    importances = torch.rand(len(table.sizes))
    taken = 0

    def step() -> None:
        nonlocal taken
        selected = selections[taken % len(selections)]
        taken += 1
        of_batch = scales.clone().requires_grad_()
        of_blocks = importances.clone().requires_grad_()
        on = torch.from_numpy(selected).float()
        straight_through = of_batch * (on + of_blocks - of_blocks.detach())
        optimiser.zero_grad()
        output = gates(setting.inputs, straight_through, selected)
        F.cross_entropy(output, setting.targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def rows_on(setting: Setting, table: BlockTable, selected: Selection) -> dict[str, int]:
    """Return layer -> the number of its rows with an active block."""
    widths = {}
    place = 0
    shapes = {name: parameter.shape for name, parameter in setting.model.named_parameters()}
    for name, sizes in table.tensors.items():
        ends = [0, *accumulate(sizes)]
        row = shapes[name][1:].numel()
        rows = {r for b in np.flatnonzero(selected[place : place + len(sizes)]) for r in _touched(ends, int(b), row)}
        place += len(sizes)
        if len(shapes[name]) > 1:
            widths[name.removesuffix(".weight")] = max(1, len(rows))
    last = list(widths)[-1]
    return {name: width for name, width in widths.items() if name != last}


def _touched(ends: Sequence[int], block: int, row: int) -> range:
    return range(ends[block] // row, -(-ends[block + 1] // row))
