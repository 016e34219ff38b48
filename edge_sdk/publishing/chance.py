"""Random numbers of a forward pass, read from inputs instead of a generator.

Random numbers inside a graph differ between runtimes. Therefore every number that a forward pass draws comes from an
input, which the training engine fills from the round's seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .translations import CannotCompile

Kind = Literal["uniform", "normal"]
KINDS: tuple[Kind, ...] = ("uniform", "normal")

_ATEN = torch.ops.aten


def _with_usual(args: Sequence[Any]) -> tuple[float, float]:
    return args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0


@dataclass(frozen=True)
class Draw:
    """A request for random numbers in a forward pass; ``count`` is per sample or in total."""

    kind: Kind
    count: int
    per_sample: bool

    @property
    def name(self) -> str:
        """The name of the input."""
        return self.kind if self.per_sample else f"{self.kind}_step"


class Chance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that replaces every random number by ``give(kind, shape)``."""

    def __init__(self, give: Callable[[Kind, tuple[Any, ...]], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._give = give

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = self._drawn(func, args, kwargs)
        return func(*args, **kwargs) if drawn is None else drawn

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _ATEN.native_dropout.default:
            x, p, training = args
            if not training or p == 0:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            kept = self._uniform(x) > p
            return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept
        if func is _ATEN.bernoulli_.float:
            x = args[0]
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return x.copy_(self._uniform(x) > 1 - p)
        if func is _ATEN.bernoulli.p:
            return (self._uniform(args[0]) > 1 - args[1]).to(args[0].dtype)
        if func is _ATEN.bernoulli.default:
            return (self._uniform(args[0]) > 1 - args[0]).to(args[0].dtype)
        if func is _ATEN.rand_like.default:
            return self._uniform(args[0])
        if func is _ATEN.randn_like.default:
            return self._give("normal", tuple(args[0].shape))
        if func is _ATEN.rand.default:
            return self._give("uniform", tuple(args[0]))
        if func is _ATEN.randn.default:
            return self._give("normal", tuple(args[0]))
        if func is _ATEN.uniform_.default:
            low, high = _with_usual(args)
            return args[0].copy_(low + (high - low) * self._uniform(args[0]))
        # Functional variants, which a recording calls in place of the others.
        if func is _ATEN.uniform.default:
            low, high = _with_usual(args)
            return low + (high - low) * self._uniform(args[0])
        if func is _ATEN.normal_functional.default:
            mean, deviation = _with_usual(args)
            return mean + deviation * self._give("normal", tuple(args[0].shape))
        if func is _ATEN.normal_.default:
            mean, deviation = _with_usual(args)
            return args[0].copy_(mean + deviation * self._give("normal", tuple(args[0].shape)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotCompile(f"{func} draws random numbers of an unsupported distribution")
        return None

    def _uniform(self, like: Tensor) -> Tensor:
        return self._give("uniform", tuple(like.shape))


def record(run: Callable[[int], object], batches: tuple[int, int]) -> list[Draw]:
    """Return the requests for random numbers that ``run(samples)`` makes, in order.

    batches: two numbers of samples. Raises CannotCompile if the requests differ in more than size.
    """
    seen: list[list[tuple[Kind, tuple[int, ...]]]] = []
    for batch in batches:
        shapes: list[tuple[Kind, tuple[int, ...]]] = []

        def give(kind: Kind, shape: tuple[int, ...], shapes: list[Any] = shapes) -> Tensor:
            shapes.append((kind, shape))
            return torch.full(shape, 0.5) if kind == "uniform" else torch.zeros(shape)

        with Chance(give):
            run(batch)
        seen.append(shapes)
    return [
        Draw(kind, math.prod(first) // (batches[0] if first != second else 1), first != second)
        for (kind, first), (_, second) in zip(*seen, strict=True)
    ]


def shapes_of(draws: Sequence[Draw], batch: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input of random numbers at this batch size: name -> shape."""
    numbers = Counter[str]()
    for draw in draws:
        numbers[draw.name] += draw.count
    return {name: (batch, count) if name in KINDS else (count,) for name, count in numbers.items()}


class Given:
    """Random numbers for ``Chance``, read from inputs. drawn: name -> tensor, shaped as ``shapes_of`` returns."""

    def __init__(self, draws: Sequence[Draw], drawn: Mapping[str, Tensor]) -> None:
        self._draws = iter(draws)
        self._drawn = drawn
        self._places = dict.fromkeys(drawn, 0)

    def __call__(self, kind: Kind, shape: tuple[Any, ...]) -> Tensor:
        """Return the next random numbers of this kind and shape."""
        draw = next(self._draws)
        start = self._places[draw.name]
        source = self._drawn[draw.name]
        self._places[draw.name] = start + draw.count
        return source[..., start : start + draw.count].reshape(shape)
