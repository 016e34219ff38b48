"""Tokens, invitations and removed devices on the page, in a real browser."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from edge_sdk.publish import PublishOptions, publish
from edge_sdk.publishing.signing import Publisher
from sparrow.transport import httpx

from . import browsers
from .browsers import NARROW, playwright
from .test_page import drawn_for, sign_in

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

browser, open_page = browsers.browser, browsers.open_page
pictures, new_coordinator = browsers.pictures, browsers.new_coordinator

ADMIN, OBSERVER = "the-chief-s-secret", "an-observer-s-secret"
SETTINGS = {
    "COORDINATOR_ADMIN_TOKEN": ADMIN,
    "COORDINATOR_OBSERVER_TOKEN": OBSERVER,
    "COORDINATOR_ENROLMENT_TOKEN": "the-enrolment-token",
}
expect = playwright.expect


@pytest.fixture
def server(new_coordinator):
    """A coordinator whose calls need tokens, with the federation ``lab``; its client is an administrator's."""
    made = new_coordinator(**SETTINGS)
    made.start()
    made.http.headers["Authorization"] = f"Bearer {ADMIN}"
    made.create("lab", method="fedavg")
    return made


def enrol(server, name, token):
    body = {"name": name, "enrolment_key": name.ljust(32, "k")}
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{server.url}/v1/federations/lab/devices", json=body, headers=headers)


def signed_in(server, open_page, token=ADMIN, host="127.0.0.1"):
    page = open_page(f"http://{host}:{server.port}/?federation=lab")
    sign_in(page, token)
    expect(page.locator("#connection")).to_have_text("live")
    return page


def check(page, pictures, name):
    """The open dialog is accessible, fits a phone, and is photographed in both schemes."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for place, size in (("wide", {"width": 1440, "height": 900}), ("narrow", NARROW)):
            page.set_viewport_size(size)
            page.screenshot(path=pictures / f"{name}-{place}-{scheme}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            found = axe.Axe().run(page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    page.set_viewport_size({"width": 1280, "height": 900})


def test_an_administrator_makes_lists_and_revokes_tokens(server, open_page, pictures):
    page = signed_in(server, open_page)
    page.get_by_role("button", name="Tokens").click()
    dialog = page.get_by_role("dialog", name="Tokens")
    expect(dialog.get_by_text("No valid token was made here.")).to_be_visible()
    dialog.get_by_label("Federation").select_option("lab")
    dialog.get_by_label("Devices").fill("2")
    dialog.get_by_label("Note").fill("ward 3")
    dialog.get_by_role("button", name="Create").click()
    secret = dialog.get_by_label("The new enrolment token, shown only now")
    expect(secret).to_be_focused()
    token = secret.input_value()
    valid = dialog.get_by_role("table", name="Valid tokens")
    expect(valid.locator("tbody tr")).to_have_count(1)
    for text in ("ward 3", "lab", "0 of 2", "in 7 d", "settings"):
        expect(valid).to_contain_text(text)
    assert enrol(server, "one", token).status_code == 201

    dialog.get_by_label("Kind").select_option("admin")
    for limit in ("Federation", "Devices"):
        expect(dialog.get_by_label(limit)).to_be_disabled()
    dialog.get_by_role("button", name="Create").click()
    expect(valid.locator("tbody tr")).to_have_count(2)
    expect(valid).to_contain_text("1 of 2")
    chief = dialog.get_by_label("The new admin token, shown only now").input_value()
    check(page, pictures, "tokens")
    made = httpx.post(
        f"{server.url}/v1/tokens", json={"kind": "observer"}, headers={"Authorization": f"Bearer {chief}"}
    ).json()

    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#tokens-secret")).to_have_value("")
    page.get_by_role("button", name="Tokens").click()
    dialog.get_by_role("button", name="Revoke with 1 made").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(valid.locator("tbody tr")).to_have_count(3)
    dialog.get_by_role("button", name="Revoke with 1 made").click()
    page.locator("#ask").get_by_role("button", name="Revoke").click()
    expect(valid.locator("tbody tr")).to_have_count(1)
    for secret in (chief, made["secret"]):
        assert (
            httpx.get(f"{server.url}/v1/federations", headers={"Authorization": f"Bearer {secret}"}).status_code == 401
        )
    valid.get_by_role("button", name="Revoke").click()
    page.locator("#ask").get_by_role("button", name="Revoke").click()
    expect(valid).to_be_hidden()
    dialog.get_by_text("3 revoked, expired or used up").click()
    expect(dialog.get_by_role("table", name="Other tokens").locator("tbody tr")).to_have_count(3)
    assert enrol(server, "two", token).status_code == 401
    log = server.log.read_text()
    assert token not in log
    assert chief not in log


def test_an_observer_sees_no_tokens(server, open_page):
    page = signed_in(server, open_page, OBSERVER)
    expect(page.get_by_role("button", name="Tokens")).to_be_hidden()
    page.get_by_role("button", name="Invite a phone").click()
    expect(page.get_by_role("dialog").get_by_label("Enrolment token")).to_be_focused()


def test_an_invitation_needs_no_pasted_token_and_names_the_publisher(server, open_page, pictures):
    author = Publisher(bytes(range(32)))
    options = PublishOptions(publisher=author, admin_token=ADMIN)
    server.http.delete("/v1/federations/lab").raise_for_status()
    publish(server.url, "lab", "digits", method="fedavg", options=options)
    page = signed_in(server, open_page, host="pi.test")
    page.get_by_role("button", name="Invite a phone").press("Enter")
    dialog = page.get_by_role("dialog", name="Invite a phone")
    expect(dialog.get_by_label("Devices")).to_be_focused()
    expect(dialog.get_by_label("Enrolment token")).to_be_hidden()
    dialog.get_by_label("Devices").fill("2")
    dialog.get_by_label("Valid for").select_option("1 hour")
    dialog.get_by_label("Note").fill("two phones")
    dialog.get_by_label("Note").press("Enter")
    link = dialog.get_by_label("Link")
    expect(link).to_be_focused()
    text = link.input_value()
    named = parse_qs(urlsplit(text).fragment)
    (token,) = named["token"]
    assert named["publisher"] == [author.fingerprint.replace("-", "")]
    code = dialog.get_by_role("img", name="QR code of the link")
    assert unquote(code.get_attribute("src")) == f"data:image/svg+xml,{drawn_for(text)}"
    expect(dialog.get_by_role("status").first).to_have_text("For 2 devices, within 60 min.")
    expect(dialog.locator("pre")).to_have_text(
        f"SPARROW_ENROLMENT_TOKEN={token} sparrow join --server http://pi.test:{server.port} --federation lab "
        f"--publisher {author.fingerprint}"
    )
    check(page, pictures, "invitation")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("#invitation-command")).to_have_text("")
    assert token not in page.content()
    expect(page.locator("#invitation textarea")).to_have_value("")
    assert [enrol(server, name, token).status_code for name in ("one", "two", "three")] == [201, 201, 401]
    page.get_by_role("button", name="Tokens").click()
    expect(page.get_by_role("dialog", name="Tokens")).to_contain_text("1 revoked, expired or used up")


def test_a_revoked_device_is_removed_from_the_list(server, open_page):
    for name in ("one", "two"):
        enrol(server, name, SETTINGS["COORDINATOR_ENROLMENT_TOKEN"]).raise_for_status()
    page = signed_in(server, open_page)
    rows = page.locator("#devices tbody tr")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Revoke one").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Remove one").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("two")
    expect(page.locator("#count")).to_have_text("1 to 1 of 1 device")
