"""The errors that leave ``join``, ``publish``, ``simulate``, ``Client``, ``predict`` and ``export``.

All are ``SdkError``, and their text says what to do. ``exit_code`` is that of a command that meets them (docs/cli.md).
A caller can tell apart:

    Unreachable         no coordinator answers: try again later
    Refused             it answers no; NotAuthenticated and NotAllowed ask for another token, NotFound and NameTaken for
                        another name, WrongState for another status of the federation
    BadArgument         an argument cannot work; found before anything was done
    StateError          the state folder is in use, or belongs to another device
    NothingTrained      a device comes to its end without a model of its own

Other modules define errors of their own beside what raises them: of data (``reading.errors``), of the wire
(``sparrow.protocol.errors``), of training (``engines.training``), of exports (``sparrow.export.errors``), of
predictions (``predict``).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparrow.command_line.exits import Exit, of_status
from sparrow.protocol.errors import SdkError as SdkError
from sparrow.protocol.failures import Failure, program_error

__all__ = [
    "BadArgument",
    "BadContent",
    "CoordinatorFull",
    "Damaged",
    "DifferentFederation",
    "DifferentUpdate",
    "FederationDeleted",
    "FederationOver",
    "ModelReplaced",
    "NameTaken",
    "NoCoordinator",
    "NoGlobalModel",
    "NoSuchPath",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "NotInstalled",
    "NothingTrained",
    "OutOfMemory",
    "Refused",
    "RoundOver",
    "SdkError",
    "StateError",
    "SystemFailed",
    "TokenExpired",
    "TooManyRequests",
    "Unreachable",
    "WrongSettings",
    "WrongState",
]


class Unreachable(SdkError):
    """The coordinator does not answer: try again later."""

    exit_code = Exit.UNREACHABLE


class CoordinatorFull(Unreachable):
    """The coordinator has answered for longer than the caller's patience that it has no room left:
    have its operator make some."""

    exit_code = Exit.FULL


class TooManyRequests(Unreachable):
    """The coordinator has answered for longer than the caller's patience that this caller calls too often:
    wait longer between calls."""


class Refused(SdkError):
    """The coordinator refused the call. ``status`` is HTTP's; ``detail`` the text of the problem document."""

    failure = Failure("coordinator-fault")

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{detail} (HTTP {status})")
        self.status = status
        self.detail = detail

    @property
    def exit_code(self) -> Exit:  # type: ignore[override]
        """The exit code that belongs to the status."""
        return of_status(self.status)

    def __reduce__(self) -> tuple[type[Refused], tuple[int, str]]:
        """Make it again from its own arguments, so that it can be sent between the processes of a fleet."""
        return type(self), (self.status, self.detail)


class NotAuthenticated(Refused):
    """The token is missing or unknown: set the right one."""


class TokenExpired(NotAuthenticated):
    """The device's token is too old: enrol again."""


class NotAllowed(Refused):
    """The token is valid, but not for this call: use one of another kind."""


class NotFound(Refused):
    """There is no such federation, device or assignment: correct the name."""


class NoGlobalModel(NotFound):
    """The method has no global model that can be used alone: use a personal one."""


class NameTaken(Refused):
    """A federation or device of this name exists: choose another name."""


class DifferentFederation(Refused):
    """The federation of this name has another method, model or other settings; the text names each difference."""


class WrongState(Refused):
    """The federation's status forbids this now: change its status first."""


class RoundOver(Refused):
    """The assignment takes no update any more: ask for the next one."""


class DifferentUpdate(RoundOver):
    """Another update was accepted for this assignment before."""


class FederationOver(Refused):
    """The federation is finished and has nothing left for this device."""


class FederationDeleted(Refused):
    """The device's federation was deleted by its operator."""


class BadContent(Refused):
    """The content of a request breaks the contract."""


class NotInstalled(BadContent):
    """The method or task that was named is not installed at the coordinator."""

    exit_code = Exit.NOT_FOUND


class NoCoordinator(Refused):
    """The server at the address speaks HTTP, but is not a coordinator: check the address."""

    exit_code = Exit.UNREACHABLE


class BadArgument(SdkError):
    """An argument, option or setting cannot work."""

    exit_code = Exit.USAGE


class WrongSettings(BadArgument):
    """A federation cannot be created with these settings."""


class ModelReplaced(SdkError):
    """The federation's model has a new version, and the device trains with code of the one before."""

    failure = Failure("model-replaced")


class NothingTrained(SdkError):
    """A device has trained in no round, or could not make its personal model in the end."""

    failure = Failure("nothing-trained")


class OutOfMemory(SdkError):
    """Training needs more memory than the device, or its accelerator, has."""

    exit_code = Exit.CANNOT
    failure = Failure("no-memory")


class Damaged(SdkError):
    """A download does not match its announced digest."""

    failure = Failure("bad-payload/damaged")


class StateError(SdkError):
    """The state folder cannot be used."""


class SystemFailed(SdkError):
    """The operating system refuses a file, folder or connection."""


class NoSuchPath(SystemFailed):
    """A file or folder does not exist."""

    exit_code = Exit.NOT_FOUND


@contextmanager
def translated() -> Iterator[None]:
    """Raise SdkErrors in place of the errors of the operating system and of missing memory that leave the block.

    Errors of a task's own code leave it as they are: they are bugs, and their traceback says where.
    """
    try:
        yield
    except OSError as error:
        kind = NoSuchPath if isinstance(error, FileNotFoundError) else SystemFailed
        raise kind(_of_system(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        raise OutOfMemory(
            f"there is not enough memory to train ({error}); give a smaller --budget, or another --accelerator"
        ) from error


def failure_of(error: BaseException) -> Failure:
    """Return what a device reports of an error: never its text, which may hold names of files or data."""
    if isinstance(error, SdkError):
        # A class from outside may have set anything.
        return error.failure if isinstance(error.failure, Failure) else SdkError.failure
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted/user")
    if _lacks_memory(error):
        return OutOfMemory.failure
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure("no-space")
    kind = type(error)
    return program_error(kind.__name__ if kind.__module__ == "builtins" else "other")


def _lacks_memory(error: BaseException) -> bool:
    """Return whether memory was missing, of the processor or of PyTorch's accelerator."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _of_system(error: OSError) -> str:
    said: Any = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {said}" if error.filename and error.strerror else str(said)
