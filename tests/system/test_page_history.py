"""The page about the past, in a real browser: earlier models."""

from __future__ import annotations

from contextlib import closing

import pytest

from sparrow.coordinator.storage.tables import Device

from ..coordinator.fakes import LocalCoordinator, answering
from . import browsers
from .browsers import playwright
from .conftest import wait_until

browser, open_page = browsers.browser, browsers.open_page
pictures, new_coordinator = browsers.pictures, browsers.new_coordinator

pytestmark = pytest.mark.integration


def models(coordinator):
    return {model["version"]: model for model in coordinator.get("/v1/federations/lab/models").json()}


@pytest.fixture
def training(coordinator_and_devices):
    """A coordinator whose federation trains on and on, and whose devices evaluate each round."""
    coordinator, device = coordinator_and_devices
    coordinator.create("lab", cohort=2, min_devices=2, rounds=5000, local_epochs=1, evaluation_interval=1)
    device.fleet(coordinator.url, "lab", "--devices", "2", "--processes", "1")
    return coordinator


def test_a_model_stays_while_its_user_decides_and_is_gone_back_to(training, open_page):
    page, expect = open_page(training.url), playwright.expect
    wait_until(lambda: training.info("lab")["model_version"] >= 13, "rounds", timeout=60)
    page.get_by_text("Global models, and going back to one").click()
    # One that neither its number nor its quality keeps.
    back = page.locator("#models-table button:enabled")
    expect(back.first).to_be_visible()
    found = models(training)
    version = next(each for each in sorted(found, reverse=True) if each % 10 and not found[each]["best"])
    page.get_by_role("button", name=f"Go back to model {version}", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Go back to model {version}")
    wait_until(lambda: training.info("lab")["model_version"] >= version + 6, "rounds", timeout=60)
    assert version in models(training)
    dialog.get_by_role("button", name="Go back").click()
    told = wait_until(
        lambda: training.get("/v1/federations/lab/timeline?kind=rolled_back").json()["events"], "the rollback"
    )
    assert told[0]["text"].endswith(f" to {version}")


@pytest.fixture
def judged(new_coordinator, clock, train):
    """A finished federation whose second model was the best."""
    server = new_coordinator()
    answer = answering(train)
    local = LocalCoordinator(server.data, clock)
    with closing(local.store):
        local.create("lab", cohort=1, min_devices=1, rounds=5, evaluation_interval=1)
        (device,) = local.enrol("a", federation="lab")
        local.rounds.advance()
        while local.info("lab").status != "finished":
            answer(device, accuracy=[0.0, 0.5, 0.9, 0.4, 0.3, 0.2][local.info("lab").round])
            local.rounds.advance()
    server.start()
    return server


def test_the_best_model_is_a_click_away(judged, open_page):
    page, expect = open_page(judged.url), playwright.expect
    page.get_by_text("Global models, and going back to one").click()
    page.get_by_role("button", name="Go back to the best: model 2, 90.0 %").click()
    page.get_by_role("dialog").get_by_role("button", name="Go back").click()
    expect(page.get_by_role("row", name="Model 2")).to_contain_text("current, best")
    assert judged.info("lab")["model_version"] == 2
    expect(page.locator("#models-best")).to_be_hidden()


@pytest.fixture
def helped(new_coordinator, clock):
    """Three devices, of which the federation helps one, harms one, and nothing is known of the third."""
    server = new_coordinator()
    local = LocalCoordinator(server.data, clock)
    with closing(local.store):
        local.create("lab")
        devices = local.enrol("helped", "harmed", "unknown", federation="lab")
        with local.store.writing() as db:
            for device, accuracy, alone in zip(devices, (0.9, 0.5, 0.7), (0.7, 0.8, None), strict=True):
                record = db.get_one(Device, device.id)
                record.accuracy = accuracy
                record.accuracy_alone = alone
    server.start()
    return server


def test_a_column_says_whom_the_federation_helped(helped, open_page):
    page, expect = open_page(helped.url), playwright.expect
    row = page.locator("#devices tbody tr")
    page.get_by_role("columnheader", name="Did it help?").get_by_role("button").click()
    for place, (name, told) in enumerate({"harmed": "−30.0 points", "helped": "+20.0 points", "unknown": "–"}.items()):
        expect(row.nth(place).locator("th")).to_have_text(name)
        expect(row.nth(place).locator("td[data-label='Did it help?']")).to_have_text(told)
    page.get_by_role("columnheader", name="Did it help?").get_by_role("button").click()
    expect(row.first.locator("th")).to_have_text("helped")
