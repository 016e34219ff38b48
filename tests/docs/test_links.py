"""Links within the documentation lead somewhere, and docs/README.md leads to every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def without_code(text):
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page):
    for target, anchor in LINK.findall(without_code(page.read_text())):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"({target}) leads nowhere"
        assert not anchor or anchor in anchors(found), f"({target}#{anchor}): {found.name} has no such heading"


def test_the_table_of_contents_has_every_page():
    docs = ROOT / "docs"
    listed = re.findall(r"\]\(([a-z0-9/-]+\.md)\)", (docs / "README.md").read_text())
    assert sorted(listed) == sorted({str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"})
