"""Answers of a coordinator, and of proxies in between: messages, problem documents, remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from sparrow.command_line.table import printable
from sparrow.protocol.messages import UpdateReceived
from sparrow.protocol.wire import WIRE, WIRE_HEADER
from sparrow.transport import httpx

from .. import errors
from ..errors import NoCoordinator, OtherVersion, Refused, Unreachable

_ALIKE = (
    errors.NotAuthenticated,
    errors.TokenExpired,
    errors.NotAllowed,
    errors.NotFound,
    errors.NoGlobalModel,
    errors.NameTaken,
    errors.StateCopied,
    errors.DifferentFederation,
    errors.WrongState,
    errors.DifferentUpdate,
    errors.FederationDeleted,
    errors.BadContent,
    errors.OtherVersion,
    errors.TooManyRequests,
)
# Type of a problem document, without ``PREFIX`` -> exception; other types raise ``Refused``. ``Unreachable`` ones are
# temporary and raised when the caller's patience ends.
PROBLEMS: Mapping[str, type[Refused] | type[Unreachable]] = {
    **{kind.__name__: kind for kind in _ALIKE},
    **dict.fromkeys(("CrossSite", "WrongHost"), errors.NotAllowed),
    "OtherStart": errors.StateCopied,
    "RoundClosed": errors.RoundOver,
    "Finished": errors.FederationOver,
    **dict.fromkeys(("NoSuchMethod", "NoSuchTask"), errors.NotInstalled),
    **dict.fromkeys(("InvalidRequest", "LengthRequired", "TooLarge", "WrongMediaType"), errors.BadContent),
    **dict.fromkeys(("WrongRange", "RangeNotSatisfiable", "RequestHeaderFieldsTooLarge"), errors.BadContent),
    "DiskFull": errors.CoordinatorFull,
    **dict.fromkeys(("Unavailable", "NotReady", "Unreadable", "Damaged", "InternalError"), Unreachable),
}
PREFIX = "urn:sparrow:problem:"

# Header of every coordinator's answer, also of those before WIRE_HEADER.
REQUEST_ID = "X-Request-Id"
OLDER = "The coordinator at {host} runs an older Sparrow than this installation ({reason}); upgrade it there"

# Bounds the seconds of Retry-After.
LONGEST_PAUSE = 900.0

# Characters shown of a refusal.
LONGEST_TEXT = 1000
Message = TypeVar("Message", bound=BaseModel)

# Statuses with which proxies refuse calls, never a coordinator without a problem document.
BY_PROXIES = (407, 411, 413, 414, 431)
REMEDIES = {
    403: "let it pass calls with GET, POST, PUT, PATCH and DELETE",
    405: "let it pass calls with GET, POST, PUT, PATCH and DELETE",
    407: "give it a name and password: http://NAME:PASSWORD@HOST:PORT",
    411: "let it pass bodies with a Content-Length",
    413: "raise its limit (nginx: client_max_body_size; Caddy: request_body)",
    414: "raise its limit of an address's length (nginx: large_client_header_buffers)",
    431: "raise its limit of the headers' length (nginx: large_client_header_buffers)",
}


def message_of(kind: type[Message], answer: httpx.Response) -> Message:
    """Return the message in the answer. Raises NoCoordinator, for example for a proxy's page."""
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError:
        raise NoCoordinator(answer.status_code, detail_of(answer)) from None


def read_all(kind: type[Message], answer: httpx.Response) -> list[Message]:
    """Return the messages of a list in the answer. Raises NoCoordinator if the answer is no such list."""
    try:
        return TypeAdapter(list[kind]).validate_json(answer.content)  # type: ignore[valid-type]
    except ValidationError:
        raise NoCoordinator(answer.status_code, detail_of(answer)) from None


def pause_of(answer: httpx.Response, usual: float) -> float:
    """Return the seconds in Retry-After, at most ``LONGEST_PAUSE``, or ``usual``."""
    # Dates, its other form, are ignored: they would need a correct clock on this device.
    text = answer.headers.get("Retry-After", "")
    sensible = text.isascii() and text.isdecimal() and len(text) < 10
    return min(float(text), LONGEST_PAUSE) if sensible else usual


def passes(answer: httpx.Response) -> bool:
    """Return True if the refusal is temporary."""
    return answer.status_code in (408, 429) or answer.status_code >= 500


def is_problem(answer: httpx.Response) -> bool:
    """Return whether an answer is a problem document."""
    return str(answer.headers.get("Content-Type", "")).startswith("application/problem+json")


def problem_type(answer: httpx.Response) -> str:
    """Return the type of a problem document without ``PREFIX``, or ""."""
    try:
        return str(answer.json()["type"]).removeprefix(PREFIX)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def detail_of(answer: httpx.Response) -> str:
    """Return the text of a problem document."""
    try:
        return printable(str(answer.json()["detail"])[:LONGEST_TEXT])[:LONGEST_TEXT]
    except (ValueError, KeyError, TypeError, RecursionError):
        host = answer.url.host
        if WIRE_HEADER in answer.headers:
            return f"The coordinator at {host} runs another Sparrow (its answer cannot be read); upgrade the older one"
        if REQUEST_ID in answer.headers and _is_json(answer):
            return OLDER.format(host=host, reason="its answer cannot be read")
        return f"The answer of {host} is not from a Sparrow coordinator; check the address"


def check_version(answer: httpx.Response) -> None:
    """Raise OtherVersion if the coordinator names another version of the HTTP contract."""
    named = str(answer.headers.get(WIRE_HEADER, ""))
    if not (named.isascii() and named.isdecimal() and len(named) < 10) or int(named) == WIRE:
        return
    older = "the coordinator" if int(named) < WIRE else "this installation"
    raise OtherVersion(
        answer.status_code,
        f"The coordinator at {answer.url.host} uses version {int(named)} of the HTTP contract, this installation "
        f"version {WIRE}; upgrade Sparrow in {older}",
    )


def refusal_of(answer: httpx.Response) -> str:
    """Return the text of a problem document, and whether the coordinator is too old for the call."""
    detail = detail_of(answer)
    unknown = problem_type(answer) in ("InvalidRequest", "NotFound", "MethodNotAllowed")
    # Older coordinators do not name the version.
    if unknown and WIRE_HEADER not in answer.headers and REQUEST_ID in answer.headers:
        return OLDER.format(host=answer.url.host, reason=detail)
    return detail


def _is_json(answer: httpx.Response) -> bool:
    return str(answer.headers.get("Content-Type", "")).startswith("application/json")


def continued(answer: httpx.Response, first: int, size: int) -> int:
    """Return the position of the next part. Raises NoCoordinator if it is not between ``first`` and ``size``."""
    received = message_of(UpdateReceived, answer).received
    if not first < received < size:
        raise NoCoordinator(answer.status_code, f"it has received {received:,} bytes of {size:,}")
    return received
