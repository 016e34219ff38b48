"""A full disk, a lost database, clients that dribble: the coordinator says so, once, and goes on when it can."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from unittest.mock import Mock

import psycopg
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from edge_sdk.device.transport import Transport
from sparrow.coordinator import app
from sparrow.coordinator.api import connections
from sparrow.coordinator.calls import uploads
from sparrow.coordinator.calls.bodies import Downloads
from sparrow.coordinator.calls.threads import Batches, Threads
from sparrow.coordinator.errors import NotFound, Unavailable, UnknownMethod
from sparrow.coordinator.fleet.serving import ServedModels
from sparrow.coordinator.rounds.engine import Rounds
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage import database, store
from sparrow.protocol import bundle
from sparrow.protocol.errors import BundleError
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import httpx

from ...disks import fill, small_disk
from .test_contract import DIGITS, ask, assert_problem, enrol, open_app, put, settings_of

pytestmark = pytest.mark.integration  # serves from a real port to many threads

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


# --- the coordinator's own faults --------------------------------------------------------------------------------


def unreadable_settings(*_, **__):
    return FederationSettings.model_validate({"rounds": "many"})


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("sparrow.protocol.bundle.encode", BundleError("training diverged: a value is not finite")),
        ("sparrow.coordinator.rounds.dispatch.settings_of", unreadable_settings),
        ("sparrow.coordinator.models.global_models.load_method", UnknownMethod("fedspu is not installed")),
    ],
)
def test_a_fault_of_the_coordinator_never_ends_a_device(open_app, monkeypatch, train, place, fault):
    client = open_app()
    first, second = (enrol(client, name)[1] for name in ("one", "two"))
    become(lambda: client.get("/v1/federations/default/rounds").json())  # it has opened the round
    waits = []
    with monkeypatch.context() as broken:
        broken.setattr(place, fault if callable(fault) else Mock(side_effect=fault))
        # A client for each: the server closes the connection after such an answer.
        answer = httpx.get(f"{client.base_url}/v1/federations/default/assignment", headers=first)
        assert_problem(answer, 500, "the coordinator failed to handle this call; try again")
        assert answer.headers["retry-after"] == "5"
        with httpx.Client(base_url=client.base_url) as device:
            transport = Transport(device, sleep=lambda seconds: (waits.append(seconds), broken.undo()))
            transport.token = first["Authorization"].removeprefix("Bearer ")
            assert transport.assignment("default", 0.0, None)[0].round == 1, "it asks again, and goes on"
    assert waits[0] >= 5
    finish_round(client, [(headers, ask(client, headers)) for headers in (first, second)], train)


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
    assert_problem(client.get("/readyz"), 503, "is full", "check the database and the disk")
    assert client.get("/healthz").status_code == 200
    assert client.get("/v1/federations/default").json()["status"] == "running", "who only looks is answered"
    assert 1 <= len(said(caplog)) <= 2, "a line for the blobs, and one for the records"
    assert not [record for record in caplog.records if record.exc_info], "and no tracebacks"
    assert not list((small_disk / "data").rglob("*.partial"))

    others.unlink()
    become(lambda: client.get("/readyz").status_code == 200)
    finish_round(client, devices, train)
    assert said(caplog, logging.WARNING)[-1].endswith("writing works again")


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
            assert_problem(answer, 503, "cannot reach its records", "retry later")
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


# --- damaged records and models ----------------------------------------------------------------------------------


def test_a_damaged_page_of_the_records_is_said_once_and_never_ready_again(open_app, tmp_path, train, caplog):
    client = open_app()
    devices = start_round(client)
    records = tmp_path / "data" / "coordinator.sqlite3"
    with closing(sqlite3.connect(records)) as others:
        others.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with records.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (records.stat().st_size - 4096))
        others.execute("PRAGMA user_version=1")  # whoever has pages in memory reads them again
    for headers, assignment in devices:
        answer = put(client, headers, assignment, train(DIGITS.manifest, assignment))
        assert_problem(answer, 503, "records are damaged", "its operator")
        assert answer.headers["retry-after"] == "5"
    for _ in range(2):
        assert_problem(client.get("/readyz"), 503, "records are damaged")
    assert client.get("/healthz").status_code == 200
    assert said(caplog) == [said(caplog)[0]]
    assert "restore a backup (sparrow restore)" in said(caplog)[0]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_damaged_model_is_not_served_and_readyz_names_it_until_it_is_restored(open_app, tmp_path, caplog):
    client = open_app()
    assert client.get("/readyz").status_code == 200
    (model,) = (tmp_path / "data" / "blobs" / "1" / "models").iterdir()
    whole = model.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        model.write_bytes(damaged)
        answer = client.get("/v1/federations/default/model")
        assert_problem(answer, 503, "damaged or missing", "retry after its operator has restored it")
        assert answer.headers["retry-after"] == "5"
        assert_problem(client.get("/readyz"), 503, f"1/models/{model.name} is damaged", "from a backup")
    assert len(said(caplog)) == 1
    model.write_bytes(whole)
    assert client.get("/readyz").status_code == 200
    assert said(caplog, logging.WARNING)[-1].endswith("is intact again")
    assert client.get("/v1/federations/default/model").content == whole


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


def enrolment(client):
    """A call that enrols a device of this number."""

    # Its pool keeps no idle connection: one might be closed that another thread has just been given.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    crowd = httpx.Client(base_url=client.base_url, timeout=60, limits=limits)

    def enrol_one(number):
        body = {"name": f"device-{number}", "enrolment_key": 32 * "k"}
        return crowd.post("/v1/federations/default/devices", json=body)

    return enrol_one


def test_a_locked_database_takes_neither_health_nor_readers_with_it(open_app, tmp_path, impatient, train):
    client = open_app(limit_loopback=False)
    devices = start_round(client)
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as somebody:
        somebody.execute("BEGIN IMMEDIATE")
        assert_problem(client.get("/readyz"), 503, "have not answered for")

        writers = all_at_once(enrolment(client), 60)  # more than there are threads
        for _ in range(5):
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/federations/default").json()["devices"] == 2
            assert (
                client.get("/v1/federations/default", headers={"Authorization": "Bearer nobody's"}).status_code == 200
            )
        assert not any(each.done() for each in writers[:16])
        for answer in (each.result() for each in writers):
            assert_problem(answer, 503, "retry later")
            assert answer.headers["retry-after"] == "5"
        become(lambda: "keeps the coordinator's records locked" in client.get("/readyz").text)
        assert client.get("/v1/federations/default/rounds").json()[0]["status"] == "open", "though none can be kept"
        assert b"sparrow_rounds_thread_still_seconds" in client.get("/metrics").content
    become(lambda: client.get("/readyz").status_code == 200)
    assert client.get("/v1/federations/default").json()["devices"] == 2, "who was sent away is not written down later"
    finish_round(client, devices, train)


def test_a_crowd_of_writers_is_not_refused(open_app):
    assert {each.result().status_code for each in all_at_once(enrolment(open_app()), 200)} == {201}


def test_waiting_calls_give_up_only_if_no_thread_makes_progress():
    async def crowd(patience, seconds):
        threads = Threads(1, patience)
        return await asyncio.gather(*(threads.run(time.sleep, seconds) for _ in range(12)), return_exceptions=True)

    assert asyncio.run(crowd(0.5, 0.1)) == [None] * 12, "though the last one waits for 1.1 s"
    first, *others = asyncio.run(crowd(0.1, 0.5))
    assert first is None
    assert {type(each) for each in others} == {Unavailable}


def test_calls_that_come_while_a_batch_is_done_are_the_next():
    async def crowd(free):
        done = []

        def work(batch):
            done.append(list(batch))
            assert free.wait(20)
            return [ValueError(item) if item == 3 else 2 * item for item in batch]

        batches = Batches("batches", work, 20.0)
        first = asyncio.ensure_future(batches.run(0))
        while not done:
            await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(batches.run(item)) for item in range(1, 5)]
        await asyncio.sleep(0)
        others[0].cancel()  # its caller has gone
        free.set()
        results = await asyncio.gather(first, *others[1:], return_exceptions=True)
        batches.close()
        return done, results

    done, (zero, two, three, four) = asyncio.run(crowd(threading.Event()))
    assert done == [[0], [1, 2, 3, 4]]
    assert (zero, two, four) == (0, 4, 8)
    assert isinstance(three, ValueError), "one's error is nobody else's"


def test_calls_behind_a_slow_batch_give_up():
    async def crowd(free):
        batches = Batches("batches", lambda batch: [free.wait(20) for _ in batch], 0.1)
        first = asyncio.ensure_future(batches.run(0))
        await asyncio.sleep(0.01)
        others = await asyncio.gather(*(batches.run(item) for item in (1, 2)), return_exceptions=True)
        free.set()
        last = await asyncio.wait_for(asyncio.gather(first, batches.run(3)), 20)
        batches.close()
        return others, last

    others, last = asyncio.run(crowd(threading.Event()))
    assert {type(each) for each in others} == {Unavailable}
    assert last == [True, True], "it goes on when the batch is done after all"


def test_one_addresss_calls_are_not_in_all_threads(open_app, monkeypatch):
    client = open_app(limit_loopback=True, device_calls_per_second=100.0)
    _, other = enrol(client, "other")
    free, inside = threading.Event(), []

    def model(self, name, version=None):
        if version == 7:
            inside.append(name)
            assert free.wait(60)
        raise NotFound("no such model")

    monkeypatch.setattr(ServedModels, "model", model)
    calls = all_at_once(lambda number: client.get("/v1/federations/default/model", params={"version": 7}), 60)
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
        calls = all_at_once(enrolment(client), 60)
        assert client.get("/healthz").status_code == 200
        assert not any(each.done() for each in calls)
        assert client.get("/readyz").status_code == 503
        for answer in (each.result() for each in calls):
            assert_problem(answer, 503, "retry later")
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
    assert_problem(client.get("/readyz"), 503, "has not moved for")
    assert client.get("/healthz").status_code == 200
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["sparrow_rounds_thread_still_seconds"] > 0.2
    assert found["sparrow_moves_rounds"] == 1
    held.set()
    become(lambda: client.get("/readyz").status_code == 200)
    dies.append(True)
    become(lambda: "the round thread has ended" in client.get("/readyz").text)


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
        assert "RequestTimeout" in answer
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


def update_of(headers, assignment, size, **more):
    """The head of a device's update of so many bytes."""
    lines = [f"PUT /v1/assignments/{assignment.assignment_id}/update HTTP/1.1", "Host: 127.0.0.1"]
    more = {"Content-Type": bundle.MEDIA_TYPE, "Content-Length": size, **headers, **more}
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in more.items()), "\r\n"]).encode()


def test_a_body_held_a_byte_short_is_ended_whatever_was_sent_before(open_app, train):
    client = open_app(body_patience_seconds=0.3, body_bytes_per_second=1000)
    devices = start_round(client)
    with dribbling(client, update_of(*devices[0], 1_000_000) + bytes(999_999)) as connection:
        answer = connection.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert "at 1000 bytes/s or more" in answer
    finish_round(client, devices, train)


# --- heads without end -------------------------------------------------------------------------------------------

START = b"GET /v1/federations HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /v1/federations/x/devices HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
HEADS = {
    "lines": START + b"X: y\r\n" * 200,
    "long lines": START + (b"X: " + b"y" * 5000 + b"\r\n") * 8,
    "one header": START + b"X: " + b"y" * 60_000,
    "one header's name": START + b"X" * 60_000,
    "a URL": b"GET /" + b"y" * 9000,
    "a URL of a whole head": b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a second request's": START + b"\r\n" + START + b"X: y\r\n" * 200,
    "an upgrade's": START + UPGRADE + b"X: y\r\n" * 200,
    "trailers": CHUNKED + b"0\r\n" + b"X: y\r\n" * 200,
    "a trailer": CHUNKED + b"0\r\nX: " + b"y" * 60_000,
    "a chunk's extension": CHUNKED + b"1;" + b"y" * 60_000,
    "requests that wait": (START + b"\r\n") * 20,
}


def last_answer(client, sent):
    """What comes after all of this was sent, to the connection's end."""
    with dribbling(client, sent) as connection:
        connection.settimeout(10)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:  # some of it came after the answer
            pass
        return found


def test_heads_without_end_are_refused(open_app):
    client = open_app()
    for name, sent in HEADS.items():
        answer = last_answer(client, sent)
        assert b"HTTP/1.1 431 " in answer, name
        if name == "lines":
            assert b"application/problem+json" in answer
            assert b"32 KiB, 100 headers or a URL of 8 KiB" in answer
    many = {f"X-{number}": "y" * 250 for number in range(90)}
    assert client.get("/v1/federations", headers=many).status_code == 200
    assert client.get(f"/v1/federations/{'y' * 7000}").status_code == 404


def test_plain_uvicorn_has_the_limits(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "coordinator.main:app", "--port", str(port)]
    settings = {"COORDINATOR_DATA_DIR": str(tmp_path / "data"), "COORDINATOR_DEFAULT_TASK": ""}
    with subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                for _ in range(600):
                    try:
                        client.get("/healthz")
                        break
                    except httpx.TransportError:
                        time.sleep(0.1)
                assert b"HTTP/1.1 431 " in last_answer(client, HEADS["one header"])
        finally:
            process.terminate()
        assert "does not limit heads" not in process.stderr.read()


@contextmanager
def served(app, **config):
    """Serve an ASGI application on a port of this machine; yields the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1, **config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def application(settings, calls):
    """An application without end: it installs the limits, and notes how each answer has ended."""

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            connections.install(receive, settings)
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await gone  # the request
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await asyncio.sleep(0)
        calls.append((await gone)["type"])

    return app


def test_another_protocol_is_warned_of_once(caplog, tmp_path):
    with served(application(Settings(data_dir=tmp_path), []), http="h11"):
        pass
    assert [record.levelname for record in caplog.records if "does not limit heads" in record.getMessage()] == [
        "WARNING"
    ]


def test_who_does_not_read_an_answer_is_disconnected(tmp_path):
    ended = []
    settings = Settings(data_dir=tmp_path, body_patience_seconds=0.1, body_bytes_per_second=1000)
    with served(application(settings, ended)) as port, ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(START + b"\r\n")
        become(lambda: ended == ["http.disconnect"] * 3)


def test_an_answer_to_one_of_many_requests_at_once_ends_with_its_connection(tmp_path, caplog):
    """uvicorn alone goes on sending the first answer: it tells the latest request that its caller has gone."""
    ended = []
    with served(application(Settings(data_dir=tmp_path), ended)) as port:
        for requests in (2, 20):  # the caller leaves; more wait than may
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(START + b"\r\n")
                connection.recv(4096)
                connection.sendall((START + b"\r\n") * (requests - 1))
                if requests > 2:
                    with suppress(ConnectionResetError):
                        while found := connection.recv(65536):
                            assert b"431" not in found, "it would be read as a part of the first answer"
            become(lambda: len(ended) == (1 if requests == 2 else 2))  # noqa: B023 - called at once
    assert ended == ["http.disconnect"] * 2
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_who_sends_on_what_was_answered_is_disconnected(open_app):
    client = open_app(body_patience_seconds=1)
    head = b"POST /v1/federations/default/devices HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000\r\n\r\n"
    with dribbling(client, head) as connection:
        assert b" 413 " in connection.recv(65536)

        def sends():
            try:
                connection.sendall(b"y")
            except OSError:
                return False
            return True

        become(lambda: not sends())


# --- connections -------------------------------------------------------------------------------------------------


def opened(client, count):
    """So many connections without a request."""
    stack = ExitStack()
    for _ in range(count):
        stack.enter_context(dribbling(client, b""))
    return stack


def fresh(client, path):
    """One call on a connection of its own."""
    with httpx.Client(base_url=client.base_url, timeout=30) as other:
        return other.get(path)


def test_an_address_has_so_many_connections_and_devices_their_own(open_app):
    client = open_app(address_connections=5, limit_loopback=True)
    _, headers = enrol(client, "one")
    poll = {"url": "/v1/federations/default/assignment", "headers": headers}
    assert client.get(**poll).status_code == 204  # from here on the connection is the device's
    with opened(client, 5):
        become(lambda: fresh(client, "/v1/federations").status_code == 429)
        assert_problem(fresh(client, "/v1/federations"), 429, "too many connections from this address")
        assert fresh(client, "/v1/federations").headers["retry-after"] == "5"
        assert fresh(client, "/healthz").status_code == 200
        assert client.get(**poll).status_code == 204
    become(lambda: fresh(client, "/v1/federations").status_code == 200)


def test_loopback_and_proxies_are_not_counted_and_a_customers_network_once(tmp_path):
    limits = connections.Limits(Settings(data_dir=tmp_path), "127.0.0.1, 192.0.2.7,10.0.0.0/8")
    assert [limits.key(host) for host in ("127.0.0.1", "::1", "192.0.2.7", "10.1.2.3", None)] == [None] * 5
    assert limits.key("192.0.2.8") == "192.0.2.8"
    assert limits.key("2001:db8::1") == limits.key("2001:db8::2:1") != limits.key("2001:db8:0:1::1")
    assert connections.Limits(Settings(data_dir=tmp_path, address_connections=0)).of_address > 64


def test_descriptors_are_left_for_health(open_app, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    client = open_app()
    with opened(client, 21):
        become(lambda: fresh(client, "/v1/federations").status_code == 503)
        refused = fresh(client, "/v1/federations")
        assert_problem(refused, 503, "too many connections")
        assert refused.headers["retry-after"] == "5"
        assert fresh(client, "/healthz").status_code == 200
    become(lambda: fresh(client, "/v1/federations").status_code == 200)


# --- calls of one device -----------------------------------------------------------------------------------------


def test_a_device_has_one_long_poll(open_app):
    client = open_app()
    _, headers = enrol(client, "one")
    assert client.get("/v1/federations/default/assignment", headers=headers).status_code == 204  # its token is known
    head = "\r\n".join(
        ["GET /v1/federations/default/assignment?wait=50 HTTP/1.1", "Host: 127.0.0.1", *map(": ".join, headers.items())]
    )
    with ExitStack() as stack:
        polls = []
        for _ in range(12):
            polls.append(stack.enter_context(dribbling(client, f"{head}\r\n\r\n".encode())))
            if len(polls) > 1:
                assert polls[-2].recv(65536).startswith(b"HTTP/1.1 204 "), "the newer one has ended it"
        polls[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            polls[-1].recv(1)
    assert client.get("/v1/federations/default/assignment", headers=headers).status_code == 204


def test_a_device_has_few_calls_at_once(open_app, train):
    client = open_app()
    devices = start_round(client)
    headers, assignment = devices[0]
    path = f"/v1/assignments/{assignment.assignment_id}/heartbeat"
    with ExitStack() as stack:

        def is_refused_beside_one_more():  # which may be refused itself, if a heartbeat is the fourth
            stack.enter_context(dribbling(client, update_of(headers, assignment, 100_000) + b"few"))
            return client.post(path, headers=headers).status_code == 429

        become(is_refused_beside_one_more)
        answer = client.post(path, headers=headers)
        assert_problem(answer, 429, "4 calls in progress")
        assert answer.headers["retry-after"] == "1"
        assert client.post(path.replace(assignment.assignment_id, devices[1][1].assignment_id), headers=devices[1][0])
    become(lambda: client.post(path, headers=headers).status_code == 204)
    finish_round(client, devices, train)


def test_a_large_update_without_a_range_is_checked_first_and_goes_to_the_disk(open_app, train, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "GATHERED_BYTES", 1000)
    monkeypatch.setattr(uploads, "WRITTEN_BYTES", 1000)
    client = open_app()
    devices = start_round(client)
    headers, assignment = devices[0]
    body = train(DIGITS.manifest, assignment)
    with dribbling(client, update_of(devices[1][0], assignment, len(body))) as connection:
        assert b"HTTP/1.1 403 " in connection.recv(65536), "before a byte of it was sent"
    with dribbling(client, update_of(headers, assignment, len(body)) + body[:-1]) as connection:
        parts = tmp_path / "data" / "uploads"
        become(lambda: sum(part.stat().st_size for part in parts.rglob("*.part")) > len(body) - 1000)
        connection.sendall(body[-1:])
        assert b"HTTP/1.1 201 " in connection.recv(65536)
    assert put(client, headers, assignment, body).status_code == 200
    assert put(client, *devices[1], train(DIGITS.manifest, devices[1][1])).status_code == 201
    assert not list(parts.rglob("*.part"))


def test_small_updates_without_room_in_memory_go_to_the_disk(open_app, train, monkeypatch):
    monkeypatch.setattr(uploads, "SMALL_BYTES", 0)
    client = open_app()
    finish_round(client, start_round(client), train)


def test_a_body_that_many_download_counts_once_and_others_wait():
    downloads, shared, other = Downloads(100), bytes(80), bytes(range(30))
    assert [downloads.take(each) for each in (shared, memoryview(shared)[5:], other)] == [True, True, False]
    downloads.give_back(memoryview(shared)[5:])
    assert not downloads.take(other)
    downloads.give_back(shared)
    assert downloads.take(other)
    downloads.give_back(other)
    assert downloads.take(bytes(1000)), "however large, if it is the only one"


@pytest.mark.parametrize("status", [408, 503, 507])
def test_devices_come_again(status):
    answers = iter([httpx.Response(status, json={"detail": "full"}, headers={"Retry-After": "7"}), httpx.Response(201)])
    waits = []
    client = httpx.Client(base_url="http://c", transport=httpx.MockTransport(lambda request: next(answers)))
    transport = Transport(client, sleep=waits.append)
    transport.update("a", b"body", "application/json")
    assert len(waits) == 1
    assert waits[0] >= 7
