"""The operators that a function of tensors runs, recorded at two batch sizes.

A ``Recording`` lists every call of PyTorch's operators with its arguments and real results. ``free_batch`` compares two
recordings of one function at two batch sizes: numbers that differ become ``Sized``, functions of the batch size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .translations import CannotCompile, Fourier

_ATEN = torch.ops.aten

SAME = (_ATEN.alias.default, _ATEN.detach.default, _ATEN.clone.default, _ATEN.lift_fresh.default)
"""Operators that return the values of their first argument: recorded calls change nothing in place."""

UNTIL_THE_END = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Ref:
    """Reference to the value at ``place`` of a recording."""

    place: int


@dataclass(frozen=True)
class Sized:
    """A number that depends on the batch size n: slope · n + rest; ``inverse``: slope / n."""

    slope: float
    rest: int = 0
    inverse: bool = False

    def at(self, batch: int) -> float:
        """Return the number at a batch size."""
        return self.slope / batch if self.inverse else self.slope * batch + self.rest


@dataclass(frozen=True)
class Call:
    """A call of an operator. Arguments: numbers, and ``Ref`` in place of tensors. made: places of its results."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int | None, ...]


@dataclass
class Recording:
    """Calls in order, and the values by place. inputs and outputs: their places, in order."""

    batch: int
    values: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._decompositions = decompositions
        self._places: dict[int, int] = {}
        # Numbers of objects are unique only while the objects live.
        self._alive: list[Tensor] = []
        # Places of values that depend on no input.
        self._fixed = set[int]()

    def place_of(self, tensor: Tensor) -> int:
        """Return the place of a tensor; an unknown tensor becomes a constant."""
        found = self._places.get(id(tensor))
        if found is None:
            found = self._add(tensor)
            self._fixed.add(found)
        return found

    def _add(self, tensor: Tensor) -> int:
        place = len(self._recording.values)
        self._recording.values.append(tensor)
        self._alive.append(tensor)
        self._places[id(tensor)] = place
        return place

    def add_input(self, tensor: Tensor) -> None:
        """Add an input of the function."""
        self._recording.inputs.append(self._add(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        how = self._decompositions.get(func)
        if how is not None:
            with self:
                found = how(*args, **kwargs)
            if found is not NotImplemented:
                return found
        elif _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            raise CannotCompile(f"{func} changes a tensor in place")
        if func is _ATEN._local_scalar_dense.default and self.place_of(args[0]) not in self._fixed:
            raise CannotCompile(
                "the step cannot be traced: forward or loss reads a value of a tensor (item, int, float, bool or if); "
                "decide by shapes instead"
            )
        if self._sized_by_values(func, args):
            raise CannotCompile(
                f"the step cannot be traced: {func} returns a number of entries that depends on values; multiply by a "
                "mask instead"
            )
        found = func(*args, **kwargs)
        self._record(func, args, kwargs, found)
        return found

    def _sized_by_values(self, func: Any, args: Any) -> bool:
        if torch.Tag.dynamic_output_shape not in func.tags:
            return False
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if func is _ATEN.index.Tensor:
            given = [each for each in given[1:] if each.dtype in (torch.bool, torch.uint8)]
        return any(self.place_of(each) not in self._fixed for each in given)

    def _record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        made = tree_leaves(found)
        if not any(isinstance(each, Tensor) for each in made):
            return
        if func in SAME:
            place = self.place_of(args[0])
            self._places[id(found)] = place
            self._alive.append(found)
            return
        given = tree_map(self._refer, tuple(args))
        named = tree_map(self._refer, dict(kwargs))
        fixed = all(each.place in self._fixed for each in tree_leaves((given, named)) if isinstance(each, Ref))
        places = tuple(self._add(each) if isinstance(each, Tensor) else None for each in made)
        if fixed:
            self._fixed.update(place for place in places if place is not None)
        self._recording.calls.append(Call(func, given, named, places))

    def _refer(self, value: Any) -> Any:
        return Ref(self.place_of(value)) if isinstance(value, Tensor) else value


@functools.cache
def _composite(func: Any) -> bool:
    """Return True if an operator is composed of other operators."""
    return bool(func._can_decompose()) and func is not _ATEN._local_scalar_dense.default


def record(
    function: Callable[..., Sequence[Tensor]],
    given: tuple[Any, ...],
    batch: int,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Recording:
    """Run ``function`` on ``given``, nested tensors, and return the recording.

    Raises CannotCompile if it cannot be traced.
    """
    recording = Recording(batch)
    recorder = _Recorder(recording, decompositions)
    # Copies: a tensor that occurs twice must stay two inputs.
    given = tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, given)
    for each in tree_leaves(given):
        if isinstance(each, Tensor):
            recorder.add_input(each)
    try:
        # Libraries leave out their checks of values, such as warnings, while a graph is made.
        with patch.object(torch.compiler, "_is_compiling_flag", True), enable_python_dispatcher(), Fourier(), recorder:
            made = _functional(function, given)
    except CannotCompile:
        raise
    # The user's code may raise anything.
    except Exception as error:
        raise CannotCompile(f"the step cannot be traced: {first_line(error)}") from error
    recording.outputs = [recorder.place_of(each) for each in made]
    return recording


def _functional(function: Callable[..., Sequence[Tensor]], given: tuple[Any, ...]) -> list[Tensor]:
    """Call a function with in-place operators replaced by functional ones."""
    wrapped = tree_map(lambda each: torch._to_functional_tensor(each) if isinstance(each, Tensor) else each, given)
    torch._enable_functionalization(reapply_views=True)
    try:
        made = list(function(*wrapped))
    finally:
        torch._disable_functionalization()  # type: ignore[no-untyped-call]
    for each in made:
        if torch._is_functional_tensor(each):
            torch._sync(each)  # type: ignore[attr-defined, no-untyped-call]
    return [plain(each) for each in made]


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its functional wrapper, for use in a dispatch mode."""
    return torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's text."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@dataclass(frozen=True)
class FreeRecording:
    """A recording whose numbers may be ``Sized``.

    shapes, dtypes: place -> shape, dtype of every value. constants: place -> value.
    """

    calls: tuple[Call, ...]
    shapes: Mapping[int, tuple[int | Sized, ...]]
    dtypes: Mapping[int, torch.dtype]
    constants: Mapping[int, Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def free_batch(one: Recording, other: Recording) -> FreeRecording:
    """Return the common recording for any batch size. Raises CannotCompile if they differ in more than sizes."""
    made, made_too = ([(call.operator, call.made) for call in each.calls] for each in (one, other))
    if made != made_too or one.outputs != other.outputs or one.inputs != other.inputs:
        raise CannotCompile(
            "the batch size cannot be left free: forward or loss runs other operators for other numbers of samples"
        )
    sizes = (one.batch, other.batch)
    shapes: dict[int, tuple[int | Sized, ...]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for place, (first, second) in enumerate(zip(one.values, other.values, strict=True)):
        if first.dim() != second.dim():
            raise _not_free(f"a value of {first.dim()} axes")
        shapes[place] = tuple(_sized(*pair, sizes) for pair in zip(first.shape, second.shape, strict=True))
        dtypes[place] = first.dtype
    constants = _given_constants(one, other)
    calls: list[Call] = []
    needed = _needed(one)
    for call, same in zip(one.calls, other.calls, strict=True):
        if not needed.intersection(call.made):
            continue
        leaves, structure = tree_flatten((call.args, call.kwargs))
        others, other_structure = tree_flatten((same.args, same.kwargs))
        if structure != other_structure:
            raise _not_free(str(call.operator))
        merged = [_merged(*pair, sizes, call.operator) for pair in zip(leaves, others, strict=True)]
        args, kwargs = tree_unflatten(merged, structure)
        free = any(isinstance(each, Sized) for each in merged)
        if not free and all(each.place in constants for each in merged if isinstance(each, Ref)):
            constants |= {place: one.values[place] for place in call.made if place is not None}
            continue
        calls.append(Call(call.operator, args, kwargs, call.made))
    return FreeRecording(tuple(calls), shapes, dtypes, constants, tuple(one.inputs), tuple(one.outputs))


def _given_constants(one: Recording, other: Recording) -> dict[int, Tensor]:
    """Return the values that are neither inputs nor results of calls."""
    made = {place for call in one.calls for place in call.made}
    found: dict[int, Tensor] = {}
    for place, (first, second) in enumerate(zip(one.values, other.values, strict=True)):
        if place in made or place in one.inputs:
            continue
        if first.shape != second.shape or not torch.equal(first, second):
            raise _not_free("a tensor that forward makes without PyTorch's operators")
        found[place] = first
    return found


def _needed(recording: Recording) -> set[int | None]:
    """Return the places of the values that the outputs depend on."""
    needed: set[int | None] = set(recording.outputs)
    for call in reversed(recording.calls):
        if needed.intersection(call.made):
            needed.update(each.place for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Ref))
    needed.discard(None)
    return needed


def _merged(one: Any, other: Any, sizes: tuple[int, int], operator: Any) -> Any:
    if isinstance(one, Ref):
        if one != other:
            raise _not_free(str(operator))
        return one
    if one == other or (one != one and other != other):
        return one
    if type(one) is not type(other) or isinstance(one, bool) or not isinstance(one, int | float):
        raise _not_free(str(operator))
    return _sized(one, other, sizes) if isinstance(one, int) else _sized_float(one, other, sizes, operator)


def _sized(one: int, other: int, sizes: tuple[int, int]) -> int | Sized:
    if one == other:
        return one
    slope, left = divmod(one - other, sizes[0] - sizes[1])
    if left:
        raise _not_free(f"a size of {one} for {sizes[0]} samples and {other} for {sizes[1]}")
    return Sized(slope, one - slope * sizes[0])


def _sized_float(one: float, other: float, sizes: tuple[int, int], operator: Any) -> Sized:
    if abs(one * sizes[0] - other * sizes[1]) <= 1e-9 * abs(one * sizes[0]):
        return Sized(one * sizes[0], inverse=True)
    slope = (one - other) / (sizes[0] - sizes[1])
    rest = one - slope * sizes[0]
    if abs(rest - round(rest)) > 1e-9 * abs(one):
        raise _not_free(f"{operator}, for a number that is neither proportional nor inverse to it")
    return Sized(slope, round(rest))


def _not_free(what: str) -> CannotCompile:
    return CannotCompile(
        f"the batch size cannot be left free ({what}): in forward, write x.shape[0] instead of len(x) or a number"
    )
