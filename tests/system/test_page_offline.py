"""The device page without its coordinator: a service worker keeps it, and Chromium can install it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from . import browsers
from .browsers import persistent, playwright
from .conftest import wait_until
from .test_join_page import ALONE, FIGURES, Finger, phase, taken_part, tried_again

browser, open_page = browsers.browser, browsers.open_page
expect = playwright.expect

CACHES = "async () => (await caches.keys()).sort()"
KEPT = """async () => {
  const cache = await caches.open("sparrow onnxruntime-web-1.30.0");
  return (await cache.keys()).length === 2;
}"""
REGISTRATIONS = "async () => (await navigator.serviceWorker.getRegistrations()).length"

pytestmark = pytest.mark.integration


@pytest.fixture
def trained(coordinator, open_page):
    """A page whose device has taken part in a federation that has ended."""
    page, _ = taken_part(coordinator, open_page, 50)
    expect(page.locator("#offline")).to_contain_text("opens without a network")
    wait_until(lambda: page.evaluate(KEPT), "the runtime in its cache")
    yield page
    page.troubles.clear()  # Chromium notes refused connections as errors


def predicted(page):
    """Draw a one, and return what the page says of it."""
    page.locator("#answer").evaluate("one => { one.hidden = true; }")
    stroke = np.array(FIGURES[1]) / 100 * 0.6 + 0.2
    Finger(page).draw(page.get_by_role("application", name="Draw something to be recognised"), stroke)
    page.locator("#answer").wait_for()
    return page.locator("#predicted").text_content()


def test_a_reload_without_a_coordinator_opens_the_model_and_predicts(coordinator, trained):
    before = predicted(trained)
    coordinator.kill()
    trained.reload()
    expect(trained.locator("#away")).to_contain_text("The coordinator does not answer")
    expect(trained.locator("#samples")).to_contain_text("12 samples")
    assert predicted(trained) == before
    Finger(trained).give([1], np.random.default_rng(8))
    expect(trained.locator("#samples")).to_contain_text("13 samples")
    Finger(trained).press("Download the model (.onnx)")
    expect(trained.locator("#trial-problem")).to_contain_text("the first download of the model needs the coordinator")
    other = trained.context.new_page()
    other.goto(trained.url)
    expect(other.get_by_role("alert")).to_contain_text("open in another tab")
    trained.close()
    wait_until(lambda: tried_again(other, "joining"), "the other tab to go on", interval=0.5)
    assert predicted(other) == before
    expect(other.locator("#samples")).to_contain_text("13 samples")
    coordinator.start()
    phase(other, "finished")
    expect(other.locator("#away")).to_be_hidden()


def test_leaving_and_forgetting_do_not_wait_for_a_coordinator_that_is_away(coordinator, trained):
    coordinator.kill()
    trained.reload()
    phase(trained, "joining")
    finger = Finger(trained)
    finger.press("Leave")
    phase(trained, "left")
    expect(trained.locator("#away")).to_be_visible()
    coordinator.start()
    expect(trained.locator("#away")).to_be_hidden()
    coordinator.kill()
    finger.press("Forget me")
    trained.get_by_role("dialog").get_by_role("button", name="Forget me").tap()
    expect(trained.locator("#remains")).to_contain_text("could not be asked to delete this device")
    assert trained.evaluate(CACHES) == []
    assert trained.evaluate(REGISTRATIONS) == 0
    coordinator.start()
    phase(trained, "ready")
    trained.reload()
    phase(trained, "ready")
    expect(trained.locator("#offline")).to_contain_text("opens without a network")
    assert len(trained.evaluate(CACHES)) == 1


def test_the_answer_of_the_browser_to_keep_its_storage_is_shown(trained):
    kept = trained.evaluate("navigator.storage.persisted()")
    expect(trained.locator("#stored")).to_have_text(re.compile("keeps your data" if kept else "may delete your data"))


def test_chromium_can_install_the_page(browser, coordinator, tmp_path):
    coordinator.create("lab", **ALONE)
    with persistent(browser, tmp_path) as context:
        page = context.new_page()
        page.goto(f"{coordinator.url}/join/lab")
        expect(page.locator("#offline")).to_contain_text("To install it")
        tools = context.new_cdp_session(page)
        manifest = tools.send("Page.getAppManifest")
        assert manifest["url"] == f"{coordinator.url}/join/lab/app.webmanifest"
        assert manifest["errors"] == []
        assert manifest["manifest"]["startUrl"] == f"{coordinator.url}/join/lab"
        assert tools.send("Page.getInstallabilityErrors")["installabilityErrors"] == []
