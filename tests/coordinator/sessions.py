"""A coordinator's domain in this process, and real devices that train the digits; the wire between is left out."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from types import SimpleNamespace

from edge_sdk.device.connection import Traffic
from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.errors import DifferentUpdate, FederationOver, NotFound, Refused, RoundOver
from edge_sdk.tasks import load_task
from sparrow.coordinator import errors as coordinator_errors
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.storage.tables import Assignment
from sparrow.protocol.messages import ChangeFederation, CreateFederation
from sparrow.protocol.settings import FederationSettings

from .fakes import LocalCoordinator, next_assignment

ANSWERS = {
    coordinator_errors.Finished: lambda text: FederationOver(410, text),
    coordinator_errors.RoundClosed: lambda text: RoundOver(409, text),
    coordinator_errors.DifferentUpdate: lambda text: DifferentUpdate(409, text),
    coordinator_errors.NotFound: lambda text: NotFound(404, text),
    BadContent: lambda text: Refused(422, text),
}


@contextmanager
def answered():
    """What the coordinator raises, as a device gets it."""
    try:
        yield
    except tuple(ANSWERS) as error:
        raise ANSWERS[type(error)](str(error)) from None


class Wire:
    """A device's transport, without a wire between it and the coordinator's domain.

    received and sent: bodies of payloads, and of the updates that were accepted, in order.
    """

    def __init__(self, coordinator, name):
        self.coordinator, self.name = coordinator, name
        self.traffic = Traffic()
        self.token = self.patience_seconds = None
        self.renewal_due = False
        self._device_id = None
        self.media_types = []
        self.received = []
        self.sent = []
        self.broken = False

    @property
    def device(self):
        if self._device_id is None:
            self._device_id = self.coordinator.device(self.name).device_id
        return self._device_id

    def federation(self, name):
        return self.coordinator.federations.get(name)

    def manifest(self, name):
        return self.coordinator.served.manifest(name)

    def graph(self, name, which):
        return self.coordinator.served.graph(name, which)

    def enrol(self, federation, request):
        self._device_id = None
        return self.coordinator.devices.enrol(federation, request)

    def change_device(self, device_id, change):
        self.coordinator.devices.change(device_id, change)

    def assignment(self, federation, wait_seconds, cost, mask=None, model=None):
        if cost:
            self.coordinator.costs.note(self.device, cost)
        with answered():
            return next_assignment(self.coordinator, self.device, mask, model).assignment, 1.0

    def heartbeat(self, assignment_id):
        return True

    def payload(self, assignment_id, payload):
        body = self.coordinator.dispatch.payload(assignment_id, self.device).body
        assert hashlib.sha256(body).hexdigest() == payload.sha256
        self.traffic.down += len(body)
        self.received.append(body)
        return body

    def update(self, assignment_id, body, media_type, cost=None, mask=None, model=None, goes_on=False):
        if self.broken:
            raise ConnectionError("pulled the plug")
        if cost:
            self.coordinator.costs.note(self.device, cost)
        self.media_types.append(media_type)
        with answered():
            self.coordinator.acceptance.accept_update(assignment_id, self.device, body, media_type)
        self.traffic.up += len(body)
        self.sent.append(body)

    def hand_back(self, assignment_id, reason):
        with answered():
            self.coordinator.dispatch.hand_back(assignment_id, self.device, reason)


class CoordinatorWithDevices(LocalCoordinator):
    """A coordinator, and devices that live in folders beside its own."""

    def __init__(self, folder, clock, **settings):
        self.folder = folder
        self.folders = []
        super().__init__(folder / "data", clock, **settings)

    def close(self):
        for folder in self.folders:
            folder.close()
        super().close()

    def create(self, method, **settings):
        usual = {
            "rounds": 3,
            "learning_rate": 0.1,
            "evaluation_interval": 0,
            "early_stopping": "off",
            "local_epochs": 1,
            "draws": "seed",
        }
        task = settings.pop("task", "digits")
        settings = FederationSettings(method=method, **{**usual, **settings})
        return self.publisher.create(CreateFederation(name="f", task=task, settings=settings))

    def open_device(self, name, budget=1.0, of=8, engine="torch", data=None):
        """The device of this name: its session, new or taken up again from its folder. data: a file, for all tasks but
        the digits."""
        index = "abcdefgh".index(name)
        dealt = f"index={index},of={of},alpha=1"
        self.folders.append(StateFolder(self.folder / name))
        return Session(
            Wire(self, name),
            self.folders[-1],
            federation="f",
            name=name,
            options=SessionOptions(budget=budget, engine=engine),
            make_task=lambda info, manifest: load_task(
                info.task,
                (f"{data}," if data else "") + dealt + (",public=0.1" if info.method == "fedmd" else ""),
                device=name,
                seed=0,
                batch_size=16,
            ),
        )

    def play(self, *sessions):
        """Let everybody work until nobody has anything to do; answers what was worked on, by device."""
        worked = {session: [] for session in sessions}
        moved = True
        while moved:
            moved = self.rounds.advance()
            for session in sessions:
                step = session.step()
                if step.outcome is Outcome.worked:
                    worked[session].append(step.assignment)
                    moved = True
            # Devices that asked are back.
            moved = bool(self.rounds.advance()) or moved
        return [worked[session] for session in sessions]

    def info(self):
        return self.federations.get("f")

    def model(self):
        """The global model as the coordinator has it."""
        with self.store.reading() as db:
            federation = find(db, "f")
        return self.models.model(federation, federation.model_version)

    def reopen(self, rounds):
        self.federations.change("f", ChangeFederation(action="reopen", rounds=rounds))

    def device(self, name):
        return next(device for device in self.device_lists.list("f")[0] if device.name == name)

    def receipts(self, kind="evaluate"):
        with self.store.reading() as db:
            found = db.query(Assignment).filter(Assignment.kind == kind, Assignment.status == "done")
            return [SimpleNamespace(**assignment.report) for assignment in found]
