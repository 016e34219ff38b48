"""Energy counters of NVIDIA graphics cards, through the driver's library (package nvidia-ml-py)."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from .rails import PowerSource, trapezoid
from .readings import Quality, Reading, Reason
from .system import System

# Source: NVIDIA's NVML reference (total energy in millijoules since the driver was loaded; power in milliwatts).
DRIVER = "proc/driver/nvidia/version"
HOW_TO_GET = "pip install nvidia-ml-py"

# The strongest cards may draw 1.2 kW; a counter that was reset shows far more.
_LIMIT_WATTS = 2000.0
# Counters move in steps of 20 to 100 ms.
_SHORTEST_JUDGED_SECONDS = 0.1


class Nvml(PowerSource):
    """All NVIDIA cards, as a single source of energy."""

    name = "NVML"
    scope = "accelerator"
    quality = Quality.MEASURED
    shortest_period_seconds = 1.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.ABSENT: f"the library nvidia-ml-py is missing; {HOW_TO_GET}",
        Reason.STALE: "the card's counter did not change, or was read too rarely",
        Reason.POWERED_DOWN: "NVIDIA's driver does not respond; run nvidia-smi",
    }

    def __init__(self, system: System) -> None:
        self._library = system.library
        self._cards: list[tuple[Any, bool]] | None = None
        self._nvml: Any = None
        self._process = 0

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return each card's counter in joules, or its power in watts if it has no counter."""
        try:
            self._open()
        except ImportError:
            return (Reading.failed("J", self.scope, self.name, now, Reason.ABSENT),)
        # The library's own error classes exist only once it is loaded.
        except Exception as error:
            return (Reading.failed("J", self.scope, self.name, now, self._reason(error)),)
        readings = tuple(self._read(card, counts, now) for card, counts in self._cards or [])
        return readings or (Reading.failed("J", self.scope, self.name, now, Reason.ABSENT),)

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return joules between two reads; None if a counter decreased or made an implausible step."""
        total = 0.0
        for (_, counts), first, last in zip(self._cards or [], before, after, strict=True):
            joules = last - first if counts else trapezoid((first,), (last,), seconds)
            if not 0 <= joules <= _LIMIT_WATTS * max(seconds, _SHORTEST_JUDGED_SECONDS):
                return None
            total += joules
        return total

    def _open(self) -> None:
        # The library is unusable after a fork.
        if self._cards is None or self._process != os.getpid():
            self._process = os.getpid()
            self._nvml = self._library("pynvml")
            self._nvml.nvmlInit()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(n) for n in range(self._nvml.nvmlDeviceGetCount())]
            self._cards = [(handle, self._has_counter(handle)) for handle in handles]

    # Cards older than Volta have no counter; their power is integrated instead.
    def _has_counter(self, card: Any) -> bool:
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(card)
        except self._nvml.NVMLError:
            return False
        return True

    def _read(self, card: Any, counts: bool, now: float) -> Reading:
        unit = "J" if counts else "W"
        ask = self._nvml.nvmlDeviceGetTotalEnergyConsumption if counts else self._nvml.nvmlDeviceGetPowerUsage
        try:
            value = ask(card) * 1e-3
        except self._nvml.NVMLError as error:
            return Reading.failed(unit, self.scope, self.name, now, self._reason(error))
        if value < 0:
            return Reading.failed(unit, self.scope, self.name, now, Reason.IMPLAUSIBLE)
        return Reading(value, unit, self.scope, self.quality, self.name, now)

    def _reason(self, error: Exception) -> Reason:
        denied = getattr(self._nvml, "NVML_ERROR_NO_PERMISSION", None)
        return Reason.PERMISSION if getattr(error, "value", object()) == denied else Reason.POWERED_DOWN


def find_cards(system: System) -> Nvml | None:
    """Return NVIDIA's cards if their driver is loaded."""
    return Nvml(system) if system.files.has(DRIVER) else None
