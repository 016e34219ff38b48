"""Power rails by way of jetson-stats: where it is installed and its service runs, it reads what is root's to read.

The service publishes milliwatts of each rail about once a second. Its own total is left aside, because it adds up
whatever rails it finds; ours comes from the table in `devices.rails`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from devices.board import BoardInfo
from devices.rails import Total, believable, total_of, trapezoid
from devices.readings import Quality, ReadError, Reading, Reason
from devices.system import System

HOW_TO_GET = "sudo pip3 install jetson-stats, start its service, sudo usermod -aG jtop USER"


class JetsonStats:
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
        self.name = "jetson-stats"
        self.scope = "rails"

    def read(self, now: float) -> tuple[Reading, ...]:
        """Watts of the rails that make up the whole."""
        try:
            watts = self._rails()
        except ReadError as failure:
            return (Reading.failed("W", self.scope, self.name, now, failure.reason),)
        total = total_of(watts)
        if total is None:
            return (Reading.failed("W", self.scope, self.name, now, Reason.ABSENT),)
        self._take(total)
        return believable(
            tuple(Reading(watts[rail], "W", self.scope, self.quality, self.name, now) for rail in total.rails)
        )

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float:
        """Joules between two reads."""
        return trapezoid(before, after, seconds)

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Five periods."""
        return 5 * max(period_seconds, self.shortest_period_seconds)

    def _take(self, total: Total) -> None:
        self.scope, self.name = total.scope, f"jetson-stats {' + '.join(total.rails)}"

    def _rails(self) -> dict[str, float]:
        try:
            if self._client is None:
                client = self._library("jtop").jtop()
                client.start()
                self._client = client
            rails = self._client.power["rail"] | _total_rail(self._client.power["tot"])
            return {str(label): float(values["power"]) * 1e-3 for label, values in rails.items()}
        except ImportError:
            raise ReadError(self.name, Reason.ABSENT) from None
        except (KeyError, TypeError, ValueError):
            raise ReadError(self.name, Reason.PARSE) from None
        except Exception as error:  # the library raises its own kinds, and those of its connection
            denied = isinstance(error, PermissionError) or "permission" in str(error).lower()
            raise ReadError(self.name, Reason.PERMISSION if denied else Reason.POWERED_DOWN) from None


def _total_rail(total: Mapping[str, Any]) -> dict[str, Any]:
    """Its total where that is one rail (it is then not among the others)."""
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
