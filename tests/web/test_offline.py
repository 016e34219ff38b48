"""The service worker of the page: which of its files come from the network, and which from this browser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from sparrow.coordinator.web import offline

from ..system import browsers
from ..system.conftest import wait_until
from .conftest import STATIC, Files

pytestmark = pytest.mark.integration
browser = browsers.browser

FILES = """async () => {
  const found = {};
  for (const name of await caches.keys()) {
    found[name] = (await (await caches.open(name)).keys()).map(({ url }) => new URL(url).pathname);
  }
  return found;
}"""
SEEN = "() => document.querySelector('.lead').textContent"


class Pages(Files):
    """Serves the page of an edition, or 502 as a proxy does for a coordinator that is down."""

    server: Edition

    def do_GET(self) -> None:
        if self.server.down:
            self.give(502, "text/html", b"<h1>Bad Gateway</h1>")
        elif self.path == "/join/lab":
            text = (STATIC / "join.html").read_text()
            self.give(200, "text/html", text.replace("Your data stay", f"Edition {self.server.edition}").encode())
        elif self.path == "/web/join.html":
            self.path = "/join/lab"
            self.do_GET()
        elif self.path == f"/web/{offline.WORKER}":
            self.give(200, "text/javascript", self.server.service_worker.encode(), **offline.SCOPE)
        else:
            super().do_GET()

    def give(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


class Edition(ThreadingHTTPServer):
    """Serves edition 1 of the page, then later ones."""

    daemon_threads = True
    edition = 1
    down = False

    @property
    def service_worker(self) -> str:
        """The service worker whose version is the edition."""
        text = offline.service_worker().plain.decode()
        version = text.partition('"sparrow page ')[2].partition('"')[0]
        return text.replace(version, str(self.edition))


@pytest.fixture
def server() -> Iterator[Edition]:
    with Edition(("127.0.0.1", 0), partial(Pages, directory=str(STATIC))) as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Any, server: Edition) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{server.server_port}/join/lab")
    page.wait_for_function("() => navigator.serviceWorker.controller")
    yield page
    context.close()


def test_a_new_edition_comes_with_the_next_load_and_replaces_the_kept_one(server: Edition, page: Any) -> None:
    page.evaluate("(names) => Promise.all(names.map((name) => caches.open(name)))", ["sparrow ort-1", "of another"])
    server.edition = 2
    page.reload()
    assert page.evaluate(SEEN).startswith("Edition 2")
    wanted = {"sparrow page 2", "of another"}
    wait_until(lambda: set(page.evaluate(FILES)) == wanted, "the caches of older editions to be deleted", interval=0.1)
    server.down = True
    page.reload()
    assert page.evaluate(SEEN).startswith("Edition 2")


def test_only_files_of_the_page_are_kept(page: Any) -> None:
    (files,) = page.evaluate(FILES).values()
    made = {offline.WORKER, offline.MANIFEST}
    assert set(files) == {f"/web/{path.name}" for path in STATIC.iterdir() if path.name not in made}


def test_calls_of_the_api_do_not_come_from_this_browser(server: Edition, page: Any) -> None:
    called = "async (path) => (await fetch(path)).status"
    assert page.evaluate(called, "/web/page.js") == 200
    server.down = True
    assert page.evaluate(called, "/web/page.js") == 200
    for path in ("/v1/federations/lab", "/", "/page/page.js", "/join/lab/app.webmanifest"):
        assert page.evaluate(called, path) == 502, path
