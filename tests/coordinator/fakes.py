"""A coordinator without HTTP, torch or waiting: devices here answer from a seed."""

from __future__ import annotations

from sparrow.coordinator.app import Coordinator
from sparrow.coordinator.errors import Finished
from sparrow.coordinator.rounds.dispatch import Ask
from sparrow.coordinator.settings import Settings
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.messages import ChangeFederation, CreateFederation, Enrol, Evaluation, Receipt
from sparrow.protocol.settings import FederationSettings

DIGITS = load_builtin("digits").manifest
STOPS = {"min_participations": 1, "patience": 1}
"""A device may stop with the first round."""
CALM = {"deadline_seconds": 100, "evaluation_interval": 0, "silence_seconds": 59}
"""With the second that a device without work may pause, a device is silent after a minute."""


class LocalCoordinator(Coordinator):
    """A coordinator over a folder, whose rounds move when a test says so."""

    def __init__(self, folder, clock, store=None, **settings):
        self.clock = clock
        usual = {"data_dir": folder, "default_task": "", "keep_models": 1, "keep_every": 0, "retry_after_seconds": 0}
        super().__init__(Settings(**{**usual, **settings}), clock, store and store(folder))
        self.store.moves()

    def create(self, name="f", task="digits", **settings):
        self.publisher.create(
            CreateFederation(name=name, task=task, settings=FederationSettings(**{**CALM, "draws": "seed", **settings}))
        )

    def enrol(self, *names, federation="f", examples=None, **budgets):
        """examples: how many samples each says that it has, by name."""
        devices = [FakeDevice(self, name, federation, budgets.get(name, 1.0)) for name in names]
        for device in devices:
            device.examples = (examples or {}).get(device.name)
        for device in devices:
            device.enrol()
        return devices

    def info(self, name="f"):
        return self.federations.get(name)

    def change(self, **what):
        return self.federations.change("f", ChangeFederation(**what))

    def model(self):
        return self.served.model("f")

    def record(self, number):
        return self.records.rounds("f")[number - 1]


def next_assignment(coordinator, device_id, mask=None, model=None, *, asked=True):
    """Return what the coordinator answers to one device's request for work. Raises its error."""
    (answer,) = coordinator.dispatch.answer_all([Ask(device_id, mask, model, asked)])
    if isinstance(answer, Exception):
        raise answer
    return answer


class FakeDevice:
    """Asks, and answers with values drawn from its name and the round."""

    def __init__(self, coordinator, name, federation, budget, hosted=False):
        self.coordinator, self.name, self.federation, self.budget, self.hosted = (
            coordinator,
            name,
            federation,
            budget,
            hosted,
        )
        self.key = name.ljust(32, "k")
        self.examples = None

    def enrol(self):
        told = {"budget": self.budget, "hosted": self.hosted, "num_examples": self.examples}
        request = Enrol(name=self.name, enrolment_key=self.key, **told)
        enrolled = self.coordinator.devices.enrol(self.federation, request)
        self.id, self.token = enrolled.device_id, enrolled.token

    def beat(self, assignment):
        self.coordinator.last_seen.note(self.id)  # as a middleware does for every call
        self.coordinator.dispatch.check_open(assignment.assignment_id, self.id)

    def ask(self):
        self.coordinator.last_seen.note(self.id)
        return next_assignment(self.coordinator, self.id).assignment

    def payload(self, assignment):
        self.coordinator.last_seen.note(self.id)
        return self.coordinator.dispatch.payload(assignment.assignment_id, self.id).body

    def send(self, assignment, body):
        self.coordinator.last_seen.note(self.id)
        media_type = bundle.MEDIA_TYPE if assignment.kind in ("train", "prepare") else "application/json"
        return self.coordinator.acceptance.accept_update(assignment.assignment_id, self.id, body, media_type)

    def hand_back(self, assignment, reason="too hot"):
        self.coordinator.dispatch.hand_back(assignment.assignment_id, self.id, reason)


def answering(train):
    """Do what the device is asked to, if it is asked: the assignment that was answered, or None."""

    def answer(device, *, stopped=False, examples=10, accuracy=0.5):
        assignment = device.ask()
        if assignment is None:
            return None
        if assignment.kind == "train":
            status = "stopped" if stopped else "active"
            body = train(DIGITS, assignment, status=status, examples=examples)
        else:
            found = Evaluation(num_examples=10, loss=1 - accuracy, accuracy=accuracy)
            body = Receipt(personal=found, global_model=found).model_dump_json().encode()
        assert device.send(assignment, body)
        return assignment

    return answer


def playing(answer):
    """Advance, and let the devices answer in the order given, until nobody is asked any more."""

    def play(coordinator, devices):
        moved = True
        while moved:
            coordinator.rounds.advance()
            moved = False
            for device in devices:
                try:
                    moved = answer(device) is not None or moved
                except Finished:
                    continue
            # Devices that asked are back.
            moved = bool(coordinator.rounds.advance()) or moved

    return play
