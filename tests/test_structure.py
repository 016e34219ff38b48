"""No import cycles, and two trees of errors."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]

# Exceptions that never reach a caller of ours, with the reason.
INTERNAL_ERRORS = {
    "ReadError": "becomes a reading without a value",
    "Paused": "ends a piece of work inside the session, which then pauses",
    "WrongUsage": "ends the reading of a command line, before any function is called",
    **dict.fromkeys(
        ("NotAnswered", "TookTooLong", "TookTooMuchMemory", "Stopped", "Crashed"),
        "sparrow.limited loads neither tree; its callers translate what it raises",
    ),
}


def modules_of(package: str) -> list[str]:
    """Return the names of a package and of all modules below it that can be imported anywhere."""
    found = [package]
    for each in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        # Not programs.
        if not re.search(r"\.(__main__|migrations)$", each.name):
            found += modules_of(each.name) if each.ispkg else [each.name]
    return found


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def walk(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports[module]:
            if other not in number:
                walk(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            component = stack[stack.index(module) :]
            del stack[-len(component) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(imports):
        if module not in number:
            walk(module)
    return found


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]


def test_no_modules_import_one_another_not_even_inside_functions():
    graph = grimp.build_graph("sparrow", "edge_sdk", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    found = cycles(imports)
    assert not found, found


def test_every_error_is_in_one_of_two_trees():
    trees = (
        importlib.import_module("edge_sdk.errors").SdkError,
        importlib.import_module("sparrow.coordinator.errors").CoordinatorError,
    )
    outside = set()
    for name in [*modules_of("edge_sdk"), *modules_of("sparrow")]:
        for _, found in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            ours = found.__module__ == name and issubclass(found, Exception) and not issubclass(found, Warning)
            if ours and not issubclass(found, trees) and found.__name__ not in INTERNAL_ERRORS:
                outside.add(f"{name}.{found.__qualname__}")
    assert not outside, "\n".join(sorted(outside))
