"""Access to the files, commands and environment of a device.

All reads use this module, so a folder with a board's files and command outputs can replace the board (`System.at`), in
tests and in `sparrow devices --root`.
"""

import importlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .readings import Files, ReadError, Reason

Runner = Callable[[Sequence[str], float], tuple[int, str]]
"""argv, timeout in seconds -> exit status, output. Raises OSError or subprocess.TimeoutExpired."""

_REFUSALS = ("permission denied", "not permitted", "access denied", "can't open device file")


class Commands:
    """Programs that report values without changing the device."""

    def __init__(self, run: Runner | None = None) -> None:
        self._run = run or _run

    def text(self, argv: Sequence[str], timeout_seconds: float = 5.0) -> str:
        """Return the stripped output of a program.

        Raises ReadError: ABSENT if the program is missing, PERMISSION if access was denied, STALE if it timed out,
        PARSE for other failures.
        """
        try:
            status, output = self._run(argv, timeout_seconds)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ReadError(argv[0], Reason.ABSENT) from error
        except PermissionError as error:
            raise ReadError(argv[0], Reason.PERMISSION) from error
        except subprocess.TimeoutExpired as error:
            raise ReadError(argv[0], Reason.STALE) from error
        except OSError as error:
            raise ReadError(argv[0], Reason.POWERED_DOWN) from error
        if status != 0:
            # vcgencmd prints refusals on standard output.
            refused = any(words in output.lower() for words in _REFUSALS)
            raise ReadError(argv[0], Reason.PERMISSION if refused else Reason.PARSE)
        return output.strip(" \t\r\n\x00")


@dataclass(frozen=True)
class System:
    """Files, commands and environment of one device."""

    files: Files = field(default_factory=Files)
    commands: Commands = field(default_factory=Commands)
    environment: Mapping[str, str] = field(default_factory=dict)
    # Word size of its programs, None if unknown.
    pointer_bits: int | None = None
    # A folder's free storage; raises OSError.
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    # Imports an optional Python library by name; raises ImportError.
    library: Callable[[str], Any] = importlib.import_module

    @classmethod
    def here(cls) -> "System":
        """Return this machine."""
        return cls(environment=os.environ, pointer_bits=8 * struct.calcsize("P"))

    @classmethod
    def at(cls, path: Path | str) -> "System":
        """Return a device that is read from a folder: either the root of its file tree, or a folder with `root/`.

        The folder may also contain `commands/` (a file per command, named by its words joined with _, holds its
        output), `environment.txt` (NAME=value lines) and `denied.txt` (paths that this user may not read). Raises
        FileNotFoundError if the folder does not exist.
        """
        folder = Path(path)
        root = folder / "root" if (folder / "root").is_dir() else folder
        if not root.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder; give one with a copy of a device's files, such as FOLDER/sys"
            )
        denied = [line.strip("/") for line in _lines(folder / "denied.txt")]
        pairs = [line.partition("=") for line in _lines(folder / "environment.txt")]
        return cls(
            files=_guarded(root, denied),
            commands=Commands(_replay(folder / "commands")),
            environment={name: value for name, _, value in pairs},
            free_bytes=_unknown,
            library=_no_library,
        )


def _run(argv: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    # A list of fixed words, without a shell.
    done = subprocess.run(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_seconds,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _replay(folder: Path) -> Runner:
    def run(argv: Sequence[str], _timeout_seconds: float) -> tuple[int, str]:
        name = "_".join(word.lstrip("-").replace("/", "_") for word in argv)
        for suffix in (".txt", ".json"):
            if (folder / f"{name}{suffix}").is_file():
                return 0, (folder / f"{name}{suffix}").read_text()
        raise FileNotFoundError(argv[0])

    return run


def _guarded(root: Path, denied: list[str]) -> Files:
    def check(path: Path) -> Path:
        relative = str(path.relative_to(root))
        if any(relative == entry or relative.startswith(f"{entry}/") for entry in denied):
            raise PermissionError(str(path))
        return path

    return Files(root, lambda path: check(path).read_bytes(), lambda path: os.listdir(check(path)))


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []


def _unknown(path: Path) -> int:
    raise FileNotFoundError(f"{path}: a copy of a device has no storage of its own")


def _no_library(name: str) -> Any:
    raise ImportError(f"{name}: a copy of a device runs no libraries")
