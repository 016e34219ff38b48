"""How long a training step takes under a mask, predicted from what this machine needs for the parts.

Masks change the weight gradients and nothing else of a step (FedSPU's method card, 4.4). So two steps are timed, of the
whole model and with half of its neurons active, and the weight gradient of each layer by itself. With w_l the seconds
of layer l's, and s_l(m) the share of it that mask m leaves,

    seconds(m) = seconds(half) + Σ_l w_l·(s_l(m) - s_l(half))

where the step at half brings along what gathering active rows and columns costs; the whole model gathers nothing and is
what was timed. A convolution of few inputs computes its gradient whole (``active.FEW_INPUTS``): its share is 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_neurons
from edge_sdk.training.active import FEW_INPUTS
from edge_sdk.training.compute import Compute
from edge_sdk.training.layout import Layout
from edge_sdk.training.rehearsal import Rehearsal

HALF = 0.5
LEAST_STEPS = 3
SECONDS = 0.5
"""How long a step is timed, again and again, after the least number of them."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step of the whole model, of one with half of its neurons, and of each weight's gradient by name."""

    whole: float
    half: float
    gradients: Mapping[str, float]
    manifest: Manifest

    def predict(self, mask: NeuronMask | None) -> float:
        """Seconds of a step under ``mask``."""
        if mask is None:
            return self.whole
        now, half = self._shares(mask), self._shares(_half(self.manifest))
        return self.half + sum(seconds * (now[name] - half[name]) for name, seconds in self.gradients.items())

    def _shares(self, mask: NeuronMask) -> dict[str, float]:
        return {
            spec.name: block_of(self.manifest, spec, mask).size / spec.size
            for spec in self.manifest.tensors
            if spec.name in self.gradients
        }


def measure_pace(rehearsal: Rehearsal, manifest: Manifest, samples: int | None = None) -> Pace:
    """Time the parts of a step on ``samples`` of the task's batch, all by default; seconds in the end are of all.

    Fewer samples, for a device that has no memory for more, are scaled up as if a step were proportional to them.
    """
    few = samples or rehearsal.samples
    scale = rehearsal.samples / few
    return Pace(
        whole=scale * steps_seconds(rehearsal, None, few),
        half=scale * steps_seconds(rehearsal, _half(manifest), few),
        gradients={name: scale * seconds for name, seconds in _gradients(rehearsal, few).items()},
        manifest=manifest,
    )


def steps_seconds(rehearsal: Rehearsal, mask: NeuronMask | None, samples: int | None = None) -> float:
    """Seconds of a step under ``mask``: the median over as many as fit into ``SECONDS``."""
    first = median(rehearsal.train(1 + LEAST_STEPS, mask=mask, samples=samples))
    more = min(50, int(SECONDS / max(first, 1e-6)))
    return median(rehearsal.train(1 + more, mask=mask, samples=samples)) if more > LEAST_STEPS else first


def _half(manifest: Manifest) -> NeuronMask:
    return draw_neurons(manifest, NeuronDraw("pace", 1, "pace", HALF))


def _gradients(rehearsal: Rehearsal, samples: int) -> dict[str, float]:
    """Seconds that the gradient of each weight takes by itself, of layers that compute only a part of it if need be."""
    seen: dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]] = {}

    def look(name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        return lambda module, inputs, output: seen.update({name: (module, inputs[0], output)})

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    layers = [(name, module) for name, module in rehearsal.model.named_modules() if type(module) in kinds]
    handles = [module.register_forward_hook(look(name)) for name, module in layers]
    try:
        with torch.no_grad(), Layout(rehearsal.model, rehearsal.task) as layout:
            batch = rehearsal.batch(samples)
            rehearsal.model(layout(*(part.to(rehearsal.task.compute.device) for part in batch)))
            return {
                f"{name}.weight": _seconds(_gradient(*parts), rehearsal.task.compute)
                for name, parts in seen.items()
                if isinstance(parts[0], nn.Linear) or _weights_of_one(parts[0]) >= FEW_INPUTS
            }
    finally:
        for handle in handles:
            handle.remove()


def _weights_of_one(convolution: nn.Module) -> int:
    """Weights of one filter."""
    weight = convolution.weight
    assert isinstance(weight, torch.Tensor)
    return weight[0].numel()


def _gradient(layer: nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> Callable[[], object]:
    """What computes the gradient of a layer's weight, for an error of ``output``'s shape and layout."""
    error = torch.ones_like(output)
    if isinstance(layer, nn.Linear):
        return lambda: error.flatten(0, -2).t() @ inputs.flatten(0, -2)
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    return lambda: torch.ops.aten.convolution_backward(
        *(error, inputs, layer.weight, None, layer.stride, layer.padding, layer.dilation, False),
        *([0] * len(layer.kernel_size), layer.groups, [False, True, False]),
    )


def _seconds(work: Callable[[], object], compute: Compute) -> float:
    taken: list[float] = []
    while len(taken) < 1 + LEAST_STEPS or (sum(taken) < SECONDS / 5 and len(taken) < 50):
        begin = time.perf_counter()
        work()
        compute.wait()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])
