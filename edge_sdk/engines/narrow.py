"""Physically small networks without PyTorch: of the active neurons alone, as ``training.narrow`` has them with it."""

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
"""Widths whose sessions are kept; those that were not used for longest are forgotten first."""


class Narrow:
    """The network of the active neurons of ``network``, whose dropped ones must be zero.

    network: one that holds what is active, or the whole itself where that is everything. manifest: its own. Sessions
    are made once for as many neurons, whichever they are. Raises CannotNarrow.
    """

    def __init__(self, network: Network, mask: NeuronMask) -> None:
        self._whole, self._narrowing = network, Narrowing.of(network.manifest, mask)
        self.network, self.manifest = network, self._narrowing.manifest
        if self.manifest is network.manifest:
            return
        # A graph is cut once: the neurons of a network that is narrow already are found in the whole one.
        whole, outer = network.cut_from or (network, None)
        of_whole = mask if outer is None else _within(outer, mask)
        sessions, labels = _sessions(whole, of_whole)
        self.network = Network(self.manifest, sessions, _index(whole, of_whole, labels))
        self.network.cut_from = (whole, of_whole)
        tensors = network.tensors
        self.network.load({spec.name: self._narrowing.take(spec, tensors[spec.name]) for spec in self.manifest.kept})

    def write_back(self) -> None:
        """Bring what the narrow network has become into the whole one; what is dropped stays as it is."""
        if self.network is self._whole:
            return
        for name, tensor in self.network.tensors.items():
            self._narrowing.blocks[name].put(self._whole.tensors[name], tensor)


def _within(outer: NeuronMask, mask: NeuronMask) -> NeuronMask:
    """Return the neurons of a whole network that are active in ``mask``, whose neurons are those of ``outer``."""
    return NeuronMask({group: outer.active[group][active] for group, active in mask.active.items()})


def _sessions(network: Network, mask: NeuronMask) -> tuple[Sessions, Mapping[str, Label]]:
    counts = {group: len(mask.active[group]) for group in network.manifest.group_sizes}
    whole, widths = network.sessions, tuple(counts.values())
    kept = whole.narrow
    with whole.lock:
        if widths not in kept:
            step, labels = cut_graph(whole.graphs.step, network.manifest, counts)
            evaluation, more = cut_graph(whole.graphs.evaluation, network.manifest, counts)
            graphs = replace(whole.graphs, step=step, evaluation=evaluation)
            kept[widths] = Sessions(graphs, threads=whole.threads), {**labels, **more}
        found: tuple[Sessions, Mapping[str, Label]] = kept.pop(widths)
        kept[widths] = found  # the last that was used
        while len(kept) > KEPT:
            del kept[next(iter(kept))]
    return found


def _index(network: Network, mask: NeuronMask, labels: Mapping[str, Label]) -> dict[str, Index]:
    """Return the values of a narrow graph's inputs that say which neurons are active."""
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
