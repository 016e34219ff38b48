"""Power rails from jetson-stats, whose service can read files that are readable only by root."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from .board import BoardInfo
from .rails import PowerSource, Total, believable, total_of
from .readings import Quality, ReadError, Reading, Reason
from .system import System

# Each attempt to connect starts threads, so a failed one is not repeated sooner.
_ASK_AGAIN_SECONDS = 60.0

HOW_TO_GET = "sudo pip3 install jetson-stats, start its service, sudo usermod -aG jtop USER"


class JetsonStats(PowerSource):
    """The total of the rails in `devices.rails`; jetson-stats itself would sum all rails."""

    quality = Quality.MEASURED
    shortest_period_seconds = 1.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.ABSENT: f"jetson-stats is not installed or this board's total is unknown; {HOW_TO_GET}",
        Reason.PERMISSION: "jetson-stats refuses this user; sudo usermod -aG jtop USER, then log in again",
        Reason.POWERED_DOWN: "jetson-stats does not respond; sudo systemctl restart jtop.service",
    }

    def __init__(self, system: System) -> None:
        self._library = system.library
        self._client: Any = None
        self._process = 0
        self._failure: tuple[float, Reason] | None = None
        self.name = "jetson-stats"
        self.scope = "rails"

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return the total power in watts."""
        try:
            watts = self._rails(now)
        except ReadError as failure:
            return (Reading.failed("W", self.scope, self.name, now, failure.reason),)
        total = total_of(watts)
        if total is None:
            return (Reading.failed("W", self.scope, self.name, now, Reason.ABSENT),)
        self._take(total)
        return believable(
            tuple(Reading(watts[rail], "W", self.scope, self.quality, self.name, now) for rail in total.rails)
        )

    def _take(self, total: Total) -> None:
        self.scope = total.scope
        self.name = f"jetson-stats {' + '.join(total.rails)}"

    def _rails(self, now: float) -> dict[str, float]:
        """Return watts per label. Raises ReadError; after a failed connection, without reconnecting for a while."""
        if self._failure is not None and 0 <= now - self._failure[0] < _ASK_AGAIN_SECONDS:
            raise ReadError(self.name, self._failure[1])
        try:
            power = self._connected().power
            rails = {**power["rail"], **_total_rail(power["tot"])}
            watts = {str(label): float(values["power"]) * 1e-3 for label, values in rails.items()}
        except (KeyError, TypeError, ValueError):
            raise ReadError(self.name, Reason.PARSE) from None
        # The library raises its own errors and those of its connection.
        except Exception as error:
            self._client = None
            self._failure = now, _reason(error)
            raise ReadError(self.name, self._failure[1]) from None
        self._failure = None
        return watts

    def _connected(self) -> Any:
        # After a fork the old client has no thread.
        if self._client is None or self._process != os.getpid():
            client = self._library("jtop").jtop()
            client.start()
            self._client = client
            self._process = os.getpid()
        # `ok` raises the error that ended its thread.
        if not self._client.ok(spin=True):
            raise RuntimeError("its thread has ended")
        return self._client


def _reason(error: Exception) -> Reason:
    if isinstance(error, ImportError):
        return Reason.ABSENT
    denied = isinstance(error, PermissionError) or "can't access" in str(error)
    return Reason.PERMISSION if denied else Reason.POWERED_DOWN


def _total_rail(total: Mapping[str, Any]) -> dict[str, Any]:
    # A total that is a single rail is missing among the rails.
    return {str(total["name"]): total} if "name" in total else {}


def find_jetson_stats(system: System, board: BoardInfo) -> JetsonStats | None:
    """Return jetson-stats if this is a Jetson with the package installed."""
    if board.kind != "jetson":
        return None
    try:
        system.library("jtop")
    except ImportError:
        return None
    return JetsonStats(system)
