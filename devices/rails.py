"""The power rails of a Jetson whose sum is the total power."""

from collections.abc import Collection
from dataclasses import dataclass

from .readings import Quality, Reading, Reason


@dataclass(frozen=True)
class Total:
    """The rails to sum, and their scope: board (including the carrier), module, or rails."""

    scope: str
    rails: tuple[str, ...]


# Rails are nested: VDD_IN feeds the module and thereby VDD_SOC. Unknown sets of rails have no total, since a sum could
# count power twice. Source: NVIDIA's developer guides, which name the loads of each rail.
TOTALS = (
    # Thor
    Total("board", ("VIN",)),
    # TX2 on its carrier
    Total("board", ("VDD_MUX",)),
    Total("module", ("VDD_IN",)),
    # Nano
    Total("module", ("POM_5V_IN",)),
    # AGX Xavier
    Total("rails", ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")),
    # AGX Orin
    Total("rails", ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),
    # Thor without its input sensor
    Total("rails", ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0")),
)


def total_of(labels: Collection[str]) -> Total | None:
    """Return the total with the widest scope that these rails permit."""
    return next((total for total in TOTALS if set(total.rails) <= set(labels)), None)


def trapezoid(before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float:
    """Integrate the sum of these powers by the trapezoid rule."""
    return (sum(before) + sum(after)) / 2 * seconds


class PowerSource:
    """A source of power readings, integrated by the trapezoid rule; long gaps are not covered."""

    shortest_period_seconds: float

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return joules between two reads."""
        return trapezoid(before, after, seconds)

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Return five times the sensor's period."""
        return 5 * max(period_seconds, self.shortest_period_seconds)


def believable(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Return the readings; if their sum is not positive, failed readings, because a running device draws power."""
    # A single rail may read 0 or, if gated, a little below.
    if any(reading.value is None for reading in readings) or sum(reading.value or 0.0 for reading in readings) > 0:
        return readings
    return tuple(Reading.failed(r.unit, r.scope, r.source, r.t_monotonic, Reason.STALE) for r in readings)


def worst(qualities: Collection[Quality]) -> Quality:
    """Return the quality of a sum: derived if a summand is derived."""
    return Quality.DERIVED if Quality.DERIVED in qualities else Quality.MEASURED
