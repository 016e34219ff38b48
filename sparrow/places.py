"""Folders of the user: state, cache and configuration (XDG Base Directory Specification)."""

from __future__ import annotations

import os
from pathlib import Path

from .protocol.errors import BadArgument

BELOW_HOME = {"XDG_STATE_HOME": ".local/state", "XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config"}
"""Variable -> its default, below the home folder."""


def user_folder(variable: str) -> Path:
    """Return Sparrow's folder below the one in ``variable``. Raises BadArgument if neither it nor a home is known."""
    named = os.environ.get(variable)
    if named:
        return Path(named) / "sparrow"
    try:
        return Path.home() / BELOW_HOME[variable] / "sparrow"
    except RuntimeError:
        raise BadArgument(f"this user has no home folder; set {variable} to a folder that Sparrow may write") from None


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with ``~`` replaced. Raises BadArgument for an unknown home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadArgument(f"{path}: no home folder is known for it; give the whole path") from None
