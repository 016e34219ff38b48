"""Methods, tasks and other plugins that installed packages register as entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .nearest import nearest

Record = TypeVar("Record")


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def load(entry: EntryPoint, error: type[Exception], *, what: str) -> Any:
    """Import the object of an entry point. Raises ``error`` if that fails; ``what`` is the object's kind."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as reason:
        raise error(
            f"{what}: {entry.name!r} is registered as {entry.value}, which cannot be imported ({reason}); correct that "
            f"package, or install it again"
        ) from reason


def load_method_record(
    group: str, name: str, kind: type[Record], error: type[Exception], *, advice: str = ""
) -> Record:
    """Return one half of a method. Raises ``error``, whose message lists the installed methods and ``advice``."""
    found = installed(group)
    if name not in found:
        there_are = f"there are {', '.join(found)}{advice}"
        raise error(f"method: {name!r} is not installed here{nearest(name, found)}; {there_are}")
    record = load(found[name], error, what="method")
    if not isinstance(record, kind):
        raise error(
            f"method: {name!r} is registered as {found[name].value}, which is not a {kind.__name__}; register the "
            f"record in that package's pyproject.toml"
        )
    return record
