"""Errors raised by ``join``, ``publish``, ``simulate``, ``Client``, ``predict`` and ``export``.

All are ``SdkError``; their message has the remedy, ``exit_code`` is the command's (docs/cli.md). The main branches:

    Unreachable         no answer from a coordinator: retry later
    Refused             the coordinator refused: use another token, name or status of the federation
    BadArgument         an argument is invalid; found before any work
    StateError          the state folder is in use, or belongs to another device
    NothingTrained      the device finished without a personal model
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparrow.command_line.exits import Exit, of_status
from sparrow.protocol.errors import BadArgument as BadArgument
from sparrow.protocol.errors import SdkError as SdkError
from sparrow.protocol.failures import Failure, program_error

__all__ = [
    "BadArgument",
    "BadContent",
    "Blocked",
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
    "OtherVersion",
    "OutOfMemory",
    "Refused",
    "RoundOver",
    "SdkError",
    "StateCopied",
    "StateError",
    "SystemFailed",
    "TokenExpired",
    "TooManyRequests",
    "Unreachable",
    "WrongSettings",
    "WrongState",
]


class Unreachable(SdkError):
    """The coordinator does not answer: retry later."""

    exit_code = Exit.UNREACHABLE


class CoordinatorFull(Unreachable):
    """The coordinator's storage stayed full: ask its operator to free space."""

    exit_code = Exit.FULL


class TooManyRequests(Unreachable):
    """The coordinator kept limiting this caller: wait longer between calls."""


class Refused(SdkError):
    """The coordinator refused the call; ``detail`` is the text of its problem document."""

    failure = Failure("coordinator-fault")

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail

    @property
    def exit_code(self) -> Exit:  # type: ignore[override]
        """The exit code for the HTTP status."""
        return of_status(self.status)

    # Exceptions unpickle from ``args``, which hold one text here; a fleet sends errors between processes.
    def __reduce__(self) -> tuple[type[Refused], tuple[int, str]]:
        return type(self), (self.status, self.detail)


class NotAuthenticated(Refused):
    """The token is missing or unknown."""


class TokenExpired(NotAuthenticated):
    """The device's token has expired: enrol again."""


class NotAllowed(Refused):
    """The token does not permit this call."""


class StateCopied(NotAllowed):
    """Another copy of this state folder has started: keep one (``JoinOptions.take_over``)."""


class NotFound(Refused):
    """There is no such federation, device or assignment."""


class NoGlobalModel(NotFound):
    """The method has no usable global model: use a personal one."""


class NameTaken(Refused):
    """A federation or device of this name exists."""

    exit_code = Exit.USAGE


class DifferentFederation(Refused):
    """The federation of this name differs; the text lists the differences."""


class WrongState(Refused):
    """The federation's status forbids this call."""


class RoundOver(Refused):
    """The assignment no longer accepts an update: ask for the next one."""


class DifferentUpdate(RoundOver):
    """Another update was already accepted for this assignment."""


class FederationOver(Refused):
    """The federation is finished."""


class FederationDeleted(Refused):
    """The operator deleted the federation."""


class BadContent(Refused):
    """The content of a request is invalid."""


class Blocked(Refused):
    """A proxy or firewall refuses the call: change its configuration."""

    exit_code = Exit.FAILED


class NotInstalled(BadContent):
    """The method or task is not installed at the coordinator."""

    exit_code = Exit.NOT_FOUND


class NoCoordinator(Refused):
    """The HTTP server at the address is not a coordinator."""

    exit_code = Exit.UNREACHABLE

    def __str__(self) -> str:
        return f"{self.detail} (HTTP {self.status})"


class OtherVersion(Refused):
    """Coordinator and device use different versions of the HTTP contract: upgrade the older one."""

    exit_code = Exit.FAILED


class WrongSettings(BadArgument):
    """Settings with which no federation can be created."""


class ModelReplaced(SdkError):
    """The federation's model was replaced; the device still has the old code."""

    failure = Failure("model-replaced")


class NothingTrained(SdkError):
    """The device finished without a personal model."""

    failure = Failure("nothing-trained")


class OutOfMemory(SdkError):
    """Training needs more memory than the device or its accelerator has."""

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
    """Translate errors of the operating system and of missing memory into SdkErrors."""
    try:
        yield
    except OSError as error:
        kind = NoSuchPath if isinstance(error, FileNotFoundError) else SystemFailed
        raise kind(_of_system(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        raise OutOfMemory(
            f"not enough memory to train ({error}); give a smaller --budget, or another --accelerator"
        ) from error


def failure_of(error: BaseException) -> Failure:
    """Return the failure to report. It omits the error's text, which may hold names of files or data."""
    if isinstance(error, SdkError):
        # Third-party subclasses may set any value.
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
    # By name: torch.cuda.OutOfMemoryError would need torch.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _of_system(error: OSError) -> str:
    said: Any = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {said}" if error.filename and error.strerror else str(said)
