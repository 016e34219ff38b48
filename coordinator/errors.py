"""What can go wrong with a call, by what the caller can do about it; ``coordinator/api/problems.py`` maps it to HTTP.

CoordinatorError
├── NotAuthenticated      send a valid token
│   ├── TokenExpired      the device's token is too old: enrol again
│   └── FederationDeleted  the device's federation is there no more
├── TooManyRequests       come back later, as Retry-After says
├── NotAllowed            the token is valid, but not for this
├── NotFound              no such federation, device, assignment
│   └── NoGlobalModel     this method has no global model that can be used alone
├── NameTaken             choose another name
├── DifferentFederation   one of this name exists, and is not the one that was asked for
├── WrongState            the federation's status forbids this now
├── RoundClosed           the assignment is no longer open: fetch the next one
├── DifferentUpdate       another update was already accepted for this assignment
├── Finished              the federation is over
├── Unavailable           storage does not work just now: try again later
│   └── DiskFull          there is no room left for it
├── WrongRange            ask how much of the update is here, and send the rest
├── LengthRequired, TooLarge, WrongMediaType      the request's envelope is wrong
└── BadContent            what was sent breaks the contract; the text says where and what to do
    └── UnknownMethod     the method that was named is not installed at the coordinator
"""

from pydantic import ValidationError

from sparrow.command_line.exits import Exit


class CoordinatorError(Exception):
    """Base of everything a caller can be told; its text is for the caller."""

    exit_code = Exit.FAILED


class NotAuthenticated(CoordinatorError):
    """No token, or none that is known."""


class TokenExpired(NotAuthenticated):
    """The device's token is too old."""


class FederationDeleted(NotAuthenticated):
    """The device's federation was deleted, and its token with it."""

    def __init__(self) -> None:
        super().__init__(
            "the federation of this device was deleted by its operator, so there is nothing left to do; its personal "
            "model stays with it. To join one that was made anew, start with another --state-dir"
        )


class TooManyRequests(CoordinatorError):
    """More calls than this caller may make."""


class NotAllowed(CoordinatorError):
    """The token belongs to somebody who may not do this."""


class NotFound(CoordinatorError):
    """There is no such thing."""

    exit_code = Exit.NOT_FOUND


class NoGlobalModel(NotFound):
    """The method has no global model that can be used alone."""


class NameTaken(CoordinatorError):
    """A federation or device of this name exists."""


class DifferentFederation(CoordinatorError):
    """A federation of this name exists, with another method, model or other settings."""


class WrongState(CoordinatorError):
    """The federation's status forbids this now."""


class RoundClosed(CoordinatorError):
    """The assignment is no longer open."""


class DifferentUpdate(CoordinatorError):
    """Another update was already accepted for this assignment."""


class Finished(CoordinatorError):
    """The federation is over and this device has nothing left to do in it."""


class LengthRequired(CoordinatorError):
    """The body's length must be declared."""


class TooLarge(CoordinatorError):
    """The body is longer than anything valid could be."""


class WrongMediaType(CoordinatorError):
    """The body is of a type that this call does not take."""


class BadContent(CoordinatorError):
    """What was sent breaks the contract."""


class UnknownMethod(BadContent):
    """The method that was named is not installed here."""


class Unavailable(CoordinatorError):
    """Records or blobs cannot be reached just now; nothing of the call was done."""

    exit_code = Exit.UNREACHABLE


class DiskFull(Unavailable):
    """There is no room for what the call brings."""

    exit_code = Exit.FULL


class WrongRange(CoordinatorError):
    """A part of an update does not begin where the last one ended, or the whole is not what was announced."""


def explain(error: ValidationError) -> str:
    """A pydantic error in one line: where, what was wrong."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "body"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}; see docs/settings.md and the OpenAPI page at /docs"
