"""Trees of devices, with values laid over them and a clock that only the test moves."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparrow.devices.readings import Files
from sparrow.devices.system import Commands, System

FIXTURES = Path(__file__).parent / "fixtures"
TREES = Path(tempfile.mkdtemp(prefix="sparrow-boards-"))
atexit.register(shutil.rmtree, TREES, ignore_errors=True)

Overlay = dict[str, str | Exception]


class Clock:
    """Seconds that pass when told to; also counts the processor seconds of a pretended process."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu = 50.0

    def __call__(self) -> float:
        return self.now

    def cpu_seconds(self) -> float:
        return self.cpu


class Tree:
    """A device's files, some of them replaced: a path (or a folder above it) -> text to read, or error to raise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.over: Overlay = {}
        self.reads: list[str] = []
        self.files = Files(root, self._read, self._names)
        self.commands: dict[str, str | tuple[int, str] | Exception] = {}
        self.asked: list[str] = []
        self.libraries: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.system = System(
            self.files, Commands(self._run), self.environment, library=self._library, free_bytes=self._free_bytes
        )
        self.free: int | Exception = FileNotFoundError()

    def play(self, folder: str, **commands: str) -> None:
        """Answer commands with the texts of a board's folder: the command's words joined by _ = the text's name."""
        for words, name in commands.items():
            self.commands[words] = (TREES / folder / "commands" / name).read_text()

    def _run(self, argv: Sequence[str], _timeout: float) -> tuple[int, str]:
        words = "_".join(word.lstrip("-") for word in argv)
        self.asked.append(words)
        answer = self.commands.get(words.replace("-", "_"), FileNotFoundError(argv[0]))
        if isinstance(answer, Exception):
            raise answer
        return (0, answer) if isinstance(answer, str) else answer

    def _library(self, name: str) -> Any:
        if name not in self.libraries:
            raise ImportError(name)
        return self.libraries[name]

    def _free_bytes(self, _path: Path) -> int:
        if isinstance(self.free, Exception):
            raise self.free
        return self.free

    def _replaced(self, path: Path) -> str | None:
        relative = path.relative_to(self.root)
        for key in (relative, *relative.parents):
            value = self.over.get(str(key))
            if isinstance(value, Exception):
                raise value
            if value is not None:
                return value
        return None

    def _read(self, path: Path) -> bytes:
        self.reads.append(str(path.relative_to(self.root)))
        text = self._replaced(path)
        return path.read_bytes() if text is None else text.encode()

    def _names(self, path: Path) -> Iterable[str]:
        self._replaced(path)
        return os.listdir(path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session", autouse=True)
def _laid_out() -> None:
    """Write the files of all copied devices to `TREES`."""
    for board in FIXTURES.glob("*.json"):
        for path, text in json.loads(board.read_text())["files"].items():
            file = TREES / board.stem / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode("utf-8", "surrogateescape"))


@pytest.fixture
def tree() -> Callable[[str], Tree]:
    return lambda name: Tree(TREES / name)


@pytest.fixture(scope="session")
def trees() -> Path:
    """The folder of all copied devices."""
    return TREES


@pytest.fixture
def expected() -> Callable[[str], Any]:
    return lambda board: json.loads((FIXTURES / f"{board}.json").read_text())["expected"]


@pytest.fixture
def denied() -> Overlay:
    """What an app on a phone may not read."""
    return {path.strip("/"): PermissionError(path) for path in (TREES / "phone-termux/denied.txt").read_text().split()}


@pytest.fixture
def rapl_rows() -> list[tuple[float, dict[str, str]]]:
    """Successive moments of the laptop with RAPL: seconds, and its counters as an overlay."""
    folders = {
        "psys": "intel-rapl:1",
        "package-0": "intel-rapl:0",
        "core": "intel-rapl:0:0",
        "uncore": "intel-rapl:0:1",
        "dram": "intel-rapl:0:2",
    }
    head, *rows = ((TREES / "laptop-rapl/sequence_energy_uj.csv").read_text()).split()
    zones = [folders[name] for name in head.split(",")[1:]]
    moments = []
    for row in rows:
        seconds, *counters = row.split(",")
        overlay = {f"sys/class/powercap/{zone}/energy_uj": value for zone, value in zip(zones, counters, strict=True)}
        moments.append((float(seconds), overlay))
    return moments
