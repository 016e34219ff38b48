"""Headers and path of a call, read from its ASGI scope: an object of all headers takes longer than to find one."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name, which is given in small letters; None where there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def below_root(scope: Scope) -> Scope:
    """Return the scope of a call whose path begins below the server's root path (uvicorn's ``--root-path``).

    Middlewares and routes compare whole paths, and then see the same as behind a proxy that removes the prefix.
    """
    root = scope.get("root_path", "").rstrip("/")
    path = scope["path"]
    if not root or not f"{path}/".startswith(f"{root}/"):
        return scope
    # Starlette makes base URLs with ``app_root_path``.
    return {**scope, "path": path.removeprefix(root) or "/", "root_path": "", "app_root_path": root}
