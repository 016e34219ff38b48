"""``make pictures``: the picture of the demo's page in README. Needs Chromium."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks import demo

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 1280
HEIGHT = 1010


def main() -> int:
    """Run the demo and keep a picture of its page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("there is no Chromium here; install the package chromium")
    home = Path("runs/pictures")
    FOLDER.mkdir(exist_ok=True)
    with demo.fresh(home) as server:
        demo.show(demo.run(home, server, seed=0), home)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            )
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(server)
            page.locator("figure canvas").last.wait_for()
            for part in ("#admin", "#actions", "#new"):
                # Show the page as an observer sees it.
                page.locator(part).evaluate("part => part.hidden = true")
            page.screenshot(path=FOLDER / "page.png")
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
