"""A full disk, a lost database, clients that dribble: the coordinator says so, once, and goes on when it can."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import httpx
import psycopg
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from edge_sdk.device.transport import Transport
from edge_sdk.protocol import bundle
from sparrow.coordinator import app
from sparrow.coordinator.api.headers import TimedHeaders
from sparrow.coordinator.api.threads import Threads
from sparrow.coordinator.errors import NotFound, Unavailable
from sparrow.coordinator.fleet.federations import Federations
from sparrow.coordinator.rounds.engine import Rounds
from sparrow.coordinator.storage import database, store

from ...disks import fill, small_disk
from .test_contract import DIGITS, ask, assert_problem, enrol, open_app, put, settings_of

__all__ = ["open_app", "settings_of", "small_disk"]  # fixtures


def said(caplog, level=logging.ERROR):
    """What the log says of storage."""
    logged = [record for record in caplog.records if record.name == "sparrow.coordinator.storage.failing"]
    return [record.getMessage() for record in logged if record.levelno == level]


def become(condition):
    """Wait until it holds: the coordinator looks again at every tick, which is 0.05 s here."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("in vain")


def start_round(client):
    """Two devices and their first assignments."""
    headers = [enrol(client, name)[1] for name in ("one", "two")]
    return [(each, ask(client, each)) for each in headers]


def finish_round(client, devices, train):
    """Both updates are taken, and the next round opens."""
    for headers, assignment in devices:
        assert put(client, headers, assignment, train(DIGITS.manifest, assignment)).status_code == 201
    assert ask(client, devices[0][0]).round == 2
    assert client.get("/v1/federations/default/rounds").json()[0]["updates"] == 2


# --- a full disk -------------------------------------------------------------------------------------------------


def test_a_full_disk_is_said_and_survived(open_app, small_disk, train, caplog):
    client = open_app(data_dir=small_disk / "data", min_free_bytes=0)
    devices = start_round(client)
    others = fill(small_disk)
    for headers, assignment in devices * 4:
        answer = put(client, headers, assignment, train(DIGITS.manifest, assignment))
        assert_problem(answer, 507, "disk is full", "its operator")
        assert answer.headers["retry-after"] == "5"
    if (small_disk / "data" / "coordinator.sqlite3").exists():
        refused = client.post("/v1/federations/default/devices", json={"name": "x", "enrolment_key": 32 * "k"})
        assert refused.status_code in (503, 507)
    assert_problem(client.get("/readyz"), 503, "disk is full", "check the database and the disk")
    assert client.get("/healthz").status_code == 200
    assert client.get("/v1/federations/default").json()["status"] == "running", "who only looks is answered"
    assert 1 <= len(said(caplog)) <= 2, "a line for the blobs, and one for the records"
    assert not [record for record in caplog.records if record.exc_info], "and no tracebacks"
    assert not list((small_disk / "data").rglob("*.partial"))

    others.unlink()
    become(lambda: client.get("/readyz").status_code == 200)
    finish_round(client, devices, train)
    assert said(caplog, logging.WARNING)[-1].endswith("written again; going on")


def test_a_round_whose_model_does_not_fit_closes_when_there_is_room(open_app, train, caplog, monkeypatch):
    """On any machine: what the disk answers is put in its mouth."""
    client, flush, full = open_app(), os.fsync, [True]

    def no_room_for_models(number):
        name = os.readlink(f"/proc/self/fd/{number}")
        if full[0] and "/models/" in name and name.endswith(".partial"):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        flush(number)

    devices = start_round(client)
    monkeypatch.setattr(os, "fsync", no_room_for_models)
    for headers, assignment in devices:
        assert put(client, headers, assignment, train(DIGITS.manifest, assignment)).status_code == 201
    become(lambda: said(caplog))
    assert client.get("/v1/federations/default").json()["round"] == 0
    full[0] = False
    assert ask(client, devices[0][0]).round == 2
    assert client.get("/v1/federations/default/rounds").json()[0]["updates"] == 2
    assert not [record for record in caplog.records if record.exc_info]


# --- a lost database ---------------------------------------------------------------------------------------------


def test_a_database_that_goes_and_comes_back(open_app, postgresql, train, caplog):
    client = open_app(database_url=postgresql.new_database())
    devices = start_round(client)
    postgresql.stop()
    try:
        for headers, assignment in devices * 3:
            answer = put(client, headers, assignment, train(DIGITS.manifest, assignment))
            assert_problem(answer, 503, "cannot reach its records", "try again")
            assert answer.headers["retry-after"] == "5"
        assert_problem(client.get("/readyz"), 503, "cannot reach its records")
        assert client.get("/healthz").status_code == 200
        assert len(said(caplog)) == 1
    finally:
        postgresql.start()
    become(lambda: client.get("/readyz").status_code == 200)
    finish_round(client, devices, train)
    assert not [record for record in caplog.records if record.exc_info]
    assert len(said(caplog)) == len(said(caplog, logging.WARNING)) == 1


# --- a locked database -------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """What waits five seconds for a lock waits one."""
    for module in (database, store, app):
        monkeypatch.setattr(module, "BUSY_SECONDS", 1)
    monkeypatch.setattr(app, "READY_SECONDS", 0.5)


def all_at_once(call, count):
    """So many calls at a time: their futures."""
    pool = ThreadPoolExecutor(count)
    calls = [pool.submit(call, number) for number in range(count)]
    pool.shutdown(wait=False)
    return calls


def test_a_locked_database_takes_neither_health_nor_readers_with_it(open_app, tmp_path, impatient, train):
    client = open_app(limit_loopback=False)
    devices = start_round(client)
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as somebody:
        somebody.execute("BEGIN IMMEDIATE")
        assert_problem(client.get("/readyz"), 503, "have not answered for")

        def enrol_another(number):
            body = {"name": f"device-{number}", "enrolment_key": 32 * "k"}
            return client.post("/v1/federations/default/devices", json=body)

        writers = all_at_once(enrol_another, 60)  # more than there are threads
        for _ in range(5):
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/federations/default").json()["devices"] == 2
            assert (
                client.get("/v1/federations/default", headers={"Authorization": "Bearer nobody's"}).status_code == 200
            )
        assert not any(each.done() for each in writers[:16])
        for answer in (each.result() for each in writers):
            assert_problem(answer, 503, "try again")
            assert answer.headers["retry-after"] == "5"
        become(lambda: "keeps the coordinator's records locked" in client.get("/readyz").text)
        assert client.get("/v1/federations/default/rounds").json()[0]["status"] == "open", "though none can be kept"
        assert b"sparrow_rounds_thread_still_seconds" in client.get("/metrics").content
    become(lambda: client.get("/readyz").status_code == 200)
    assert client.get("/v1/federations/default").json()["devices"] == 2, "who was sent away is not written down later"
    finish_round(client, devices, train)


def test_a_crowd_of_writers_is_not_refused(open_app):
    client = open_app()

    def enrol_one(number):
        body = {"name": f"device-{number}", "enrolment_key": 32 * "k"}
        return client.post("/v1/federations/default/devices", json=body)

    assert {each.result().status_code for each in all_at_once(enrol_one, 200)} == {201}


def test_who_waits_for_a_thread_gives_up_only_where_none_is_done_with_its_work():
    async def crowd(patience, seconds):
        threads = Threads(1, patience)
        return await asyncio.gather(*(threads.run(time.sleep, seconds) for _ in range(12)), return_exceptions=True)

    assert asyncio.run(crowd(0.5, 0.1)) == [None] * 12, "though the last one waits for 1.1 s"
    first, *others = asyncio.run(crowd(0.1, 0.5))
    assert first is None
    assert {type(each) for each in others} == {Unavailable}


def test_one_callers_calls_are_not_in_all_threads(open_app, monkeypatch):
    client = open_app(limit_loopback=True, device_calls_per_second=100.0)
    (_, greedy), (_, other) = enrol(client, "greedy"), enrol(client, "other")
    free, inside = threading.Event(), []

    def model(self, name, version=None):
        if version == 7:
            inside.append(name)
            assert free.wait(60)
        raise NotFound("no such model")

    monkeypatch.setattr(Federations, "model", model)
    calls = all_at_once(
        lambda number: client.get("/v1/federations/default/model", params={"version": 7}, headers=greedy), 60
    )
    become(lambda: len(inside) >= 8)
    for _ in range(5):
        assert client.get("/v1/federations/default/model", headers=other).status_code == 404
    assert len(inside) == 8
    free.set()
    assert {each.result().status_code for each in calls} == {404}
    assert len(inside) == 60


def test_tables_that_somebody_locks_leave_health(open_app, postgresql, impatient, train):
    url = postgresql.new_database()
    client = open_app(database_url=url)
    devices = start_round(client)
    with psycopg.connect(url) as somebody:
        somebody.execute("LOCK TABLE federations, devices, tokens, alembic_version IN ACCESS EXCLUSIVE MODE")
        time.sleep(5.1)  # what was looked up before is forgotten
        calls = all_at_once(lambda _: client.get("/v1/federations/default/assignment", headers=devices[0][0]), 60)
        assert client.get("/healthz").status_code == 200
        assert not any(each.done() for each in calls)
        assert client.get("/readyz").status_code == 503
        for answer in (each.result() for each in calls):
            assert_problem(answer, 503, "try again")
    become(lambda: client.get("/readyz").status_code == 200)
    finish_round(client, devices, train)


# --- a thread of the rounds that does not move ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Exception in thread rounds")
def test_readiness_says_that_the_thread_of_the_rounds_hangs_or_has_ended(open_app, monkeypatch):
    held, advance, dies = threading.Event(), Rounds.advance, []

    def stuck(self):
        assert held.wait(60)
        if dies:
            raise SystemExit
        return advance(self)

    held.set()
    monkeypatch.setattr(Rounds, "advance", stuck)
    client = open_app()
    become(lambda: client.get("/readyz").status_code == 200)
    monkeypatch.setattr(app, "STALLED_SECONDS", 0.2)
    held.clear()
    become(lambda: client.get("/readyz").status_code == 503)
    assert_problem(client.get("/readyz"), 503, "the thread of the rounds has not moved for")
    assert client.get("/healthz").status_code == 200
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["sparrow_rounds_thread_still_seconds"] > 0.2
    assert found["sparrow_moves_rounds"] == 1
    held.set()
    become(lambda: client.get("/readyz").status_code == 200)
    dies.append(True)
    become(lambda: "the thread of the rounds has ended" in client.get("/readyz").text)


# --- clients that dribble ----------------------------------------------------------------------------------------


@contextmanager
def dribbling(client, head):
    """A connection on which this much of a request was sent."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as connection:
        connection.sendall(head)
        yield connection


def test_a_body_that_dribbles_is_ended_and_others_are_served(open_app, train, caplog):
    client = open_app(body_patience_seconds=0.3)
    devices = start_round(client)
    headers, assignment = devices[0]
    update = (
        f"PUT /v1/assignments/{assignment.assignment_id}/update HTTP/1.1\r\nHost: here\r\n"
        f"Authorization: {headers['Authorization']}\r\nContent-Type: {bundle.MEDIA_TYPE}\r\n"
        f"Content-Length: 1000\r\n\r\nfew"
    )
    enrolment = "POST /v1/federations/default/devices HTTP/1.1\r\nHost: here\r\nContent-Length: 300\r\n\r\n{"
    for request in (update, enrolment):
        with dribbling(client, request.encode()) as connection:
            answer = connection.makefile("rb").read().decode()  # to its end: the connection is closed
        assert answer.startswith("HTTP/1.1 408 ")
        assert "application/problem+json" in answer
        assert "bytes of the body came" in answer
        assert "retry-after: 5" in answer.lower()
    slow = [record for record in caplog.records if record.name == "sparrow.coordinator.api.middleware.body_limits"]
    assert len(slow) == 1, "once a minute"
    finish_round(client, devices, train)


class Impatient(TimedHeaders):
    head_seconds = 0.3


def test_heads_that_dribble_are_closed(open_app, monkeypatch, train):
    config = uvicorn.Config
    monkeypatch.setattr(uvicorn, "Config", lambda app, **known: config(app, http=Impatient, **known))
    client = open_app()
    with dribbling(client, b"") as nothing, dribbling(client, b"GET /healthz HTTP/1.1\r\nHost: he") as half:
        assert nothing.recv(1) == b""
        assert half.recv(1) == b""
    finish_round(client, start_round(client), train)


@pytest.mark.parametrize("status", [408, 503, 507])
def test_devices_come_again(status):
    answers = iter([httpx.Response(status, json={"detail": "full"}, headers={"Retry-After": "7"}), httpx.Response(201)])
    waits = []
    client = httpx.Client(base_url="http://c", transport=httpx.MockTransport(lambda request: next(answers)))
    transport = Transport(client, sleep=waits.append)
    transport.update("a", b"body", "application/json")
    assert len(waits) == 1
    assert waits[0] >= 7
