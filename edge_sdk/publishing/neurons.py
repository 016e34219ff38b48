"""Index sets of the neurons along axes; the analysis unites sets that are equal.

An axis is a sequence of runs; the empty sequence is an axis without neurons, which is always complete. A set may later
equal another, become complete, be cut in two, or be merged into larger neurons such as attention heads. ``resolve``
then returns the runs of other sets that replace it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sparrow.protocol.manifest import NeuronGroup, Segment

_COMPLETE = 0
ALWAYS = "always"
"""Group of the complete part of an axis that has neurons, too: one neuron, and a single neuron is always active."""
# An axis with more runs becomes complete.
_MOST_RUNS = 4096


@dataclass(frozen=True)
class Run:
    """Neurons of a set in order, with ``repeat`` entries each; set 0 has the complete entries."""

    set: int
    repeat: int = 1


Axis = tuple[Run, ...]
Axes = tuple[Axis, ...]


class Neurons:
    """The sets, numbered in order of creation; united sets have the name of the first.

    ``doing``: the operation under analysis, recorded as the reason for sets that become complete (``why``).
    """

    def __init__(self) -> None:
        self._sizes = [1]
        self._names = [ALWAYS]
        self._order = [0]
        self._become: list[Axis | None] = [None]
        self._why: dict[int, str] = {}
        self.doing = ""
        self.lost = False

    def add(self, name: str, size: int) -> Axis:
        """Return a new set of ``size`` neurons as an axis; a single neuron is always active."""
        return (self._new(name, size, len(self._sizes)),) if size > 1 else ()

    def _new(self, name: str, size: int, order: int) -> Run:
        self._sizes.append(size)
        self._names.append(name)
        self._order.append(order)
        self._become.append(None)
        return Run(len(self._sizes) - 1)

    def length(self, axis: Axis) -> int:
        """Return the number of entries of an axis with neurons."""
        return sum(self._sizes[run.set] * run.repeat for run in axis)

    def resolve(self, axis: Axis) -> Axis:
        """Return the axis as runs of independent sets; empty if all its entries are complete."""
        found: list[Run] = []
        for run in axis:
            become = self._become[run.set]
            if become is None:
                found.append(run)
                continue
            known = self._expand(run.set)
            found += [Run(each.set, each.repeat * run.repeat) for each in known]
        if len(found) > _MOST_RUNS:
            return self.complete(tuple(found))
        return () if all(run.set == _COMPLETE for run in found) else tuple(found)

    def _expand(self, number: int) -> Axis:
        become = self._become[number]
        assert become is not None
        if any(self._become[run.set] is not None for run in become):
            become = tuple(
                Run(each.set, each.repeat * run.repeat)
                for run in become
                for each in ((Run(run.set),) if self._become[run.set] is None else self._expand(run.set))
            )
            self._become[number] = become
        return become

    def complete(self, *axes: Axis) -> Axis:
        """Make every neuron of ``axes`` always active, and return the empty axis."""
        for axis in axes:
            for run in axis:
                if run.set != _COMPLETE and self._become[run.set] is None:
                    self._become[run.set] = (Run(_COMPLETE, self._sizes[run.set]),)
                    self._why[run.set] = self.doing
                elif run.set != _COMPLETE:
                    self.complete(self._expand(run.set))
        return ()

    def lose(self, axes: Iterable[Axis]) -> None:
        """Complete the neurons of an operator without a rule."""
        known = [resolved for axis in axes if (resolved := self.resolve(axis))]
        self.lost |= bool(known)
        self.complete(*known)

    def why(self, axis: Axis) -> str:
        """Return the operation that made a set of the axis complete, or an empty string."""
        waiting = list(axis)
        while waiting:
            run = waiting.pop(0)
            if run.set in self._why:
                return self._why[run.set]
            waiting += self._become[run.set] or ()
        return ""

    def join(self, first: Axis | None, second: Axis | None) -> Axis | None:
        """Unite two axes and return the result; None is an axis without restriction."""
        if first is None or second is None:
            return second if first is None else first
        return self.unite(first, second)

    def unite(self, first: Axis, second: Axis) -> Axis:
        """Equate the neurons of two axes of one length; return the result."""
        one = self.resolve(first)
        other = self.resolve(second)
        if not one or not other or self.length(one) != self.length(other):
            return self.complete(one, other)
        while one and other:
            step = min(self.length(one[:1]), self.length(other[:1]))
            left, one = self.cut(one, step)
            right, other = self.cut(other, step)
            left = self._whole(left)
            right = self._whole(right)
            if len(left) == len(right) == 1:
                self._same(left[0], right[0])
            # Cutting one axis has cut the other.
            else:
                one = (*left, *one)
                other = (*right, *other)
            one = self._whole(one)
            other = self._whole(other)
        return self.resolve(first)

    def _whole(self, axis: Axis) -> Axis:
        """Return the resolved axis, with its complete runs."""
        return self.resolve(axis) or ((Run(_COMPLETE, self.length(axis)),) if axis else ())

    def _same(self, one: Run, other: Run) -> None:
        """Equate two runs of one length, both of independent sets."""
        if one == other:
            return
        if one.set == other.set or _COMPLETE in (one.set, other.set):
            self.complete((one, other))
            return
        if one.repeat == other.repeat:
            low, high = sorted((one.set, other.set), key=self._order.__getitem__)
            self._become[high] = (Run(low),)
            return
        repeat = math.lcm(one.repeat, other.repeat)
        length = self.length((one,))
        if length % repeat or length == repeat:
            self.complete((one, other))
            return
        first = min(one.set, other.set, key=self._order.__getitem__)
        united = self._new(self._names[first], length // repeat, self._order[first])
        for run in (one, other):
            self._become[run.set] = (Run(united.set, repeat // run.repeat),)

    def cut(self, axis: Axis, place: int) -> tuple[Axis, Axis]:
        """Return the axis before and from entry ``place``; cuts a set in two if needed."""
        while True:
            axis = self._whole(axis)
            at = place
            for position, run in enumerate(axis):
                length = self.length((run,))
                if at <= 0 or at >= length:
                    if at <= 0:
                        return axis[:position], axis[position:]
                    at -= length
                    continue
                if run.set == _COMPLETE:
                    before = Run(_COMPLETE, at)
                    behind = Run(_COMPLETE, length - at)
                    return (*axis[:position], before), (behind, *axis[position + 1 :])
                if at % run.repeat:
                    self.complete((run,))
                else:
                    self._split(run.set, at // run.repeat)
                break
            else:
                return axis, ()

    def _split(self, number: int, place: int) -> None:
        name = self._names[number]
        order = self._order[number]
        size = self._sizes[number]
        self._become[number] = (self._new(name, place, order), self._new(name, size - place, order))

    def coarsen(self, axis: Axis, count: int) -> Axis:
        """Return the axis with every ``count`` entries merged."""
        if count == 1:
            return self.resolve(axis)
        found: list[Run] = []
        for run in axis:
            for each in self._whole((run,)):
                size = self._sizes[each.set]
                repeat = each.repeat
                if repeat % count == 0:
                    found.append(Run(each.set, repeat // count))
                elif each.set != _COMPLETE and count % repeat == 0 and size % (count // repeat) == 0:
                    together = count // repeat
                    new = self._new(self._names[each.set], size // together, self._order[each.set])
                    self._become[each.set] = (Run(new.set, together),)
                    found.append(new)
                else:
                    return self.complete(axis)
        return self.resolve(tuple(found))

    def covered(self, axis: Axis) -> Fraction:
        """Return the share of an axis's entries that belong to neurons."""
        runs = self.resolve(axis)
        found = self.length(tuple(run for run in runs if run.set != _COMPLETE))
        return Fraction(found, self.length(runs)) if runs else Fraction(0)

    def segments(self, axis: Axis, names: Sequence[str]) -> tuple[Segment, ...]:
        """Return the axis as the manifest's segments."""
        return tuple(Segment(group=names[run.set], repeat=run.repeat) for run in self.resolve(axis))

    def groups(self, axes: Iterable[Axes]) -> tuple[tuple[NeuronGroup, ...], list[str]]:
        """Return the groups of these axes, in forward order, and each set's name by its number."""
        used = {run.set for tensor in axes for axis in tensor for run in self.resolve(axis)}
        names = list(self._names)
        taken = Counter[str]()
        groups = []
        for number in sorted(used, key=lambda each: (self._order[each], each)):
            name = names[number]
            taken[name] += 1
            # No module path contains a colon.
            if taken[name] > 1:
                names[number] = f"{name}:{taken[name]}"
            groups.append(NeuronGroup(name=names[number], size=self._sizes[number]))
        return tuple(groups), names
