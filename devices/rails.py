"""The power rails of a Jetson that make up the whole.

Rails lie inside one another: VDD_IN feeds the module and thereby VDD_SOC. So a rail that is the total is the total, and
only where there is none are rails added, those of a table. A set of rails that no table knows has no total: better
none than one that counts twice. Source: NVIDIA's developer guides, which name what each rail feeds.
"""

from collections.abc import Collection
from dataclasses import dataclass

from .readings import Quality, Reading, Reason


@dataclass(frozen=True)
class Total:
    """The rails to add up, and what they cover: board (with its carrier), module, or rails."""

    scope: str
    rails: tuple[str, ...]


TOTALS = (
    Total("board", ("VIN",)),  # Thor
    Total("board", ("VDD_MUX",)),  # TX2 on its carrier
    Total("module", ("VDD_IN",)),
    Total("module", ("POM_5V_IN",)),  # Nano
    Total("rails", ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")),  # AGX Xavier
    Total("rails", ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),  # AGX Orin
    Total("rails", ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0")),  # Thor without its input sensor
)


def total_of(labels: Collection[str]) -> Total | None:
    """Return the rails among these that make up the whole, the one of widest reach first."""
    return next((total for total in TOTALS if set(total.rails) <= set(labels)), None)


def trapezoid(before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float:
    """Return joules of powers in watts that are added to one another, by the trapezoid rule."""
    return (sum(before) + sum(after)) / 2 * seconds


class PowerSource:
    """A source that tells watts: energy is the trapezoids between its reads, and a long gap is anybody's guess."""

    shortest_period_seconds: float

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return joules between two reads."""
        return trapezoid(before, after, seconds)

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Five periods."""
        return 5 * max(period_seconds, self.shortest_period_seconds)


def believable(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Return the same readings, or failed ones where their sum is nothing: a device that runs draws something.

    A single rail may read 0 or, gated, a little below; all of them together may not.
    """
    if any(reading.value is None for reading in readings) or sum(reading.value or 0.0 for reading in readings) > 0:
        return readings
    return tuple(Reading.failed(r.unit, r.scope, r.source, r.t_monotonic, Reason.STALE) for r in readings)


def worst(qualities: Collection[Quality]) -> Quality:
    """Return the quality of a sum: derived as soon as one part is."""
    return Quality.DERIVED if Quality.DERIVED in qualities else Quality.MEASURED
