"""Errors of the coordinator, grouped by what their receiver can do.

A RequestError is the caller's to correct; ``calls.problems`` maps it to HTTP, and every other error in a call is
answered with 500. ``callers_data`` turns errors in a caller's data into BadContent. ``exit_code`` is the exit code of a
command that meets the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sparrow.command_line.exits import Exit
from sparrow.graphs.errors import SkeletonError
from sparrow.protocol.errors import ProtocolError


class CoordinatorError(Exception):
    """Base of all errors of the coordinator."""

    # Exit code of a command that meets it.
    exit_code: Exit = Exit.FAILED


class RequestError(CoordinatorError):
    """Base of all unsuccessful answers to a request."""


class NotAuthenticated(RequestError):
    """The request has no token, or an unknown one."""

    exit_code = Exit.REFUSED


class TokenExpired(NotAuthenticated):
    """The device's token is too old."""


class FederationDeleted(NotAuthenticated):
    """The device's federation was deleted, and its token with it."""

    def __init__(self) -> None:
        super().__init__(
            "the federation of this device was deleted by its operator; its personal model stays on the device. To "
            "join a new federation, start with another --state-dir"
        )


class TooManyRequests(RequestError):
    """The caller exceeds its rate limit."""


class NotAllowed(RequestError):
    """The token is valid, but not for this call."""

    exit_code = Exit.REFUSED


class WrongHost(NotAllowed):
    """The call has no token and a host name that is not this coordinator's."""


class NotFound(RequestError):
    """The requested thing does not exist."""

    exit_code = Exit.NOT_FOUND


class NoGlobalModel(NotFound):
    """The global model is not usable without a device's own part."""


class NameTaken(RequestError):
    """A federation or device of this name already exists."""


class StateCopied(RequestError):
    """A device's state folder was copied: another copy of it has started since."""


class OtherStart(RequestError):
    """The call comes from a process that is not the last one started for this device."""


class DifferentFederation(RequestError):
    """A federation of this name exists, with another method, model or other settings."""


class WrongState(RequestError):
    """The federation's status does not permit this call now."""


class RoundClosed(RequestError):
    """The assignment is no longer open."""


class DifferentUpdate(RequestError):
    """Another update was already accepted for this assignment."""


class Finished(RequestError):
    """The federation is over and the device has no work left in it."""


class OtherVersion(RequestError):
    """The caller uses another version of the HTTP contract."""


class LengthRequired(RequestError):
    """The body's length must be declared."""


class TooLarge(RequestError):
    """The body is longer than any valid one for this call."""


class WrongMediaType(RequestError):
    """The call does not accept this media type."""


class BadContent(RequestError):
    """The body breaks the contract."""


class NoSuchMethod(BadContent):
    """The new federation's method is not installed here."""


class NoSuchTask(BadContent):
    """The new federation's task is not built in."""


class UnknownMethod(CoordinatorError):
    """A method is no longer installed here."""


class Unavailable(RequestError):
    """Records or blobs cannot be reached at the moment; the call had no effect."""

    exit_code = Exit.UNREACHABLE


class Damaged(Unavailable):
    """A blob is missing or does not match its key, which is ``key``."""

    def __init__(self, key: str) -> None:
        super().__init__("a file of the coordinator is damaged or missing; retry after its operator has restored it")
        self.key = key


class DiskFull(Unavailable):
    """There is no disk space for the call's data."""

    exit_code = Exit.FULL


class Unreadable(RequestError):
    """A required record is damaged, or of an incompatible version."""


class WrongRange(RequestError):
    """A part of an update does not continue the received one, or the whole does not match its digest."""


class OperatorError(CoordinatorError):
    """Base of all errors for the operator, of commands and at the start."""


class BadStorage(OperatorError):
    """The configured database, object storage or data folder cannot be used."""

    exit_code = Exit.USAGE


class DataInUse(OperatorError):
    """Another coordinator process uses the same data folder."""


class WrongBlobs(OperatorError):
    """Records and blobs do not belong together."""


class DamagedRecords(OperatorError):
    """The database is damaged, or not one of this program."""


class NewerRecords(OperatorError):
    """The database was written by a newer version of this program."""


class NoRecords(OperatorError):
    """There is no database in the configured place."""

    exit_code = Exit.NOT_FOUND


class BadRuntime(OperatorError):
    """A package for browsers is not the pinned one."""

    exit_code = Exit.CANNOT


class MissingProgram(OperatorError):
    """A required program is not installed here."""

    exit_code = Exit.CANNOT


class BackupFailed(OperatorError):
    """A backup could not be made or restored."""


Message = TypeVar("Message", bound=BaseModel)


def read_stored(kind: type[Message], value: object) -> Message | None:
    """Return a stored message, or None if it is damaged or of an incompatible version."""
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None


def explain(error: ValidationError) -> str:
    """Return the location and reason of a pydantic error in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    # Checks across fields have no location; their text names the fields.
    text = f"{where or 'body'}: {reason}" if where or first["type"] != "value_error" else reason
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{text}{more}; the page at /docs describes this call"


@contextmanager
def callers_data() -> Iterator[None]:
    """Context manager: raise errors in a caller's data as BadContent."""
    try:
        yield
    except ValidationError as error:
        raise BadContent(explain(error)) from None
    except (ProtocolError, SkeletonError) as error:
        raise BadContent(str(error)) from None
