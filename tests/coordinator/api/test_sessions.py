"""Sessions of browsers: a cookie stands for a token, never is one, and ends with it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import func, select

from sparrow.coordinator.errors import NotAuthenticated
from sparrow.coordinator.fleet import issuing
from sparrow.coordinator.fleet.access import REMEMBER_SECONDS, Tokens
from sparrow.coordinator.fleet.sessions import MOST_SESSIONS, SESSION_SECONDS, Sessions
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import BrowserSession
from sparrow.protocol.messages import CreateToken
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import httpx

from .test_contract import serving

SETTINGS = FederationSettings(rounds=2, evaluation_interval=0)
ADMIN, OBSERVER = "the-chief-s-secret", "an-observer-s-secret"
TOKENS = {"admin_token": ADMIN, "observer_token": OBSERVER, "enrolment_token": "the-enrolment-token"}


@pytest.fixture
def store(tmp_path):
    with closing(Store(tmp_path / "data")) as opened:
        yield opened


@pytest.fixture
def process(store, clock):
    """A further process over the same records, with these tokens in its settings."""

    def start(**given):
        return Sessions(store, clock, Tokens(store, clock, given))

    return start


def make_token(store, clock, kind="observer", **limits):
    with store.writing() as db:
        made = issuing.create(db, CreateToken(kind=kind, **limits), clock())
        return made, made.secret


def is_over(sessions, session):
    with pytest.raises(NotAuthenticated, match="sign in again"):
        sessions.find(session)
    return sessions.known_holder(session) is None


def sign_in(client, token=ADMIN, **headers):
    """The cookie of a browser whose user signs in."""
    answer = client.post("/sign-in", data={"token": token}, headers=headers, follow_redirects=False)
    assert answer.status_code == 303
    client.cookies.clear()
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_a_session_of_one_process_is_known_to_another(store, clock, process):
    _, secret = make_token(store, clock)
    one, other = process(admin=ADMIN), process(admin=ADMIN)
    assert other.find(one.begin(ADMIN)).kind == "admin"
    assert other.find(one.begin(secret)).kind == "observer"


def test_after_twelve_hours_a_session_is_over(store, clock, process):
    _, short = make_token(store, clock, seconds=3600)
    sessions = process(admin=ADMIN)
    of_settings, of_records = sessions.begin(ADMIN), sessions.begin(short)
    clock.pass_seconds(3599)
    assert sessions.find(of_records).kind == "observer"
    clock.pass_seconds(1)
    assert sessions.known_holder(of_records) is None, "to the second, remembered or not"
    assert is_over(sessions, of_records), "with its token"
    clock.pass_seconds(SESSION_SECONDS - 3601)
    assert sessions.find(of_settings).kind == "admin"
    clock.pass_seconds(1)
    assert is_over(sessions, of_settings)
    assert SESSION_SECONDS == 12 * 3600


def test_a_session_ends_with_its_token(store, clock, process):
    made, secret = make_token(store, clock)
    sessions = process(admin=ADMIN)
    of_records, of_settings = sessions.begin(secret), sessions.begin(ADMIN)
    assert {sessions.find(each).kind for each in (of_records, of_settings)} == {"observer", "admin"}
    with store.writing() as db:
        issuing.revoke(db, made.id, clock())
    clock.pass_seconds(REMEMBER_SECONDS)
    assert is_over(sessions, of_records)
    assert is_over(process(admin="another-chief-s-secret"), of_settings), "started again with another token"
    assert is_over(process(), of_settings), "or with none"
    assert sessions.find(of_settings).kind == "admin"


def test_who_signs_out_or_signs_in_again_leaves_no_session(process):
    sessions = process(admin=ADMIN, observer=OBSERVER)
    first = sessions.begin(OBSERVER)
    assert sessions.find(first).kind == "observer"
    second = sessions.begin(ADMIN, first)
    assert is_over(sessions, first), "one browser, one session"
    assert sessions.find(second).kind == "admin"
    sessions.end(second)
    assert is_over(sessions, second)


def test_each_token_has_a_separate_limit_of_sessions(store, clock, process):
    _, secret = make_token(store, clock)
    sessions = process(observer=OBSERVER)
    other = sessions.begin(secret)
    many = []
    for _ in range(MOST_SESSIONS + 2):
        many.append(sessions.begin(OBSERVER))
        clock.pass_seconds(1)
    assert [is_over(sessions, each) for each in many[:2]] == [True, True]
    assert {sessions.find(each).kind for each in (other, *many[2:])} == {"observer"}
    with pytest.raises(NotAuthenticated):
        sessions.begin("made-up")


def test_expired_sessions_are_deleted_with_the_next_sign_in(store, clock, process):
    sessions = process(admin=ADMIN, observer=OBSERVER)
    for _ in range(3):
        sessions.begin(OBSERVER)
    clock.pass_seconds(SESSION_SECONDS)
    sessions.begin(ADMIN)
    with store.reading() as db:
        assert db.scalar(select(func.count()).select_from(BrowserSession)) == 1


def test_neither_the_cookie_nor_the_records_have_the_token_nor_the_records_the_cookie(open_app, tmp_path):
    client = open_app(**TOKENS)
    cookie = sign_in(client)["Cookie"]
    session = cookie.partition("=")[2]
    assert ADMIN not in cookie
    assert len(session.removeprefix("sparrow_session_")) == 43, "256 bits"
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as connection:
        dump = "\n".join(connection.iterdump())
    assert ADMIN not in dump
    assert session.removeprefix("sparrow_session_") not in dump


def test_a_cookie_is_no_token_and_a_token_no_cookie(open_app):
    client = open_app(**TOKENS)
    cookie = sign_in(client)
    name, _, session = cookie["Cookie"].partition("=")
    assert client.get("/v1/federations", headers=cookie).status_code == 200
    for wrong in (
        {"Authorization": f"Bearer {session}"},
        {"Cookie": f"{name}={ADMIN}"},
        {"Cookie": f"{name}={session}x"},
        {"Cookie": f"{name}="},
    ):
        assert client.get("/v1/federations", headers=wrong).status_code == 401, wrong


def test_signing_out_ends_the_session_at_the_coordinator(open_app):
    client = open_app(**TOKENS)
    cookie, another = sign_in(client), sign_in(client)
    for headers in (cookie, {"Cookie": "sparrow-session=made-up"}, {}):
        out = client.post("/sign-out", headers=headers, follow_redirects=False)
        assert (out.status_code, "max-age=0" in out.headers["set-cookie"].lower()) == (303, True)
    assert client.get("/v1/federations", headers=cookie).status_code == 401
    assert client.get("/", headers=cookie, follow_redirects=False).headers["location"] == "sign-in?note=again"
    assert client.get("/v1/federations", headers=another).status_code == 200


class RemovesPrefix(httpx.HTTPTransport):
    """A proxy that serves the coordinator below ``/lab``, and something else beside it."""

    def __init__(self):
        super().__init__()
        self.elsewhere = []

    def handle_request(self, request):
        path = request.url.raw_path.decode()
        if not path.startswith("/lab/"):
            self.elsewhere.append(request.headers.get("cookie"))
            return httpx.Response(204)
        url = request.url.copy_with(raw_path=path.removeprefix("/lab").encode())
        return super().handle_request(
            httpx.Request(request.method, url, headers=request.headers, stream=request.stream)
        )


@pytest.mark.integration
@pytest.mark.parametrize("root_path", ["", "/lab"], ids=["unknown", "root-path"])
def test_pages_work_below_a_prefix_and_keep_their_cookie_there(tmp_path, root_path):
    settings = Settings(data_dir=tmp_path / "data", default_settings=SETTINGS, **TOKENS)
    proxy = RemovesPrefix()
    with serving(settings, root_path=root_path) as direct:
        base = f"http://127.0.0.1:{direct.base_url.port}"
        with httpx.Client(base_url=f"{base}/lab/", transport=proxy, follow_redirects=True) as browser:
            assert str(browser.get("").url) == f"{base}/lab/sign-in"
            page = browser.post("sign-in", data={"token": ADMIN, "federation": "default"})
            assert (page.status_code, str(page.url)) == (200, f"{base}/lab/?federation=default")
            for path in ("v1/federations", "page/dashboard.js", "docs", "metrics", "readyz", "healthz"):
                assert browser.get(path).status_code == 200, path
            pause = {"action": "pause"}
            assert browser.patch("v1/federations/default", json=pause).status_code == 200
            assert browser.get(f"{base}/other").status_code == 204
            assert proxy.elsewhere == [None], "the neighbours below other paths do not get the session"
            assert str(browser.post("sign-out").url) == f"{base}/lab/sign-in?note=out"
            assert len(browser.cookies) == 0
            assert browser.get("v1/federations").status_code == 401


@pytest.mark.integration
def test_two_coordinators_on_one_database_know_the_same_sessions(open_app, postgresql, tmp_path):
    url = postgresql.new_database()
    shared = {"database_url": url, "data_dir": tmp_path / "data", **TOKENS}
    one, other = open_app(**shared), open_app(**shared)
    cookie = sign_in(one)
    assert other.get("/v1/federations", headers=cookie).status_code == 200
    other.post("/sign-out", headers=cookie)
    assert other.get("/v1/federations", headers=cookie).status_code == 401
