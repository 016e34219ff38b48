"""The energy of a source over a phase, accumulated from read to read."""

from dataclasses import dataclass

from .power import Source
from .readings import Quality, Reason

# A sampler may wake up a little early: a read that is almost due counts as due.
_DUE = 0.9
# A source that covered this share of a phase is preferred to a later one that covered more.
_ENOUGH_COVERAGE = 0.9
# A running device draws power: a sensor that shows none for this long is stuck, as in some virtual machines.
_STUCK_SECONDS = 1.0


@dataclass
class Integral:
    """Joules so far, and the seconds that they cover.

    After a failed read, the next successful read closes the interval unless the gap is too long for the source. Values
    are not extrapolated.
    """

    source: Source
    period_seconds: float
    joules: float = 0.0
    covered_seconds: float = 0.0
    intervals: int = 0
    # The reason for the last loss.
    trouble: Reason | None = None
    _tried_at: float | None = None
    _last: tuple[float, tuple[float, ...]] | None = None

    @property
    def wake_seconds(self) -> float:
        """Seconds between two reads: longer for slow sensors, shorter for counters that might wrap."""
        period = max(self.period_seconds, self.source.shortest_period_seconds)
        return min(period, self.source.longest_gap_seconds(self.period_seconds) / 2)

    @property
    def answered(self) -> bool:
        """True if the source has given a plausible value."""
        stuck = self.joules == 0 and self.covered_seconds >= _STUCK_SECONDS
        return self.intervals > 0 and (not stuck or self.source.quality is Quality.ESTIMATED)

    def sample(self, now: float, *, at_end: bool = False) -> None:
        """Add the energy since the last successful read, if a read is due or at_end is set."""
        due = self._tried_at is None or now - self._tried_at >= _DUE * self.wake_seconds
        if not due and not at_end:
            return
        self._tried_at = now
        readings = self.source.read(now)
        reason = next((reading.reason for reading in readings if reading.reason is not None), None)
        if reason is not None:
            self.trouble = reason
            return
        values = tuple(reading.value for reading in readings if reading.value is not None)
        if self._last is not None:
            self._add(*self._last, now, values)
        self._last = now, values

    def _add(self, start: float, before: tuple[float, ...], end: float, after: tuple[float, ...]) -> None:
        seconds = end - start
        if seconds > self.source.longest_gap_seconds(self.period_seconds):
            self.trouble = Reason.STALE
            return
        joules = self.source.joules(before, after, seconds)
        if joules is None:
            self.trouble = Reason.IMPLAUSIBLE
            return
        self.joules += joules
        self.covered_seconds += seconds
        self.intervals += 1


def best(integrals: list[Integral], seconds: float) -> Integral | None:
    """Return the first integral with sufficient coverage of the phase, else the integral with the largest coverage, if
    any.
    """
    answered = [integral for integral in integrals if integral.answered]
    package = next((i for i in answered if i.source.scope.startswith("package")), None)
    # Less than the processor package is wrong: psys is wrong on some laptops, and a battery's gauge lags behind.
    if package is not None:
        answered = [i for i in answered if i is package or _watts(i) >= _watts(package)]
    enough = [i for i in answered if i.covered_seconds >= _ENOUGH_COVERAGE * seconds]
    return enough[0] if enough else max(answered, key=lambda i: i.covered_seconds, default=None)


def _watts(integral: Integral) -> float:
    return integral.joules / integral.covered_seconds if integral.covered_seconds > 0 else 0.0
