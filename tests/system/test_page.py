"""The page in a real browser: a running coordinator, a running fleet, and what is shown beside the records.

Screenshots are kept in the folder that ``SPARROW_SCREENSHOTS`` names, else in pytest's own. Skipped, and said so,
where there is no Chromium.
"""

from __future__ import annotations

import io
import re
import time
from urllib.parse import unquote

import pytest
import segno

from sparrow.coordinator.fleet.federations import find
from sparrow.protocol.addresses import in_network
from sparrow.protocol.messages import RoundRecord

from ..coordinator.fakes import LocalCoordinator
from ..coordinator.grown import grow
from . import browsers
from .browsers import NARROW, playwright
from .conftest import wait_until

browser, open_page = browsers.browser, browsers.open_page
pictures, new_coordinator = browsers.pictures, browsers.new_coordinator

AXES = re.compile(r"[-+]?[\d.,]+")


def train(coordinator, device, rounds):
    """Begin a federation of four devices; it is paused when ``rounds`` of its eight have closed."""
    coordinator.create(
        "lab", cohort=4, min_devices=4, rounds=8, evaluation_interval=1, global_evaluation_interval=1, local_epochs=1
    )
    fleet = ("--devices", "4", "--budgets", "0.3,0.6,0.9,1", "--boards", "pi4b", "--processes", "1")
    device.fleet(coordinator.url, "lab", *fleet)
    wait_until(lambda: coordinator.info("lab")["round"] >= rounds, f"{rounds} rounds", timeout=60, interval=0.02)
    if rounds < 8:
        change(coordinator, action="pause")
    return coordinator


def change(coordinator, **what):
    coordinator.http.patch("/v1/federations/lab", json=what).raise_for_status()


@pytest.fixture(scope="module")
def trained(machine):
    """A coordinator whose federation has ended; a test may have reopened it since."""
    return train(*machine(), rounds=8)


def tiles(page):
    terms = page.locator("#tiles dt").all_text_contents()
    return dict(zip(terms, texts(page.locator("#tiles dd")), strict=True))


def texts(found):
    """What is written in each, with common spaces between numbers and units."""
    return [text.replace("\u00a0", " ") for text in found.all_text_contents()]


def records_of(coordinator, name="lab"):
    return [RoundRecord.model_validate(each) for each in coordinator.rounds(name)]


def test_what_is_shown_equals_the_records_and_follows_them_live(coordinator_and_devices, open_page, pictures):
    trained = train(*coordinator_and_devices, rounds=3)
    page = open_page(trained.url)
    expect = playwright.expect
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#name")).to_have_text("lab")
    expect(page.locator("#status")).to_have_text("paused")
    assert int(tiles(page)["Round"].split()[0]) < 8
    change(trained, action="resume")
    wait_until(lambda: trained.info("lab")["status"] == "finished", "the last round", timeout=60, interval=0.1)
    expect(page.locator("#status")).to_have_text("finished")
    expect(page.locator("#tiles")).to_contain_text("8 of 8")

    settled = None
    while (records := records_of(trained)) != settled:  # evaluations and costs of the last round
        settled = records
        time.sleep(1)
    shown = tiles(page)
    assert shown["Personal accuracy"].startswith(f"{100 * records[-1].accuracy_personal:.1f} %")
    assert f"bottom decile {100 * records[-1].accuracy_personal_decile:.1f} %" in shown["Personal accuracy"]
    assert shown["Global accuracy"].startswith(f"{100 * records[-1].accuracy_global:.1f} %")
    sent = sum(each.bytes_up + each.bytes_down for each in records)
    assert float(shown["Training, bytes"].split()[0]) == pytest.approx(sent / 10 ** (6 if sent > 1e6 else 3), rel=0.01)
    spent = sum(p.joules_estimated for each in records for p in (each.download, each.train, each.upload))
    assert float(AXES.match(shown["Energy, estimated"])[0]) == pytest.approx(spent, rel=0.01)

    accuracy = page.get_by_role("figure", name="Accuracy")
    expect(accuracy.locator("canvas")).to_be_visible()
    accuracy.get_by_text("As a table").click()
    drawn = accuracy.locator("details tbody tr")
    expect(drawn).to_have_count(len(records))  # filled once the browser says that it is open
    rows = [texts(row.locator("td")) for row in drawn.all()]
    percent = [f"{100 * value:.1f} %" for each in records for value in (each.accuracy_personal, each.accuracy_global)]
    assert [row[0] for row in rows] == [str(each.round) for each in records]
    assert [text for row in rows for text in (row[1], row[3])] == percent

    names = page.locator("#devices tbody th").all_text_contents()
    listed = trained.get("/v1/federations/lab/devices").json()
    assert names == [each["name"] for each in listed]
    budgets = [float(text) for text in page.locator("#devices tbody td.budget").all_text_contents()]
    assert budgets == [each["budget"] for each in listed]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(300)  # charts are drawn anew
        page.screenshot(path=pictures / f"{scheme}.png", full_page=True)
    page.set_viewport_size(NARROW)
    page.wait_for_timeout(300)
    width = page.evaluate("document.documentElement.scrollWidth")
    page.screenshot(path=pictures / "narrow.png", full_page=True)
    assert width <= NARROW["width"], "a phone need not scroll sideways"


def test_keys_and_screen_readers_reach_everything(trained, open_page):
    page = open_page(trained.url)
    plot = page.get_by_role("img", name=re.compile("^Accuracy. Newest: personal mean"))
    plot.focus()
    page.keyboard.press("Home")
    said = page.get_by_role("figure", name="Accuracy").locator(".at")
    playwright.expect(said).to_have_text(re.compile(r"^Round 1: personal mean [\d.]+\s%, bottom decile"))
    page.keyboard.press("ArrowRight")
    playwright.expect(said).to_have_text(re.compile("^Round 2: "))
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.textContent"
            )
        )
    assert {"federation", "compare", "search", "doing", "Accuracy", "rounds", "cohort"} <= reached | {"compare"}
    assert reached & {"Reopen", "Pause"}
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, a')].filter((each) => each.checkVisibility()"
        " && !(each.labels?.length || each.ariaLabel || each.textContent.trim())).length"
    )
    assert unnamed == 0
    assert page.locator("h1").count() == 1


def test_an_administrator_changes_things(trained, open_page, tmp_path):
    page, expect = open_page(trained.url), playwright.expect
    page.get_by_label("Rounds in all").fill("100")
    page.get_by_role("button", name="Reopen").click()
    expect(page.locator("#status")).to_have_text("running")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#status")).to_have_text("paused")
    assert trained.info("lab")["status"] == "paused"
    expect(page.locator("#time-lines")).to_contain_text("paused")

    page.get_by_label("Rounds in all").fill("90")
    page.get_by_label("Cohort, devices").fill("3")
    page.get_by_label("Deadline, s").fill("120.5")
    page.locator("#settings").get_by_label("Run by").fill("Clinic of Ulm")
    page.locator("#settings").get_by_label("Purpose").fill("To read digits on forms")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#saved")).to_have_text("Saved.")
    settings = trained.info("lab")["settings"]
    assert (settings["operator"], settings["purpose"]) == ("Clinic of Ulm", "To read digits on forms")
    assert (settings["rounds"], settings["cohort"], settings["deadline_seconds"]) == (90, 3, 120.5)

    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#status")).not_to_have_text("paused")
    first = page.locator("#devices tbody th").first.text_content()
    page.get_by_role("button", name=f"Revoke {first}").click()
    page.get_by_role("button", name="Cancel").click()
    assert trained.get("/v1/federations/lab/devices").json()[0]["status"] != "revoked"
    page.get_by_role("button", name=f"Revoke {first}").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.locator("#devices tbody tr").first).to_contain_text("revoked")
    assert trained.get("/v1/federations/lab/devices").json()[0]["status"] == "revoked"

    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("stopped")
    expect(page.locator("#state")).to_contain_text("stopped by an operator")
    page.get_by_label("Rounds in all").fill("200")
    page.get_by_role("button", name="Reopen").click()
    expect(page.locator("#status")).to_have_text("running")
    assert trained.info("lab")["rounds"] == 200

    for name, path in (
        ("Global model (safetensors)", "/model"),
        ("Global model (ONNX)", "/model.onnx"),
        ("Records of all rounds (CSV)", "/rounds?format=csv"),
        ("Records of all rounds (JSON)", "/rounds"),
    ):
        with page.expect_download() as download:
            page.get_by_role("link", name=name).click()
        download.value.save_as(tmp_path / "got")
        begins = {
            "/model": b"",
            "/model.onnx": b"\x08",
            "/rounds?format=csv": b"round,status",
            "/rounds": b'[{"round":1',
        }
        assert (tmp_path / "got").read_bytes().startswith(begins[path])
        assert (tmp_path / "got").stat().st_size > 1000


def test_an_administrator_deletes_a_federation(coordinator, open_page):
    for name in ("lab", "night"):
        coordinator.create(name, rounds=1)
    page = open_page(f"{coordinator.url}/?federation=night")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    playwright.expect(page.locator("#name")).to_have_text("lab")
    assert [each["name"] for each in coordinator.get("/v1/federations").json()] == ["lab"]


def test_a_change_that_cannot_be_made_is_said(coordinator, open_page):
    coordinator.create("lab", rounds=1)
    page = open_page(coordinator.url)
    page.get_by_role("button", name="Pause").wait_for()
    coordinator.http.patch("/v1/federations/lab", json={"action": "stop"})
    with page.expect_response("**/v1/federations/lab"):
        page.evaluate("document.querySelector('#actions button').click()")
    playwright.expect(page.get_by_role("alert")).to_contain_text("lab is stopped")
    page.troubles.clear()  # Chromium notes a 409 as an error


def test_a_user_signs_in_with_a_token_and_only_an_administrator_sees_the_actions(new_coordinator, open_page):
    secrets = {"ADMIN": "the-chief-s-secret", "OBSERVER": "an-observer-s-secret", "ENROLMENT": "the-enrolment-token"}
    server = new_coordinator(**{f"COORDINATOR_{kind}_TOKEN": secret for kind, secret in secrets.items()})
    server.start()
    create = {"name": "lab", "task": "digits"}
    headers = {"Authorization": "Bearer the-chief-s-secret"}
    server.http.post("/v1/federations", json=create, headers=headers).raise_for_status()
    page, expect = open_page(server.url), playwright.expect
    sign_in(page, "the-enrolment-token")
    expect(page.get_by_role("status")).to_contain_text("enrolment token")
    sign_in(page, "an-observer-s-secret")
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#name")).to_have_text("lab")
    for part in ("#admin", "#actions", "#devices th.actions"):
        expect(page.locator(part)).to_be_hidden()
    chief = open_page(server.url)
    sign_in(chief, "the-chief-s-secret")
    chief.get_by_role("button", name="Pause").click()
    expect(chief.locator("#status")).to_have_text("paused")
    expect(page.locator("#status")).to_have_text("paused")
    page.get_by_role("link", name="Sign in").click()
    sign_in(page, "the-chief-s-secret")
    page.get_by_role("button", name="Resume").click()
    expect(chief.locator("#status")).to_have_text("waiting")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in?note=out")
    expect(page.get_by_role("status")).to_have_text("You are signed out.")
    page.goto(server.url)
    expect(page.get_by_label("Token")).to_be_focused()
    page.troubles.clear()  # Chromium notes a 401 as an error


def sign_in(page, token):
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    page.wait_for_load_state()


def drawn_for(link):
    """The QR code of this link as an SVG document."""
    found = io.BytesIO()
    segno.make_qr(link).save(found, kind="svg", xmldecl=False, omitsize=True, light="#fff", nl=False)
    return found.getvalue().decode()


def test_a_phone_is_invited_by_a_link_that_has_the_enrolment_token(new_coordinator, open_page, pictures):
    observer, secret = "an-observer-s-secret", "an-enrolment-token+/of-this-lab"
    server = new_coordinator(COORDINATOR_OBSERVER_TOKEN=observer, COORDINATOR_ENROLMENT_TOKEN=secret)
    server.start()
    server.create("lab", method="fedavg")
    address = f"http://pi.test:{server.port}"  # which is no address of its own to a phone, or to the browser
    page = open_page(f"{address}/?federation=lab")
    sign_in(page, observer)
    expect, dialog = playwright.expect, page.get_by_role("dialog", name="Invite a phone")
    page.get_by_role("button", name="Invite a phone").press("Enter")
    field, link = dialog.get_by_label("Enrolment token"), dialog.get_by_label("Link")
    expect(field).to_be_focused()
    expect(link).to_be_hidden()
    page.keyboard.type("another-token")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("not valid for lab")
    expect(link).to_be_hidden()

    field.fill(secret)
    page.keyboard.press("Tab")
    expect(dialog.get_by_role("button", name="Make the link")).to_be_focused()
    page.keyboard.press("Enter")
    text = f"{address}/join/lab#token=an-enrolment-token%2B%2Fof-this-lab"
    expect(link).to_have_value(text)
    expect(link).to_be_focused()
    assert page.evaluate("getSelection().toString()") == text
    expect(dialog.get_by_role("alert")).to_be_hidden()
    code = dialog.get_by_role("img", name="QR code of the link")
    assert unquote(code.get_attribute("src")) == f"data:image/svg+xml,{drawn_for(text)}"
    assert code.evaluate("image => image.decode().then(() => image.naturalWidth > 0)")
    expect(dialog.get_by_role("list")).to_contain_text("need HTTPS: give the coordinator a certificate")
    expect(dialog.get_by_role("list")).not_to_contain_text("localhost")
    dialog.get_by_role("button", name="Copy", exact=True).click()  # over plain http
    expect(dialog.locator("#invitation-copied")).to_have_text("Copied.")
    page.screenshot(path=pictures / "invitation.png")
    page.set_viewport_size(NARROW)
    assert page.evaluate("document.querySelector('dialog[open]').scrollWidth") <= NARROW["width"]
    page.screenshot(path=pictures / "invitation-narrow.png")

    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Invite a phone")).to_be_focused()
    assert "an-enrolment-token" not in page.content()
    values = page.locator("#invitation input, #invitation textarea").evaluate_all("all => all.map(one => one.value)")
    assert "an-enrolment-token" not in "".join(values)
    log = server.log.read_text()
    assert "POST /v1/federations/lab/join-link" in log
    assert "an-enrolment-token" not in log
    page.troubles.clear()  # Chromium notes a 403 as an error


def test_a_page_of_this_machine_invites_phones_to_its_address_in_the_network(coordinator, open_page):
    coordinator.create("lab", method="fedavg")
    coordinator.create("alone", method="ditto")
    page, expect = open_page(f"{coordinator.url}/?federation=lab"), playwright.expect
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Invite a phone").click()
    dialog = page.get_by_role("dialog", name="Invite a phone")
    expect(dialog.get_by_label("Enrolment token")).to_be_hidden()
    if in_network() is None:
        expect(dialog.get_by_role("alert")).to_contain_text("this machine is not connected to a network")
        page.troubles.clear()  # Chromium notes a 422 as an error
    else:
        text = coordinator.url.replace("127.0.0.1", in_network()) + "/join/lab"
        expect(dialog.get_by_label("Link")).to_have_value(text)
        expect(dialog.get_by_role("list")).to_contain_text(f"The link has {in_network()}, this machine's address")
        dialog.get_by_role("button", name="Copy", exact=True).click()
        expect(dialog.get_by_role("status")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == text
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    other = open_page(f"{coordinator.url}/?federation=alone")
    expect(other.locator("#name")).to_have_text("alone")
    expect(other.get_by_role("button", name="Invite a phone")).to_be_hidden()


def test_a_user_with_an_invalid_token_gets_a_message(new_coordinator, open_page):
    server = new_coordinator(
        COORDINATOR_ADMIN_TOKEN="the-chief-s-secret", COORDINATOR_OBSERVER_TOKEN="an-observer-s-secret"
    )
    server.start()
    create = {"name": "lab", "task": "digits"}
    server.http.post(
        "/v1/federations", json=create, headers={"Authorization": "Bearer the-chief-s-secret"}
    ).raise_for_status()
    page, expect = open_page(server.url), playwright.expect
    sign_in(page, "an-observer-s-secret")
    expect(page.locator("#connection")).to_have_text("live")
    server.kill()
    server.settings["COORDINATOR_OBSERVER_TOKEN"] = "another-observer-s-secret"
    server.start()
    expect(page.locator("#connection")).to_have_text("signed out: sign in again")
    expect(page.get_by_role("alert")).to_contain_text("observer token")
    page.get_by_role("link", name="Sign in").click()
    sign_in(page, "another-observer-s-secret")
    expect(page.locator("#connection")).to_have_text("live")
    page.troubles.clear()  # Chromium notes a refused connection, and a 401, as errors


def test_the_way_to_the_actions_leads_to_the_federation_that_is_shown(new_coordinator, open_page):
    server = new_coordinator(COORDINATOR_ADMIN_TOKEN="the-chief-s-secret")
    server.start()
    for name in ("old", "new"):
        body, headers = {"name": name, "task": "digits"}, {"Authorization": "Bearer the-chief-s-secret"}
        server.http.post("/v1/federations", json=body, headers=headers).raise_for_status()
    page = open_page(f"{server.url}/?federation=old")
    page.get_by_role("link", name="Sign in").click()
    sign_in(page, "the-chief-s-secret")
    page.get_by_role("button", name="Pause").wait_for()
    playwright.expect(page.locator("#name")).to_have_text("old")
    assert page.get_by_label("Federation", exact=True).input_value() == "old"


def test_a_page_that_is_taken_up_again_is_as_live_as_before(coordinator, open_page):
    coordinator.create("lab")
    page, expect = open_page(coordinator.url), playwright.expect
    expect(page.locator("#status")).to_have_text("waiting")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', {persisted: true}))")
    change(coordinator, action="pause")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    expect(page.locator("#status")).to_have_text("paused")


def test_the_smallest_phone_need_not_scroll_sideways_whatever_the_name(coordinator, open_page):
    name = "n" * 64
    coordinator.create(name)
    page = open_page(coordinator.url, viewport={"width": 320, "height": 640})
    playwright.expect(page.locator("#name")).to_have_text(name)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_two_administrators_do_not_undo_each_other(coordinator, open_page):
    coordinator.create("lab", rounds=10, cohort=4)
    page, expect = open_page(coordinator.url), playwright.expect
    page.get_by_label("Cohort, devices").fill("5")
    change(coordinator, rounds=20)
    expect(page.get_by_label("Rounds in all")).to_have_value("20")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#saved")).to_have_text("Saved.")
    settings = coordinator.info("lab")["settings"]
    assert (settings["rounds"], settings["cohort"]) == (20, 5)
    pause = page.get_by_role("button", name="Pause")
    pause.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Resume")).to_be_focused()


def test_devices_follow_and_what_is_the_same_is_not_read_out_again(coordinator, open_page):
    coordinator.create("lab", min_devices=5)
    page, expect = open_page(coordinator.url), playwright.expect
    expect(page.locator("#count")).to_have_text("No device yet.")
    page.evaluate(
        "window.read = []; for (const id of ['state', 'connection', 'count', 'error']) "
        "new MutationObserver(() => read.push(id)).observe(document.getElementById(id), {childList: true})"
    )
    for index, count in enumerate(("1 to 1 of 1 device", "1 to 2 of 2 devices")):
        body = {"name": f"pi-{index}", "enrolment_key": "k" * 32}
        coordinator.http.post("/v1/federations/lab/devices", json=body).raise_for_status()
        expect(page.locator("#tiles")).to_contain_text(f"Devices{index + 1}")
        expect(page.locator("#count")).to_have_text(count)  # though another look at them was a moment ago
    assert page.evaluate("read") == ["count", "count"]


def test_what_devices_say_of_themselves_is_shown_as_text(coordinator, open_page):
    coordinator.create("lab")
    board = "<img src=x onerror=document.title='taken'>"
    body = {"name": "sly", "enrolment_key": "k" * 32, "profile": {"board": board}}
    coordinator.http.post("/v1/federations/lab/devices", json=body).raise_for_status()
    page = open_page(coordinator.url)
    playwright.expect(page.locator("#devices tbody td").first).to_have_text(board)
    assert "lab" in page.title()


def test_the_page_reports_a_lost_coordinator_and_recovers(coordinator, open_page):
    coordinator.create("lab")
    page, expect = open_page(coordinator.url), playwright.expect
    expect(page.locator("#connection")).to_have_text("live")
    coordinator.kill()
    expect(page.locator("#connection")).to_have_text("connection lost, trying again")
    coordinator.start()
    expect(page.locator("#connection")).to_have_text("live")
    page.troubles.clear()  # Chromium notes a refused connection as an error


def test_a_fleet_of_ten_thousand_and_a_thousand_rounds(new_coordinator, open_page, clock, pictures):
    server = new_coordinator()
    large = LocalCoordinator(server.data, clock)
    large.create("large")
    grow(large.store, devices=10_000, rounds=1000, cohort=200, name="large")
    with large.store.writing() as db:  # nobody moves it on while it is looked at
        find(db, "large").status = "paused"
    large.store.close()
    server.start()
    page, expect = open_page(server.url), playwright.expect
    expect(page.locator("#count")).to_have_text("1 to 50 of 10,000 devices")
    expect(page.get_by_role("figure", name="Accuracy").locator("canvas")).to_be_visible()
    own = [request for request in page.requests if not request.url.endswith(("uPlot.js", "uPlot.css"))]
    assert len(own) <= 14, [request.url for request in own]
    stream = server.http.stream("GET", "/v1/federations/large/events")
    with stream as events:
        first = next(line for line in events.iter_lines() if line.startswith("data"))
    answered = [request for request in own if not request.url.endswith("/events")]
    total = len(first) + sum(len(request.response().body()) for request in answered)
    assert total < 600_000

    page.get_by_role("button", name="Next").click()
    expect(page.locator("#count")).to_have_text("51 to 100 of 10,000 devices")
    page.get_by_label("Name or board").fill("09999")
    expect(page.locator("#count")).to_have_text("1 to 1 of 1 device")
    expect(page.locator("#devices tbody th")).to_have_text("device-09999")
    page.screenshot(path=pictures / "large.png", full_page=True)
    page.close()

    with server.http.stream("GET", "/v1/federations/large/events") as events:
        lines = (line for line in events.iter_lines() if line.startswith("data"))
        next(lines)
        server.http.patch("/v1/federations/large", json={"action": "resume"}).raise_for_status()
        update = next(lines)
    assert '"status":"running"' in update
    assert len(update) < 50_000
