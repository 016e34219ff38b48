"""Physically smaller networks without PyTorch, with only the active neurons (see ``training.narrow``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sparrow.graphs.cutting import ALWAYS, Label, cut_graph
from sparrow.protocol.manifest import Segment
from sparrow.protocol.masks import NeuronMask, axis_index
from sparrow.protocol.neurons import Narrowing

from .onnx import Index, Network, Sessions

KEPT = 8
"""Number of widths with cached sessions; the least recently used are dropped."""


class Narrow:
    """The network of the active neurons of ``network``, whose dropped neurons must be zero.

    Raises CannotNarrow if it cannot be built.
    """

    def __init__(self, network: Network, mask: NeuronMask) -> None:
        self._whole = network
        self._narrowing = Narrowing.of(network.manifest, mask)
        self.network = network
        self.manifest = self._narrowing.manifest
        if self.manifest is network.manifest:
            return
        # Graphs are cut from the whole network only: the neurons of a narrow one are translated first.
        whole, outer = network.cut_from or (network, None)
        of_whole = mask if outer is None else _within(outer, mask)
        sessions, labels = _sessions(whole, of_whole)
        self.network = Network(self.manifest, sessions, _index(whole, of_whole, labels))
        self.network.cut_from = (whole, of_whole)
        tensors = network.tensors
        self.network.load({spec.name: self._narrowing.take(spec, tensors[spec.name]) for spec in self.manifest.kept})

    def write_back(self) -> None:
        """Copy the narrow network's values into the whole one."""
        if self.network is self._whole:
            return
        for name, tensor in self.network.tensors.items():
            self._narrowing.blocks[name].put(self._whole.tensors[name], tensor)


def _within(outer: NeuronMask, mask: NeuronMask) -> NeuronMask:
    return NeuronMask({group: outer.active[group][active] for group, active in mask.active.items()})


def _sessions(network: Network, mask: NeuronMask) -> tuple[Sessions, Mapping[str, Label]]:
    counts = {group: len(mask.active[group]) for group in network.manifest.group_sizes}
    whole = network.sessions
    widths = tuple(counts.values())
    kept = whole.narrow
    with whole.lock:
        if widths not in kept:
            step, labels = cut_graph(whole.graphs.step, network.manifest, counts)
            evaluation, more = cut_graph(whole.graphs.evaluation, network.manifest, counts)
            graphs = replace(whole.graphs, step=step, evaluation=evaluation)
            kept[widths] = Sessions(graphs, threads=whole.threads), {**labels, **more}
        found: tuple[Sessions, Mapping[str, Label]] = kept.pop(widths)
        # Move the entry to the end, as the most recently used.
        kept[widths] = found
        while len(kept) > KEPT:
            del kept[next(iter(kept))]
    return found


def _index(network: Network, mask: NeuronMask, labels: Mapping[str, Label]) -> dict[str, Index]:
    sizes = {**network.manifest.group_sizes, ALWAYS: 1}
    neurons = NeuronMask({**mask.active, ALWAYS: np.arange(1)})
    index: dict[str, Index] = {}
    for name, label in labels.items():
        segments = tuple(Segment.model_construct(group=group, repeat=repeat) for group, repeat in label)
        kept = np.array(axis_index(segments, neurons, sizes), np.int64)
        if name.startswith("places:"):
            places = np.full(sum(sizes[group] * repeat for group, repeat in label), -1, np.int64)
            places[kept] = np.arange(len(kept))
            kept = places
        index[name] = kept
    return index
