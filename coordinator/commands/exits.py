"""Exit codes of what can go wrong in a coordinator's commands (``command_line.exits`` has the codes)."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from sparrow.command_line.command import WrongUsage
from sparrow.command_line.exits import Exit
from sparrow.coordinator.errors import CoordinatorError, DiskFull, Unavailable
from sparrow.coordinator.settings import PREFIX, Settings
from sparrow.coordinator.storage.failing import of_database

SQLITE_NEEDS = 64 * 1024
"""Free bytes below which SQLite cannot even begin to write: then it does not call the disk full, but its I/O broken."""


class NoRecords(CoordinatorError):
    """There is no database where the settings say."""

    exit_code = Exit.NOT_FOUND


def read_settings() -> Settings:
    """The settings of the environment. Raises WrongUsage, which names the variable."""
    try:
        return Settings()
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise WrongUsage("; ".join(map(_told_of, faults))) from None


def _told_of(fault: Mapping[str, Any]) -> str:
    """A setting that cannot be, after the variable's name; what concerns several names them itself."""
    said = fault["msg"].removeprefix("Value error, ")
    return f"{(PREFIX + '_'.join(map(str, fault['loc']))).upper()}: {said}" if fault["loc"] else said


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Around work on records: what the database says is told in our words, for its own may hold its address.

    folder: where SQLite writes. Raises DiskFull, Unavailable.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        trouble = of_database(error)
        if isinstance(trouble, DiskFull) or (folder.is_dir() and shutil.disk_usage(folder).free < SQLITE_NEEDS):
            raise DiskFull(f"the disk of {folder}, or of the database, is full; make room") from error
        raise Unavailable(f"the database failed ({type(error).__name__}); is it running?") from error
