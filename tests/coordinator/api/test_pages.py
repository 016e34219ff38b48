"""The page for people: what it is made of, who may see it, and that no other site can use it."""

from __future__ import annotations

import io
import re
from urllib.parse import parse_qs, urlsplit

import pytest
import segno

from edge_sdk.publish import PublishOptions, publish
from edge_sdk.publishing.signing import Publisher
from sparrow.coordinator.dashboard import OWN
from sparrow.coordinator.web import links, runtime
from sparrow.protocol.fields import LONGEST_LINK
from sparrow.protocol.messages import JoinLink, MakeJoinLink
from sparrow.protocol.settings import FederationSettings

pytestmark = pytest.mark.integration  # serves from a real port

SETTINGS = FederationSettings(rounds=2, evaluation_interval=0)
TOKENS = {
    "admin_token": "the-chief-s-secret",
    "observer_token": "an-observer-s-secret",
    "enrolment_token": "the enrolment token",
}
PAGES = ["/", "/docs", *(f"/page/{path.name}" for path in OWN.iterdir())]


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
    """Files that nobody needs at first are loaded later; here all count."""
    client = open_app()
    sent = [client.get(path, headers={"Accept-Encoding": "gzip"}) for path in PAGES if path != "/docs"]
    assert {answer.headers["content-encoding"] for answer in sent} == {"gzip"}
    assert sum(int(answer.headers["content-length"]) for answer in sent) < 85_000
    plain = client.get("/page/uPlot.js", headers={"Accept-Encoding": "identity"})
    assert ("content-encoding" in plain.headers, plain.headers["vary"]) == (False, "Accept-Encoding")


def test_long_answers_are_compressed_for_who_takes_them(open_app):
    client, path = open_app(), "/v1/federations/default/devices"
    for index in range(20):
        client.post(path, json={"name": f"pi-{index}", "enrolment_key": "k" * 32})
    packed, plain = (client.get(path, headers={"Accept-Encoding": how}) for how in ("gzip", "identity"))
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 4
    assert packed.json() == plain.json()
    assert "content-encoding" not in client.get("/healthz").headers, "short ones are not"


def test_devices_are_listed_by_what_one_looks_for(open_app):
    client, path = open_app(), "/v1/federations/default/devices"
    for name in ("pi-10", "pi-9", "Pi-2", "pi-02"):
        client.post(path, json={"name": name, "enrolment_key": "k" * 32})
    natural = ["Pi-2", "pi-02", "pi-9", "pi-10"]
    assert [each["name"] for each in client.get(path).json()] == natural
    for order in ("accuracy", "-accuracy", "seconds", "board", "doing", "-doing"):
        assert len(client.get(path, params={"order": order}).json()) == 4
    assert [each["name"] for each in client.get(path, params={"device": "pi-9"}).json()] == ["pi-9"]
    states = client.get(f"{path}/states", params={"most": 3}).json()
    assert states == {
        "names": natural[:3],
        "doing": [each["doing"] for each in client.get(path).json()[:3]],
        "total": 4,
    }


def test_the_page_is_of_the_only_federation_or_of_all(open_app):
    client = open_app(default_task="")
    for name, shown in (("", ""), ("first", "first"), ("second", "")):
        if name:
            client.post("/v1/federations", json={"name": name, "task": "digits"})
        assert f'data-federation="{shown}"' in client.get("/").text
    assert [each["name"] for each in client.get("/v1/summaries").json()["federations"]] == ["second", "first"]


@pytest.mark.parametrize("name", ["none.js", "..%2Fpages.py", "%2e%2e", "n" * 300])
def test_no_other_file_is_served(open_app, name):
    assert open_app().get(f"/page/{name}").status_code == 404


def signed_in(client, token, **headers):
    """The headers of a browser whose user has signed in."""
    form = {"token": token, "federation": "default"}
    answer = client.post("/sign-in", data=form, headers=headers, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "./?federation=default")
    rules = answer.headers["set-cookie"].lower()
    assert all(rule in rules for rule in ("httponly", "samesite=strict"))
    client.cookies.clear()
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_who_is_not_signed_in_is_led_to_a_form_and_back(open_app):
    client = open_app(**TOKENS)
    for path, form in (
        ("/", "sign-in"),
        ("/?federation=lab", "sign-in?federation=lab"),
        ("/docs", "sign-in?page=docs"),
    ):
        answer = client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, form)
        asked = client.get(f"/{form}")
        assert (asked.status_code, asked.headers["cache-control"]) == (200, "no-store")
        assert "form-action 'self'" in asked.headers["content-security-policy"]
    assert client.get("/v1/federations").headers["www-authenticate"] == "Bearer"
    looks = signed_in(client, "an-observer-s-secret")
    for path in ("/", "/docs", "/v1/federations", "/v1/federations/default/overview", "/metrics"):
        assert client.get(path, headers=looks, follow_redirects=False).status_code == 200, path
    docs = client.post("/sign-in", data={"token": "the-chief-s-secret", "page": "docs"}, follow_redirects=False)
    assert docs.headers["location"] == "docs"


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"token": "made-up"}, 401, "not an observer"),
        ({"token": ""}, 401, "not an observer"),
        ({"token": "the enrolment token"}, 401, "an enrolment token, for devices"),
        ({}, 401, "not an observer"),
        ({"token": "<b>", "federation": '"><script>'}, 401, "not an observer"),
        ({"token": "x" * 5000}, 413, "TooLarge"),
        ({str(index): "x" for index in range(20)}, 422, "reload the page"),
    ],
)
def test_what_is_no_token_to_look_with_signs_nobody_in(open_app, form, status, said):
    client = open_app(**TOKENS)
    answer = client.post("/sign-in", data=form, follow_redirects=False)
    assert (answer.status_code, said in answer.text) == (status, True)
    assert "set-cookie" not in answer.headers
    assert "<script" not in answer.text
    assert client.post("/sign-in", content=b"\xff=%ff", follow_redirects=False).status_code in (401, 422)


def test_sign_out_and_expired_tokens_lead_to_the_form(open_app):
    client = open_app(**TOKENS)
    out = client.post("/sign-out", headers=signed_in(client, "the-chief-s-secret"), follow_redirects=False)
    assert (out.status_code, out.headers["location"]) == (303, "sign-in?note=out")
    assert "max-age=0" in out.headers["set-cookie"].lower()
    kept = {"Cookie": "sparrow-session=former"}
    led = client.get("/", headers=kept, follow_redirects=False)
    assert led.headers["location"] == "sign-in?note=again"
    assert "signed out" in client.get("/sign-in?note=again").text
    assert client.get("/v1/federations", headers=kept).status_code == 401


def test_a_cookie_belongs_to_a_port(open_app):
    client = open_app(**TOKENS)
    sent = {"token": "an-observer-s-secret"}
    answer = client.post("/sign-in", data=sent, headers={"Host": "127.0.0.1:8001"}, follow_redirects=False)
    kept = {"Cookie": "theme=dark; " + answer.headers["set-cookie"].partition(";")[0]}
    client.cookies.clear()
    assert kept["Cookie"].startswith("theme=dark; sparrow-8001=")
    for host, status in (("127.0.0.1:8001", 200), ("127.0.0.1:8002", 401)):
        assert client.get("/v1/federations", headers={**kept, "Host": host}).status_code == status


def test_signing_in_for_another_site_is_refused(open_app):
    client = open_app(**TOKENS)
    for path in ("/sign-in", "/sign-out"):
        sent = client.post(path, data={"token": "the-chief-s-secret"}, headers={"Sec-Fetch-Site": "cross-site"})
        assert sent.status_code == 403


def test_the_page_knows_whether_its_user_may_change_things(open_app):
    client = open_app(**TOKENS)
    path = "/v1/federations/default/overview"
    assert client.get(path, headers=signed_in(client, "an-observer-s-secret")).json()["may_change"] is False
    assert client.get(path, headers=signed_in(client, "the-chief-s-secret")).json()["may_change"] is True
    assert (
        client.patch(
            "/v1/federations/default", json={"action": "pause"}, headers=signed_in(client, "an-observer-s-secret")
        ).status_code
        == 401
    )
    assert (
        client.patch(
            "/v1/federations/default", json={"action": "pause"}, headers=signed_in(client, "the-chief-s-secret")
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
    host = {"Host": headers["Host"]} if "Host" in headers else {}
    sent = {**headers, **(signed_in(client, "the-chief-s-secret", **host) if tokens else {})}
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


# --- links for phones ------------------------------------------------------------------------------------------------

LINK = "/v1/federations/default/join-link"
SERVER = "https://lab.example:8443"


@pytest.fixture
def pages_train(monkeypatch):
    """As if ``sparrow web`` had been run."""
    monkeypatch.setattr(links.runtime, "missing", list)


def test_a_join_link_has_a_qr_code_and_opens_the_device_page(open_app, pages_train):
    client = open_app()
    for server, link in (
        (SERVER, f"{SERVER}/join/default"),
        ("https://lab.example/below/", "https://lab.example/below/join/default"),
        ("http://[2001:db8::7]:8000", "http://[2001:db8::7]:8000/join/default"),
    ):
        answer = client.post(LINK, json={"server": server})
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        assert answer.json()["link"] == link
        drawn = io.BytesIO()
        segno.make_qr(link).save(drawn, kind="svg", xmldecl=False, omitsize=True, light="#fff", nl=False)
        assert answer.json()["svg"] == drawn.getvalue().decode()
        assert bool(answer.json()["hints"]) == server.startswith("http://")
        assert client.get(urlsplit(link).path.removeprefix("/below")).status_code == 200
    own = client.post(LINK, json={}, headers={"Host": "192.0.2.7:8000"}).json()
    assert own["link"] == "http://192.0.2.7:8000/join/default"


def test_over_plain_http_and_before_pages_can_train_there_are_hints(open_app, monkeypatch):
    client = open_app()
    for missing, said in (
        ((), ""),
        (runtime.PACKAGES, "Pages cannot train here yet: run sparrow web on"),
        ((runtime.TRAINING,), "Pages cannot train here yet: run sparrow web on"),
        ((runtime.SIGNATURES,), "@noble/ed25519 3.2.0 is missing; run sparrow web again on"),
    ):
        monkeypatch.setattr(links.runtime, "missing", lambda missing=missing: list(missing))
        (https,) = client.post(LINK, json={"server": SERVER}).json()["hints"] or [""]
        assert said in https
        assert bool(https) == bool(missing)
    http = client.post(LINK, json={"server": "http://lab.example:8000"}).json()["hints"]
    assert any("HTTPS" in hint for hint in http)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "0.0.0.0", "pi.localhost"])
def test_an_address_that_phones_have_for_themselves_is_replaced(open_app, monkeypatch, pages_train, host):
    client = open_app()
    for own, link in (("192.0.2.7", "192.0.2.7"), ("2001:db8::7", "[2001:db8::7]")):
        monkeypatch.setattr(links, "in_network", lambda own=own: own)
        for port in ("", ":8443"):
            made = client.post(LINK, json={"server": f"https://{host}{port}"}).json()
            assert made["link"] == f"https://{link}{port}/join/default"
            (hint,) = made["hints"]
            assert own in hint
            assert "--host 0.0.0.0" in hint
    monkeypatch.setattr(links, "in_network", lambda: None)
    refused = client.post(LINK, json={"server": f"http://{host}:8000"})
    assert (refused.status_code, "network" in refused.json()["detail"]) == (422, True)


@pytest.mark.parametrize(
    "server",
    [
        *("", "lab.example", "ftp://lab.example", "https://", "https://:8443", "https://lab.example:port"),
        *("https://me:secret@lab.example", "https://lab.example/?a=b", "https://lab.example#token=x", "https://[::1"),
        *("https://lab.example/<b>", "https://lab.example/a b", "https://lab\n.example", "https://läb.example"),
        "https://" + "a" * LONGEST_LINK,
    ],
)
def test_what_is_no_address_gets_no_link(open_app, server):
    answer = open_app().post(LINK, json={"server": server})
    assert answer.status_code == 422
    assert answer.json()["title"] == "BadContent"


def test_a_federation_without_pages_has_no_link(open_app):
    client = open_app()
    client.post("/v1/federations", json={"name": "alone", "task": "digits", "settings": {"method": "ditto"}})
    answer = client.post("/v1/federations/alone/join-link", json={"server": SERVER})
    assert answer.status_code == 404
    assert client.get("/v1/federations/alone").json()["no_pages_because"] in answer.json()["detail"]
    assert client.post("/v1/federations/none/join-link", json={"server": SERVER}).status_code == 404


def test_the_link_has_the_enrolment_token_where_one_is_needed_and_no_other(open_app, pages_train):
    client = open_app(**TOKENS)
    look, overview = signed_in(client, "an-observer-s-secret"), "/v1/federations/default/overview"
    assert client.get(overview, headers=look).json()["enrolment_guarded"] is True
    for token, said in (
        (None, "set SPARROW_ENROLMENT_TOKEN"),
        ("", "not valid for default"),
        ("made-up", "not valid for default"),
        ("an-observer-s-secret", "is an observer token"),
        ("the-chief-s-secret", "is an admin token"),
    ):
        refused = client.post(LINK, json={"server": SERVER, "token": token}, headers=look)
        assert refused.status_code == 403, "after a 401 a browser would forget its user's own token"
        assert said in refused.json()["detail"]
        assert "sparrow token create enrolment --federation default" in refused.json()["detail"]
        assert not token or token not in refused.text
    made = client.post(LINK, json={"server": SERVER, "token": "the enrolment token"}, headers=look).json()
    address, _, fragment = made["link"].partition("#")
    assert address == f"{SERVER}/join/default"
    assert parse_qs(fragment) == {"token": ["the enrolment token"]}, "as URLSearchParams reads it"


def test_a_link_has_no_token_where_none_is_needed(open_app):
    client = open_app()
    assert client.get("/v1/federations/default/overview").json()["enrolment_guarded"] is False
    made = client.post(LINK, json={"server": SERVER, "token": "of-another-coordinator"})
    assert made.json()["link"] == f"{SERVER}/join/default"


@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["open", "guarded"])
def test_a_link_names_the_publisher_of_a_signed_model(open_app, pages_train, tokens):
    author = Publisher(bytes(range(32)))
    client = open_app(**tokens)
    admin = tokens.get("admin_token")
    publish(
        "http://coordinator",
        "signed",
        "digits",
        method="fedavg",
        client=client,
        options=PublishOptions(publisher=author, admin_token=admin),
    )
    look = signed_in(client, admin) if tokens else {}
    body = {"server": SERVER, "token": tokens.get("enrolment_token")}
    made = client.post(LINK.replace("default", "signed"), json=body, headers=look).json()["link"]
    assert made.startswith(f"{SERVER}/join/signed#")
    token = {"token": [tokens["enrolment_token"]]} if tokens else {}
    assert parse_qs(urlsplit(made).fragment) == {**token, "publisher": [author.fingerprint.replace("-", "")]}


def test_links_are_for_who_may_look(open_app):
    client = open_app(**TOKENS)
    body = {"server": SERVER, "token": "the enrolment token"}
    for headers, status in (
        ({}, 401),
        ({"Cookie": "sparrow-token=the%20enrolment%20token"}, 401),
        (signed_in(client, "an-observer-s-secret"), 200),
        (signed_in(client, "the-chief-s-secret"), 200),
        ({**signed_in(client, "the-chief-s-secret"), "Sec-Fetch-Site": "cross-site"}, 403),
    ):
        assert client.post(LINK, json=body, headers=headers).status_code == status


def test_the_token_of_a_link_is_neither_logged_nor_kept(open_app, caplog, tmp_path):
    caplog.set_level("DEBUG")
    client, secret = open_app(**TOKENS), TOKENS["enrolment_token"]
    for body in (
        {"server": SERVER, "token": secret},
        {"server": "nowhere", "token": secret},
        {"server": SERVER, "token": secret, "more": secret},
        {"server": [secret], "token": secret},
    ):
        answer = client.post(LINK, json=body, headers=signed_in(client, "an-observer-s-secret"))
        assert (answer.status_code == 200) == (secret.replace(" ", "%20") in answer.text)
        assert secret not in answer.text
    messages = (MakeJoinLink(server=SERVER, token=secret), JoinLink(link=f"{SERVER}/#token={secret[:3]}", svg=secret))
    assert secret[:3] not in repr(messages)
    for text in (secret, secret.replace(" ", "%20")):
        assert text not in caplog.text
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
