"""The page for people: what it is made of, who may see it, and that no other site can use it."""

from __future__ import annotations

import base64
import re

import pytest

from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.dashboard import OWN

pytestmark = pytest.mark.integration  # serves from a real port

SETTINGS = FederationSettings(rounds=2, evaluation_interval=0)
TOKENS = {
    "admin_token": "the-chief-s-secret",
    "observer_token": "an-observer-s-secret",
    "enrolment_token": "the enrolment token",
}
PAGES = ["/", "/docs", *(f"/page/{path.name}" for path in OWN.iterdir())]


def basic(password, name="anybody"):
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


@pytest.mark.parametrize("path", PAGES)
def test_the_page_comes_from_here_alone(open_app, path):
    client = open_app()
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    if path != "/docs":
        assert client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    if path != "/page/uPlot.js":  # which names its home in a comment
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", answer.text) == []
    if path.endswith(".html"):
        assert re.findall(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", answer.text) == [], "which the policy forbids"


def test_the_page_is_small_enough_for_a_phone(open_app):
    client = open_app()
    own = sum(len(client.get(path).content) for path in PAGES if "uPlot" not in path and path != "/docs")
    assert own < 100_000


def test_the_page_knows_the_newest_federation(open_app):
    client = open_app(default_task="")
    assert 'data-federation=""' in client.get("/").text
    for name in ("first", "second"):
        client.post("/v1/federations", json={"name": name, "task": "digits"})
    assert 'data-federation="second"' in client.get("/").text


@pytest.mark.parametrize("name", ["none.js", "..%2Fpages.py", "%2e%2e", "n" * 300])
def test_no_other_file_is_served(open_app, name):
    assert open_app().get(f"/page/{name}").status_code == 404


def test_a_browser_asks_its_user_for_a_token_and_sends_it_as_a_password(open_app):
    client = open_app(**TOKENS)
    for path in (*PAGES, "/admin", "/docs"):
        answer = client.get(path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith('Basic realm="Sparrow')
    assert client.get("/v1/federations").headers["www-authenticate"] == "Bearer"
    for path in (*PAGES, "/docs", "/v1/federations", "/v1/federations/default/overview", "/metrics"):
        assert client.get(path, headers=basic("an-observer-s-secret")).status_code == 200
    assert client.get("/admin", headers=basic("the-chief-s-secret")).status_code == 200
    refused = client.get("/admin", headers=basic("an-observer-s-secret"))
    assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")


@pytest.mark.parametrize(
    "sent", ["Basic", "Basic !!!", "Basic " + base64.b64encode(b"\xff\xfe").decode(), "Digest eye"]
)
def test_what_is_no_password_is_none(open_app, sent):
    assert open_app(**TOKENS).get("/", headers={"Authorization": sent}).status_code == 401


def test_the_page_knows_whether_its_user_may_change_things(open_app):
    client = open_app(**TOKENS)
    path = "/v1/federations/default/overview"
    assert client.get(path, headers=basic("an-observer-s-secret")).json()["may_change"] is False
    assert client.get(path, headers=basic("the-chief-s-secret")).json()["may_change"] is True
    assert (
        client.patch(
            "/v1/federations/default", json={"action": "pause"}, headers=basic("an-observer-s-secret")
        ).status_code
        == 401
    )
    assert (
        client.patch(
            "/v1/federations/default", json={"action": "pause"}, headers=basic("the-chief-s-secret")
        ).status_code
        == 200
    )


@pytest.mark.parametrize("tokens", [{}, TOKENS])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://coordinator.evil.example"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8000", "Host": "127.0.0.1:8000"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://coordinator"}, 200),
        ({}, 200),
    ],
)
def test_a_page_of_another_site_changes_nothing(open_app, tokens, headers, status):
    client = open_app(**tokens)
    sent = {**headers, **(basic("the-chief-s-secret") if tokens else {})}
    answer = client.patch("/v1/federations/default", json={"action": "pause"}, headers=sent)
    assert answer.status_code == status
    assert client.get("/", headers=sent).status_code == 200, "to look is no change"


def test_devices_come_in_pages(open_app):
    client = open_app()
    path = "/v1/federations/default/devices"
    for index in range(5):
        body = {"name": f"pi-{index}", "enrolment_key": "k" * 32, "profile": {"board": "Raspberry Pi 4 B"}}
        client.post(path, json=body)
    answer = client.get(path, params={"limit": 2, "offset": 4, "search": "PI"})
    assert [device["name"] for device in answer.json()] == ["pi-4"]
    assert answer.headers["sparrow-total"] == "5"
    assert len(client.get(path).json()) == 5
    for wrong in (
        {"limit": 0},
        {"offset": -1},
        {"order": "colour"},
        {"doing": "nothing"},
        {"search": "x" * 201},
        {"search": "\0"},
    ):
        assert client.get(path, params=wrong).status_code == 422
