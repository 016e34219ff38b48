"""The quantities in FedSPU's Theorem 1 (arXiv:2403.11464, section 4) that a run can measure.

With w_k the personal model of device k, ŵ_k the same with the active values of the global model merged into it, F_k the
loss over all training data of the device, and ∇F̄_k its gradient with frozen parameters set to zero, the theorem says
that F_k falls until ‖∇F_k(w_k)‖² is below ε², if p_k² >= Q L and the learning rate η is small enough, where

    ‖∇F_k(w_k)‖² <= Q ‖∇F_k(ŵ_k)‖²     (Assumption 2)        ‖ŵ_k - w_k‖² <= σ²                    (Assumption 3)
    E ‖∇F̄_k(w)‖² = p_k² ‖∇F_k(w)‖²     (Lemma 1)             ε² = (L+1) Q σ² / ((2η - Lη²) p_k² + Q)

Measured after an evaluated round, with the newest global model: both gradients, ‖ŵ_k - w_k‖² and the masked gradient,
means over ``DRAWS`` separate masks. They give the least Q and σ² for these devices and this round, and Lemma 1's share.
A lower bound of L is the largest

    L >= ‖∇F_k(ŵ_k) - ∇F_k(w_k)‖ / ‖ŵ_k - w_k‖

L, Q and σ bound all rounds and devices, so all three measured values are lower bounds. F_k is in training mode: with
batch norm it is the mean over the device's batches in a fixed order. PyTorch computes its gradient, with either engine.
Norms are over trainable values.

The paper's ε² follows from its inequality (13) only with a minus sign in place of its last plus; then it is positive
only for p_k² (2η - Lη²) > Q. It is reported as printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.engines import Engine
from edge_sdk.tasks import Batches
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, merge_in_place, pack

DRAWS = 2
"""Masks over which a device's terms are averaged."""


@dataclass(frozen=True)
class Terms:
    """Theorem 1's terms for one device, means over masks, and how steep its gradient was found to be at most.

    gradient: ‖∇F_k(w_k)‖². merged: ‖∇F_k(ŵ_k)‖². active: ‖∇F̄_k(ŵ_k)‖². drift: ‖ŵ_k - w_k‖². values: the share of
    the model's values that a mask has.
    """

    budget: float
    gradient: float
    merged: float
    active: float
    drift: float
    steepness: float
    values: float


def gradient_of(engine: Engine, manifest: Manifest, tensors: Tensors, batches: Batches) -> dict[str, NDArray[Any]]:
    """Return the gradient of the mean loss over all samples, in training mode, by tensor; float64."""
    engine.load(tensors)
    names = [spec.name for spec in manifest.shared if spec.trainable]
    total: dict[str, NDArray[Any]] = {spec.name: np.zeros(spec.shape) for spec in manifest.shared if spec.trainable}
    samples = 0
    for batch in islice(engine.epochs(batches, seed=0), len(batches)):
        count = len(batch[1])

        def add(name: str, gradient: NDArray[Any], count: int = count) -> None:
            total[name] += count * gradient.astype(np.float64)

        engine.differentiate([batch], names, add)
        samples += count
    return {name: each / samples for name, each in total.items()}


def measure_terms(
    engine: Engine,
    manifest: Manifest,
    batches: Batches,
    *,
    personal: Tensors,
    global_model: Tensors,
    budget: float,
    key: str,
) -> Terms:
    """Return the terms of one device. key: seed of its masks."""
    before = gradient_of(engine, manifest, personal, batches)
    merged = list[float]()
    active = list[float]()
    drift = list[float]()
    values = list[float]()
    steepness = 0.0
    for number in range(DRAWS):
        mask = draw_neurons(manifest, NeuronDraw(f"{key}-{number}", budget))
        received = {name: np.array(tensor) for name, tensor in personal.items()}
        merge_in_place(manifest, received, pack(manifest, global_model, mask), mask)
        gradient = gradient_of(engine, manifest, received, batches)
        moved = {name: received[name].astype(np.float64) - personal[name].astype(np.float64) for name in before}
        merged.append(_square(gradient))
        active.append(_square(_masked(manifest, gradient, mask)))
        drift.append(_square(moved))
        values.append(count_values(manifest, mask) / manifest.shared_values)
        if drift[-1] > 0:
            turned = {name: gradient[name] - before[name] for name in before}
            steepness = max(steepness, math.sqrt(_square(turned) / drift[-1]))
    return Terms(
        budget, _square(before), _mean(merged), _mean(active), _mean(drift), steepness=steepness, values=_mean(values)
    )


def _masked(manifest: Manifest, gradient: Mapping[str, NDArray[Any]], mask: NeuronMask) -> dict[str, NDArray[Any]]:
    """Return the gradient with zeros outside the mask."""
    whole: Tensors = {
        spec.name: gradient.get(spec.name, np.zeros(spec.shape)).astype(np.float32) for spec in manifest.shared
    }
    kept: Tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.shared}
    merge_in_place(manifest, kept, pack(manifest, whole, mask), mask)
    return {name: kept[name] for name in gradient}


def _square(parts: Mapping[str, NDArray[Any]]) -> float:
    return float(sum(np.square(each, dtype=np.float64).sum() for each in parts.values()))


def summarise(terms: Sequence[Terms], learning_rate: float) -> dict[str, Any]:
    """Return a row's numbers: means over devices, lower bounds of Q, σ² and L, and the bound ε² by budget."""
    q = max(each.gradient / each.merged for each in terms if each.merged)
    sigma2 = max(each.drift for each in terms)
    steepest = max(each.steepness for each in terms)
    budgets = []
    for budget in sorted({each.budget for each in terms}):
        among = [each for each in terms if each.budget == budget]
        below = (2 * learning_rate - steepest * learning_rate**2) * budget**2 + q
        budgets.append(
            {
                "budget": budget,
                "gradient": _mean([each.gradient for each in among]),
                "lemma": _mean([each.active / each.merged for each in among if each.merged]),
                "values": _mean([each.values for each in among]),
                "epsilon2": (steepest + 1) * q * sigma2 / below if below > 0 else None,
                "condition": q * steepest / budget**2,
            }
        )
    return {
        "devices": len(terms),
        **{name: _mean([getattr(each, name) for each in terms]) for name in ("gradient", "merged", "active", "drift")},
        "q": q,
        "sigma2": sigma2,
        "steepness": steepest,
        "budgets": budgets,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
