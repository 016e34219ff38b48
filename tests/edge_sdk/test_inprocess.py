"""An application in the caller's own process behaves as behind a socket."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request, Response

from edge_sdk.device.transport import Transport
from edge_sdk.publish import publish
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.messages import Enrol
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process as inprocess
from sparrow.transport import httpx

KEY = "k" * 32


class Life:
    """An application that notes when it is started and stopped, and by whom."""

    def __init__(self, *, fails_to_start=False, fails_to_stop=False):
        self.events = []
        self.tasks = []

        @asynccontextmanager
        async def life(app):
            self.tasks.append(asyncio.current_task())
            if fails_to_start:
                raise RuntimeError("no room")
            self.events.append("started")
            yield
            self.tasks.append(asyncio.current_task())
            self.events.append("stopped")
            if fails_to_stop:
                raise RuntimeError("cannot let go")

        self.app = FastAPI(lifespan=life)

        @self.app.put("/echo")
        async def echo(request: Request):
            return {"headers": dict(request.headers), "body": (await request.body()).decode()}

        @self.app.get("/broken")
        async def broken():
            raise ZeroDivisionError("deliberately")

        @self.app.get("/meet")
        async def meet():
            self.met += 1
            while self.met < 2:
                await asyncio.sleep(0.001)
            return Response()

        @self.app.get("/forever")
        async def forever():
            self.events.append("asked")
            try:
                await asyncio.Event().wait()
            finally:
                self.events.append("cancelled")

        self.met = 0


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "asgi"]


def test_the_application_is_started_before_the_first_call_and_stopped_after_the_last():
    life = Life()
    with inprocess.running(life.app) as client:
        assert life.events == ["started"]
        assert client.put("/echo", content=b"x").status_code == 200
        assert threads() == ["asgi"]
    assert life.events == ["started", "stopped"]
    assert threads() == []


def test_one_task_starts_and_stops_it():
    """Task groups and cancel scopes that a lifespan holds open can be left by the task that entered them alone."""
    life = Life()
    with inprocess.running(life.app):
        pass
    assert life.tasks[0] is life.tasks[1]


def test_it_is_stopped_when_the_caller_fails():
    life = Life()
    with pytest.raises(KeyboardInterrupt), inprocess.running(life.app):
        raise KeyboardInterrupt
    assert life.events == ["started", "stopped"]
    assert threads() == []


def test_what_keeps_it_from_starting_is_raised():
    life = Life(fails_to_start=True)
    with pytest.raises(RuntimeError, match="no room"), inprocess.running(life.app):
        pytest.fail("it is not running")
    assert threads() == []


def test_what_keeps_it_from_stopping_is_raised():
    life = Life(fails_to_stop=True)
    with pytest.raises(RuntimeError, match="cannot let go"), inprocess.running(life.app):
        pass
    assert threads() == []


def test_a_call_that_nobody_waits_for_any_more_ends_with_the_application():
    life = Life()
    with inprocess.running(life.app) as client:
        pool = ThreadPoolExecutor(1)
        call = pool.submit(client.get, "/forever")
        while "asked" not in life.events:
            client.put("/echo")
    assert call.exception(10) is not None
    pool.shutdown()
    assert life.events == ["started", "asked", "stopped", "cancelled"]


def test_a_body_sent_in_parts_arrives_whole_with_its_length():
    life = Life()

    def parts():
        yield b"one "
        yield b"two"

    with inprocess.running(life.app) as client:
        whole = client.put("/echo", content=b"one two").json()
        announced = client.put("/echo", content=parts(), headers={"Content-Length": "7"}).json()
        chunked = client.put("/echo", content=parts()).json()
    for answer in (whole, announced, chunked):
        assert answer["body"] == "one two"
        assert "transfer-encoding" not in answer["headers"]
    assert whole["headers"]["content-length"] == announced["headers"]["content-length"] == "7"


def test_what_the_application_fails_with_is_raised_and_it_goes_on():
    life = Life()
    with inprocess.running(life.app) as client:
        with pytest.raises(ZeroDivisionError, match="deliberately"):
            client.get("/broken")
        assert client.put("/echo", content=b"x").json()["body"] == "x"


def test_calls_from_two_threads_do_not_wait_for_each_other():
    life = Life()
    with inprocess.running(life.app) as client, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(client.get, "/meet") for _ in range(2)]
        assert [answer.result(20).status_code for answer in answers] == [200, 200]


# --- the coordinator ---------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path):
    settings = FederationSettings(rounds=1, deadline_seconds=600)
    app = create_app(Settings(data_dir=tmp_path, default_settings=settings, tick_seconds=0.05))
    with inprocess.running(app) as client:
        yield client


def enrolled(client, name):
    transport = Transport(client)
    transport.token = transport.enrol("default", Enrol(name=name, enrolment_key=KEY)).token
    return transport


def test_a_payload_comes_whole_in_ranges_or_not_again(client):
    first = enrolled(client, "one")
    enrolled(client, "two")
    assignment, _ = first.assignment("default", 20, None)
    before = first.traffic.down
    body = first.payload(assignment.assignment_id, assignment.payload)
    assert len(body) == assignment.payload.bytes == first.traffic.down - before
    path = f"/v1/assignments/{assignment.assignment_id}/payload"
    headers = {"Authorization": f"Bearer {first.token}"}
    with client.stream("GET", path, headers={**headers, "Range": "bytes=100-"}) as part:
        assert part.status_code == 206
        assert b"".join(part.iter_raw()) == body[100:]
        etag = part.headers["ETag"]
    assert client.get(path, headers={**headers, "If-None-Match": etag}).status_code == 304


def test_a_coordinator_in_process_keeps_its_records_for_the_next_one(tmp_path):
    uids = []
    for _ in range(2):
        with inprocess.running(create_app(Settings(data_dir=tmp_path, default_task=""))) as client:
            uids.append(publish(inprocess.ADDRESS, "night", "digits", exist_ok=True, client=client, rounds=2).uid)
    assert uids[0] == uids[1]


def test_a_refusal_is_an_answer(client):
    assert client.get("/v1/federations/none").headers["content-type"] == "application/problem+json"
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        client.get("/v1/federations/none").raise_for_status()
