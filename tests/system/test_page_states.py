"""Every state of the page in a real browser: accessible, nothing to scroll sideways, and what one looks for is there.

Pictures of each state go where ``SPARROW_SCREENSHOTS`` says.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from sparrow.coordinator.fleet.federations import find
from sparrow.protocol.messages import ChangeDevice, Conditions

from ..coordinator.fakes import LocalCoordinator
from ..coordinator.grown import grow
from . import browsers
from .browsers import playwright
from .conftest import wait_until

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

browser, open_page = browsers.browser, browsers.open_page
pictures, new_coordinator = browsers.pictures, browsers.new_coordinator

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB"
WIDTHS = (360, 768, 1280, 1920)
HEIGHTS = {360: 740, 768: 1024, 1280: 720, 1920: 1080}
SERIOUS = ("serious", "critical")


@pytest.fixture
def grown(new_coordinator, clock):
    """Starts a coordinator over records that were written before; ``status`` is what they say then."""

    def start(write, *, status="paused", **settings):
        server = new_coordinator(**settings)
        local = LocalCoordinator(server.data, clock)
        write(local)
        with local.store.writing() as db:
            find(db, "lab").status = status
        local.store.close()
        server.start()
        return server

    return start


def devices_and_rounds(devices, rounds, cohort):
    def write(local):
        local.create("lab")
        grow(local.store, devices=devices, rounds=rounds, cohort=cohort, name="lab")

    return write


def failing(local):
    """Three devices, of which one has handed its work back."""
    local.create("lab", cohort=3, min_devices=3, rounds=5)
    one, *_ = local.enrol("broken", "two", "three", federation="lab")
    local.rounds.advance()
    one.hand_back(one.ask(), OOM)


def look_at(page, pictures, state):
    """Check and photograph a state at each width, light and dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
            page.wait_for_timeout(150)  # charts take their new size
            page.screenshot(path=pictures / f"{state}-{width}-{scheme}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{state} scrolls at {width}"
            if scheme == "dark" and width not in (360, 1280):
                continue  # only colours differ
            found = axe.Axe().run(page).response["violations"]
            wrong = {
                each["id"]: [node["html"][:200] for node in each["nodes"]]
                for each in found
                if each["impact"] in SERIOUS
            }
            assert not wrong, f"{state}, {width} px, {scheme}: {json.dumps(wrong, indent=1)}"


def test_no_federation_yet_and_then_one(coordinator, open_page, pictures):
    page, expect = open_page(coordinator.url), playwright.expect
    expect(page.locator("#nothing-title")).to_have_text("No federation yet")
    expect(page.locator("#nothing-commands")).to_contain_text(f"create lab --task digits --server {coordinator.url}")
    assert page.locator("figure").count() == 0 or not page.locator("figure").first.is_visible()
    look_at(page, pictures, "empty")
    coordinator.create("lab")
    expect(page.locator("#name")).to_have_text("lab")


def test_a_wrong_name_leads_to_those_that_there_are(coordinator, open_page, pictures):
    coordinator.create("lab")
    page, expect = open_page(f"{coordinator.url}/?federation=lap"), playwright.expect
    expect(page.locator("#nothing-title")).to_have_text("There is no federation lap")
    look_at(page, pictures, "wrong-name")
    page.get_by_role("link", name="lab").click()
    expect(page.locator("#name")).to_have_text("lab")
    page.troubles.clear()  # Chromium notes a 404 as an error


def test_who_waits_for_devices_is_told_how_they_join(coordinator, open_page, pictures):
    coordinator.create("lab", min_devices=2)
    page, expect = open_page(coordinator.url), playwright.expect
    expect(page.locator("#health-lines")).to_contain_text("Begins when 2 more devices have joined")
    command = f"sparrow join --server {coordinator.url} --federation lab"
    expect(page.locator("#join-command")).to_have_text(command)
    for figure in page.locator("#charts figure").all():
        expect(figure).to_contain_text("Not measured yet")
    expect(page.locator("#legend")).to_have_text("No device yet.")
    expect(page.locator("#count")).to_have_text("No device yet.")
    page.get_by_role("button", name="Copy the command to join").click()
    expect(page.locator("#join-copied")).to_have_text("Copied.")
    page.context.grant_permissions(["clipboard-read"])
    assert page.evaluate("navigator.clipboard.readText()") == command
    look_at(page, pictures, "waiting")


@pytest.mark.parametrize("size", [(1280, 720), (360, 740)])
def test_the_first_screen_answers_five_questions_while_a_federation_runs(
    coordinator_and_devices, open_page, pictures, size
):
    coordinator, device = coordinator_and_devices
    for name, rounds in (("alone", 3), ("lab", 1000)):
        settings = {"cohort": 4, "min_devices": 8, "rounds": rounds, "evaluation_interval": 1, "local_epochs": 1}
        coordinator.create(name, **settings, method="local" if name == "alone" else "fedspu")
    fleet = ("--devices", "8", "--budgets", "0.3,1", "--boards", "pi4b", "--processes", "1")
    assert device.fleet(coordinator.url, "alone", *fleet, "--state-dir", str(device.folder / "alone")).wait(60) == 0
    device.fleet(coordinator.url, "lab", *fleet)
    page, expect = open_page(f"{coordinator.url}/?federation=lab"), playwright.expect
    page.set_viewport_size({"width": size[0], "height": size[1]})
    expect(page.locator("#health-value")).to_have_text("Well")
    expect(page.locator("#accuracy-lines")).to_contain_text("worst decile")
    expect(page.locator("#accuracy-lines")).to_contain_text("against training alone (alone)")
    expect(page.locator("#fleet-value")).to_have_text("8 of 8 devices")
    expect(page.locator("#fleet-lines")).to_contain_text("slowest: device-")
    expect(page.locator("#cost-value")).to_contain_text("B")
    expect(page.locator("#cost-lines")).to_contain_text("J")
    expect(page.locator("#time-value")).to_contain_text("Within")
    expect(page.locator("#legend button").first).to_be_visible()
    bottoms = page.evaluate(
        "[...document.querySelectorAll('.answers article, #legend')].map((each) => each.getBoundingClientRect().bottom)"
    )
    assert max(bottoms) <= size[1], "without scrolling"
    page.get_by_role("button", name="worst decile").click()
    listed = coordinator.get("/v1/federations/lab/devices?order=accuracy").json()
    assert len(listed) == 8
    expect(page.locator("#devices tbody tr").first.locator("td").nth(2)).to_contain_text("%")
    page.get_by_label("Compare with").select_option("alone")
    compared = page.get_by_role("figure", name="Accuracy", exact=True)
    expect(compared).to_contain_text("alone: personal mean")
    compared.get_by_text("As a table").click()
    first_round = compared.get_by_role("row").filter(has=page.get_by_role("cell", name="1", exact=True)).locator("td")
    # The own curves stay at rounds that both federations have.
    for column in (1, 4):
        expect(first_round.nth(column)).to_contain_text("%")
    compared.get_by_text("As a table").click()
    page.locator("#devices tbody th a").first.click()
    history = page.locator("#device-view")
    for what in ("Accuracy", "Loss", "Seconds", "Bytes", "Joules"):
        expect(history.get_by_role("figure", name=f"{what} of this device").locator("canvas")).to_be_visible()
    page.get_by_role("link", name="All devices").click()
    if size[0] == 1280:
        look_at(page, pictures, "running")


def test_a_device_that_fails_is_found_with_its_reason(grown, open_page, pictures):
    server = grown(failing, status="running")
    page, expect = open_page(server.url), playwright.expect
    expect(page.locator("#health-value")).to_have_text("Needs attention")
    expect(page.locator("#health-lines")).to_contain_text(f"broken: {OOM}")
    expect(page.locator("#health-lines")).to_contain_text("smaller budget")
    expect(page.locator("#devices tbody tr").first).to_contain_text(OOM)
    look_at(page, pictures, "error")
    page.set_viewport_size({"width": 1280, "height": 720})
    page.get_by_role("link", name="broken", exact=True).click()
    view = page.get_by_role("region", name="broken")
    expect(view.locator("#device-failure")).to_contain_text(OOM)
    expect(view.locator("#device-work tbody tr")).to_contain_text(f"returned: {OOM}")
    view.get_by_label("Show").scroll_into_view_if_needed()
    expect(view.locator("#device-events li.failed")).to_contain_text(OOM)
    look_at(page, pictures, "device")
    page.go_back()
    page.locator("#strip").click(position={"x": 3, "y": 3})
    expect(page.get_by_role("region", name="broken")).to_be_visible()


def test_ten_minutes_after_all_devices_died_none_is_ready(grown, open_page):
    def died(local):
        local.create("lab", cohort=2, min_devices=4, rounds=9)
        for device in local.enrol("one", "two", "three", federation="lab"):
            local.devices.change(device.id, ChangeDevice(conditions=Conditions()))

    server = grown(died, status="waiting")  # whose clock is years ahead of the one by which these were heard of
    page, expect = open_page(server.url), playwright.expect
    expect(page.locator("#legend")).to_have_text("3 offline")
    expect(page.locator("#health-lines")).to_contain_text("Offline devices: 3")
    assert [each.split()[0] for each in page.locator("#devices tbody td[data-label=Doing]").all_text_contents()] == [
        "offline"
    ] * 3
    command = [sys.executable, "-m", "sparrow", "device", "list", "lab", "--server", server.url]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (listed.count("offline"), listed.count("ready")) == (3, 0)


def test_ten_thousand_devices(grown, open_page, pictures):
    server = grown(devices_and_rounds(10_000, 1000, 200))
    page, expect = open_page(server.url), playwright.expect
    expect(page.locator("#strip")).to_have_attribute("aria-label", re.compile("offline"))
    look_at(page, pictures, "large")


def test_one_that_has_finished(grown, open_page, pictures):
    server = grown(devices_and_rounds(30, 40, 10), status="finished")
    page, expect = open_page(server.url), playwright.expect
    expect(page.locator("#health-value")).to_have_text("Finished")
    expect(page.locator("#legend")).to_contain_text("done")
    look_at(page, pictures, "finished")


def test_the_form_of_who_is_signed_out(new_coordinator, open_page, pictures):
    server = new_coordinator(COORDINATOR_OBSERVER_TOKEN="an-observer-s-secret")
    server.start()
    page = open_page(server.url)
    playwright.expect(page.get_by_label("Token")).to_be_focused()
    look_at(page, pictures, "signed-out")


def test_what_cannot_be_undone_is_not_under_the_enter_key(grown, open_page):
    server = grown(devices_and_rounds(3, 2, 2), status="finished")
    page, expect = open_page(server.url), playwright.expect
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert server.get("/v1/federations").json()[0]["name"] == "lab"


def test_a_federation_is_made_on_the_page(coordinator, open_page, pictures):
    coordinator.create("taken")
    page, expect = open_page(coordinator.url), playwright.expect
    page.get_by_role("button", name="New federation").click()
    dialog = page.get_by_role("dialog", name="New federation")
    expect(dialog.get_by_label("Name")).to_be_focused()
    page.keyboard.type("taken")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_contain_text("taken")
    look_at(page, pictures, "create")
    page.troubles.clear()  # Chromium notes a 409 as an error
    dialog.get_by_label("Name").fill("lab")
    dialog.get_by_label("Method").select_option("fedavg")
    dialog.get_by_label("Rounds").fill("7")
    dialog.get_by_label("Run by").fill("Clinic of Ulm ")
    dialog.get_by_label("Purpose").fill("To read digits on forms")
    expect(dialog.get_by_label("Purpose")).to_have_accessible_description(re.compile("before they take part"))
    dialog.get_by_role("button", name="Create").click()
    expect(page.locator("#name")).to_have_text("lab")
    info = coordinator.info("lab")
    assert info["settings"]["operator"] == "Clinic of Ulm"
    assert info["settings"]["purpose"] == "To read digits on forms"
    assert (info["method"], info["rounds"], info["settings"]["min_devices"]) == ("fedavg", 7, 2)
    assert not info["settings"]["secure"]


def test_the_page_creates_a_secure_federation_and_describes_it(coordinator, open_page, pictures):
    coordinator.create("other")
    page, expect = open_page(coordinator.url), playwright.expect
    page.get_by_role("button", name="New federation").click()
    dialog = page.get_by_role("dialog", name="New federation")
    dialog.get_by_label("Name").fill("sums")
    dialog.get_by_label("Method").select_option("pfedgate")
    dialog.get_by_label("Secure sums").check()
    dialog.get_by_label("Colluding devices").fill("3")
    dialog.get_by_label("Colluding devices").blur()
    expect(dialog.get_by_label("Method")).to_have_value("fedspu")  # of pfedgate there are no secure sums
    expect(dialog.get_by_label("Devices to begin with")).to_have_value("5")
    expect(dialog.get_by_label("Devices a round")).to_have_value("11")
    dialog.get_by_label("Method").select_option("fedavg")
    dialog.get_by_role("button", name="Create").click()
    expect(page.locator("#name")).to_have_text("sums")
    settings = coordinator.info("sums")["settings"]
    assert (settings["secure"], settings["secure_colluders"], settings["min_devices"]) == (True, 3, 5)
    assert settings["cohort"] == 11  # ten cannot tolerate three of them to drop out
    expect(page.locator("#state")).to_contain_text("secure sums of at least 5 devices (c = 3 may collude)")
    expect(page.locator("#join-command")).to_have_text(re.compile(r"--federation sums --require-secure 3$"))
    page.screenshot(path=pictures / "secure.png")


def test_secure_rounds_wait_for_devices_and_missing_sums_are_shown(coordinator_and_devices, open_page, pictures):
    coordinator, device = coordinator_and_devices
    settings = {"method": "fedavg", "secure": True, "rounds": 30, "evaluation_interval": 0, "local_epochs": 1}
    coordinator.create("f", **settings)
    page, expect = open_page(coordinator.url), playwright.expect
    data = ("--data", "index=0,of=4", "--engine", "onnx")
    started = [device(coordinator.url, "f", f"d{number}", *data) for number in range(2)]
    expect(page.locator("#fleet-value")).to_have_text("2 of 2 devices")
    expect(page.locator("#health-lines")).to_contain_text("Begins when 1 more device has joined")
    # This one takes part in no round with fewer than two other honest devices besides two colluders.
    careful = device(coordinator.url, "f", "careful", *data, "--require-secure", "2")
    expect(page.locator("#health-value")).to_have_text("Needs attention")
    expect(page.locator("#health-lines")).to_contain_text("careful")
    expect(page.locator("#state")).to_contain_text("waiting for the 3 devices of a secure sum")
    page.locator("#all-notices-count").click()
    expect(page.locator("#notices")).to_contain_text("no secure sum")
    look_at(page, pictures, "no-sum")
    assert coordinator.info("f")["round"] < 5
    careful.signal(signal.SIGTERM)
    started.append(device(coordinator.url, "f", "d2", *data))
    wait_until(lambda: coordinator.info("f")["round"] >= 5, "rounds with a sum", timeout=60, interval=0.1)
    expect(page.locator("#notices")).not_to_contain_text("no secure sum")


def test_what_is_pressed_is_large_enough(grown, open_page):
    """24 px each way (WCAG 2.5.8)."""
    server = grown(devices_and_rounds(12, 5, 4))
    page, expect = open_page(server.url), playwright.expect
    expect(page.locator("#devices tbody tr")).to_have_count(12)
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        for summary in page.locator("details:not([open]) > summary").all():
            if summary.is_visible():
                summary.click()
        assert page.evaluate(SMALL_TARGETS) == []


@pytest.mark.parametrize(
    ("role", "opener", "dialog"),
    [("button", "New federation", "create"), ("button", "Stop", "ask"), ("link", "device-00003", "device-view")],
)
def test_dialogs_and_the_view_of_a_device_are_accessible(grown, open_page, pictures, role, opener, dialog):
    """Those of invitations and tokens are in test_page_tokens.py."""
    server = grown(devices_and_rounds(12, 5, 4))
    page, expect = open_page(server.url), playwright.expect
    page.get_by_role(role, name=opener, exact=True).click()
    expect(page.locator(f"#{dialog}")).to_be_visible()
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.wait_for_timeout(150)  # charts take their new size
            page.screenshot(path=pictures / f"dialog-{dialog}-{width}-{scheme}.png")
            found = axe.Axe().run(page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
        assert page.evaluate(SMALL_TARGETS) == []


SMALL_TARGETS = """() => [...document.querySelectorAll("a, button, input, select, textarea, summary")]
  .filter((each) => each.checkVisibility({ visibilityProperty: true }) && !each.matches(".skip"))
  .map((each) => [each, each.getBoundingClientRect()])
  .filter(([, { width, height }]) => width < 24 || height < 24)
  .map(([each, { width, height }]) => `${each.outerHTML.slice(0, 80)}: ${width} x ${height}`)"""


def test_charts_have_equal_heights(grown, open_page):
    server = grown(devices_and_rounds(12, 5, 4))
    page, expect = open_page(server.url), playwright.expect
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(page.get_by_role("figure", name="Loss").locator("canvas")).to_be_visible()
    heights = page.evaluate("[...document.querySelectorAll('#charts figure')].map((each) => each.offsetHeight)")
    assert len(heights) == 6
    assert len(set(heights)) == 1


@pytest.mark.parametrize("width", [390, 1440])
def test_a_live_federation_moves_nothing_on_the_page(coordinator_and_devices, open_page, width):
    """From a federation that waits, over its first rounds and evaluations, to its end. Chromium's own measure."""
    coordinator, device = coordinator_and_devices
    settings = {"cohort": 4, "min_devices": 4, "rounds": 4, "evaluation_interval": 2, "global_evaluation_interval": 2}
    coordinator.create("lab", **settings, local_epochs=1)
    page, expect = open_page("about:blank", viewport={"width": width, "height": 900}), playwright.expect
    page.add_init_script(SHIFTS)
    page.goto(coordinator.url)
    expect(page.locator("#count")).to_have_text("No device yet.")
    device.fleet(coordinator.url, "lab", "--devices", "8", "--boards", "pi4b", "--processes", "1")
    expect(page.locator("#status")).to_have_text("finished", timeout=90_000)
    expect(page.locator("#tiles")).to_contain_text("4 of 4")
    shifts = page.evaluate("shifts")
    assert sum(shift["value"] for shift in shifts) < 0.02, json.dumps(shifts, indent=1)


SHIFTS = """
  window.shifts = [];
  const placeOf = ({ x, y, width, height }) => [x, y, width, height].map(Math.round).join();
  const nameOf = (node) => (node?.closest ? node : node?.parentElement)?.closest("[id]")?.id ?? "gone";
  new PerformanceObserver((list) => {
    for (const { value, sources } of list.getEntries()) {
      const of = sources.map(({ node, previousRect, currentRect }) =>
        `${nameOf(node)}: ${placeOf(previousRect)} to ${placeOf(currentRect)}`);
      shifts.push({ value, of });
    }
  }).observe({ type: "layout-shift", buffered: true });
"""


def test_an_administrator_goes_back_to_an_earlier_model(coordinator_and_devices, open_page):
    coordinator, device = coordinator_and_devices
    coordinator.create("lab", cohort=2, min_devices=2, rounds=3, local_epochs=1)
    assert device.fleet(coordinator.url, "lab", "--devices", "2", "--processes", "1").wait(60) == 0
    coordinator.http.patch("/v1/federations/lab", json={"action": "reopen", "rounds": 9}).raise_for_status()
    page, expect = open_page(coordinator.url), playwright.expect
    page.get_by_text("Global models, and going back to one").click()
    page.get_by_role("button", name="Go back to model 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Go back").click()
    expect(page.locator("#state")).to_contain_text("goes back to model 1 when this round has closed")
    assert coordinator.info("lab")["rollback_version"] == 1


def test_columns_sort_and_say_so(grown, open_page):
    server = grown(devices_and_rounds(12, 2, 2))
    page, expect = open_page(server.url), playwright.expect
    names = page.locator("#devices tbody th")
    head = page.get_by_role("columnheader", name="Budget")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(names.first).to_have_text("device-00000")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(names.first).to_have_text("device-00004")
    page.get_by_role("button", name="Last seen").click()
    expect(names.first).to_have_text("device-00011")
