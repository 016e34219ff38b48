"""One device's conversation with its coordinator: enrol, ask, download, train, upload, and resume after any crash.

``Session.step`` does one thing and returns; ``join`` calls it in a loop, a fleet for many devices in turn. Between
steps everything that matters is on disk (``state``), so a step can be killed anywhere:

    before the state is saved   the assignment is still open: it is given again and done again, from the same model and
                                with the same random numbers, so to the same update
    after it                    the outbox holds the update: it is sent again, byte for byte, and counts once
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
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
    DeviceProfile,
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

PATIENCE_WHEN_LEAVING = 3.0
FAILURES = 3
"""Rounds in a row that fail, of a device that has trained in none, after which it gives up."""
TRAINING = (Kind.train, Kind.personalise, Kind.prepare)
"""The kinds of work that train in a round."""
FIRST_REST, LONGEST_REST = 5.0, 900.0
"""Seconds of rest after a fault of the coordinator; each in a row doubles it."""
FINAL = (errors.NotAuthenticated, errors.NotAllowed, errors.NameTaken, errors.FederationOver, errors.FederationDeleted)
"""Refusals that concern the device itself. After any other it tries again: it may come of a coordinator's fault."""

Answer = TypeVar("Answer")


class Outcome(Enum):
    """The outcome of a step."""

    worked = "worked"
    idle = "idle"
    over = "over"


@dataclass(frozen=True)
class Step:
    """Outcome of one step. ``assignment`` is what was worked on; ``pause_seconds`` how long an idle device rests, as it
    is asked to or after a fault; ``paused`` why its policy keeps it idle; ``failed`` why nothing came of the work."""

    outcome: Outcome
    assignment: Assignment | None = None
    pause_seconds: float = 0.0
    paused: PauseReason | None = None
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
        self._away: PauseReason | None = None  # what the coordinator was told last
        self.failed_rounds = 0  # in a row, since this process began
        self.last_failure: str | None = None
        # The same, as the coordinator learns it.
        self.reported_failure: Failure | None = None
        self._faults = 0  # of the coordinator, in a row
        self.working_on: Assignment | None = None  # stays when a step is interrupted: leave() hands it back
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
            )
            self._or_enrol_again(lambda: self._tell(change))

    def _enrol(self) -> None:
        request = Enrol(
            name=self.identity.name,
            enrolment_key=self.identity.enrolment_key,
            identity_key=self._public_identity(),
            budget=self.budget,
            limited_by=self._prepared.limited_by,
            num_examples=count_examples(self.task.train) or None,
            hosted=self._options.hosted,
            profile=(self._options.profile or own_profile(self._telemetry.describe())).model_copy(
                update={"data_warnings": self._data_warnings()}
            ),
        )
        enrolled = self.transport.enrol(self._federation, request)
        self.identity = self.identity.model_copy(update={"device_id": enrolled.device_id, "token": enrolled.token})
        self.folder.save_identity(self.identity)
        if enrolled.notice:
            log.warning("%s", printable(enrolled.notice))
        self.transport.token = enrolled.token

    def _data_warnings(self) -> tuple[str, ...]:
        """Return the operator's warnings about data unlike the publisher's; none in a secure federation, or with local
        noise."""
        if self.info.settings.secure or self._options.local_noise is not None:
            return ()
        return tuple(there for _, there in self.differences)

    def _or_enrol_again(self, call: Callable[[], Answer]) -> Answer:
        """Return the answer of ``call``; a device whose token has expired enrols again first.

        Raises Refused where an enrolment token is needed and was not given.
        """
        try:
            return call()
        except errors.TokenExpired:
            self.transport.token = self._enrolment_token
            self._enrol()
            return call()

    def step(self, wait_seconds: float = 0.0) -> Step:
        """Send what is waiting to be sent, or ask for work and do it, or find that there is none.

        No fault of the coordinator ends a device: where it gives work that cannot be used, or refuses for a reason that
        is not in ``FINAL``, the work is handed back and the device rests.
        """
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
        """Hand back what is open, and rest for longer after each fault in a row."""
        seconds = min(FIRST_REST * 2.0 ** min(self._faults, 30), LONGEST_REST)
        self._faults += 1
        self.last_failure = str(fault)
        self.reported_failure = errors.failure_of(fault)
        log.warning("%s; this device tries again in %.0f s", fault, seconds)
        assignment, self.working_on = self.working_on, None
        if assignment is not None:
            try:
                self._give_up(assignment, self.reported_failure)
            except FINAL:
                raise
            except errors.Refused as refusal:
                log.info("the work could not be handed back: %s", refusal.detail)
        return Step(Outcome.idle, assignment, pause_seconds=seconds, failed=str(fault))

    def _step(self, wait_seconds: float) -> Step:
        if (reason := self._options.watchdog.look() if self._options.watchdog else None) is not None:
            if reason is not self._away:  # it is reported once
                self._tell(ChangeDevice(conditions=Conditions(available=False, reason=reason)))
                self._away = reason
            self._next = None  # which was taken back with that
            return Step(Outcome.idle, pause_seconds=LOOK_SECONDS, paused=reason)
        self._away = None  # asking for work says that it is back
        if self.progress.pending is not None:
            with self._heard(self.progress.pending.assignment_id, self.info.settings):
                self._send(self.progress.pending)
        assignment, self._next, pause = self._next, None, 0.0
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
        failed, to_blame = None, True
        try:
            if assignment.manifest_digest not in (None, self.manifest.digest):
                self._take_new_version()
            self.trust.check(assignment.settings)
            with self._heard(assignment.assignment_id, assignment.settings):
                self._judge_best_again()
                self._work(assignment, self._watched_work(assignment))
        except BundleError:  # of the payload
            raise
        except errors.ModelReplaced as error:
            self._give_up(assignment, errors.failure_of(error))
            raise
        except (TrainingDiverged, ProtocolError) as error:
            failed, to_blame = str(error), not isinstance(error, UnsoundModel)
            if isinstance(error, TrainingDiverged):
                failed = diagnose(error, assignment.settings, self.task.train)
            log.warning("round %s: %s", assignment.round, failed)
            self.reported_failure = errors.failure_of(error)
            self._give_up(assignment, self.reported_failure)
            if assignment.kind in TRAINING:
                self._save_progress(failures=self.progress.failures + 1, failure=failed)
        except Paused as pause_:
            log.warning("round %s is handed back: the pause would last beyond its deadline", assignment.round)
            self._give_up(assignment, pause_.reason)
            self._away = pause_.reason
            self._reassess(assignment)
        except errors.RoundOver as error:
            # The round closed while this device was downloading; there is other work, or will be.
            log.info("round %s: %s", assignment.round, error.detail)
            self._tell(ChangeDevice(conditions=Conditions()))  # the coordinator may have marked it absent
        self.working_on = None  # not in a finally: after an interrupt or error ``leave`` must know what to hand back
        if assignment.kind not in JUDGING:
            self.failed_rounds = (self.failed_rounds + to_blame) if failed else 0
            self.last_failure = failed or self.last_failure
        return Step(Outcome.worked, assignment, failed=failed)

    def _ask(self, wait_seconds: float) -> tuple[Assignment | None, float]:
        """Ask for work, and say what the last upload cost, which need not be said again."""
        cost = self.progress.upload_cost
        found = self.transport.assignment(self._federation, wait_seconds, cost, *self._holding())
        if cost is not None:
            self.progress = self.progress.model_copy(update={"upload_cost": None})
        return found

    def _heard(self, assignment_id: str, settings: FederationSettings) -> AbstractContextManager[None]:
        """Have the coordinator hear of this device while it works, transfers included."""
        return (
            nullcontext()
            if self._options.hosted
            else heartbeat(self.transport, assignment_id, settings.silence_seconds)
        )

    def _give_up(self, assignment: Assignment, reason: PauseReason | Failure) -> None:
        if self.personal is None:  # a part of its own begins as it was, not with what a failed round has left
            self.engine.load(self._as_new)
        self._hand_back(assignment.assignment_id, reason)

    def leave(self, reason: Failure) -> None:
        """Return open work and mark the device as away, so that the round need not wait for the deadline."""
        self.transport.patience_seconds = PATIENCE_WHEN_LEAVING
        reason = reason if self._options.local_noise is None else WITHHELD
        try:
            if self.working_on is not None:
                self._hand_back(self.working_on.assignment_id, reason)
            self._tell(ChangeDevice(conditions=Conditions(available=False, reason=reason)))
        except errors.SdkError as error:
            log.warning("the coordinator could not be told that this device leaves: %s", error)


def own_profile(energy: str) -> DeviceProfile:
    """Return the profile that this device sends when it enrols."""
    try:
        sdk_version = version("sparrow-fl")
    except PackageNotFoundError:
        sdk_version = "unknown"
    return DeviceProfile(
        board=platform.machine(),
        system=f"{platform.system()} {platform.release()}"[:200],
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        sensors=(energy[:300],),
        sdk_version=sdk_version,
    )
