"""The errors of the coordinator, by what the caller can do about them.

``coordinator/calls/problems.py`` maps those of requests to HTTP; ``exit_code`` is how a command ends that meets one.
Only a RequestError is the caller's to mend. Any other error in a call is the coordinator's own, and answered with 500;
what reads a caller's data says so with ``callers_data``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sparrow.command_line.exits import Exit, of_status
from sparrow.graphs.errors import SkeletonError
from sparrow.protocol.errors import ProtocolError


class CoordinatorError(Exception):
    """The base of every error of the coordinator. ``exit_code`` is how a command ends that meets it."""

    exit_code: Exit = Exit.FAILED


class RequestError(CoordinatorError):
    """The base of every answer to a request that is no success; its text is for the caller."""


class NotAuthenticated(RequestError):
    """The request has no token, or an unknown one."""

    exit_code = Exit.REFUSED


class TokenExpired(NotAuthenticated):
    """The device's token is too old."""


class FederationDeleted(NotAuthenticated):
    """The device's federation was deleted, and its token with it."""

    def __init__(self) -> None:
        super().__init__(
            "the federation of this device was deleted by its operator, so there is nothing left to do; its personal "
            "model stays on the device. To join a new federation, start with another --state-dir"
        )


class TooManyRequests(RequestError):
    """The caller makes more calls than it may."""


class NotAllowed(RequestError):
    """The token is valid, but not for this call."""

    exit_code = Exit.REFUSED


class WrongHost(NotAllowed):
    """The call came under a name that is not this coordinator's, and without a token."""


class NotFound(RequestError):
    """The requested thing does not exist."""

    exit_code = Exit.NOT_FOUND


class NoGlobalModel(NotFound):
    """The method has no global model that can be used alone."""


class NameTaken(RequestError):
    """A federation or device of this name exists."""


class DifferentFederation(RequestError):
    """A federation of this name exists, with another method, model or other settings."""


class WrongState(RequestError):
    """The federation's status forbids this now."""


class RoundClosed(RequestError):
    """The assignment is no longer open."""


class DifferentUpdate(RequestError):
    """Another update was already accepted for this assignment."""


class Finished(RequestError):
    """The federation is over and this device has nothing left to do in it."""


class LengthRequired(RequestError):
    """The body's length must be declared."""


class TooLarge(RequestError):
    """The body is longer than any valid one."""


class WrongMediaType(RequestError):
    """The body is of a type that this call does not take."""


class BadContent(RequestError):
    """The body breaks the contract."""


class NoSuchMethod(BadContent):
    """The method that a new federation asks for is not installed here."""


class NoSuchTask(BadContent):
    """The task that a new federation asks for is not built in."""


class UnknownMethod(CoordinatorError):
    """The method is not installed here; no fault of the devices of a federation that was made when it was."""


class Unavailable(RequestError):
    """Records or blobs cannot be reached at the moment; nothing of the call was done."""

    exit_code = Exit.UNREACHABLE


class Damaged(Unavailable):
    """A blob is not what its key names, or missing; ``key`` says which."""

    def __init__(self, key: str) -> None:
        super().__init__("a file of the coordinator is damaged or missing; try again when its operator has restored it")
        self.key = key


class DiskFull(Unavailable):
    """There is no room for the call's data."""

    exit_code = Exit.FULL


class Unreadable(RequestError):
    """A record that the call cannot do without is damaged, or was written by a version that allows other values."""


class WrongRange(RequestError):
    """A part of an update does not begin where the last one ended, or the whole has another digest than announced."""


class OperatorError(CoordinatorError):
    """The base of every error of a command and of the coordinator's start; its text is for the operator."""


class BadStorage(OperatorError):
    """The database, object storage or data folder of the settings cannot be used: correct the setting."""

    exit_code = Exit.USAGE


class DataInUse(OperatorError):
    """Another coordinator process works on the same data folder."""


class WrongBlobs(OperatorError):
    """Records and blobs do not belong together."""


class DamagedRecords(OperatorError):
    """The database is damaged, or no database of this program."""


class NewerRecords(OperatorError):
    """The database was written by a newer version of this program."""


class NoRecords(OperatorError):
    """There is no database where the settings say."""

    exit_code = Exit.NOT_FOUND


class BadRuntime(OperatorError):
    """A package for browsers that is not the pinned one; the text says what was met."""

    exit_code = Exit.CANNOT


class MissingProgram(OperatorError):
    """A program that the command runs is not installed here."""

    exit_code = Exit.CANNOT


class BackupFailed(OperatorError):
    """No backup was made, or none was restored."""


class NoAnswer(OperatorError):
    """No coordinator answers at this address."""

    exit_code = Exit.UNREACHABLE


class EvaluationRefused(OperatorError):
    """The coordinator refused, with this HTTP status; the text is its advice."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{detail} (HTTP {status})")
        self.exit_code = of_status(status)


Message = TypeVar("Message", bound=BaseModel)


def read_stored(kind: type[Message], value: object) -> Message | None:
    """Return what the records hold; None where it cannot be read: it is damaged, or from a version that allows more."""
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None


def explain(error: ValidationError) -> str:
    """Return the place and the reason of a pydantic error, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "body"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}; the page at /docs describes this call"


@contextmanager
def callers_data() -> Iterator[None]:
    """Raise what the data of a caller break within as BadContent; the same error elsewhere is the coordinator's own."""
    try:
        yield
    except ValidationError as error:
        raise BadContent(explain(error)) from None
    except (ProtocolError, SkeletonError) as error:
        raise BadContent(str(error)) from None
