"""Power rails by way of jetson-stats: where it is installed and its service runs, it reads what is root's to read.

The service publishes milliwatts of each rail about once a second. Its own total is left aside, because it adds up
whatever rails it finds; ours comes from the table in `devices.rails`.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from .board import BoardInfo
from .rails import PowerSource, Total, believable, total_of
from .readings import Quality, ReadError, Reading, Reason
from .system import System

_ASK_AGAIN_SECONDS = 60.0
"""A service that does not serve is left alone for so long: each attempt starts threads."""

HOW_TO_GET = "sudo pip3 install jetson-stats, start its service, sudo usermod -aG jtop USER"


class JetsonStats(PowerSource):
    """The rails that make up the whole, as jetson-stats tells them."""

    quality = Quality.MEASURED
    shortest_period_seconds = 1.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.ABSENT: f"jetson-stats is not there or knows no total of this board; {HOW_TO_GET}",
        Reason.PERMISSION: "jetson-stats does not serve this user; sudo usermod -aG jtop USER, then log in again",
        Reason.POWERED_DOWN: "jetson-stats does not serve; sudo systemctl restart jtop.service",
    }

    def __init__(self, system: System) -> None:
        self._library = system.library
        self._client: Any = None
        self._process = 0
        self._failure: tuple[float, Reason] | None = None
        self.name = "jetson-stats"
        self.scope = "rails"

    def read(self, now: float) -> tuple[Reading, ...]:
        """Watts of the rails that make up the whole."""
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
        self.scope, self.name = total.scope, f"jetson-stats {' + '.join(total.rails)}"

    def _rails(self, now: float) -> dict[str, float]:
        """Label -> watts. Raises ReadError, and for a while again after a failure without asking anew."""
        if self._failure is not None and 0 <= now - self._failure[0] < _ASK_AGAIN_SECONDS:
            raise ReadError(self.name, self._failure[1])
        try:
            power = self._connected().power
            rails = {**power["rail"], **_total_rail(power["tot"])}
            watts = {str(label): float(values["power"]) * 1e-3 for label, values in rails.items()}
        except (KeyError, TypeError, ValueError):
            raise ReadError(self.name, Reason.PARSE) from None
        except Exception as error:  # the library raises its own kinds, and those of its connection
            self._client, self._failure = None, (now, _reason(error))
            raise ReadError(self.name, self._failure[1]) from None
        self._failure = None
        return watts

    def _connected(self) -> Any:
        """Return a client whose thread is at work, in this process: the one before a fork has none behind it."""
        if self._client is None or self._process != os.getpid():
            client = self._library("jtop").jtop()
            client.start()
            self._client, self._process = client, os.getpid()
        if not self._client.ok(spin=True):  # raises what ended its thread
            raise RuntimeError("its thread has ended")
        return self._client


def _reason(error: Exception) -> Reason:
    if isinstance(error, ImportError):
        return Reason.ABSENT
    denied = isinstance(error, PermissionError) or "can't access" in str(error)
    return Reason.PERMISSION if denied else Reason.POWERED_DOWN


def _total_rail(total: Mapping[str, Any]) -> dict[str, Any]:
    """Return its total if that is one rail (it is then not among the others)."""
    return {str(total["name"]): total} if "name" in total else {}


def find_jetson_stats(system: System, board: BoardInfo) -> JetsonStats | None:
    """jetson-stats on a Jetson that has it installed."""
    if board.kind != "jetson":
        return None
    try:
        system.library("jtop")
    except ImportError:
        return None
    return JetsonStats(system)
