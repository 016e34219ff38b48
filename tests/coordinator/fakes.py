"""A coordinator's domain without HTTP, torch or waiting: devices here answer from a seed."""

from __future__ import annotations

from edge_sdk.protocol.builtin import load_builtin
from edge_sdk.protocol.messages import (
    ChangeFederation,
    CreateFederation,
    Enrol,
    Evaluation,
    FederationSettings,
    Receipt,
)
from sparrow.coordinator.errors import Finished
from sparrow.coordinator.fleet.devices import Devices
from sparrow.coordinator.fleet.federations import Federations
from sparrow.coordinator.fleet.last_heard import Heard
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.reports.device_list import Roster
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.coordinator.reports.overview import Overviews
from sparrow.coordinator.reports.records import Records
from sparrow.coordinator.rounds.acceptance import Acceptance
from sparrow.coordinator.rounds.costs import UploadCosts
from sparrow.coordinator.rounds.dispatch import Dispatch
from sparrow.coordinator.rounds.engine import Rounds
from sparrow.coordinator.storage.store import Store

DIGITS = load_builtin("digits").manifest
CALM = {"deadline_seconds": 100, "evaluation_interval": 0}


def furnish(house, clock, models):
    """Give a house the coordinator's domain over its store."""
    store = house.store
    house.models = models
    house.federations = Federations(store, models, clock)
    house.devices = Devices(store, clock)
    house.dispatch = Dispatch(store, models, clock)
    house.acceptance = Acceptance(store, models)
    house.costs = UploadCosts(store)
    house.heard = Heard(store, clock)
    house.rounds = Rounds(store, models, clock, house.costs, house.heard)
    house.records = Records(store, house.costs.write, clock, house.heard)
    house.roster = Roster(store, clock)
    house.metrics = Metrics()
    house.overviews = Overviews(store, models, house.federations, house.records, house.metrics, clock)


class House:
    """A coordinator's domain objects over a folder."""

    def __init__(self, folder, clock, store=Store):
        self.clock = clock
        self.store = store(folder)
        furnish(self, clock, Models(self.store))

    def create(self, name="f", task="digits", **settings):
        self.federations.create(
            CreateFederation(name=name, task=task, settings=FederationSettings(**{**CALM, **settings}))
        )

    def enrol(self, *names, federation="f", **budgets):
        devices = [FakeDevice(self, name, federation, budgets.get(name, 1.0)) for name in names]
        for device in devices:
            device.enrol()
        return devices

    def info(self, name="f"):
        return self.federations.get(name)

    def change(self, **what):
        return self.federations.change("f", ChangeFederation(**what))

    def model(self):
        return self.federations.model("f")

    def record(self, number):
        return self.records.rounds("f")[number - 1]


class FakeDevice:
    """Asks, and answers with values drawn from its name and the round."""

    def __init__(self, house, name, federation, budget, hosted=False):
        self.house, self.name, self.federation, self.budget, self.hosted = house, name, federation, budget, hosted
        self.key = name.ljust(32, "k")

    def enrol(self):
        request = Enrol(name=self.name, enrolment_key=self.key, budget=self.budget, hosted=self.hosted)
        enrolled = self.house.devices.enrol(self.federation, request)
        self.id, self.token = enrolled.device_id, enrolled.token

    def beat(self, assignment):
        self.house.heard.note(self.id)  # as the door does for every call
        self.house.dispatch.check_open(assignment.assignment_id, self.id)

    def ask(self):
        self.house.heard.note(self.id)
        return self.house.dispatch.next_assignment(self.id).assignment

    def payload(self, assignment):
        self.house.heard.note(self.id)
        return self.house.dispatch.payload(assignment.assignment_id, self.id).body

    def send(self, assignment, body):
        self.house.heard.note(self.id)
        return self.house.acceptance.accept_update(assignment.assignment_id, self.id, body)

    def hand_back(self, assignment, reason="too hot"):
        self.house.dispatch.hand_back(assignment.assignment_id, self.id, reason)


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

    def play(house, devices):
        moved = True
        while moved:
            house.rounds.advance()
            moved = False
            for device in devices:
                try:
                    moved = answer(device) is not None or moved
                except Finished:
                    continue

    return play
