"""The webhook: events and alerts in order, signed, bounded, and none lost while its receiver is away."""

from __future__ import annotations

import hmac
from contextlib import ExitStack

import pytest

from sparrow.command_line.command import WrongUsage
from sparrow.coordinator import webhook
from sparrow.coordinator.errors import Unavailable
from sparrow.coordinator.settings import read_settings
from sparrow.coordinator.webhook import Wanted, Webhook
from sparrow.protocol.messages import ChangeFederation
from sparrow.transport.pinned import Destination, NotDelivered

from .fakes import LocalCoordinator
from .receiver import receiving

SECRET = "a-secret-that-signs"


class Posting:
    """A coordinator whose webhook posts when a test says so. trouble: why it is not ready."""

    def __init__(self, folder, clock, port, kinds=()):
        self.coordinator = LocalCoordinator(folder, clock)
        self.clock = clock
        self.trouble = None
        self.port = port
        self.webhook = self.new(kinds)
        self.webhook.begin()
        self.coordinator.create("lab", deadline_seconds=100)

    def new(self, kinds=(), reserve=0):
        """A webhook as of a process that starts."""
        destination = Destination.parse(f"http://127.0.0.1:{self.port}/hook")
        wanted = Wanted(destination, SECRET, frozenset(kinds))
        coordinator = self.coordinator
        return Webhook(wanted, coordinator.store, self.clock, coordinator.metrics, lambda: self.trouble, reserve)

    def enrol(self, *names):
        return self.coordinator.enrol(*names, federation="lab")

    def deliver(self):
        while self.webhook.deliver():
            pass


@pytest.fixture
def receiver():
    with receiving() as started:
        yield started


@pytest.fixture
def posting(tmp_path, clock, receiver):
    with ExitStack() as stack:

        def make(**named):
            made = Posting(tmp_path / "data", clock, receiver.port, **named)
            stack.callback(made.coordinator.store.close)
            return made

        yield make


def test_events_are_posted_once_in_order_and_signed(posting, receiver):
    ours = posting()
    ours.enrol("one", "two")
    ours.deliver()
    ours.coordinator.federations.change("lab", ChangeFederation(action="pause"))
    ours.deliver()
    ours.deliver()
    assert receiver.events == [
        ("lab", "created", None),
        ("lab", "joined", "one"),
        ("lab", "joined", "two"),
        ("lab", "paused", None),
    ]
    ids = [each["id"] for body in receiver.bodies for each in body["events"]]
    assert ids == sorted(set(ids))
    assert len(receiver.got) == 2
    for headers, body in receiver.got:
        signed = headers["Sparrow-Timestamp"].encode() + b"." + body
        assert headers["Sparrow-Signature"] == f"v1={hmac.digest(SECRET.encode(), signed, 'sha256').hex()}"
        assert headers["Content-Type"] == "application/json"


def test_only_the_chosen_kinds_are_posted(posting, receiver):
    ours = posting(kinds={"paused"})
    ours.enrol("one")
    ours.coordinator.federations.change("lab", ChangeFederation(action="pause"))
    ours.deliver()
    assert receiver.events == [("lab", "paused", None)]


def test_what_was_not_accepted_is_posted_again_also_after_a_restart(posting, receiver):
    ours = posting()
    receiver.status = 500
    for _ in range(2):
        with pytest.raises(NotDelivered):
            ours.webhook.deliver()
    receiver.status = 204
    receiver.got.clear()
    ours.webhook = ours.new()
    ours.webhook.begin()
    ours.deliver()
    assert receiver.events == [("lab", "created", None)]


def test_at_the_first_start_old_events_are_not_posted(posting, receiver):
    ours = posting()
    ours.deliver()
    receiver.got.clear()
    ours.enrol("one")
    with ours.coordinator.store.writing() as db:
        db.delete(db.get_one(webhook.Delivered, 1))
    ours.webhook.begin()
    ours.enrol("two")
    ours.deliver()
    assert receiver.events == [("lab", "joined", "two")]


def test_when_too_many_wait_the_oldest_are_dropped_and_counted(posting, receiver, monkeypatch):
    monkeypatch.setattr(webhook, "MOST_WAITING", 3)
    ours = posting()
    receiver.status = 503
    names = [f"pi-{number}" for number in range(6)]
    for name in names:
        ours.enrol(name)
        with pytest.raises(NotDelivered):
            ours.webhook.deliver()
    receiver.status = 204
    receiver.got.clear()
    ours.deliver()
    assert receiver.events == [("lab", "joined", name) for name in names[-3:]]
    assert [body["dropped"] for body in receiver.bodies] == [4], "three devices, and that it was created"
    registry = ours.coordinator.metrics.registry
    outcomes = [
        registry.get_sample_value("sparrow_webhook_events_total", {"outcome": each}) for each in ("sent", "dropped")
    ]
    assert outcomes == [3.0, 4.0]


def test_a_delivery_has_a_bounded_number_of_events(posting, receiver, monkeypatch):
    monkeypatch.setattr(webhook, "BATCH", 2)
    ours = posting()
    ours.enrol("one", "two", "three", "four")
    ours.deliver()
    assert [len(body["events"]) for body in receiver.bodies] == [2, 2, 1]


def test_a_stalled_federation_is_an_alert_until_it_moves(posting, receiver):
    ours = posting()
    devices = ours.enrol("one", "two")
    ours.coordinator.rounds.advance()
    ours.webhook.look()
    ours.clock.pass_seconds(201)
    for _ in range(2):
        ours.webhook.look()
    ours.deliver()
    assert receiver.alerts == [("stalled", "lab", False)]
    assert devices
    ours.coordinator.federations.change("lab", ChangeFederation(action="stop"))
    ours.webhook.look()
    ours.deliver()
    assert receiver.alerts == [("stalled", "lab", False), ("stalled", "lab", True)]


def test_a_coordinator_that_is_not_ready_posts_it_without_its_records(posting, receiver, monkeypatch):
    ours = posting()
    ours.deliver()
    receiver.got.clear()
    ours.trouble = "the database is gone"

    def gone():
        raise Unavailable("the database is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ours.coordinator.store, "reading", gone)
        ours.webhook.look()
        ours.webhook.deliver()
    assert receiver.alerts == [("not_ready", None, False)]
    assert receiver.bodies[0]["alerts"][0]["text"] == "the database is gone"
    ours.trouble = None
    ours.webhook.look()
    ours.deliver()
    assert receiver.alerts[-1] == ("not_ready", None, True)


def test_a_disk_that_is_nearly_full_is_an_alert(posting, receiver):
    ours = posting()
    ours.deliver()
    receiver.got.clear()
    ours.webhook = ours.new(reserve=2**62)
    ours.webhook.look()
    ours.deliver()
    assert receiver.alerts == [("disk_low", None, False)]


def test_no_representation_has_the_secret(posting):
    ours = posting()
    assert SECRET not in repr(Wanted(Destination.parse(f"http://127.0.0.1:{ours.port}/"), SECRET))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"URL": "https://hook.example/a-secret-path"}, "COORDINATOR_WEBHOOK_SECRET"),
        ({"SECRET": SECRET}, "COORDINATOR_WEBHOOK_URL"),
        ({"URL": "http://hook.example/a-secret-path", "SECRET": SECRET}, "only for this machine"),
        ({"URL": "https://hook.example/a-secret-path", "SECRET": "short"}, "COORDINATOR_WEBHOOK_SECRET"),
        ({"URL": "https://hook.example/a-secret-path", "SECRET": SECRET, "NETWORKS": "lab"}, "10.1.2.0/24"),
        ({"EVENTS": "failed,jioned"}, "did you mean joined?"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings, named, monkeypatch):
    for name, text in settings.items():
        monkeypatch.setenv(f"COORDINATOR_WEBHOOK_{name}", text)
    with pytest.raises(WrongUsage) as refused:
        read_settings()
    assert named in str(refused.value)
    assert "a-secret" not in str(refused.value)
