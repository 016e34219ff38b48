"""The files, modules and commands that the pages name exist, and README is short.

docs/results is left out: its pages name the commands that were run at the time.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from sparrow.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = r"(?:benchmarks|command_line|coordinator|deploy|devices|docs|edge_sdk|export|sparrow|tests)"
EXAMPLES = re.compile(r"\b(x|NAME|my_\w+)\b")
"""Words that stand for a name of the reader's own."""
NOT_MODULES = {"sparrow.tasks", "sparrow.partitions", "sparrow.device_methods", "sparrow.coordinator_methods"}
NOT_MODULES |= {"sparrow.dynamic_exports", "sparrow.federation"}
"""Groups of entry points, and a tag of MLflow."""
README_WORDS = 500

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_readme_is_short():
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(text.split()) <= README_WORDS


@each_page
def test_its_files_exist(page):
    named = set(
        re.findall(rf"(?<![\w./-])({FOLDERS}/[\w./-]*\w\.(?:py|md|toml|service|timer|env|yaml))", page.read_text())
    )
    assert not {path for path in named if not EXAMPLES.search(path) and not (ROOT / path).exists()}


@each_page
def test_its_tests_exist(page):
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()))
    assert not {f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()}


@each_page
def test_its_modules_exist(page):
    text = page.read_text()
    named = set(re.findall(r"python -m ((?:benchmarks|coordinator|devices|edge_sdk|export|sparrow)[\w.]*\w)", text))
    named |= set(re.findall(r"`((?:edge_sdk|sparrow)(?:\.\w+)+)(?=[(`:])", text))
    named |= set(re.findall(r"^ *from ((?:edge_sdk|sparrow)[\w.]*) import", text, re.MULTILINE))
    missing = []
    for name in sorted(named - NOT_MODULES):
        if EXAMPLES.search(name):
            continue
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ImportError:
            try:
                getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError):
                missing.append(name)
    assert not missing


@each_page
def test_its_commands_have_the_options_that_it_gives_them(page):
    text = re.sub(r"\\\n *", "", page.read_text())
    wrong = []
    for command, words in re.findall(r"(?:^|[ `/(])sparrow ([a-z]+)((?: [^`#|\n]*)?)", text, re.MULTILINE):
        line = f"sparrow {command}{words}"
        if not re.search(r" --?\w", words):
            continue
        if command not in COMMANDS:
            wrong.append(line)
            continue
        known = options(command)
        wrong += [line for option in re.findall(r"(?<= )--[a-z][\w-]*", words) if option not in known]
    assert not wrong


def options(command):
    """Return every option string of a command, those of its sub-commands included."""
    found, parsers = set(), [COMMANDS[command].load().parser(f"sparrow {command}", brief=False)]
    while parsers:
        parser = parsers.pop()
        for action in parser._actions:
            found |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found
