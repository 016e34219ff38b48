"""Methods, tasks and other pieces that installed packages register under entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .nearest import nearest

Record = TypeVar("Record")


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in the order of their names."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def load(entry: EntryPoint, error: type[Exception], *, what: str) -> Any:
    """Return the object that an entry point names. Raises ``error``, after ``what``, if it cannot be imported."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as reason:
        raise error(
            f"{what}: {entry.name!r} is registered as {entry.value}, which cannot be imported ({reason}); correct or "
            f"install that package anew"
        ) from reason


def load_method_record(
    group: str, name: str, kind: type[Record], error: type[Exception], *, advice: str = ""
) -> Record:
    """Return a half of the method ``name``. Raises ``error``, which names those installed and ends with ``advice``."""
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
