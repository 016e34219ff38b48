"""Streaming averages of sparse updates, weight by weight.

    w_i <- sum over the devices k that sent i of n_k * w_ki / sum over the same devices of n_k        (FedSPU, Alg. 1)

Numerators are float64 arrays of the model's shapes. Weights need no array of that size: under neuron masks all values
that join the same two neurons (a kernel's taps, the columns of a flattened channel) are sent by the same devices, so
one weight per pair of neurons serves. Memory is that of one model in float64 and a little, whatever the cohort.

Order: float64 sums depend on it in the last bits, so the caller folds updates in the cohort's fixed order and the same
updates give the same model, bit for bit. A value that nobody sent keeps its old one; it is never averaged in as zero.
"""

from __future__ import annotations

import numpy as np

from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import NeuronMask, neuron_view, unpack


class MaskedSums:
    """Running numerators and weights of one round."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        views = {spec.name: neuron_view(manifest, spec) for spec in manifest.shared}
        self._numerators = {name: np.zeros(view, dtype=np.float64) for name, view in views.items()}
        self._weights = {name: np.zeros(view[:2], dtype=np.float64) for name, view in views.items()}
        self.updates = 0

    def fold_in_place(self, values: Array, mask: NeuronMask | None, num_examples: int) -> None:
        """Add one update: float32 [count_values(manifest, mask)], weighted with its ``num_examples``."""
        weight = float(num_examples)
        for spec, block, part in unpack(self._manifest, values, mask):
            block.add(self._numerators[spec.name], part, scale=weight)
            block.pairs().add(self._weights[spec.name], weight)
        self.updates += 1

    def mean(self, previous: Tensors) -> Tensors:
        """The next global values: name -> float32; what nobody sent is taken from ``previous``."""
        result: Tensors = {}
        for spec in self._manifest.shared:
            numerator, weights = self._numerators[spec.name], self._weights[spec.name]
            spread = weights.reshape(weights.shape + (1,) * (numerator.ndim - weights.ndim))
            quotient = (numerator / np.where(spread > 0, spread, 1.0)).astype(np.float32)
            old = previous[spec.name].reshape(numerator.shape)
            result[spec.name] = np.where(spread > 0, quotient, old).reshape(spec.shape)
        return result
