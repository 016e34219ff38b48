"""Messages for invalid settings, from pydantic's errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .nearest import nearest

WANTED = {
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "{expected}",
    "finite_number": "a finite number",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    **dict.fromkeys(("dict_type", "mapping_type"), "names with values"),
}
"""Type of pydantic's error -> description of valid values."""


def faults(error: Any, known: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return a (setting, message) for each fault; the setting is empty if several contradict each other.

    error: pydantic's ValidationError. known: valid names, to suggest the nearest one.
    """
    # A union type has a fault for each member; the first one is enough.
    found: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        found.setdefault(".".join(map(str, fault["loc"])), _explained(fault, known))
    return list(found.items())


def _explained(fault: Any, known: Iterable[str]) -> str:
    kind, given = fault["type"], fault["input"]
    if kind == "extra_forbidden":
        return f"there is no such setting{nearest(str(fault['loc'][-1]), known)}"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind in WANTED:
        met = given if str(given).strip() else repr(given)
        return f"{met} is invalid; give {WANTED[kind].format(**fault.get('ctx', {}))}"
    return str(fault["msg"])
