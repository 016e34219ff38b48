"""One device's work for its coordinator: enrol, ask, download, train, upload, and resume after any crash.

``join`` calls ``Session.step`` in a loop; a fleet calls it for many devices in turn. After a crash during a step:

    before the state is saved   the open assignment is repeated, from the same model and with the same random numbers,
                                and gives the same update
    after that                  the outbox sends the same bytes again, which count once
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from sparrow.command_line.table import printable
from sparrow.protocol.errors import BundleError, ProtocolError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import (
    JUDGING,
    Assignment,
    ChangeDevice,
    Conditions,
    Enrol,
    FederationInfo,
    Kind,
    PauseReason,
)
from sparrow.protocol.settings import FederationSettings

from ... import errors
from ...engines.training import TrainingDiverged, UnsoundModel
from ...tasks import Task, count_examples
from ..diagnosis import diagnose
from ..heartbeat import heartbeat
from ..local_noise import WITHHELD
from ..state import StateFolder
from ..transport import Transport
from ..watchdog import LOOK_SECONDS, Paused
from .options import USUAL, Device, SessionOptions
from .work import Working

log = logging.getLogger(__name__)

# A device gives up if its first rounds fail this many times in a row.
FAILURES = 3
# Kinds of work that train in a round.
TRAINING = (Kind.train, Kind.personalise, Kind.prepare)
# Seconds of rest after a fault of the coordinator; doubled after each further fault in a row.
FIRST_REST = 5.0
LONGEST_REST = 900.0
# Refusals of the device itself. It retries after any other, which may be a fault of the coordinator.
FINAL = (
    errors.NotAuthenticated,
    errors.NotAllowed,
    errors.Blocked,
    errors.NameTaken,
    errors.FederationOver,
    errors.FederationDeleted,
)

Answer = TypeVar("Answer")


class Outcome(Enum):
    """The outcome of a step."""

    worked = "worked"
    idle = "idle"
    over = "over"


@dataclass(frozen=True)
class Step:
    """The result of a step."""

    outcome: Outcome
    assignment: Assignment | None = None
    # Requested rest of an idle device.
    pause_seconds: float = 0.0
    # The policy's reason for being idle.
    paused: PauseReason | None = None
    # Why the work failed.
    failed: str | None = None


class Session(Working):
    """One device in one federation."""

    def __init__(
        self,
        transport: Transport,
        folder: StateFolder,
        *,
        federation: str,
        name: str,
        make_task: Callable[[FederationInfo, Manifest], Task],
        options: SessionOptions = USUAL,
    ) -> None:
        super().__init__(Device(transport, folder, federation, name, make_task), options)
        # The reason for a pause that was last reported.
        self._away: PauseReason | None = None
        # In a row, since this process began.
        self.failed_rounds = 0
        self.last_failure: str | None = None
        # The same, as reported to the coordinator.
        self.reported_failure: Failure | None = None
        # Faults of the coordinator, in a row.
        self._faults = 0
        # Still set after an interrupted step, so that ``leave`` returns it.
        self.working_on: Assignment | None = None
        if self.identity.token is None:
            self._enrol()
        elif options.announce:
            transport.token = self.identity.token
            change = ChangeDevice(
                budget=self.budget,
                limited_by=self._prepared.limited_by,
                num_examples=count_examples(self.task.train) or None,
                data_warnings=self._data_warnings(),
                conditions=Conditions(),
                holds_model=self.personal is not None,
                tags=self._options.tags,
                continues=True if self._has_new_data else None,
            )
            # Enrolling again registers a start, too: each call needs the one after it.
            self._or_enrol_again(lambda: self._tell(change.model_copy(update={"start": self._begin()})))

    def _enrol(self) -> None:
        request = Enrol(
            name=self.identity.name,
            enrolment_key=self.identity.enrolment_key,
            identity_key=self._public_identity(),
            budget=self.budget,
            limited_by=self._prepared.limited_by,
            num_examples=count_examples(self.task.train) or None,
            hosted=self._options.hosted,
            profile=self._profile().model_copy(update={"data_warnings": self._data_warnings()}),
            tags=self._options.tags,
            start=self._begin(),
        )
        enrolled = self.transport.enrol(self._federation, request)
        self.identity = self.identity.model_copy(update={"device_id": enrolled.device_id, "token": enrolled.token})
        self.folder.save_identity(self.identity)
        if enrolled.notice:
            log.warning("%s", printable(enrolled.notice))
        self.transport.token = enrolled.token

    def _data_warnings(self) -> tuple[str, ...]:
        """Return warnings about data unlike the publisher's, unless they must stay private."""
        if self.info.settings.secure or self._options.local_noise is not None:
            return ()
        return tuple(there for _, there in self.differences)

    def _or_enrol_again(self, call: Callable[[], Answer]) -> Answer:
        """Call once; if the token has expired, enrol again and retry. Raises Refused without an enrolment token."""
        try:
            return call()
        except errors.TokenExpired:
            self.transport.token = self._enrolment_token
            self._enrol()
            return call()

    def step(self, wait_seconds: float = 0.0) -> Step:
        """Send the outbox, ask for work and do it."""
        try:
            step = self._step(wait_seconds)
        except FINAL:
            raise
        except (errors.Refused, errors.Damaged, BundleError) as fault:
            return self._rest(fault)
        if step.outcome is Outcome.worked and step.failed is None:
            self._faults = 0
        return step

    def _rest(self, fault: errors.SdkError) -> Step:
        """Return open work; rest longer after each fault in a row."""
        seconds = min(FIRST_REST * 2.0 ** min(self._faults, 30), LONGEST_REST)
        self._faults += 1
        self.last_failure = str(fault)
        self.reported_failure = errors.failure_of(fault)
        log.warning("%s; this device tries again in %.0f s", fault, seconds)
        assignment = self.working_on
        self.working_on = None
        if assignment is not None:
            try:
                self._give_up(assignment, self.reported_failure)
            except FINAL:
                raise
            except errors.Refused as refusal:
                log.info("the work could not be returned: %s", refusal.detail)
        return Step(Outcome.idle, assignment, pause_seconds=seconds, failed=str(fault))

    def _step(self, wait_seconds: float) -> Step:
        if (reason := self._options.watchdog.look() if self._options.watchdog else None) is not None:
            if reason is not self._away:
                self._tell(ChangeDevice(conditions=Conditions(available=False, reason=reason)))
                self._away = reason
            # The coordinator has withdrawn it.
            self._next = None
            return Step(Outcome.idle, pause_seconds=LOOK_SECONDS, paused=reason)
        # Asking for work reports that the device is available again.
        self._away = None
        if self.progress.pending is not None:
            with self._heard(self.progress.pending.assignment_id, self.info.settings):
                self._send(self.progress.pending)
        assignment = self._next
        self._next = None
        pause = 0.0
        if assignment is None:
            try:
                assignment, pause = self._or_enrol_again(lambda: self._ask(wait_seconds))
            except errors.FederationOver:
                self._judge_best_again()
                return Step(Outcome.over)
        if self.transport.renewal_due:
            self._renew_token()
        if assignment is None:
            return Step(Outcome.idle, pause_seconds=pause)
        self.working_on = assignment
        failed = None
        to_blame = True
        self._refusal = None
        try:
            if assignment.manifest_digest not in (None, self.manifest.digest):
                self._take_new_version()
            self.trust.check(assignment.settings)
            with self._heard(assignment.assignment_id, assignment.settings):
                self._judge_best_again()
                self._work(assignment, self._watched_work(assignment))
        # Of the payload: ``step`` handles it.
        except BundleError:
            raise
        except errors.ModelReplaced as error:
            self._give_up(assignment, errors.failure_of(error))
            raise
        except (TrainingDiverged, ProtocolError) as error:
            failed = str(error)
            to_blame = not isinstance(error, UnsoundModel)
            if isinstance(error, TrainingDiverged):
                failed = diagnose(error, assignment.settings, self.task.train)
            log.warning("round %s: %s", assignment.round, failed)
            self.reported_failure = errors.failure_of(error)
            self._give_up(assignment, self.reported_failure)
            if assignment.kind in TRAINING:
                self._save_progress(failures=self.progress.failures + 1, failure=failed)
        except Paused as pause_:
            log.warning("round %s is returned: the pause would end after its deadline", assignment.round)
            self._give_up(assignment, pause_.reason)
            self._away = pause_.reason
            self._reassess(assignment)
        except errors.RoundOver as error:
            # The round closed during the download, and the coordinator may have marked this device absent.
            log.info("round %s: %s", assignment.round, error.detail)
            self._tell(ChangeDevice(conditions=Conditions()))
        # Not in a finally block: after an interrupt or error, ``leave`` returns it.
        self.working_on = None
        if self._refusal is not None:
            failed = self._refusal
            self.reported_failure = Failure("update-refused")
        if assignment.kind not in JUDGING:
            self.failed_rounds = (self.failed_rounds + to_blame) if failed else 0
            self.last_failure = failed or self.last_failure
        return Step(Outcome.worked, assignment, failed=failed)

    def _ask(self, wait_seconds: float) -> tuple[Assignment | None, float]:
        cost = self.progress.upload_cost
        found = self.transport.assignment(self._federation, wait_seconds, cost, *self._holding())
        if cost is not None:
            self.progress = self.progress.model_copy(update={"upload_cost": None})
        return found

    def _heard(self, assignment_id: str, settings: FederationSettings) -> AbstractContextManager[None]:
        """Send heartbeats during work and transfers, unless hosted."""
        return (
            nullcontext()
            if self._options.hosted
            else heartbeat(self.transport, assignment_id, settings.silence_seconds)
        )

    def _give_up(self, assignment: Assignment, reason: PauseReason | Failure) -> None:
        # Without a personal model, restore the initial values of the device's own part.
        if self.personal is None:
            self.engine.load(self._as_new)
        self._hand_back(assignment.assignment_id, reason)

    def leave(self, reason: Failure) -> None:
        """Return open work and mark the device unavailable."""
        reason = reason if self._options.local_noise is None else WITHHELD
        with self._briefly("that it leaves"):
            if self.working_on is not None:
                self._hand_back(self.working_on.assignment_id, reason)
            self._tell(ChangeDevice(conditions=Conditions(available=False, reason=reason)))

    def note_exported(self) -> None:
        """Report that the personal model has been exported."""
        with self._briefly("its export"):
            self._tell(ChangeDevice(exported=True))
