"""Headers of a call, read from its ASGI scope: to make an object of them all takes longer than to find one."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name, which is given in small letters; None where there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
