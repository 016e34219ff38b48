"""Headers and path of a call, read from its ASGI scope, which is faster than parsing all headers."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this lower-case name, or None."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def below_root(scope: Scope) -> Scope:
    """Return the scope with a path below the server's root path (uvicorn's ``--root-path``)."""
    # Middlewares and routes compare whole paths, and see the same as behind a proxy that removes the prefix.
    root = scope.get("root_path", "").rstrip("/")
    path = scope["path"]
    if not root or not f"{path}/".startswith(f"{root}/"):
        return scope
    # Starlette builds base URLs from ``app_root_path``.
    return {**scope, "path": path.removeprefix(root) or "/", "root_path": "", "app_root_path": root}
