"""HetLoRA, server half: every device has the first ranks of each adapter, as many as its budget allows.

Cho et al., EMNLP 2024, arXiv:2401.06432. FedAvg on low-rank adapters, whose product B A [out, in] is added to a frozen
weight:

- *truncation*: a device of budget p has the first ceil(p r) of r ranks, rows of A and columns of B;
- *sparsity-weighted aggregation*: missing ranks count as zero, and each adapter is weighted by n_k times its
  Frobenius norm ||B_k A_k||.

The manifest finds an adapter's ranks as neurons between two frozen layers: rows of one weight and columns of another
only. Other trained hidden neurons are cut alike. The paper's rank self-pruning is left out.
"""

from __future__ import annotations

import numpy as np

from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask, unpack
from sparrow.protocol.neurons import first_neurons_up
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from ..sums.averages import MaskedSums, Sum, quotient
from . import ActiveNeurons, Aggregation, CoordinatorMethod, GlobalModel, Situation, any_budget


def adapters(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Return the adapters: group of ranks -> weight A with these rows, weight B with these columns."""
    found: dict[str, tuple[list[str], list[str], list[str]]] = {group.name: ([], [], []) for group in manifest.groups}
    for spec in manifest.shared:
        for axis, segments in enumerate(spec.axes):
            for segment in segments:
                plain = len(spec.shape) == 2 and len(segments) == 1 and segment.repeat == 1
                found[segment.group][axis if plain else 2].append(spec.name)
    return {
        name: (rows[0], columns[0])
        for name, (rows, columns, rest) in found.items()
        if len(rows) == len(columns) == 1 and not rest and rows != columns
    }


class AdapterSums:
    """``MaskedSums``, with each adapter weighted by its norm."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._pairs = adapters(manifest)
        self._adapter = {name: group for group, pair in self._pairs.items() for name in pair}
        self._others = MaskedSums(manifest)
        self._numerators: dict[str, Sum] = {
            spec.name: np.zeros(spec.shape) for spec in manifest.shared if spec.name in self._adapter
        }
        self._weights = dict.fromkeys(self._pairs, 0.0)
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update."""
        self._others.fold_in_place(values, mask, num_examples)
        parts = {spec.name: (block, part) for spec, block, part in unpack(self._manifest, values, mask)}
        for group, (down, up) in self._pairs.items():
            # [r_k, in], [out, r_k]
            a, b = (np.asarray(parts[name][1], np.float64).reshape(parts[name][0].shape) for name in (down, up))
            # ||B A|| without computing the product
            norm = float(np.sqrt(max(0.0, ((b.T @ b) * (a @ a.T)).sum())))
            weight = num_examples * norm
            self._weights[group] += weight
            for name in (down, up):
                block, part = parts[name]
                block.add(self._numerators[name], part, scale=weight)
        self.updates += 1

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values: name -> float32. Adapters without an update do not change."""
        result = self._others.mean(previous)
        for name, numerator in self._numerators.items():
            weight = np.full(numerator.shape, self._weights[self._adapter[name]])
            result[name] = quotient(numerator, weight, previous[name])
        return result


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the published manifest. Raises BadContent without an adapter."""
    if not adapters(published):
        raise BadContent(
            "hetlora: the model has no low-rank adapter, which is two linear layers in a row beside a frozen one; add "
            "one (peft.get_peft_model), or choose heterofl, which narrows whole models"
        )
    return published


def sums_of(model: GlobalModel, situation: Situation) -> AdapterSums:
    """Return the sums of a round."""
    return AdapterSums(situation.manifest)


HETLORA = CoordinatorMethod(
    smallest_budget=any_budget,
    manifest=manifest,
    active=ActiveNeurons(narrow=True, rule=first_neurons_up),
    aggregation=Aggregation(sums=sums_of),
    why_not_secure=lambda settings: "adapters are weighted by norms of single updates, which are hidden",
)
