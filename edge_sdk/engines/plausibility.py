"""The check that a training step's gradients are those of its loss, before a device trains with it.

A step is published by someone else. One whose ``grad:NAME`` is not the gradient of its ``loss`` can hold samples: the
product of a chosen row and the inputs copies a sample into a weight's update (Boenisch et al., arXiv:2112.02918; Fowl
et al., arXiv:2110.13057). So a device compares: it moves the parameters along random directions, runs the step on the
same few samples with the same random inputs, and looks at how much the loss changes.

A direction moves all parameters at once, by signs drawn at random. Each parameter's step is so wide that its gradient
predicts the same change of the loss as any other's: a small parameter cannot hide behind a large one. Elements whose
gradient is exactly zero stay: they reveal nothing, and some are zero by design, such as an embedding's padding row.
Slopes are central differences at two widths. The widths are chosen on the first directions, because smooth losses need
wide steps, for rounding, and kinked ones narrow steps.

    error  the median, over the directions, of the distance between slope and prediction at the better width
    doubt  the root mean square of: the distance between both widths, half the difference between the slopes to either
           side (only at the weights themselves, which may lie on kinks), and the loss's rounding

An error above 1.25 times the doubt is a suspicion. The parameters are then divided in halves, again and again, until
directions that move one parameter only confirm it, with twice the doubt. If the doubt is so large that the lie of one
parameter could pass, the check is repeated beside the weights, at a random point, which lies on no kink; and then for
a half, or a quarter, of the parameters at a time.

The check is against plain leaks, and finds no others. These pass:

    a leak that is written into the loss itself, whose gradient it is then
    a part of a gradient: one below a twentieth of its parameter's gradient passes, one below a half may
    a gradient so small that what it predicts is lost in the rounding of a float32 loss
    a message in the pattern of zeros, or in the running statistics (``new:NAME``)
    a step that behaves differently for other weights, for later rounds or for larger batches

Gradients that a model stops, reverses or scales on purpose are refused: they are not those of its loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.errors import GraphError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Tensors

from .onnx import Array, Network

SAMPLES = 8
"""Samples of the batch that are used, at most."""
DIRECTIONS, PILOTS = 8, 2
"""Random directions, and those of them that choose the widths."""
WIDTHS = (2.5e-4, 6e-5, 1.5e-5, 4e-6)
"""Widths of a step: the change of the loss that all gradients together predict, relative to the loss."""
LARGEST_STEP = 100.0
"""Largest step of a parameter at width 1, relative to the root mean square of its values."""
SMALLEST_VALUES = 0.05
"""Values below this count as large as this: biases, and scales of layers, often begin at zero or close to it."""
SMALLEST_LOSS = 1e-3
"""A loss below this counts as large as this, when the widths are chosen."""
ROUNDING = 2.0**-24
"""Relative rounding of a float32."""
LARGE_TERMS = 0.1
"""Terms of a loss that cancel, such as those of a log-softmax: a smaller loss has their rounding."""
SUSPECTED, CONFIRMED = 1.25, 2.0
"""Errors above so many times the doubt make parameters suspicious, and a single one guilty. Of the models that were
tried, over five seeds, honest gradients reached 0.9."""
VISIBLE = 0.33
"""Half the median error of a lie, relative to what its parameter predicts: with a larger tolerance it could pass."""
DIVISIONS = 2
"""Times that the parameters are divided in halves because the tolerance is larger."""
SHARE_OF_ALL, SHARE_OF_ONE = 0.01, 0.05
"""Errors below these shares of the slope are accepted, of several parameters and of a single one."""
NUDGE = 0.03
"""Distance of the second point from the weights, relative to the root mean square of a parameter."""
NAMED = 3
"""Parameters that are looked for; a step with that many is refused without a search for more."""

Number = NDArray[np.float64]


class ImplausibleStep(GraphError):
    """A training step whose gradients are not those of its loss. names: of the parameters."""

    failure = Failure("bad-work/implausible")

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the training step reports gradients of {', '.join(names)} that are not those of its loss: on the same "
            f"samples, both differ by more than {SHARE_OF_ONE:.0%}. Such a step may send samples of this device to the "
            "coordinator. Do not train with it; ask the operator who published the model. A model that stops, reverses "
            "or scales gradients on purpose looks the same: train it with PyTorch, --engine torch"
        )
        self.names = tuple(names)

    def __reduce__(self) -> tuple[type[ImplausibleStep], tuple[tuple[str, ...]]]:
        return type(self), (self.names,)


@dataclass(frozen=True)
class Plausibility:
    """The result of a check that found no fault.

    runs: of the step. judged: False if rounding, kinks or a loss that is not finite could hide a lying gradient.
    """

    runs: int
    judged: bool


def check_gradients(
    network: Network, inputs: Array, targets: Array, chance: np.random.Generator, *, samples: int = SAMPLES
) -> Plausibility:
    """Compare the gradients of a network's whole step with finite differences of its loss.

    inputs [N, ...] and targets [N, ...]: a batch, whose first samples are used. chance: for directions and the step's
    random inputs. The network stays as it is; the check holds two copies of its parameters, and two of its gradients.
    Raises ImplausibleStep, naming the parameters.
    """
    probe = _Probe(network, inputs[:samples], targets[:samples], chance)
    judged = probe.stand(network.tensors, kinks=True) and probe.judge()
    if not judged:
        judged = probe.stand(_beside(network, chance), kinks=False) and probe.judge(DIVISIONS)
    return Plausibility(probe.runs, judged)


def _beside(network: Network, chance: np.random.Generator) -> Tensors:
    """Return parameters close to a network's, none of them exactly zero."""
    return {
        spec.name: _moved(network.tensors[spec.name], chance) if spec.trainable else network.tensors[spec.name]
        for spec in network.manifest.kept
    }


def _moved(values: Array, chance: np.random.Generator) -> Array:
    noise = chance.standard_normal(values.shape, np.float32)
    return np.asarray(values + np.float32(NUDGE * _size(values)) * noise, values.dtype)


def _size(values: Array) -> float:
    """Return the root mean square of a parameter's values, or the least that counts."""
    return max(_norm(values) / math.sqrt(max(1, values.size)), SMALLEST_VALUES)


def _norm(values: Array) -> float:
    # In float64, because squares of a float32 may overflow; in parts, because a copy of all would be twice as large.
    flat = values.reshape(-1)
    parts = (flat[start : start + 2**20].astype(np.float64) for start in range(0, flat.size, 2**20))
    return math.sqrt(sum(float(np.dot(part, part)) for part in parts))


@dataclass(frozen=True)
class _Look:
    """Slopes of the loss along directions, compared with what gradients predict, all per unit of width.

    error: the median distance. doubt: the uncertainty of the slopes themselves. slope: the root mean square of slopes
    or of predictions, the larger of both. alone: the prediction of one parameter.
    """

    error: float
    doubt: float
    slope: float
    alone: float

    @property
    def suspicious(self) -> bool:
        """True if gradients of several parameters may not be those of the loss."""
        return self.error > max(SUSPECTED * self.doubt, SHARE_OF_ALL * self.slope)

    @property
    def guilty(self) -> bool:
        """True if the gradient of a single parameter is not that of the loss."""
        return self.error > max(CONFIRMED * self.doubt, SHARE_OF_ONE * self.slope)

    @property
    def clear(self) -> bool:
        """True if the lie of one parameter would be seen."""
        return SUSPECTED * self.doubt <= VISIBLE * self.alone


_UNSEEN = _Look(0.0, math.inf, math.inf, 0.0)


class _Probe:
    """A copy of a network that moves around a point. runs: of the step so far."""

    def __init__(self, network: Network, inputs: Array, targets: Array, chance: np.random.Generator) -> None:
        self._twin, self._inputs, self._targets, self._chance = network.twin(), inputs, targets, chance
        self._step = self._twin.step()
        self._drawn = self._step.draw(chance, len(targets))
        self.runs = 0
        self._moving: list[str] = []
        self._gradients: dict[str, NDArray[np.float32]] = {}
        self._norms: dict[str, float] = {}

    def stand(self, base: Mapping[str, Array], *, kinks: bool) -> bool:
        """Go to a point; return whether its loss and gradients are finite. kinks: it may lie on some."""
        self._base = base
        self._kinks = kinks
        self._twin.load(base)
        self._loss = self._run()
        self._gradients = {name: np.array(each) for name, each in self._step.gradients.items()}
        self._norms = {name: _norm(each) for name, each in self._gradients.items()}
        self._moving = [name for name, norm in self._norms.items() if norm > 0]
        return math.isfinite(self._loss) and all(map(math.isfinite, self._norms.values()))

    def judge(self, divisions: int = 0) -> bool:
        """Return whether the lie of one parameter would have been seen. Raises ImplausibleStep."""
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
        """Move parameters along random directions."""
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
            losses, predicted = [], 0.0
            for side in (1, -1):
                for name, step in steps.items():
                    moved, start = self._twin.tensors[name], self._base[name]
                    np.multiply(signs[name], np.float32(side * width * step), out=moved, casting="unsafe")
                    np.add(moved, start, out=moved)
                    # What was added, not what should have been: a step may be less than the rounding of a weight.
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
        """Return a random sign for each element whose gradient is not zero."""
        gradient = self._gradients[name]
        bits = np.frombuffer(self._chance.bytes((gradient.size + 7) // 8), np.uint8)
        signs: NDArray[np.int8] = np.unpackbits(bits, count=gradient.size).view(np.int8).reshape(gradient.shape)
        signs *= 2
        signs -= 1
        signs *= gradient != 0
        return signs

    def _doubt(self, found: Number, rounding: float) -> float:
        """Return the root mean square of what slopes [direction, 2 widths, 3] are not sure of."""
        apart = found[:, :, 0] - found[:, :, 1]
        kinks = _rms(found[:, 1, 2]) if self._kinks else 0.0
        return math.hypot(_rms(apart[:, 0] - apart[:, 1]), kinks, rounding)

    def _culprits(self, names: Sequence[str], most: int = NAMED) -> list[str]:
        """Return the first of suspicious parameters whose own gradient is confirmed to be wrong."""
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
