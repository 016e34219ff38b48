"""The files, modules and commands that the pages name exist, links lead somewhere, and README is short.

Of docs/results only links are read: its pages name the commands that were run at the time.
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
    named |= set(re.findall(r"^ *from ((?:edge_sdk|sparrow)(?:\.\w+)*) import", text, re.MULTILINE))
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


# --- links ---------------------------------------------------------------------------------------------------------

EVERY_PAGE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def without_code(text):
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page):
    for target, anchor in LINK.findall(without_code(page.read_text())):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"({target}) leads nowhere"
        assert not anchor or anchor in anchors(found), f"({target}#{anchor}): {found.name} has no such heading"


def test_the_table_of_contents_has_every_page():
    docs = ROOT / "docs"
    listed = re.findall(r"\]\(([a-z0-9/-]+\.md)\)", (docs / "README.md").read_text())
    assert sorted(listed) == sorted({str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"})
