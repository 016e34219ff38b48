"""Simulated boards: estimated time and energy of a known board, from FLOPs and bytes.

    seconds = FLOPs / (HPL rate * SHARE_OF_HPL)  +  bytes / network rate
    joules  = full-load watts * computing seconds  +  idle watts * transfer seconds

HPL rates: J. Geerling's top500-benchmark, double precision, all cores. Training small networks in single precision is
assumed to reach a quarter of the HPL rate, as measured on a server core. Energy covers the board without radio and USB
devices. The estimates are suitable for comparing methods, but not for sizing a battery.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .estimate import BOARDS as POWER
from .estimate import PowerModel
from .readings import BadFigures

SHARE_OF_HPL = 0.25
MIB = 1024 * 1024
WIFI_BYTES_PER_SECOND = 10e6 / 8


@dataclass(frozen=True)
class Board:
    """A simulated board."""

    name: str
    flops_per_second: float
    # Watts at rest and under full load.
    power: PowerModel
    cores: int
    memory_bytes: int
    bytes_per_second: float = WIFI_BYTES_PER_SECOND

    def __post_init__(self) -> None:
        if not (0 < self.flops_per_second < math.inf and 0 < self.bytes_per_second < math.inf):
            raise BadFigures(f"board {self.name}: its rates must be finite and above 0")
        if self.cores < 1 or self.memory_bytes < 0:
            raise BadFigures(f"board {self.name}: it has {self.cores} cores and {self.memory_bytes} bytes of memory")

    def computing_seconds(self, flops: int) -> float:
        """Return the seconds that ``flops`` take."""
        return flops / self.flops_per_second

    def transfer_seconds(self, traffic_bytes: int) -> float:
        """Return the seconds that sending or receiving ``traffic_bytes`` takes."""
        return traffic_bytes / self.bytes_per_second

    def joules(self, computing_seconds: float, transfer_seconds: float) -> float:
        """Return the energy of the whole board."""
        return self.power.max_watts * computing_seconds + self.power.idle_watts * transfer_seconds


BOARDS: Mapping[str, Board] = {
    board.name: board
    for board in (
        Board("pizero2w", 0.37e9 * SHARE_OF_HPL, POWER["raspberrypi,model-zero-2-w"], 4, 512 * MIB),
        Board("pi4b", 11.9e9 * SHARE_OF_HPL, POWER["raspberrypi,4-model-b"], 4, 4096 * MIB),
        Board("pi5", 35.2e9 * SHARE_OF_HPL, POWER["raspberrypi,5-model-b"], 4, 8192 * MIB),
    )
}
"""Boards with a published HPL rate and a power model."""


def load_boards(text: str) -> tuple[Board, ...]:
    """Return boards by name (``pi4b,pi5``), or from a TOML file with a ``[[board]]`` table per board.

    A table has ``name``, ``gflops`` (reached in training), ``idle_watts``, ``max_watts``, and optionally ``cores``,
    ``memory_mib`` and ``mbit_per_second``. Raises BadFigures if the file is invalid.
    """
    if text.endswith(".toml"):
        return _read(Path(text))
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in BOARDS:
            raise BadFigures(
                f"unknown board {name!r}; choose from {', '.join(sorted(BOARDS))}, or give a .toml file with your own "
                f"boards"
            )
    return tuple(BOARDS[name] for name in names)


_KEYS = {"name", "gflops", "idle_watts", "max_watts", "cores", "memory_mib", "mbit_per_second"}


def _read(path: Path) -> tuple[Board, ...]:
    try:
        tables = tomllib.loads(path.read_text()).get("board", [])
        if not isinstance(tables, list):
            raise TypeError("board is not a list of tables; write [[board]]")
        for table in tables:
            if unknown := set(table) - _KEYS:
                raise BadFigures(f"unknown key {', '.join(sorted(unknown))}; choose from {', '.join(sorted(_KEYS))}")
        boards = tuple(
            Board(
                name=str(table["name"]),
                flops_per_second=float(table["gflops"]) * 1e9,
                power=PowerModel(float(table["idle_watts"]), float(table["max_watts"]), str(table["name"])),
                cores=int(table.get("cores", 1)),
                memory_bytes=int(table.get("memory_mib", 1024)) * MIB,
                bytes_per_second=float(table.get("mbit_per_second", 10)) * 1e6 / 8,
            )
            for table in tables
        )
    except OSError as error:
        raise BadFigures(f"{path}: {error.strerror}; give a file with a [[board]] table for each board") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BadFigures(
            f"{path}: {error}; each [[board]] needs a name, and the numbers gflops, idle_watts and max_watts"
        ) from None
    if not boards:
        raise BadFigures(f"{path}: no [[board]] table; add one for each board")
    return boards
