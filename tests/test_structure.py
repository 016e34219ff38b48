"""Rules that keep the code easy to read: no import cycles, two trees of errors, names, and words."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("coordinator", "edge_sdk", "export", "devices", "sparrow", "benchmarks")

# Names that only the authors understood, and the plural forms of some.
PRIVATE_WORDS = {
    *("bell", "door", "furnish", "furnished", "house", "joiner", "joiners", "leftovers", "liar", "liars", "onlooker"),
    *("onlookers", "quickest", "roster", "rosters", "stint", "stir", "stranger", "strangers", "Visit"),
}

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


@functools.cache
def nodes_of(folder: str) -> list[tuple[Path, list[ast.AST]]]:
    """Return each Python file in a folder of the repository with its syntax nodes; links are not followed."""
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        inside = (file, *file.parents)
        if not any(parent.is_symlink() for parent in inside[: inside.index(ROOT)]):
            found.append((file.relative_to(ROOT), list(ast.walk(ast.parse(file.read_bytes())))))
    return found


def sources(*folders: str) -> list[tuple[Path, list[ast.AST]]]:
    return [each for folder in folders for each in nodes_of(folder)]


def modules_of(package: str) -> list[str]:
    """Return the names of a package and of all modules below it that can be imported anywhere."""
    found = [package]
    for each in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        # Not programs, and what needs the frameworks that the bench compares with.
        if not re.search(r"\.(__main__|migrations|peers|benchmarks\.coordinator)$", each.name):
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


def sniffs(node: ast.AST) -> bool:
    """Return whether a piece of code asks which functions a method overrides, instead of what it declares."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("__func__", "_way_of_its_own")
    if isinstance(node, ast.Name | ast.FunctionDef):
        return (node.id if isinstance(node, ast.Name) else node.name) == "_way_of_its_own"
    if isinstance(node, ast.Compare) and any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
        sides = [node.left, *node.comparators]
        return any(isinstance(each, ast.Attribute) and ast.unparse(each.value).endswith("Method") for each in sides)
    return False


def test_the_engine_reads_what_a_method_declares():
    found = [f"{file}:{node.lineno}" for file, nodes in sources(*FOLDERS) for node in nodes if sniffs(node)]
    assert not found, "\n".join(found)


@functools.cache
def words_of(name: str) -> set[str]:
    """Return the words of a name in snake or camel case; `Visit` was a class, to visit a tree is usual."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {word if word == "Visit" else word.lower() for word in words}


def names_in(nodes: list[ast.AST]) -> dict[str, int]:
    """Return every identifier of a module with a line where it stands."""
    found = {}
    for node in nodes:
        for field in ("name", "id", "attr", "arg", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found[value] = getattr(node, "lineno", 0)
    return found


def test_names_are_words_of_the_field():
    found = []
    for file, nodes in sources(*FOLDERS, "tests", "docs"):
        if words_of(file.stem) & PRIVATE_WORDS:
            found.append(str(file))
        names = names_in(nodes).items()
        found += [f"{file}:{line} {name}" for name, line in names if words_of(name) & PRIVATE_WORDS]
    assert not found, "\n".join(found)


def docstrings(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return the docstrings of a module and of its public functions and classes, with their lines."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Module):
            found.append((1, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.append((node.lineno, ast.get_docstring(node) or ""))
    return found


def test_docstrings_are_sentences_or_noun_phrases():
    relative = re.compile(r"(What|Who|Whether|Where)\b")
    found = [
        f"{file}:{line} {text.splitlines()[0]}"
        for file, nodes in sources(*FOLDERS, "docs")
        for line, text in docstrings(nodes)
        if relative.match(text)
    ]
    assert not found, "\n".join(found)


def test_tests_read_no_private_attributes_of_ours():
    foreign = {"os", "sys", "torch", "argparse", "parser", "self", "cls", "module._forward_hooks"}
    found = []
    for file, nodes in sources("tests"):
        for node in nodes:
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                owner = ast.unparse(node.value)
                if not {owner.split(".")[0], f"{owner}.{node.attr}"} & foreign:
                    found.append(f"{file}:{node.lineno} {owner}.{node.attr}")
    assert not found, "\n".join(found)
