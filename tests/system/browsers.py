"""A real Chromium for tests: starting it, opening pages, what goes wrong in them, and pages that are devices.

A test module takes the fixtures that it needs: ``browser, open_page = browsers.browser, browsers.open_page``. Skipped,
and said so, where there is no Chromium.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .conftest import Coordinator

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CALM = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP *.test 127.0.0.1",  # names of this machine that are not local to the browser
)
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here, so the page is not tested: install one of {', '.join(NAMES)}")
    playwright.expect.set_options(timeout=20_000)  # a machine may be busy
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=list(CALM))
        yield browser
        browser.close()


@contextmanager
def persistent(browser: Any, folder: Path, *flags: str) -> Iterator[Any]:
    """A Chromium with a profile in a folder: its pages can be installed, unlike those of other contexts."""
    found = next(filter(None, map(shutil.which, NAMES)))
    context = browser.browser_type.launch_persistent_context(folder, executable_path=found, args=[*CALM, *flags])
    try:
        yield context
    finally:
        context.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; a test in which one wrote an error to its console fails.

    Each is a browser user's of its own, unless ``beside`` names a page: then it is another tab of that one's.
    """
    troubles: list[str] = []
    contexts = []

    def open_one(url: str, *, beside: Any = None, **context: Any) -> Any:
        if beside is None:
            contexts.append(browser.new_context(**{"viewport": WIDE, "accept_downloads": True, **context}))
        page = (beside.context if beside else contexts[-1]).new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.requests = []
        page.on("request", lambda request: page.requests.append(request))
        page.troubles = troubles
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots are kept: the folder that ``SPARROW_SCREENSHOTS`` names, else pytest's own."""
    folder = Path(os.environ.get("SPARROW_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def new_coordinator(tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    """Makes coordinators that are not started yet."""
    with ExitStack() as stack:

        def make(**settings: str) -> Coordinator:
            made = Coordinator(tmp_path / "own", **settings)
            stack.callback(made.close)
            return made

        yield make


BLANK = "/web/onnxruntime-web.LICENSE.txt"
"""A page of the coordinator's own, with its rights and without a screen."""

DRIVEN = """([federation, token]) => {
  window.said = [];
  window.state = null;
  window.device = new Worker("/web/worker.js", { type: "module" });
  device.onmessage = ({ data }) => {
    if (data.say === "read") return;
    if (data.say !== "state") return said.push(data);
    window.state = data.state;
    if (window.ends?.(state)) device.terminate();
  };
  device.onerror = (event) => said.push({ say: "error", detail: event.message });
  device.postMessage({ do: "open", federation, token });
}"""

GIVEN = """([content, name, seed]) => {
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  device.postMessage({ do: "file", file: new File([bytes], name), seed, id: 1 });
}"""


class PageDevice:
    """A page that is a device, driven by the messages that its screen would send: its worker's state is ``state``.

    context: the browser user's, who keeps what the device keeps. Opened again for the same one, it goes on.
    """

    def __init__(self, context: Any, server: str, federation: str, *, token: str | None = None) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.goto(f"{server}{BLANK}")
        self.page.evaluate(DRIVEN, [federation, token])

    def send(self, **message: Any) -> None:
        """Send its worker a message, as a screen does: ``do`` says what."""
        self.page.evaluate("(message) => device.postMessage(message)", message)

    def take_part(self, file: Path, name: str, *, budget: float = 1.0, seed: int = 0) -> None:
        """Give it the samples of a file, and have it join. seed: the federation's, by which samples are split."""
        self.wait_for("state.federation")
        self.page.evaluate(GIVEN, [base64.b64encode(file.read_bytes()).decode(), file.name, str(seed)])
        self.send(do="join", name=name, budget=budget)

    @property
    def state(self) -> dict[str, Any]:
        """The state that its screen would show."""
        state: dict[str, Any] = self.page.evaluate("state")
        return state

    @property
    def said(self) -> list[dict[str, Any]]:
        """What else its worker has said, errors included."""
        said: list[dict[str, Any]] = self.page.evaluate("said")
        return said

    def wait_for(self, condition: str, timeout: float = 60.0) -> None:
        """Wait until a condition of ``state`` holds, in JavaScript. Fails the test with the state there is."""
        until = f"() => state && ({condition})"
        try:
            self.page.wait_for_function(until, polling=20, timeout=1000 * timeout)
        except playwright.TimeoutError:
            pytest.fail(f"waited {timeout} s in vain for {condition}: {self.state} {self.said}")

    def die_when(self, condition: str) -> None:
        """Wait until a condition of ``state`` holds, at which moment the device is gone, as when a page is closed."""
        self.page.evaluate(f"() => {{ window.ends = (state) => {condition}; }}")
        self.wait_for(condition)
        self.page.close()
