"""A full disk, a lost database, clients that dribble: the coordinator says so, once, and goes on when it can."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from contextlib import contextmanager

import httpx
import pytest

from edge_sdk.device.transport import Transport
from edge_sdk.protocol import bundle
from sparrow.coordinator.api import connections

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


def test_heads_that_dribble_are_closed(open_app, monkeypatch, train):
    monkeypatch.setattr(connections.LimitedConnection, "head_seconds", 0.3)
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
