"""The files, modules and commands that the pages name exist, links lead somewhere, and README is short.

Of docs/results only links are read: its pages name the commands that were run at the time.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sparrow.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = r"(?:benchmarks|coordinator|deploy|devices|docs|edge_sdk|export|sparrow|tests)"
EXAMPLES = re.compile(r"\b(x|NAME|my_\w+)\b")
"""Words that stand for a name of the reader's own."""
NOT_MODULES = {"sparrow.tasks", "sparrow.partitions", "sparrow.device_methods", "sparrow.coordinator_methods"}
NOT_MODULES |= {"sparrow.dynamic_exports", "sparrow.federation"}
"""Groups of entry points, and a tag of MLflow."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


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
    found, parsers = set(), [COMMANDS[command].load().parser(f"sparrow {command}")]
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
    _, _, contents = (docs / "README.md").read_text().partition("\n# All pages\n")
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", contents)
    assert sorted(listed) == sorted({str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"})


# --- pictures ------------------------------------------------------------------------------------------------------

DRAWINGS = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
LEAST_CONTRAST = 4.5
"""Of text and its ground, by WCAG 2.2, level AA."""


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_pictures_have_a_text_alternative(page):
    for alternative, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", without_code(page.read_text())):
        assert alternative.strip(), f"{path} needs words that say what it shows"


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def fills(style):
    return dict(re.findall(r"([.\w]+) \{[^}]*?\bfill: (#\w{6})", style))


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.name)
def test_drawings_have_descriptions_and_both_colour_schemes(drawing):
    text = drawing.read_text()
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("role") == "img"
    assert {root.find(f"{space}{name}").get("id") for name in ("title", "desc")} == set(
        root.get("aria-labelledby").split()
    )
    assert not re.search(r"(?:href|src|url)\W*(?:https?:|//)", text), "it loads nothing"
    ground, width, height = root.find(f"{space}rect"), *map(float, (root.get("width"), root.get("height")))
    assert ground.get("class") == "page", "it has a ground of its own, whatever the page's"
    light, _, dark = root.find(f"{space}style").text.partition("prefers-color-scheme: dark")
    assert dark
    for style in (fills(light), {**fills(light), **fills(dark)}):
        for name in (".page", ".box", ".kept"):
            brighter, darker = sorted((luminance(style["text"]), luminance(style[name])), reverse=True)
            assert (brighter + 0.05) / (darker + 0.05) >= LEAST_CONTRAST, (drawing.name, name, style)
    for box in root.iter(f"{space}rect"):
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height
