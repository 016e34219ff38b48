"""The page's modules in a real Chromium; skipped, and said so, where there is none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparrow.coordinator.web import runtime

STATIC = Path(__file__).resolve().parents[2] / "coordinator" / "web" / "static"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CALM = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),  # a camera and a microphone
)
POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src 'self'"


class Files(SimpleHTTPRequestHandler):
    """Serves an empty page at / and, under /web/, the page's files and runtime, under the coordinator's policy."""

    def do_GET(self) -> None:
        if self.path == "/":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>tests</title><link rel=icon href=data:,>")
        elif self.path.startswith("/web/runtime/"):
            self.give_runtime(*self.path.split("/")[-2:])
        elif self.path.startswith("/web/"):
            self.path = self.path.removeprefix("/web")
            super().do_GET()
        else:
            self.send_error(404)

    def give_runtime(self, package: str, name: str) -> None:
        file = runtime.load(package, name)
        self.send_response(200)
        self.send_header("Content-Type", file.media_type)
        self.end_headers()
        self.wfile.write(file.plain)

    def guess_type(self, path: Any) -> str:
        return "text/javascript" if str(path).endswith((".js", ".mjs")) else super().guess_type(path)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the page's files are served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(STATIC))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def modules(address: str) -> Iterator[Callable[..., Any]]:
    """``modules("async ({Generator}) => ...", module="pcg64.js", argument=...)`` evaluates the function in the browser.

    It receives the imported module and the argument, and what it returns must be JSON.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here, so the page's modules are not tested: install one of {', '.join(NAMES)}")
    with ThreadPoolExecutor(
        max_workers=1
    ) as thread:  # its event loop runs all the time, which other tests' must not see
        play = thread.submit(lambda: playwright.sync_playwright().start()).result()
        browser = thread.submit(play.chromium.launch, executable_path=found, args=list(CALM)).result()
        page = thread.submit(browser.new_page).result()
        thread.submit(page.goto, f"{address}/").result()

        def evaluate(function: str, *, module: str, argument: Any = None) -> Any:
            imported = f"async ([module, argument]) => ({function})(await import(`/web/${{module}}`), argument)"
            return thread.submit(page.evaluate, imported, [module, argument]).result()

        yield evaluate
        thread.submit(browser.close).result()
        thread.submit(play.stop).result()
