"""What callers may rely on when a coordinator dies, or stands still, while they call."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Timer

import pytest

from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.messages import Assignment
from sparrow.transport import httpx

CROWD = 15
KILLS = 2
MANIFEST = load_builtin("digits").manifest


def enrol(http, name):
    request = {"name": name, "enrolment_key": name.ljust(32, "k")}
    answer = http.post("/v1/federations/crowd/devices", json=request).raise_for_status()
    return {"Authorization": f"Bearer {answer.json()['token']}"}


@pytest.mark.slow
def test_what_was_acknowledged_survives_whenever_the_coordinator_dies(coordinator, train):
    settings = {"cohort": CROWD, "min_devices": CROWD, "rounds": 1, "deadline_seconds": 600, "evaluation_interval": 0}
    coordinator.create("crowd", **settings)
    updates = {}
    with httpx.Client(base_url=coordinator.url, timeout=30) as http:
        for headers in [enrol(http, f"device-{number:02d}") for number in range(CROWD)]:
            answer = http.get("/v1/federations/crowd/assignment", params={"wait": 20}, headers=headers)
            assignment = Assignment.model_validate(answer.json())
            path = f"/v1/assignments/{assignment.assignment_id}/update"
            updates[path] = ({**headers, "Content-Type": bundle.MEDIA_TYPE}, train(MANIFEST, assignment))
    acknowledged = {}

    def send(path, enough):
        headers, body = updates[path]
        try:
            answer = httpx.put(f"{coordinator.url}{path}", content=body, headers=headers, timeout=30)
        except httpx.TransportError:
            return  # nobody was told anything
        assert answer.status_code in (200, 201), answer.text
        acknowledged.setdefault(path, []).append(answer.status_code)
        if len(acknowledged) >= enough:
            died.set()

    for wave in range(KILLS):
        died = Event()
        begun = list(updates)[: (wave + 1) * CROWD // KILLS]
        waiting = [path for path in begun if path not in acknowledged]
        with ThreadPoolExecutor(CROWD) as pool:
            enough = len(acknowledged) + 1
            sent = [pool.submit(send, path, enough) for path in waiting]
            assert died.wait(60)
            coordinator.kill()
            for each in sent:
                each.result()
        told = dict(acknowledged)
        coordinator.start()
        for path in told:
            send(path, CROWD + 1)
            assert acknowledged[path][-1] == 200, "the same again: it is there"
    died = Event()
    for path in updates:
        send(path, CROWD + 1)
    for codes in acknowledged.values():
        assert codes.count(201) <= 1
    coordinator.wait_for_log("round 1 closed with 15 updates")
    (record,) = coordinator.rounds("crowd")
    assert record["updates"] == CROWD


@pytest.mark.slow
def test_a_request_that_came_while_the_coordinator_stood_still_is_answered(coordinator):
    """On a connection that it would have closed as idle, after 5 s, had nothing come."""
    coordinator.get("/healthz")
    coordinator.signal(signal.SIGSTOP)
    goes_on = Timer(7, coordinator.signal, [signal.SIGCONT])
    goes_on.start()
    assert coordinator.http.get("/healthz").status_code == 200
    goes_on.join()
