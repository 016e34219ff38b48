"""Draw the icons of the device page with Chromium: ``python docs/icons.py``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "coordinator" / "web" / "static"
SIZES = (192, 512)
# Everything is within 40 % of the size from the centre, because systems cut icons to circles and other shapes.
MARK = """<!doctype html><style>body {{ margin: 0 }}</style>
<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" viewBox="0 0 512 512" fill="none">
<rect width="512" height="512" fill="#0063a3"/>
<path d="M250 350v66m46-66v66" stroke="#fff" stroke-width="14" stroke-linecap="round"/>
<path fill="#fff" d="M92 330l96-44c8-78 46-128 104-136a72 72 0 0 1 104 42l44 24-46 20
c0 90-56 138-138 138-60 0-92-26-100-52z"/>
<path d="M196 276c18 64 88 74 134 26" stroke="#0063a3" stroke-width="16" stroke-linecap="round"/>
<circle cx="344" cy="196" r="13" fill="#0063a3"/>
</svg>"""


def main() -> int:
    """Draw ``icon-SIZE.png`` for each size."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("there is no Chromium here; install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for size in SIZES:
            page = browser.new_page(viewport={"width": size, "height": size})
            page.set_content(MARK.format(size=size))
            page.screenshot(path=FOLDER / f"icon-{size}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
