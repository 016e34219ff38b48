"""``make site``: docs/ becomes a site without a warning, and the site asks nothing of other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
def test_it_is_built_and_stands_alone(tmp_path):
    pytest.importorskip("material")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = sorted(site.rglob("*.html"))
    assert {page.stem for page in site.glob("*.html")} >= {page.stem for page in (ROOT / "docs").glob("[a-z]*.md")}
    for page in pages:
        fetched = re.findall(
            r"<(?:script|img|iframe|link)[^>]* (?:src|href)=[\"']?(https?:[^\"' >]+)", page.read_text()
        )
        assert not fetched, f"{page.name} fetches {fetched}"
    for path in re.findall(r'href="(source/[^"#]+)', (site / "compared.html").read_text()):
        assert (site / path).read_text() == (ROOT / path.removeprefix("source/")).read_text()
