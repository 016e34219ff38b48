"""Browsers without a capability that training needs: the page says which before a person takes part."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from sparrow.protocol.wire import WIRE

from . import browsers
from .browsers import BLANK, CALM, NAMES, playwright
from .test_join_page import ALONE, PHONE, Finger, phase

browser, open_page = browsers.browser, browsers.open_page
expect = playwright.expect

WITHOUT_SIMD = "WebAssembly.validate = () => false;"

pytestmark = pytest.mark.integration


@pytest.fixture
def limited(browser, coordinator):
    """Opens the page of a federation in a Chromium with flags of V8, and gives it samples."""
    opened = []

    def open_one(flags):
        found = next(filter(None, map(shutil.which, NAMES)))
        kind = browser.browser_type
        opened.append(kind.launch(executable_path=found, args=[*CALM, f"--js-flags={flags}"]))
        page = opened[-1].new_context(**PHONE).new_page()
        page.goto(f"{coordinator.url}/join/lab")
        Finger(page).give([0, 1] * 6, np.random.default_rng(7))
        return page

    yield open_one
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--jitless", "no WebAssembly, .* use another browser"),
        ("--wasm-max-mem-pages=600", "too little memory: .* MiB"),
    ],
)
def test_a_browser_that_cannot_train_says_so_and_does_not_enrol(coordinator, limited, flags, said):
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=5)
    page = limited(flags)
    expect(page.locator("#lacking")).to_have_text(re.compile(said))
    expect(page.get_by_role("button", name="Take part")).to_be_disabled()
    assert coordinator.get("/v1/federations/lab/devices").json() == []


def test_a_browser_without_simd_says_so(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=5)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    page.add_init_script(WITHOUT_SIMD)
    page.reload()
    Finger(page).give([0, 1] * 6, np.random.default_rng(7))
    expect(page.locator("#lacking")).to_have_text(re.compile("no WebAssembly SIMD, .* update the browser"))
    expect(page.get_by_role("button", name="Take part")).to_be_disabled()


def test_a_runtime_that_does_not_load_is_said_before_the_device_enrols(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=5)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    runtime = "**/ort-wasm-simd-threaded.wasm"
    page.context.route(runtime, lambda route: route.fulfill(body=b"damaged", content_type="application/wasm"))
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    finger.press("Take part")
    phase(page, "failed")
    expect(page.locator("#detail")).to_contain_text("this browser cannot load the model")
    assert coordinator.get("/v1/federations/lab/devices").json() == []
    page.context.unroute(runtime)
    page.reload()
    phase(page, "ready")
    Finger(page).press("Take part")
    phase(page, "finished")
    page.troubles.clear()


def test_the_last_failure_is_shown_until_a_round_succeeds(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=5)
    page = open_page(f"{coordinator.url}{BLANK}", **PHONE)
    page.context.route("**/v1/federations/lab/manifest", lambda route: route.fulfill(body=b"damaged"), times=1)
    page.goto(f"{coordinator.url}/join/lab")
    expect(page.locator("#last-failure")).to_have_text(re.compile("^Last failure: manifest does not match its SHA-256"))
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    finger.press("Take part")
    phase(page, "finished")
    expect(page.locator("#last-failure")).to_be_hidden()
    page.troubles.clear()  # Chromium asks for an icon of the text file


def test_a_page_that_is_older_than_its_coordinator_asks_for_a_reload(coordinator, open_page):
    coordinator.create("lab", **ALONE)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    phase(page, "ready")

    def newer(route):
        answer = route.fetch()
        route.fulfill(response=answer, headers={**answer.headers, "sparrow-wire": str(WIRE + 1)})

    page.context.route("**/v1/federations/lab", newer, times=1)
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("This page is older than the coordinator. Reload it.")
    page.reload()
    phase(page, "ready")


def test_right_answers_are_counts_of_the_samples(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=5)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    tested = int(re.search(r"(\d+) to test", page.locator("#samples").text_content())[1])
    finger.press("Take part")
    phase(page, "finished")
    counts = [re.search(r"(\d+) of (\d+) right", row) for row in page.locator("#accuracy > div").all_text_contents()]
    assert [int(found[2]) for found in counts] == [tested] * len(counts)
    assert len(counts) >= 2
