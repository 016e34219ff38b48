"""The manifest of an ``nn.Module``: which values of which tensors belong to which neurons.

In the graph of torch.export, each axis of each value is labelled with the neurons along it (``neurons.Run``). The first
two axes of a parameter start as new sets, which operators unite:

    x                 [N,1,4,4]   (), (), (), ()
    conv 1->3         [N,3,4,4]   (), (conv,), (), ()                 conv.weight  [conv], [], [], []
    max-pool, flatten [N,12]      (), (conv x 4,)
    linear 12->5      [N,5]       (), (fc,)                           fc.weight    [fc], [conv x 4]
    linear 5->2       [N,2]       (), ()   <- the model's output      out.weight   [], [fc]

Values that are added share one set, named after the first layer. A reshape into attention heads makes a head one
neuron. Neurons become complete if they reach the model's output, are added to a complete value such as the input, are
summed over by attention, or pass an unknown operator. docs/architecture.md lists the supported operators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparrow.command_line.table import percent
from sparrow.protocol.manifest import Manifest

from . import RunningStatistics
from .flow import Flow
from .graph import UnsupportedLayer, trace
from .modes import frozen_names
from .specs import names_of, refuse_types, specs_of


def describe(
    model: nn.Module,
    example: torch.Tensor,
    *,
    task: str,
    running_statistics: RunningStatistics = "shared",
    recipes: bool = False,
    least: float = 0.0,
) -> Manifest:
    """Return the manifest of ``model``, traced in evaluation mode on ``example`` [N, ...], N >= 1.

    running_statistics: policy of batch norm's running mean and variance. recipes: describe initial values by PyTorch's
    default initialisation. least: the share of the trained weights that must belong to neurons if an operator mixes
    neurons or is unknown.

    Tensors that training does not change are frozen (``modes.frozen_names``), or dropped if unread; neurons of frozen
    parameters are complete, because leaving them out saves no training. Raises UnsupportedLayer for a model that cannot
    be traced or sent, or with a share below ``least``.
    """
    refuse_types(model)
    frozen = frozen_names(model, example)
    model = copy.deepcopy(model).eval()
    names, aliases = names_of(model)
    traced = trace(model, example[:2])
    found = _search(lambda choices: Flow(traced, model, names, choices))
    if traced.shape[:1] != example[:2].shape[:1]:
        raise UnsupportedLayer(
            f"the model's output has shape {traced.shape} for {len(example[:2])} samples; "
            "its first axis must be the batch"
        )
    groups, numbered = found.groups
    layers = tuple(found.layers.all())
    known: dict[str, dict[str, Any]] = {
        name: {"init": recipe} for name, recipe in (found.layers.recipes() if recipes else {}).items()
    }
    for name, axes in found.state.axes.items():
        segments = tuple(found.neurons.segments(axis, numbered) for axis in axes)
        if any(segments):
            known.setdefault(name, {})["axes"] = segments
    specs = specs_of(
        model,
        aliases,
        statistics=found.state.statistics,
        running_statistics=running_statistics,
        frozen=frozen,
        read={name for layer in layers for name in layer.tensors},
        found=known,
    )
    manifest = Manifest(
        task=task,
        input_shape=tuple(example.shape[1:]),
        output_shape=traced.shape[1:],
        tensors=tuple(specs),
        groups=groups,
        layers=layers,
        aliases=aliases,
    )
    if found.neurons.lost and found.share < least:
        raise UnsupportedLayer(_too_little(manifest, found, least))
    return manifest


def _search(look: Callable[[dict[Any, int]], Flow]) -> Flow:
    """Return the best analysis. The choices are the parts that keep the neurons if a reshape splits them."""
    # Heads of attention are the outer part, groups of a shuffle the inner one. Each part is tried, one kind of
    # reshape after another; the choice with most weights, then most neurons, in groups wins.
    best = look({})
    tried: set[Any] = set()
    while (kind := next((kind for kind in best.state.splits if kind not in tried), None)) is not None:
        tried.add(kind)
        for place in range(best.state.splits[kind]):
            if place != best.state.choices.get(kind):
                found = look({**best.state.choices, kind: place})
                best = max(best, found, key=lambda each: each.worth)
    return best


def _too_little(manifest: Manifest, found: Flow, least: float) -> str:
    whole = sorted(
        (spec for spec in manifest.tensors if spec.trainable and not any(spec.axes)), key=lambda spec: -spec.size
    )
    reasons = [f"{spec.name} ({spec.size} values{found.why(spec.name)})" for spec in whole[:3]]
    return (
        f"{percent(found.share, 0)} of the weights belong to neurons that can be dropped, at least {percent(least, 0)} "
        f"must; complete are {', '.join(reasons)}. Build these parts from linear layers and convolutions, or choose a "
        "method that trains whole tensors"
    )
