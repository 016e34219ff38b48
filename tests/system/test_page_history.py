"""The page about the past and the whole, in a real browser: earlier models, events, one device, all federations."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.storage.tables import Assignment, Device
from sparrow.protocol.messages import ChangeDevice, ChangeFederation, Conditions, Evaluation, Receipt

from ..coordinator.fakes import LocalCoordinator, answering
from . import browsers
from .browsers import playwright
from .conftest import wait_until
from .test_page import change
from .test_page_states import look_at

browser, open_page = browsers.browser, browsers.open_page
pictures, new_coordinator = browsers.pictures, browsers.new_coordinator

pytestmark = pytest.mark.integration


def models(coordinator):
    return {model["version"]: model for model in coordinator.get("/v1/federations/lab/models").json()}


@pytest.fixture
def training(coordinator_and_devices):
    """A coordinator whose federation trains on and on, and whose devices evaluate each round."""
    coordinator, device = coordinator_and_devices
    coordinator.create(
        "lab", cohort=2, min_devices=2, rounds=5000, local_epochs=1, evaluation_interval=1, early_stopping="off"
    )
    device.fleet(coordinator.url, "lab", "--devices", "2", "--processes", "1")
    return coordinator


def test_a_model_stays_while_its_user_decides_and_is_gone_back_to(training, open_page):
    page, expect = open_page(training.url), playwright.expect
    wait_until(lambda: training.info("lab")["model_version"] >= 13, "rounds", timeout=60)
    page.get_by_text("Global models, and going back to one").click()
    # The list changes with each round; it stands still until a model is chosen.
    change(training, action="pause")
    found = models(training)
    # Neither its number nor its quality keeps it.
    version = next(
        each
        for each in sorted(found, reverse=True)
        if each % 10 and not found[each]["best"] and not found[each]["current"]
    )
    page.get_by_role("button", name=f"Go back to model {version}", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Go back to model {version}")
    change(training, action="resume")
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


# --- events, one device, all federations ----------------------------------------------------------------------------


@pytest.fixture
def eventful(new_coordinator, clock, train):
    """A federation of twelve rounds: its deadline changes after the fourth, and a device fails after the eighth."""
    server = new_coordinator()
    answer = answering(train)
    local = LocalCoordinator(server.data, clock)
    with closing(local.store):
        local.create("lab", cohort=2, min_devices=2, rounds=12, evaluation_interval=1)
        devices = local.enrol("one", "two", federation="lab")
        local.rounds.advance()
        while (number := local.info("lab").round) < 12:
            for device in devices:
                answer(device, accuracy=0.5 + number / 50)
            local.rounds.advance()
            if number == 4:
                local.federations.change("lab", ChangeFederation(deadline_seconds=200))
            if number == 8:
                gone = Conditions(available=False, reason="out-of-memory")
                local.devices.change(devices[0].id, ChangeDevice(conditions=gone))
        with local.store.writing() as db:
            find(db, "lab").status = "paused"
    server.start()
    return server


def picture(page, chart="Accuracy"):
    """What a chart shows, as an address of data."""
    canvas = page.get_by_role("figure", name=chart, exact=True).locator("canvas")
    return canvas.evaluate("(canvas) => canvas.toDataURL()")


def test_the_timeline_tells_what_happened_and_charts_mark_it(eventful, open_page):
    page, expect = open_page(eventful.url), playwright.expect
    events = page.locator("#events li")
    page.get_by_label("Show").scroll_into_view_if_needed()
    expect(events.filter(has_text="settings changed")).to_contain_text("deadline_seconds: 100")
    page.get_by_label("Show").select_option("failures")
    expect(events).to_have_count(1)
    expect(events).to_contain_text("one failed: ")
    told = eventful.get("/v1/federations/lab/timeline?kind=failed").json()["events"][0]
    with page.expect_download() as saved:
        page.get_by_role("link", name="Events (CSV)").click()
    head, line = Path(saved.value.path()).read_text().splitlines()
    assert head == "id,at,kind,round,device,text"
    assert line.split(",")[:5] == [str(told["id"]), told["at"], "failed", str(told["round"]), "one"]

    expect(page.locator("#charts-scale .marks-legend")).to_have_attribute("data-marks", re.compile("[1-9]"))
    plot = page.get_by_role("img", name=re.compile("^Accuracy. Newest"))
    plot.focus()
    said = page.get_by_role("figure", name="Accuracy", exact=True).locator(".at")
    page.keyboard.press("Home")
    marked = {}
    for number in range(1, 13):
        expect(said).to_contain_text(f"Round {number}: ")
        marked[number] = said.text_content().partition("; ")[2]
        page.keyboard.press("ArrowRight")
    changed = eventful.get("/v1/federations/lab/timeline?kind=settings_changed").json()["events"]
    assert all(marked[each["round"] + 1].startswith("settings changed: ") for each in changed)
    assert marked[told["round"] + 1].startswith("one: failed: ")

    page.get_by_role("button", name="one", exact=True).click()
    expect(page.get_by_role("region", name="one")).to_be_visible()


def test_charts_zoom_and_take_a_logarithmic_scale(eventful, open_page):
    page, expect = open_page(eventful.url), playwright.expect
    whole = page.get_by_role("button", name="All rounds").first
    expect(page.get_by_role("figure", name="Loss", exact=True).locator("canvas")).to_be_visible()
    expect(page.locator("#charts-scale .marks-legend")).to_have_attribute("data-marks", re.compile("[1-9]"))
    before = {chart: picture(page, chart) for chart in ("Accuracy", "Loss")}
    page.get_by_label("Charts: first round").fill("3")
    page.get_by_label("Charts: last round").fill("6")
    page.keyboard.press("Tab")
    expect(whole).to_be_enabled()
    zoomed = picture(page)
    assert zoomed != before["Accuracy"]
    assert picture(page, "Loss") != before["Loss"], "all charts show the same rounds"
    eventful.http.patch("/v1/federations/lab", json={"rounds": 40}).raise_for_status()
    expect(page.locator("#time-lines")).to_contain_text("of 40 rounds")
    expect(page.get_by_label("Charts: first round")).to_have_value("3")
    assert picture(page) == zoomed
    whole.click()
    expect(page.get_by_label("Charts: first round")).to_have_value("")

    box = page.get_by_role("img", name=re.compile("^Accuracy. Newest")).locator(".u-over").bounding_box()
    at = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * box["width"], at)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], at, steps=4)
    page.mouse.up()
    assert 3 <= int(page.get_by_label("Charts: first round").input_value()) <= 4
    assert 9 <= int(page.get_by_label("Charts: last round").input_value()) <= 10
    whole.click()

    linear = picture(page, "Loss")
    page.get_by_label("Logarithmic").first.check()
    assert picture(page, "Loss") != linear
    page.get_by_label("Logarithmic").first.uncheck()
    page.wait_for_function(
        "(known) => known === document.querySelectorAll('#charts canvas')[1].toDataURL()", arg=linear
    )


def test_a_device_has_an_address_of_its_own_with_all_its_rounds(new_coordinator, clock, open_page, pictures):
    server = new_coordinator()
    local = LocalCoordinator(server.data, clock)
    with closing(local.store):
        local.create("lab", rounds=400)
        (device, _) = local.enrol("pi", "other", federation="lab")
        with local.store.writing() as db:
            find(db, "lab").status = "paused"
            for number in range(1, 301):
                judged = Evaluation(num_examples=9, loss=1 / number, accuracy=1 - 1 / number)
                values = {"kind": "evaluate", "round": number, "status": "done"}
                values["report"] = Receipt(personal=judged).model_dump(mode="json")
                row = {"id": f"{number:032x}", "federation_id": 1, "device_id": device.id, "position": 0, **values}
                times = {"created_at": 100.0 + number, "deadline_at": 1000.0 + number}
                db.add(Assignment(**row, **times, model_version=0, full=False))
    server.start()
    page, expect = open_page(server.url), playwright.expect
    page.get_by_role("link", name="pi", exact=True).click()
    view = page.get_by_role("region", name="pi", exact=True)
    expect(view).to_be_visible()
    expect(page.locator("#devices-place")).to_be_hidden()
    expect(page).to_have_url(f"{server.url}/?federation=lab&device={device.id}")
    expect(page).to_have_title("pi in lab – Sparrow")
    rows = page.locator("#device-work tbody tr")
    expect(rows).to_have_count(200)
    page.get_by_role("button", name="Show all 300").click()
    expect(rows).to_have_count(300)
    page.get_by_role("img", name=re.compile("^Accuracy of this device")).focus()
    page.keyboard.press("Home")
    expect(view.get_by_role("figure", name="Accuracy of this device").locator(".at")).to_contain_text("Round 1: ")
    for kind, count in (("CSV", 301), ("JSON", 300)):
        with page.expect_download() as saved:
            view.get_by_role("link", name=re.compile(rf"ork \({kind}\)")).click()
        text = Path(saved.value.path()).read_text()
        assert (len(text.splitlines()) if kind == "CSV" else len(json.loads(text)["work"])) == count
    page.screenshot(path=pictures / "device-all.png", full_page=True)
    page.get_by_role("link", name="All devices").click()
    expect(page.locator("#devices-place")).to_be_visible()
    expect(view).to_be_hidden()
    page.go_forward()
    expect(view).to_be_visible()
    page.reload()
    expect(view).to_be_visible()
    page.get_by_role("link", name="All devices").click()
    expect(page.get_by_role("link", name="pi", exact=True)).to_be_visible()
    page.goto(f"{server.url}/?federation=lab&device=unknown")
    expect(page.get_by_role("alert").filter(has_text="this device does not exist")).to_be_visible()
    page.troubles.clear()  # Chromium notes a 404 as an error


def test_the_first_page_lists_all_federations_what_needs_attention_first(new_coordinator, clock, open_page, pictures):
    server = new_coordinator()
    local = LocalCoordinator(server.data, clock)
    with closing(local.store):
        for name in ("well", "broken", "ended"):
            local.create(name, cohort=1, min_devices=1)
            (device,) = local.enrol("pi", federation=name)
            local.rounds.advance()
            if name == "broken":
                device.hand_back(device.ask(), "out-of-memory")
        local.federations.change("ended", ChangeFederation(action="stop"))
    server.start()
    page, expect = open_page(server.url), playwright.expect
    names = page.locator("#federations tbody th a")
    expect(names).to_have_text(["broken", "well", "ended"])
    expect(page.locator("#federations tbody tr").first).to_contain_text("1 device failed")
    assert page.evaluate("document.querySelector('.answers').checkVisibility()") is False
    look_at(page, pictures, "federations")
    page.set_viewport_size(browsers.WIDE)
    names.first.click()
    expect(page.locator("#name")).to_have_text("broken")
    page.get_by_label("Federation", exact=True).select_option("All federations")
    expect(names).to_have_count(3)
    server.http.delete("/v1/federations/ended").raise_for_status()
    expect(names).to_have_count(2)


def test_a_token_for_one_federation_leads_to_it(new_coordinator, open_page):
    server = new_coordinator(COORDINATOR_ADMIN_TOKEN="the-chief-s-secret")
    server.start()
    chief = {"Authorization": "Bearer the-chief-s-secret"}
    for name in ("one", "two"):
        server.http.post("/v1/federations", json={"name": name, "task": "digits"}, headers=chief).raise_for_status()
    made = {"kind": "observer", "federation": "one"}
    token = server.http.post("/v1/tokens", json=made, headers=chief).raise_for_status().json()["secret"]
    own = {"Authorization": f"Bearer {token}"}
    found = server.http.get("/v1/summaries", headers=own).raise_for_status().json()["federations"]
    assert [each["name"] for each in found] == ["one"]
    page = open_page(f"{server.url}/sign-in")
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#name")).to_have_text("one")


def test_devices_are_listed_by_their_tags(new_coordinator, open_page, clock):
    server = new_coordinator()
    local = LocalCoordinator(server.data, clock)
    with closing(local.store):
        local.create("lab", min_devices=9, tags="board=orin,pi5 site=lab")
        orin, pi = local.enrol("a", "b", federation="lab")
        local.devices.change(orin.id, ChangeDevice(tags={"board": "orin", "site": "lab"}))
        local.devices.change(pi.id, ChangeDevice(set_tags={"board": "pi5"}))
    server.start()
    page, expect = open_page(server.url), playwright.expect
    rows = page.locator("#devices tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("board=orin site=lab")
    where = page.get_by_role("textbox", name="Tags")
    where.fill("board!=orin")
    where.press("Enter")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("board=pi5")
    where.fill("board=nano")
    where.press("Enter")
    expect(page.locator("#devices-problem")).to_contain_text("orin, pi5")
    # Chromium notes a 422 as an error.
    page.troubles.clear()
    where.fill("")
    where.press("Enter")
    expect(rows).to_have_count(2)
    page.get_by_role("link", name="b", exact=True).click()
    expect(page.locator("#device-about")).to_contain_text("board=pi5")
