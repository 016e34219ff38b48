"""Environment variables with URLs and paths, and their form in messages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ..command_line.table import printable


@dataclass(frozen=True)
class Setting:
    """An environment variable that is set."""

    variable: str
    value: str

    def __str__(self) -> str:
        return f"{self.variable}={without_password(self.value)}"


def setting(variable: str) -> Setting | None:
    """Return a variable, or None if it is unset or empty."""
    value = os.environ.get(variable)
    return Setting(variable, value) if value else None


def without_password(text: str) -> str:
    """Return the text of a URL in printable form, with its user and password replaced by ``***``."""
    return printable(re.sub(r"(?:(?<=//)|^(?!\w+://))\S*@", "***@", text))
