"""The webhook of a real coordinator, which is killed and whose receiver is away."""

from __future__ import annotations

import hmac

import pytest

from sparrow.transport import httpx

from ..coordinator.receiver import receiving
from .conftest import Coordinator, wait_until

SECRET = "a-secret-that-signs"


@pytest.fixture
def start(tmp_path):
    made = []

    def begin(port, **settings):
        coordinator = Coordinator(
            tmp_path / "machine",
            COORDINATOR_WEBHOOK_URL=f"http://127.0.0.1:{port}/a-path-that-is-a-secret",
            COORDINATOR_WEBHOOK_SECRET=SECRET,
            **settings,
        )
        made.append(coordinator)
        coordinator.start()
        return coordinator

    yield begin
    for coordinator in made:
        coordinator.close()


def test_events_reach_a_receiver_that_was_away_and_survive_a_kill(start):
    with receiving() as before:
        port = before.port
    coordinator = start(port, COORDINATOR_WEBHOOK_EVENTS="*")
    coordinator.create("lab")
    wait_until(
        lambda: "sparrow_webhook_failures_total 0.0" not in coordinator.get("/metrics").text, "a failed delivery"
    )
    coordinator.kill()
    with receiving(port) as receiver:
        coordinator.start()
        wait_until(lambda: ("lab", "created", None) in receiver.events, "the event of before the kill")
        device = {"name": "pi", "enrolment_key": "k" * 32}
        coordinator.http.post("/v1/federations/lab/devices", json=device).raise_for_status()
        wait_until(lambda: ("lab", "joined", "pi") in receiver.events, "the event of now")
    headers, body = receiver.got[-1]
    signed = headers["Sparrow-Timestamp"].encode() + b"." + body
    assert headers["Sparrow-Signature"] == f"v1={hmac.digest(SECRET.encode(), signed, 'sha256').hex()}"
    log = coordinator.log.read_text()
    assert SECRET not in log
    assert "a-path-that-is-a-secret" not in log


def test_a_full_disk_and_that_it_is_not_ready_reach_the_receiver(start):
    with receiving() as receiver:
        coordinator = start(receiver.port, COORDINATOR_MIN_FREE_BYTES=str(2**62))
        wait_until(lambda: len(receiver.alerts) >= 2, "both alerts")
        assert set(receiver.alerts) == {("not_ready", None, False), ("disk_low", None, False)}
        text = coordinator.get("/metrics").text
    assert "sparrow_ready 0.0" in text


def test_nothing_over_http_names_or_changes_the_webhook(start):
    with receiving() as receiver:
        coordinator = start(receiver.port)
        document = httpx.get(f"{coordinator.url}/openapi.json").text
        assert "webhook" not in document.lower()
        assert SECRET not in document
