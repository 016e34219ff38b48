"""From an ``nn.Module`` to its manifest: which values of which tensors belong to which neurons.

The forward pass is traced with torch.export into a graph of operators. Every value in it carries, for each of its axes,
the neurons that lie along it (``neurons.Run``); an axis without belongs to no hidden neuron and is always complete. A
parameter is a value like others: its first two axes begin as sets of their own, and what it is multiplied with or added
to says what they are:

    x                 [N,1,4,4]   (), (), (), ()
    conv 1->3         [N,3,4,4]   (), (conv,), (), ()                 conv.weight  [conv], [], [], []
    max-pool, flatten [N,12]      (), (conv x 4,)
    linear 12->5      [N,5]       (), (fc,)                           fc.weight    [fc], [conv x 4]
    linear 5->2       [N,2]       (), ()   <- the model's output      out.weight   [], [fc]

Values that are added share one set, which keeps the name of the first layer in forward order. A reshape into heads
makes a head's rows of query, key, value and columns of what follows one neuron. What an axis cannot describe is made
complete, never left half true: neurons that reach the model's output, that are added to a complete value such as the
input, that attention sums over, or that pass an operator we do not know. That costs sparsity, not correctness.
docs/architecture.md lists what is found and what is complete.

Beside its axes every value carries which part of its gradient can be of use below it (``manifest.Layer.input_error``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
    """Return the manifest of ``model``, found by tracing it in evaluation mode on ``example`` [N, ...], N >= 1.

    The model is left as it was: weights, buffers, training flags. ``running_statistics`` is the policy of batch norm's
    running mean and variance. ``recipes`` True writes PyTorch's default
    initialisation of the layers we know as recipes, so that initial weights need not be published; what those layers
    hold now is then ignored. least: the share of the trained weights that must belong to neurons where an operator
    mixes neurons or is not known; a model without hidden layers has none.

    Tensors come in state-dict order, a tied one under its first name; its others are the manifest's aliases. Buffers
    are not trainable; all but the running statistics stay personal, since integers and counters cannot be averaged;
    ``num_batches_tracked`` is dropped, and what training does not change is frozen (``modes.frozen_names``), or dropped
    where nothing reads it. Neurons of frozen parameters are complete: there is nothing to train of them, and a part of
    them answers otherwise. A layer's kind is its class name in lower case; its tensors are its parameters.

    Raises UnsupportedLayer for a model that cannot be traced or sent, and, naming what is complete and why, for one of
    which less than ``least`` belongs to neurons.
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
    """Return what is found with the best choices: where a reshape splits neurons, which part keeps them.

    Heads of attention are the outer part, the groups of a shuffle the inner one: each is tried, one kind of reshape
    after another, and what leaves most weights, then most neurons, to choose from is taken.
    """
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
        f"{found.share:.0%} of the weights belong to neurons that can be left out, and at least {least:.0%} must; "
        f"complete are {', '.join(reasons)}. Build these parts from linear layers and convolutions, or choose a method "
        "that trains whole tensors"
    )
