"""A device inside another program: progress events, and requests to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

from ..errors import BadArgument

if TYPE_CHECKING:
    from sparrow.protocol.messages import Assignment

    from .session import Session

# Interval at which a waiting device checks for a request to stop.
LOOK_SECONDS = 0.2

DevicePhase = Literal[
    "opening",
    "waiting",
    "paused",
    "unreachable",
    "download",
    "prepare",
    "train",
    "personalise",
    "evaluate",
    "adapt",
    "upload",
    "stopped",
]


@dataclass(frozen=True)
class DeviceProgress:
    """One event of a device's work.

    phase: ``opening`` chooses a budget and enrols; ``paused`` by the policy; ``stopped`` after early stopping, waiting
    for evaluations; others as named. round: the current or last one; 0 before the first. step, steps: done and total
    steps of training in this round. loss: the loss of the last batch. accuracy: the personal model's on validation
    data; None if not evaluated. bytes_down, bytes_up: total of all calls so far. seconds: since ``join`` was called.
    text: a message for the user, if any.
    """

    phase: DevicePhase
    round: int = 0
    rounds: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    accuracy: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    text: str | None = None


class ProgressReporter:
    """Progress events of one device, passed to ``call`` on the working thread. quiet: drop hints."""

    def __init__(self, call: Callable[[DeviceProgress], None], *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._call = call
        self._began = time.monotonic()
        self._last = DeviceProgress("opening")
        # The phase before the coordinator stopped answering.
        self._before: DevicePhase = "opening"
        self._session: Session | None = None

    def begin(self, session: Session) -> None:
        """Include this session's numbers in later events."""
        self._session = session
        self.between()

    def say(self, text: str) -> None:
        """Report a message for the user."""
        self._tell(replace(self._last, text=text))

    def hint(self, text: str) -> None:
        """Report a message that needs no attention; ``quiet`` hides it."""
        if not self.quiet:
            self.say(text)

    def unreachable(self, server: str, reason: str, seconds: float) -> None:
        """Report that the coordinator does not answer; next try in ``seconds``."""
        text = f"{server} does not answer ({reason}); trying again in {seconds:.1f} s"
        if self._last.phase != "unreachable":
            self._before = self._last.phase
        self._tell(replace(self._last, phase="unreachable", text=text))

    def connected_again(self) -> None:
        """Report that the coordinator answers again."""
        self._last = replace(self._last, phase=self._before)
        self.hint("connected again")

    def phase(self, name: str) -> None:
        """Report that a phase of a round begins."""
        self._tell(replace(self._last, phase=cast(DevicePhase, name), round=self._round(), step=0, steps=0, loss=None))

    def training(self, assignment: Assignment, done: int, total: int, loss: float) -> None:
        """Report one step of training."""
        name = cast(DevicePhase, assignment.kind.value)
        self._tell(replace(self._last, phase=name, round=assignment.round, step=done, steps=total, loss=loss))

    def between(self, *, paused: bool = False) -> None:
        """Report that the device has no work."""
        assert self._session is not None, "work comes with a session"
        stopped = self._session.progress.stopped_round is not None
        name: DevicePhase = "paused" if paused else "stopped" if stopped else "waiting"
        self._tell(DeviceProgress(name, round=self._session.progress.last_round))

    def _round(self) -> int:
        work = self._session.working_on if self._session else None
        return self._last.round if work is None else work.round

    def _tell(self, moment: DeviceProgress) -> None:
        if self._session is not None:
            best = self._session.progress.best
            moved = self._session.moved
            moment = replace(
                moment,
                rounds=self._session.info.rounds,
                accuracy=best.validation.accuracy if best else None,
                bytes_down=moved.bytes_down,
                bytes_up=moved.bytes_up,
            )
        self._last = replace(moment, seconds=time.monotonic() - self._began, text=None)
        self._call(replace(self._last, text=moment.text))


class Settable(Protocol):
    """The reading half of a ``threading.Event``."""

    def is_set(self) -> bool:
        """Return True to stop."""


# A BaseException, so that a task's code that catches every Exception does not swallow it.
class Stopped(BaseException):
    """The program has asked the device to stop."""


class Stop:
    """A program's request to stop; raises Stopped once, between training steps or while waiting.

    asked: an event, or a function that returns whether to stop; None: never. Raises BadArgument for anything else.
    """

    def __init__(self, asked: Settable | Callable[[], bool] | None) -> None:
        ask = getattr(asked, "is_set", asked)
        if ask is not None and not callable(ask):
            raise BadArgument(
                f"stop is a {type(asked).__name__}; give a threading.Event, or a function that returns whether to stop"
            )
        self._ask: Callable[[], bool] | None = ask

    @property
    def possible(self) -> bool:
        """Whether a request to stop is possible."""
        return self._ask is not None

    def check(self) -> None:
        """Raise Stopped if requested."""
        if self._ask is not None and self._ask():
            self._ask = None
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait; raise Stopped if requested."""
        if not self.possible:
            time.sleep(seconds)
            return
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, LOOK_SECONDS))
