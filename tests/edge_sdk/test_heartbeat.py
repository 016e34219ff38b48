"""A device at work says so: on a thread of its own, also to a coordinator that does not answer, while it works."""

from __future__ import annotations

import threading

import pytest

from edge_sdk.device.heartbeat import BEATS, heartbeat
from edge_sdk.device.transport import Transport
from sparrow.transport import httpx

PROBLEM = {"Content-Type": "application/problem+json"}


class Network:
    """Answers heartbeats with these, the last of them for ever; ``calls`` is released at each."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []
        self.calls = threading.Semaphore(0)
        client = httpx.Client(base_url="http://coordinator", transport=httpx.MockTransport(self.handle))
        self.transport = Transport(client)
        self.transport.token = "secret"

    def handle(self, request):
        self.seen.append(request)
        self.calls.release()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def beats(self, count):
        assert all(self.calls.acquire(timeout=10) for _ in range(count)), f"{len(self.seen)} calls of {count}"


def beating():
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def ended():
    for thread in beating():
        thread.join(10)
    return not beating()


def test_it_beats_while_the_work_goes_on_and_not_after_it():
    network = Network(httpx.Response(204))
    with heartbeat(network.transport, "abc", BEATS * 0.01):
        network.beats(3)
        assert all(thread.daemon for thread in beating()), "or it would keep the process"
    assert ended()
    assert {(call.method, call.url.path, call.headers["Authorization"]) for call in network.seen} == {
        ("POST", "/v1/assignments/abc/heartbeat", "Bearer secret")
    }


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(503),
        httpx.Response(429),
        httpx.Response(404, text="a captive portal"),
        RuntimeError("Cannot send a request, as the client has been closed."),
    ],
)
def test_a_coordinator_that_does_not_answer_is_told_again(trouble):
    network = Network(trouble, trouble, httpx.Response(204))
    with heartbeat(network.transport, "abc", BEATS * 0.01):
        network.beats(4)
    assert ended()


def test_work_goes_on_in_peace_where_nobody_waits_for_it():
    network = Network(httpx.Response(409, json={"title": "RoundClosed", "detail": "over"}, headers=PROBLEM))
    with heartbeat(network.transport, "abc", BEATS * 0.01):
        network.beats(1)
        assert ended()
    assert len(network.seen) == 1
