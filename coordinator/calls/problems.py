"""One table from errors to answers: RFC 9457 problem documents whose ``detail`` gives advice."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sparrow.protocol.messages import Problem

from .. import errors

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

CHALLENGE = {"WWW-Authenticate": "Bearer"}
"""Header of a 401. With this scheme browsers show no dialog: pages have a form (``api.sign_in``)."""

UNKNOWN_FIELD = "the coordinator knows no such field; leave it out, or upgrade the coordinator's Sparrow if it is older"
MOST_DETAIL = 2000
RETRY_SECONDS = 5
"""Seconds before a retry after a temporary failure."""

STATUS: dict[type[Exception], int] = {
    errors.OtherVersion: 400,
    errors.NotAuthenticated: 401,
    errors.TokenExpired: 401,
    errors.FederationDeleted: 410,
    errors.NotAllowed: 403,
    errors.WrongHost: 403,
    errors.NotFound: 404,
    errors.NoGlobalModel: 404,
    errors.NameTaken: 409,
    errors.StateCopied: 409,
    errors.OtherStart: 409,
    errors.DifferentFederation: 409,
    errors.WrongState: 409,
    errors.RoundClosed: 409,
    errors.DifferentUpdate: 409,
    errors.Finished: 410,
    errors.LengthRequired: 411,
    errors.TooLarge: 413,
    errors.WrongMediaType: 415,
    errors.WrongRange: 416,
    errors.BadContent: 422,
    errors.NoSuchMethod: 422,
    errors.NoSuchTask: 422,
    errors.TooManyRequests: 429,
    errors.Unavailable: 503,
    errors.Damaged: 503,
    errors.DiskFull: 507,
    errors.Unreadable: 503,
}


def install(app: FastAPI) -> None:
    """Answer errors of the coordinator and the framework, and unexpected errors, with problem documents."""
    for kind in (*STATUS, HTTPException):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(Exception, _unforeseen)


def problem(status: int, title: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return a problem document. title: its kind in CamelCase, from which the type URI is derived.

    detail: may quote a caller; it is truncated to ``MOST_DETAIL`` characters and made valid UTF-8.
    """
    detail = detail[:MOST_DETAIL].encode(errors="replace").decode()
    document = Problem(type=f"urn:sparrow:problem:{title}", title=title, status=status, detail=detail)
    return JSONResponse(
        document.model_dump(exclude_none=True), status_code=status, media_type=MEDIA_TYPE, headers=headers
    )


def unavailable(error: errors.Unavailable) -> JSONResponse:
    """Return the answer to a call that should be retried later."""
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return problem(STATUS[type(error)], type(error).__name__, str(error), headers)


async def _known(request: Request, error: Exception) -> JSONResponse:
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), None)
    if status is not None:
        headers = dict(CHALLENGE) if status == 401 else {}
        if status >= 500:
            headers["Retry-After"] = str(RETRY_SECONDS)
        return problem(status, type(error).__name__, str(error), headers)
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase.replace(" ", "")
    # The text of a RequestError gives advice already.
    advised = isinstance(error, errors.RequestError)
    reason = f"there is nothing at {request.url.path}" if error.status_code == 404 else error.detail
    detail = error.detail if advised else f"{reason}; check the address; the page at /docs lists all calls"
    return problem(error.status_code, title, detail, dict(error.headers or {}))


async def _invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    # Newer devices send fields that an older coordinator lacks.
    said = UNKNOWN_FIELD if first["type"] == "extra_forbidden" else first["msg"]
    return problem(422, "InvalidRequest", f"{where}: {said}; the page at /docs describes this call")


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(
        500,
        "InternalError",
        "the coordinator failed to handle this call; try again, or ask its operator to check the log",
        {"Retry-After": str(RETRY_SECONDS)},
    )
