"""MkDocs hooks: docs/README.md becomes the home and the navigation, and linked sources are copied into the site.

In the repository a link out of docs/ opens the file. The site has a copy of each linked file below ``source/``. Linked
pages are only named, because they would need their own links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CONTENTS = "README.md"
LIST = "\n# All pages\n"
"""The heading below which it lists the pages."""
OUTWARD = re.compile(r"\[([^]]*)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
"""A link upwards; whether it leaves docs/ depends on its page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make each heading of the list of pages a section of the navigation."""
    nav: list[Any] = [{"Home": CONTENTS}]
    _, _, listed = (Path(config.docs_dir) / CONTENTS).read_text(encoding="utf-8").partition(LIST)
    for line in listed.splitlines():
        if line.startswith("## "):
            nav.append({line[3:]: []})
        elif found := re.match(r"- \[([^]]*)\]\(([^)]*)\)", line):
            next(iter(nav[-1].values())).append({found[1]: found[2]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add copies of the sources that pages link to."""
    root = Path(config.docs_dir).parent
    links = [
        (page.src_uri, link[1]) for page in files.documentation_pages() for link in OUTWARD.findall(page.content_string)
    ]
    for path in sorted({path for page, target in links if (path := _source(page, target))}):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the copies."""
    here = page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        if not _leaves(here, found[2]):
            return found[0]
        path = _source(here, found[2])
        return f"[{found[1]}]({os.path.relpath(f'source/{path}', os.path.dirname(here))})" if path else found[1]

    return OUTWARD.sub(rewritten, markdown)


def _leaves(page: str, target: str) -> bool:
    return os.path.normpath(os.path.join(os.path.dirname(page), target)).startswith("..")


def _source(page: str, target: str) -> str | None:
    """Return the path from the repository's root of a file outside docs/ that is not a page; None otherwise."""
    if not _leaves(page, target) or target.endswith(".md"):
        return None
    return os.path.normpath(os.path.join("docs", os.path.dirname(page), target))
