"""Energy estimates without a sensor: a power model that is linear in the load; always labelled `estimated`.

    P = P_idle + (P_max - P_idle) * u * (f / f_max)^a

u is the mean utilisation of the online cores (0 to 1), f is their mean clock frequency, and a = 1.7 (fitted: 1.78 on
the Pi 5, 1.68 on the CM5). The estimate covers the whole board, including idle power but not USB devices, and has an
error of about 30 % if uncalibrated. Processor time is a counter, so the mean utilisation between two reads is exact.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from .cores import CPU, busy_seconds, load_average, online_cores
from .readings import BadFigures, Files, Quality, ReadError, Reading, Reason

METHOD = "util-linear-v1"


@dataclass(frozen=True)
class PowerModel:
    """Power of a board when idle and under full load, in watts."""

    idle_watts: float
    max_watts: float
    # Origin of the two figures.
    coefficients: str
    # A; 0 ignores the clock.
    exponent: float = 1.7
    # Relative error. Raises BadFigures unless 0 <= idle_watts <= max_watts, both finite and max_watts above 0.
    rel_uncertainty: float = 0.30

    def __post_init__(self) -> None:
        if not (0 <= self.idle_watts <= self.max_watts and 0 < self.max_watts < math.inf):
            raise BadFigures(
                f"power model {self.coefficients}: {self.idle_watts} W idle and {self.max_watts} W at full load; "
                "both must be finite, idle at least 0 and not above full load"
            )

    @classmethod
    def parse(cls, text: str) -> "PowerModel":
        """Parse a model such as "2.3:6.4": idle watts and full-load watts. Raises BadFigures if it is malformed."""
        # The clock is ignored: the measured full load already includes its clock.
        try:
            idle, full = (float(part) for part in text.split(":"))
        except ValueError as error:
            raise BadFigures(
                f"power model {text!r}: use the form IDLE:MAX in watts, such as 2.3:6.4 (read both at the plug, once "
                "at rest and once under full load)"
            ) from error
        return cls(idle, full, f"given {text.strip()}", exponent=0.0)

    def watts(self, utilisation: float, clock_share: float = 1.0) -> float:
        """Return the board's power at this utilisation and relative clock frequency, both from 0 to 1."""
        return self.idle_watts + (self.max_watts - self.idle_watts) * utilisation * math.pow(clock_share, self.exponent)


# First entry of the device tree's `compatible` -> watts, as published. 3B, 3B+, 4B, 400: PowerJoular's linear models.
# Zero 2 W: a power study at rest and the maker's typical current. 5: middle of the published idle figures (1.8 to
# 4.4 W) and PowerJoular's full load. Compute modules lack an idle figure, and a Jetson's processor load does not
# predict its GPU's: both are omitted.
BOARDS: Mapping[str, PowerModel] = {
    "raspberrypi,model-zero-2-w": PowerModel(0.6, 1.75, "pizero2w"),
    "raspberrypi,3-model-b": PowerModel(1.08, 4.56, "pi3b"),
    "raspberrypi,3-model-b-plus": PowerModel(2.0, 5.3, "pi3bplus"),
    "raspberrypi,4-model-b": PowerModel(2.31, 6.8, "pi4b"),
    "raspberrypi,400": PowerModel(1.82, 6.85, "pi400"),
    "raspberrypi,5-model-b": PowerModel(3.0, 7.9, "pi5"),
}


def board_model(files: Files) -> PowerModel | None:
    """Return the built-in power model of this board, if there is one."""
    try:
        names = files.strings("proc/device-tree/compatible")
    except ReadError:
        return None
    return next((BOARDS[name] for name in names if name in BOARDS), None)


class Estimate:
    """A power model driven by the processor time of all cores, or of this process if /proc/stat is unreadable.

    cpu_seconds: processor time of this process so far. An unreadable clock frequency counts as the maximum.
    """

    scope = "board"
    quality = Quality.ESTIMATED
    shortest_period_seconds = 0.0
    advice: ClassVar[Mapping[Reason, str]] = {}

    def __init__(self, files: Files, model: PowerModel, cpu_seconds: Callable[[], float]) -> None:
        self._files = files
        self._model = model
        self._cpu_seconds = cpu_seconds
        self._highest_clocks: dict[int, float] = {}
        self._whole_machine = busy_seconds(files, 0.0).value is not None
        whose = "all cores (/proc/stat)" if self._whole_machine else "this process only (its CPU time)"
        self.name = f"{METHOD} {model.coefficients} ±{model.rel_uncertainty:.0%}, utilisation of {whose}"

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return busy core-seconds so far, the number of online cores, and their mean relative clock frequency."""
        if self._whole_machine:
            busy = busy_seconds(self._files, now)
        else:
            busy = Reading(self._cpu_seconds(), "s", "process", Quality.MEASURED, "process CPU time", now)
        online = online_cores(self._files)
        cores = Reading(len(online), "cores", "cpu", Quality.MEASURED, "online cores", now)
        share = self._clock_share(online) if self._model.exponent else 1.0
        return busy, cores, Reading(share, "1", "cpu", Quality.DERIVED, "cpufreq", now)

    def watts_now(self, now: float) -> Reading:
        """Return the power at the mean load of the last minute, in watts."""
        load = load_average(self._files, now)
        online = online_cores(self._files)
        if load.value is None:
            return Reading.failed("W", self.scope, self.name, now, load.reason or Reason.ABSENT)
        share = self._clock_share(online) if self._model.exponent else 1.0
        watts = self._model.watts(min(1.0, load.value / len(online)), share)
        return Reading(watts, "W", self.scope, self.quality, self.name, now)

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return joules between two reads, at the mean utilisation between them."""
        busy = after[0] - before[0]
        cores = after[1]
        # The clock at the end results from the interval's load; the clock at its start does not.
        clock_share = after[2]
        if busy < 0:
            return None
        utilisation = min(1.0, busy / (seconds * cores)) if seconds > 0 else 0.0
        return self._model.watts(utilisation, clock_share) * seconds

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """No limit: processor time is a counter."""
        return math.inf

    def _clock_share(self, cores: list[int]) -> float:
        shares = []
        for core in cores:
            folder = f"{CPU}/cpu{core}/cpufreq"
            try:
                # The highest clock never changes.
                if core not in self._highest_clocks:
                    self._highest_clocks[core] = self._files.number(f"{folder}/cpuinfo_max_freq")
                shares.append(self._files.number(f"{folder}/scaling_cur_freq") / self._highest_clocks[core])
            except (ReadError, ZeroDivisionError):
                shares.append(1.0)
        return min(1.0, max(0.0, sum(shares) / len(shares)))
