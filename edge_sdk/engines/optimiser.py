"""Optimisers in numpy, in place: SGD with momentum, Adam and AdamW, with PyTorch's formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.settings import FederationSettings

Array = NDArray[np.float32]

# Pieces fit the cache, because memory passes over a large model cost as much as arithmetic.
PIECE = 2**16
"""Number of values per piece; with gradient and state they need a megabyte."""

BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class Rule:
    """An optimiser's settings."""

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    # Largest 2-norm of all gradients together, if limited.
    clip: float | None = None


def rule_of(settings: FederationSettings, learning_rate: float) -> Rule:
    """Return the optimiser of a federation's settings."""
    return Rule(settings.optimizer, learning_rate, settings.momentum, settings.weight_decay, settings.clip)


@dataclass
class Optimiser:
    """Update of ``weights`` (float32, C-contiguous) in place; the state starts at zero."""

    rule: Rule
    weights: Mapping[str, Array]
    slots: dict[str, list[Array]] = field(init=False)
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        count = {"sgd": 1 if self.rule.momentum else 0}.get(self.rule.kind, 2)
        self.slots = {
            name: [np.zeros(weight.size, np.float32) for _ in range(count)] for name, weight in self.weights.items()
        }

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Move the weights that have a gradient; overwrites the gradients."""
        self.steps += 1
        scale = self._clipped(list(gradients.values()))
        for name, gradient in gradients.items():
            weight = self.weights[name].reshape(-1)
            moved = gradient.reshape(-1)
            for piece in _pieces(weight.size):
                slots = [slot[piece] for slot in self.slots[name]]
                self._move(weight[piece], moved[piece], slots, scale)

    def _clipped(self, gradients: Sequence[Array]) -> float:
        if self.rule.clip is None:
            return 1.0
        squares = sum(float(np.dot(flat, flat)) for flat in (each.reshape(-1) for each in gradients))
        return min(1.0, self.rule.clip / (math.sqrt(squares) + 1e-6))

    def _move(self, weight: Array, gradient: Array, slots: Sequence[Array], scale: float) -> None:
        rule = self.rule
        if scale < 1.0:
            gradient *= np.float32(scale)
        if rule.weight_decay and rule.kind == "adamw":
            weight *= np.float32(1 - rule.learning_rate * rule.weight_decay)
        elif rule.weight_decay:
            gradient += np.float32(rule.weight_decay) * weight
        if rule.kind == "sgd":
            if slots:
                slots[0] *= np.float32(rule.momentum)
                slots[0] += gradient
                np.multiply(slots[0], np.float32(rule.learning_rate), out=gradient)
            else:
                gradient *= np.float32(rule.learning_rate)
            weight -= gradient
            return
        first, second = slots
        first += np.float32(1 - BETAS[0]) * (gradient - first)
        second *= np.float32(BETAS[1])
        gradient *= gradient
        gradient *= np.float32(1 - BETAS[1])
        second += gradient
        np.sqrt(second, out=gradient)
        gradient *= np.float32(1 / math.sqrt(1 - BETAS[1] ** self.steps))
        gradient += np.float32(EPSILON)
        np.divide(first, gradient, out=gradient)
        gradient *= np.float32(rule.learning_rate / (1 - BETAS[0] ** self.steps))
        weight -= gradient


def _pieces(size: int) -> Iterator[slice]:
    for start in range(0, size, PIECE):
        yield slice(start, start + PIECE)
