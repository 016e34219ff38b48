"""Devices renew their tokens by themselves, whatever is lost on the way, and enrol again with one that has expired."""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack, closing
from datetime import datetime

import pytest

from edge_sdk.device.session import Outcome, Session
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.errors import Refused, TokenExpired
from edge_sdk.tasks.digits import load
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation import in_process as inprocess
from sparrow.transport import httpx

ALWAYS = 1e-9
TOKENS = {
    "admin_token": "the-chief-s-secret",
    "observer_token": "an-observer-s-secret",
    "enrolment_token": "the-enrolment-token",
}
OBSERVER = {"Authorization": f"Bearer {TOKENS['observer_token']}"}


@pytest.fixture
def start(tmp_path):
    """Starts the coordinator over this test's folder; answers a client of it."""
    with ExitStack() as stack:

        def run(**settings):
            app = create_app(Settings(data_dir=tmp_path / "data", **{**TOKENS, **settings}))
            return stack.enter_context(inprocess.running(app))

        run.stop = stack.close
        yield run


@pytest.fixture
def folder(tmp_path):
    with closing(StateFolder(tmp_path / "state")) as folder:
        yield folder


def session(client, folder, token="the-enrolment-token"):
    transport = Transport(client, patience_seconds=60, sleep=lambda seconds: None)
    transport.token = token

    def make_task(info, manifest):
        return load("index=0,of=2", device="one", seed=0, batch_size=16)

    return Session(transport, folder, federation="default", name="one", make_task=make_task)


def status_of(client, token):
    return client.get("/v1/federations/default/manifest", headers={"Authorization": f"Bearer {token}"}).status_code


def test_a_device_takes_a_new_token_when_it_is_asked_to(start, folder):
    client = start(device_token_rotation_days=ALWAYS)
    device = session(client, folder)
    tokens = [folder.known_identity().token]
    for _ in range(2):
        assert device.step().outcome is Outcome.idle
        tokens.append(folder.known_identity().token)
    assert len(set(tokens)) == 3
    assert [status_of(client, token) for token in tokens] == [401, 401, 200]


def test_a_device_that_is_not_asked_keeps_its_token(start, folder):
    device = session(start(), folder)
    before = folder.known_identity().token
    assert device.step().outcome is Outcome.idle
    assert folder.known_identity().token == before


class Losing(httpx.BaseTransport):
    """Loses the first answer to a call for a new token."""

    def __init__(self, client):
        self._client, self.lost = client, []

    def handle_request(self, request):
        answer = self._client.send(request)
        if request.url.path.endswith("/token") and not self.lost:
            self.lost.append(answer.json()["token"])
            raise httpx.ReadError("connection reset")
        return answer


def test_an_answer_that_is_lost_does_no_harm(start, folder):
    client = start(device_token_rotation_days=ALWAYS)
    losing = Losing(client)
    with httpx.Client(transport=losing, base_url=inprocess.ADDRESS) as broken:
        device = session(broken, folder)
        for _ in range(2):
            assert device.step().outcome is Outcome.idle
    assert len(losing.lost) == 1
    assert status_of(client, folder.known_identity().token) == 200


def test_a_device_killed_during_renewal_keeps_its_old_token(start, folder, monkeypatch):
    client = start(device_token_rotation_days=ALWAYS)
    device = session(client, folder)
    before = folder.known_identity().token

    def die(identity):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "save_identity", die)
        with pytest.raises(KeyboardInterrupt):
            device.step()
    assert folder.known_identity().token == before
    again = session(client, folder, None)
    assert again.step().outcome is Outcome.idle
    assert folder.known_identity().token != before


class Repeating(httpx.BaseTransport):
    """Makes every call for a new token twice; the first answer is passed on, the second one lost."""

    def __init__(self, client):
        self._client = client

    def handle_request(self, request):
        request.read()  # what is in memory can be sent twice
        answer = self._client.send(request)
        if request.url.path.endswith("/token"):
            self._client.send(request)
        return answer


@pytest.mark.parametrize("tokens", [TOKENS, dict.fromkeys(TOKENS)])
def test_a_call_for_a_new_token_that_comes_twice_locks_nobody_out(start, folder, tokens):
    client = start(device_token_rotation_days=ALWAYS, **tokens)
    with httpx.Client(transport=Repeating(client), base_url=inprocess.ADDRESS) as repeating:
        device = session(repeating, folder)
        before = folder.known_identity()
        for _ in range(2):
            assert device.step().outcome is Outcome.idle
    assert folder.known_identity().token != before.token, "each answer has the same one"
    assert session(client, folder).step().outcome is Outcome.idle


@pytest.mark.parametrize("known", [True, False])
def test_a_device_that_dies_before_it_has_used_its_new_token_finds_out_which_is_good(
    start, folder, tmp_path, monkeypatch, known
):
    client = start(device_token_rotation_days=ALWAYS)
    device = session(client, folder)
    before = folder.known_identity()

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transport, "change_device", die)
        with pytest.raises(KeyboardInterrupt):
            device.step()
    died = folder.known_identity()
    assert died.previous == before.token != died.token
    if not known:  # a backup of before is restored
        with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as records, records:
            records.execute("UPDATE devices SET next_token_sha256 = NULL")
    session(client, folder, None)
    after = folder.known_identity()
    assert (after.token, after.previous) == (died.token if known else before.token, None)


def test_a_thief_who_renews_first_keeps_no_device_from_its_federation(start, folder):
    client = start(device_token_rotation_days=ALWAYS)
    device = session(client, folder)
    stolen = folder.known_identity()
    path, headers = f"/v1/devices/{stolen.device_id}/token", {"Authorization": f"Bearer {stolen.token}"}
    for guess in ({}, {"enrolment_key": "g" * 43}, {"enrolment_key": stolen.token}):
        answer = client.post(path, json=guess, headers=headers)
        assert answer.status_code in (403, 422)
        assert "token" not in answer.json()
    assert device.step().outcome is Outcome.idle
    assert status_of(client, folder.known_identity().token) == 200
    assert status_of(client, stolen.token) == 401, "the thief's copy"


def test_a_device_whose_token_expired_enrols_again_and_stays_who_it_was(start, folder, tmp_path):
    client = start()
    session(client, folder)
    before = folder.known_identity().token
    (device,) = client.get("/v1/federations/default/devices", headers=OBSERVER).json()
    start.stop()
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as records, records:
        records.execute("UPDATE devices SET token_issued_at = 0")
    (tmp_path / "data" / "coordinator.sqlite3.sha256").unlink(missing_ok=True)  # it was not damage
    client = start(device_token_rotation_days=1, device_token_lifetime_days=7)
    assert status_of(client, before) == 401
    with pytest.raises(Refused, match="SPARROW_ENROLMENT_TOKEN") as refused:
        session(client, folder, None)
    assert not isinstance(refused.value, TokenExpired)
    assert session(client, folder).step().outcome is Outcome.idle
    assert folder.known_identity().token != before
    (found,) = client.get("/v1/federations/default/devices", headers=OBSERVER).json()
    assert found["device_id"] == device["device_id"]


@pytest.mark.parametrize("hours", [5, -5])
def test_a_clock_that_is_set_between_two_starts_ages_no_token_and_no_deadline(start, folder, monkeypatch, hours):
    lives = {"device_token_rotation_days": 2 / 24, "device_token_lifetime_days": 4 / 24}
    client = start(**lives)
    session(client, folder)
    token, stepped = folder.known_identity().token, time.time
    seen = seen_of(client)
    start.stop()
    monkeypatch.setattr(time, "time", lambda: stepped() + hours * 3600)
    client = start(**lives)
    asked = client.get("/v1/federations/default/assignment", headers={"Authorization": f"Bearer {token}"})
    assert (asked.status_code, "Sparrow-Renew-Token" in asked.headers) == (204, False)
    assert abs(seen_of(client) - seen) < 60


def seen_of(client):
    """Return when a device was seen last, in seconds of the coordinator's clock."""
    (device,) = client.get("/v1/federations/default/devices", headers=OBSERVER).json()
    return datetime.fromisoformat(device["seen_at"]).timestamp()


def test_a_revoked_device_stays_out_whatever_it_holds(start, folder):
    client = start()
    session(client, folder)
    (device,) = client.get("/v1/federations/default/devices", headers=OBSERVER).json()
    path = f"/v1/devices/{device['device_id']}"
    client.patch(
        path, json={"revoked": True}, headers={"Authorization": "Bearer the-chief-s-secret"}
    ).raise_for_status()
    with pytest.raises(Refused) as refused:
        session(client, folder)
    assert refused.value.status == 401
