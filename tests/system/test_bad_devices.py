"""Seven kinds of bad devices in one federation: each failure stays on the operator's page until it is over.

An hour of an operator, in rounds of seconds. Devices are processes, except those that a test drives call by call.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import pytest

from edge_sdk.device.policy import Policy
from edge_sdk.device.session import Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.device.watchdog import Watchdog
from edge_sdk.tasks.digits import load
from sparrow.protocol import bundle
from sparrow.protocol.messages import Assignment, Evaluation, Receipt
from sparrow.transport import httpx

from ..coordinator.fakes import DIGITS
from ..edge_sdk.conditions import conditions
from . import browsers
from .browsers import playwright
from .conftest import wait_until

browser, open_page = browsers.browser, browsers.open_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAB = "/v1/federations/lab"
DEADLINE = 12
SETTINGS = {
    "rounds": 100_000,
    "cohort": 10,
    "min_devices": 2,
    "local_steps": 1,
    "early_stopping": "off",
    "deadline_seconds": DEADLINE,
    "silence_seconds": 8,
    "evaluation_interval": 1,
    "global_evaluation_interval": 1,
}
# Longer than a page shows a fact: a machine may be busy.
PATIENCE = 120


def listed(coordinator, name):
    return next((each for each in coordinator.get(f"{LAB}/devices").json() if each["name"] == name), None)


def reason_of(coordinator, name):
    """Why a device fails; "" if it does not."""
    failure = (listed(coordinator, name) or {}).get("failure")
    return failure["reason"] if failure else ""


def fails(coordinator, name, why):
    wait_until(lambda: why in reason_of(coordinator, name), f"{name} to fail: {why}", PATIENCE, interval=0.05)


def recovers(coordinator, name):
    wait_until(lambda: not reason_of(coordinator, name), f"{name} to recover", PATIENCE, interval=0.05)


class Raw:
    """A device that is driven call by call; it answers evaluations as it should."""

    def __init__(self, coordinator, train):
        self.http = coordinator.http
        self.train = train
        self.headers = {}
        self.id = ""

    def enrol(self, name):
        body = {"name": name, "enrolment_key": name.ljust(32, "k")}
        answer = self.http.post(f"{LAB}/devices", json=body).raise_for_status().json()
        self.id = answer["device_id"]
        self.headers = {"Authorization": f"Bearer {answer['token']}"}

    def given(self, kind, timeout=PATIENCE):
        """Answer evaluations until there is work of this kind; return it."""

        def look():
            answer = self.http.get(f"{LAB}/assignment?wait=1", headers=self.headers).raise_for_status()
            if answer.status_code == 204:
                return None
            found = Assignment.model_validate_json(answer.content)
            if found.kind == "evaluate":
                judged = Evaluation(num_examples=10, loss=0.5, accuracy=0.5)
                self.put(found, Receipt(personal=judged).model_dump_json().encode(), "application/json")
            return found if found.kind == kind else None

        return wait_until(look, f"work of kind {kind}", timeout, interval=0.05)

    def put(self, assignment, body, media_type=bundle.MEDIA_TYPE):
        headers = {**self.headers, "Content-Type": media_type}
        return self.http.put(f"/v1/assignments/{assignment.assignment_id}/update", content=body, headers=headers)

    def refused(self, body_of):
        """Send a bad update for the next training; the coordinator must refuse it, and takes the work back."""
        assignment = self.given("train")
        assert self.put(assignment, body_of(assignment)).status_code == 422
        self.http.request(
            "DELETE",
            f"/v1/assignments/{assignment.assignment_id}",
            json={"reason": "update-refused"},
            headers=self.headers,
        )

    def train_well(self):
        """Train until an update is accepted: a round may close without it."""

        def accepted():
            assignment = self.given("train")
            return self.put(assignment, self.train(DIGITS, assignment)).status_code == 201

        wait_until(accepted, "an accepted update", PATIENCE)

    def rest_is_over(self):
        body = {"conditions": {"available": True}}
        self.http.patch(f"/v1/devices/{self.id}", json=body, headers=self.headers).raise_for_status()

    def beat(self, assignment):
        """Tell that it works; returns whether the coordinator still waits for it."""
        path = f"/v1/assignments/{assignment.assignment_id}/heartbeat"
        return self.http.post(path, headers=self.headers).status_code == 204


class Hot:
    """A device that pauses, because its chip is too hot."""

    def __init__(self, stack, coordinator, folder):
        self.temperature = 95.0
        watch = Watchdog(
            Policy.for_board("raspberry-pi", board="raspberry-pi-4", has_battery=False),
            lambda: conditions(temperature=self.temperature),
            clock=self._now,
            sleep=lambda seconds: None,
            say=lambda text: None,
        )
        self.now = 0.0
        self.session = Session(
            Transport(stack.enter_context(httpx.Client(base_url=coordinator.url, timeout=30))),
            stack.enter_context(closing(StateFolder(folder / "hot"))),
            federation="lab",
            name="hot",
            make_task=lambda info, manifest: load("index=0,of=9", device="hot", seed=0, batch_size=16),
            options=SessionOptions(watchdog=watch),
        )

    def _now(self):
        self.now += 1.0
        return self.now

    def step(self):
        return self.session.step(0.2)


class Page:
    """The operator's page: at most two clicks to each fact."""

    def __init__(self, page):
        self.page = page
        self.expect = playwright.expect

    def counts(self, text):
        self.expect(self.page.locator("#fleet-lines")).to_contain_text(text, timeout=PATIENCE * 1000)

    def shows(self, line, *rows):
        """Click a line of the first screen; each row has a device's name and a text."""
        self.page.locator("#fleet-lines").get_by_role("button", name=line).click()
        for name, text in rows:
            row = self.page.locator("#devices tbody tr").filter(
                has=self.page.get_by_role("link", name=name, exact=True)
            )
            self.expect(row).to_contain_text(text, timeout=PATIENCE * 1000)


def not_a_number(take_apart, sign, body):
    header, data = take_apart(body)
    begin, _ = header["values"]["data_offsets"]
    nan = np.array([np.nan], np.float32).tobytes()
    return sign(header, data[:begin] + nan + data[begin + len(nan) :])


def test_seven_kinds_of_bad_devices_stay_visible_until_they_are_well(
    coordinator_and_devices, open_page, train, take_apart, sign, tmp_path
):
    coordinator, start = coordinator_and_devices
    coordinator.create("lab", **SETTINGS)
    page = Page(open_page(f"{coordinator.url}/?federation=lab"))

    def data(index):
        return ("--data", f"index={index},of=9")

    well = [start(coordinator.url, "lab", f"well-{index}", *data(index)) for index in (1, 2)]
    dying = start(coordinator.url, "lab", "dying", *data(3))
    wait_until(lambda: coordinator.info("lab")["round"] >= 1, "the first round", PATIENCE)

    with ExitStack() as stack:
        # --- they fail, one after the other ---
        dying.kill()
        small = start(coordinator.url, "lab", "small", *data(4), "--memory-limit", "1")
        wrong = start(coordinator.url, "lab", "wrong", "--data", "index=9,of=3")
        hot = Hot(stack, coordinator, tmp_path)
        assert hot.step().paused is not None
        assert (small.wait(PATIENCE), wrong.wait(PATIENCE)) == (3, 2)
        late, nans, hopeless = (Raw(coordinator, train) for _ in range(3))
        late.enrol("late")
        slow = late.given("train")
        wait_until(lambda: not late.beat(slow), "the deadline of a device that lives", PATIENCE, interval=0.5)
        nans.enrol("nans")
        send_nan = partial(nans.refused, lambda given: not_a_number(take_apart, sign, train(DIGITS, given)))
        send_nan()
        hopeless.enrol("hopeless")
        for _ in range(3):
            hopeless.refused(lambda assignment: b"not an update")
            hopeless.rest_is_over()
        expected = {
            "dying": "silent for too long",
            "small": "not enough memory",
            "wrong": "its data cannot be used",
            "late": "missed the deadline",
            "nans": "its update was refused",
            "hopeless": "3 updates in a row were refused",
        }
        for name, why in expected.items():
            fails(coordinator, name, why)

        # --- evaluations and rounds go on, and the page still shows all ---
        nans.rest_is_over()
        send_nan()
        before = coordinator.info("lab")["round"]
        wait_until(lambda: coordinator.info("lab")["round"] >= before + 3, "three more rounds", PATIENCE)
        page.counts("6 devices failing")
        page.counts("2 devices could not join")
        page.shows("failing", *expected.items())
        page.shows("paused", ("hot", "paused: too hot"))
        page.expect(page.page.locator("#health-value")).to_have_text("Needs attention")

        # --- they are mended ---
        start(coordinator.url, "lab", "dying", *data(3))
        start(coordinator.url, "lab", "small", *data(4))
        start(coordinator.url, "lab", "wrong", *data(5))
        nans.train_well()
        late.train_well()
        hot.temperature = 40.0
        wait_until(lambda: hot.step() and listed(coordinator, "hot")["doing"] != "paused", "it to cool", PATIENCE)
        coordinator.http.patch(f"/v1/devices/{hopeless.id}", json={"revoked": True}).raise_for_status()
        for name in ("dying", "small", "wrong", "nans", "late"):
            recovers(coordinator, name)
        assert not reason_of(coordinator, "hot")

    # --- after Stop ---
    coordinator.http.patch(LAB, json={"action": "stop"}).raise_for_status()
    for name in ("well-1", "well-2", "dying", "small", "wrong"):
        wait_until(lambda name=name: listed(coordinator, name)["exported"], f"{name} to export", PATIENCE)
    assert [each.wait(PATIENCE) for each in well] == [0, 0]
    page.counts("3 devices did not export")
    page.shows("did not export", ("hot", "hot"), ("late", "late"), ("nans", "nans"))
