"""Check that a training step's gradients match its loss, before a device trains with it.

A published step whose ``grad:NAME`` is not the gradient of its ``loss`` can leak samples: the product of a chosen row
and the inputs copies a sample into a weight's update (Boenisch et al., arXiv:2112.02918; Fowl et al.,
arXiv:2110.13057). Therefore a device moves the parameters along random directions, and compares the change of the loss
with the gradients' prediction. The check does not detect:

    a leak that is part of the loss itself
    a part of a gradient: below a twentieth of its parameter's gradient always, below a half sometimes
    a gradient so small that its prediction is lost in the rounding of a float32 loss
    a message in the pattern of zeros, or in the running statistics (``new:NAME``)
    a step that behaves differently for other weights, for later rounds or for larger batches
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow.command_line.table import percent
from sparrow.protocol.errors import GraphError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Tensors

from .onnx import Array, Network

SAMPLES = 8
"""Largest number of samples used of the batch."""
DIRECTIONS = 8
"""Number of random directions."""
PILOTS = 2
"""Number of directions for the choice of widths."""
WIDTHS = (2.5e-4, 6e-5, 1.5e-5, 4e-6)
"""Widths of a step, as the predicted change of the loss relative to the loss."""
LARGEST_STEP = 100.0
"""Largest step of a parameter at width 1, relative to the root mean square of its values."""
SMALLEST_VALUES = 0.05
"""Smallest size of values: biases and scales of layers often start at or near zero."""
SMALLEST_LOSS = 1e-3
"""Smallest size of a loss when the widths are chosen."""
ROUNDING = 2.0**-24
"""Relative rounding of a float32."""
LARGE_TERMS = 0.1
"""Size of terms of a loss that cancel, such as those of a log-softmax, whose rounding a smaller loss has."""
SUSPECTED = 1.25
"""Ratio of error to uncertainty from which on parameters are suspicious."""
CONFIRMED = 2.0
"""Ratio of error to uncertainty from which on a parameter is refused. Honest gradients of the tested models reached
0.9 over five seeds."""
VISIBLE = 0.33
"""Half the median error of a wrong gradient, relative to its prediction: with more tolerance it could pass."""
DIVISIONS = 2
"""Number of bisections if the tolerance is large."""
SHARE_OF_ALL = 0.01
"""Accepted error of several parameters, as a share of the slope."""
SHARE_OF_ONE = 0.05
"""Accepted error of a single parameter, as a share of the slope."""
NUDGE = 0.03
"""Distance of the second point from the weights, relative to the root mean square of a parameter."""
NAMED = 3
"""The search stops after this many parameters."""

Number = NDArray[np.float64]


# Gradients that a model stops, reverses or scales on purpose are refused too.
class ImplausibleStep(GraphError):
    """A training step whose gradients do not match its loss."""

    failure = Failure("bad-work/implausible")

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the training step reports gradients of {', '.join(names)} that do not match its loss: on the same "
            f"samples, both differ by more than {percent(SHARE_OF_ONE, 0)}. Such a step may send samples of this "
            "device to the coordinator. Do not train with it; ask the operator who published the model. A model that "
            "stops, reverses or scales gradients on purpose looks the same: train it with PyTorch, --engine torch"
        )
        self.names = tuple(names)

    def __reduce__(self) -> tuple[type[ImplausibleStep], tuple[tuple[str, ...]]]:
        return type(self), (self.names,)


@dataclass(frozen=True)
class Plausibility:
    """A passed check; ``judged`` is False if it could miss a wrong gradient."""

    runs: int
    judged: bool


def check_gradients(
    network: Network, inputs: Array, targets: Array, chance: np.random.Generator, *, samples: int = SAMPLES
) -> Plausibility:
    """Compare the gradients of a network's step with finite differences of its loss.

    Raises ImplausibleStep if they differ.
    """
    probe = _Probe(network, inputs[:samples], targets[:samples], chance)
    judged = probe.stand(network.tensors, kinks=True) and probe.judge()
    if not judged:
        judged = probe.stand(_beside(network, chance), kinks=False) and probe.judge(DIVISIONS)
    return Plausibility(probe.runs, judged)


def _beside(network: Network, chance: np.random.Generator) -> Tensors:
    """Return parameters near a network's, none exactly zero."""
    return {
        spec.name: _moved(network.tensors[spec.name], chance) if spec.trainable else network.tensors[spec.name]
        for spec in network.manifest.kept
    }


def _moved(values: Array, chance: np.random.Generator) -> Array:
    noise = chance.standard_normal(values.shape, np.float32)
    return np.asarray(values + np.float32(NUDGE * _size(values)) * noise, values.dtype)


def _size(values: Array) -> float:
    return max(_norm(values) / math.sqrt(max(1, values.size)), SMALLEST_VALUES)


def _norm(values: Array) -> float:
    # In float64, because squares of a float32 may overflow; in parts, because a whole copy would be twice as large.
    flat = values.reshape(-1)
    parts = (flat[start : start + 2**20].astype(np.float64) for start in range(0, flat.size, 2**20))
    return math.sqrt(sum(float(np.dot(part, part)) for part in parts))


@dataclass(frozen=True)
class _Look:
    """Slopes of the loss and their distance from the gradients' predictions, per unit of width."""

    error: float
    doubt: float
    slope: float
    alone: float

    @property
    def suspicious(self) -> bool:
        """Whether gradients of several parameters may be wrong."""
        return self.error > max(SUSPECTED * self.doubt, SHARE_OF_ALL * self.slope)

    @property
    def guilty(self) -> bool:
        """Whether the gradient of a single parameter is wrong."""
        return self.error > max(CONFIRMED * self.doubt, SHARE_OF_ONE * self.slope)

    @property
    def clear(self) -> bool:
        """Whether a wrong gradient of one parameter would be detected."""
        return SUSPECTED * self.doubt <= VISIBLE * self.alone


_UNSEEN = _Look(0.0, math.inf, math.inf, 0.0)


# A direction moves all parameters at once, by random signs. Each parameter's step is so wide that its gradient predicts
# the same change of the loss as any other's: a small parameter cannot hide behind a large one. Elements whose gradient
# is exactly zero do not move: they leak nothing, and some are zero by design, such as an embedding's padding row.
# Slopes are central differences at two widths, chosen on the first directions: smooth losses need wide steps, because
# of rounding, and kinked losses narrow ones.
#
#     error  the median, over the directions, of the distance between slope and prediction at the better width
#     doubt  the root mean square of: the distance between both widths, half the difference between the slopes to either
#            side (only at the weights themselves, which may lie on kinks), and the loss's rounding
#
# An error above 1.25 times the doubt is a suspicion. The parameters are then bisected until directions that move a
# single parameter confirm it, with twice the doubt. If the doubt is so large that one wrong gradient could pass, the
# check is repeated at a random point beside the weights, which lies on no kink, and then for halves and quarters of the
# parameters.
class _Probe:
    """A copy of a network for evaluations around a point."""

    def __init__(self, network: Network, inputs: Array, targets: Array, chance: np.random.Generator) -> None:
        self._twin = network.twin()
        self._inputs = inputs
        self._targets = targets
        self._chance = chance
        self._step = self._twin.step()
        self._drawn = self._step.draw(chance, len(targets))
        self.runs = 0
        self._moving: list[str] = []
        self._gradients: dict[str, NDArray[np.float32]] = {}
        self._norms: dict[str, float] = {}

    def stand(self, base: Mapping[str, Array], *, kinks: bool) -> bool:
        """Move to a point; return True if loss and gradients are finite. kinks: whether the point may be on a kink."""
        self._base = base
        self._kinks = kinks
        self._twin.load(base)
        self._loss = self._run()
        self._gradients = {name: np.array(each) for name, each in self._step.gradients.items()}
        self._norms = {name: _norm(each) for name, each in self._gradients.items()}
        self._moving = [name for name, norm in self._norms.items() if norm > 0]
        return math.isfinite(self._loss) and all(map(math.isfinite, self._norms.values()))

    def judge(self, divisions: int = 0) -> bool:
        """Return True if a wrong gradient would be detected. Raises ImplausibleStep if one is."""
        return not self._moving or self._judge(self._moving, divisions)

    def _judge(self, names: Sequence[str], divisions: int) -> bool:
        found = self._look(names)
        if found.suspicious and (culprits := self._culprits(names)):
            raise ImplausibleStep(culprits)
        clear = found.clear and not found.suspicious
        if clear or not divisions or len(names) == 1:
            return clear
        halves = [self._judge(half, divisions - 1) for half in _halves(names)]
        return all(halves)

    def _run(self) -> float:
        self.runs += 1
        return self._step.run(self._inputs, self._targets, self._drawn, moves=False)

    def _look(self, names: Sequence[str]) -> _Look:
        """Compare slopes and predictions along random directions."""
        size = max(abs(self._loss), SMALLEST_LOSS)
        alone = size / math.sqrt(len(names))
        steps = {
            name: min(alone / self._norms[name], LARGEST_STEP * _size(np.asarray(self._base[name]))) for name in names
        }
        rounding = ROUNDING * max(abs(self._loss), LARGE_TERMS)
        pilots = [self._slopes(steps, WIDTHS) for _ in range(PILOTS)]
        pairs = [np.array([pilot[place : place + 2] for pilot in pilots]) for place in range(len(WIDTHS) - 1)]
        doubts = [self._doubt(pair, rounding / WIDTHS[place + 1]) for place, pair in enumerate(pairs)]
        if not any(map(math.isfinite, doubts)):
            return _UNSEEN
        best = int(np.nanargmin(doubts))
        widths = WIDTHS[best : best + 2]
        others = [self._slopes(steps, widths) for _ in range(DIRECTIONS - PILOTS)]
        found = np.array([*pairs[best], *others])
        found = found[np.isfinite(found).all(axis=(1, 2))]
        if len(found) <= DIRECTIONS // 2:
            return _UNSEEN
        apart = np.abs(found[:, :, 0] - found[:, :, 1]).min(axis=1)
        slope = max(_rms(found[:, 1, 0]), _rms(found[:, 1, 1]))
        return _Look(float(np.median(apart)), self._doubt(found, rounding / widths[1]), slope, alone)

    def _slopes(self, steps: Mapping[str, float], widths: Sequence[float]) -> Number:
        """Return slope, prediction and kink [width, 3] along one random direction."""
        signs = {name: self._signs(name) for name in steps}
        found = []
        for width in widths:
            losses = []
            predicted = 0.0
            for side in (1, -1):
                for name, step in steps.items():
                    moved = self._twin.tensors[name]
                    start = self._base[name]
                    np.multiply(signs[name], np.float32(side * width * step), out=moved, casting="unsafe")
                    np.add(moved, start, out=moved)
                    # The actual step, because a step may be below the rounding of a weight.
                    taken = np.asarray(moved - start, np.float32)
                    predicted += side * float(np.vdot(self._gradients[name], taken))
                losses.append(self._run())
            up, down = losses
            found.append(
                [(up - down) / (2 * width), predicted / (2 * width), (up + down - 2 * self._loss) / (2 * width)]
            )
        for name in steps:
            np.copyto(self._twin.tensors[name], self._base[name])
        return np.array(found)

    def _signs(self, name: str) -> NDArray[np.int8]:
        """Return a random sign for each element, 0 for a gradient of zero."""
        gradient = self._gradients[name]
        bits = np.frombuffer(self._chance.bytes((gradient.size + 7) // 8), np.uint8)
        signs: NDArray[np.int8] = np.unpackbits(bits, count=gradient.size).view(np.int8).reshape(gradient.shape)
        signs *= 2
        signs -= 1
        signs *= gradient != 0
        return signs

    def _doubt(self, found: Number, rounding: float) -> float:
        """Return the uncertainty of slopes [direction, 2 widths, 3]."""
        apart = found[:, :, 0] - found[:, :, 1]
        kinks = _rms(found[:, 1, 2]) if self._kinks else 0.0
        return math.hypot(_rms(apart[:, 0] - apart[:, 1]), kinks, rounding)

    def _culprits(self, names: Sequence[str], most: int = NAMED) -> list[str]:
        """Return the first parameters whose gradients are confirmed to be wrong."""
        if len(names) == 1:
            return [*names] if self._look(names).guilty else []
        found: list[str] = []
        for half in _halves(names):
            if len(found) < most and (len(half) == 1 or self._look(half).suspicious):
                found += self._culprits(half, most - len(found))
        return found


def _halves(names: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    middle = len(names) // 2
    return names[:middle], names[middle:]


def _rms(values: Number) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
