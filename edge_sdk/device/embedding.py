"""A device inside another program: the moments of its work that the program is told, and how the program ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

from ..errors import BadArgument

if TYPE_CHECKING:
    from sparrow.protocol.messages import Assignment

    from .session import Session

LOOK_SECONDS = 0.2
"""How often a wait looks whether it is to end."""

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
    """One moment of a device's work.

    phase: what it does. ``opening``: it looks what it can afford, and enrols. ``waiting``: for its next work.
    ``paused``: its policy keeps it from working. ``unreachable``: the coordinator does not answer. ``stopped``: its
    training has stopped early, and it waits to answer evaluations. The others are parts of a round. round: the one that
    it works in or, between two, the last one; 0 before the first. rounds: how many the federation has. step, steps: of
    the training in this round, done and in all; 0 outside of it. loss: of the last step's batch. accuracy: of the
    personal model on validation data, after the last round; None where it was not judged. bytes_down, bytes_up: of all
    calls of this device so far. seconds: since ``join`` was called. text: a line to show to a person, where there is
    something to say.
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
    """Tells ``call`` the moments of one device's work, on the thread that does it."""

    def __init__(self, call: Callable[[DeviceProgress], None]) -> None:
        self._call = call
        self._began = time.monotonic()
        self._last = DeviceProgress("opening")
        self._session: Session | None = None

    def begin(self, session: Session) -> None:
        """Report from now on of this session."""
        self._session = session
        self.between()

    def say(self, text: str) -> None:
        """Report a line for a person."""
        self._tell(replace(self._last, text=text))

    def unreachable(self, reason: str, seconds: float) -> None:
        """Report that the coordinator does not answer, and that it is asked again after ``seconds``."""
        text = f"the coordinator does not answer ({reason}); trying again in {seconds:.1f} s"
        self._tell(replace(self._last, phase="unreachable", text=text))

    def phase(self, name: str) -> None:
        """Report that a part of a round begins."""
        self._tell(replace(self._last, phase=cast(DevicePhase, name), round=self._round(), step=0, steps=0, loss=None))

    def training(self, assignment: Assignment, done: int, total: int, loss: float) -> None:
        """Report one step of training."""
        name = cast(DevicePhase, assignment.kind.value)
        self._tell(replace(self._last, phase=name, round=assignment.round, step=done, steps=total, loss=loss))

    def between(self, *, paused: bool = False) -> None:
        """Report that the device has no work at the moment."""
        assert self._session is not None, "work comes with a session"
        stopped = self._session.progress.stopped_round is not None
        name: DevicePhase = "paused" if paused else "stopped" if stopped else "waiting"
        self._tell(DeviceProgress(name, round=self._session.progress.last_round))

    def _round(self) -> int:
        work = self._session.working_on if self._session else None
        return self._last.round if work is None else work.round

    def _tell(self, moment: DeviceProgress) -> None:
        if self._session is not None:
            best, moved = self._session.progress.best, self._session.moved
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
    """The part of a ``threading.Event`` that is read."""

    def is_set(self) -> bool:
        """Return whether it is set."""


class Stopped(BaseException):
    """The program has asked the device to stop. No Exception: a task's own code that catches those does not end it."""


class Stop:
    """Raises Stopped, once, where a device may stop: between two steps of training, and while it waits.

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
        """True where it may still be asked for."""
        return self._ask is not None

    def check(self) -> None:
        """Raise Stopped if it is asked for."""
        if self._ask is not None and self._ask():
            self._ask = None
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait. Raises Stopped as soon as that is asked for."""
        if not self.possible:
            time.sleep(seconds)
            return
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, LOOK_SECONDS))
