"""One table from error to answer: RFC 9457 problem documents whose ``detail`` says what to do."""

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
"""The header of a 401. It has no browser ask its user: pages have a form for that (``api.sign_in``)."""

MOST_DETAIL = 2000
RETRY_SECONDS = 5
"""The pause before a retry after a failure that passes by itself or that an operator repairs."""

STATUS: dict[type[Exception], int] = {
    errors.NotAuthenticated: 401,
    errors.TokenExpired: 401,
    errors.FederationDeleted: 410,
    errors.NotAllowed: 403,
    errors.WrongHost: 403,
    errors.NotFound: 404,
    errors.NoGlobalModel: 404,
    errors.NameTaken: 409,
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
    """Answer every error of the coordinator, of the framework, and every unforeseen one, as a problem document."""
    for kind in (*STATUS, HTTPException):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(Exception, _unforeseen)


def problem(status: int, title: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return a problem document. ``title`` is the kind of problem in CamelCase; its type URI is derived from it.

    detail: may repeat what a caller sent: it is cut off at ``MOST_DETAIL`` characters, and made valid UTF-8.
    """
    detail = detail[:MOST_DETAIL].encode(errors="replace").decode()
    document = Problem(type=f"urn:sparrow:problem:{title}", title=title, status=status, detail=detail)
    return JSONResponse(
        document.model_dump(exclude_none=True), status_code=status, media_type=MEDIA_TYPE, headers=headers
    )


def unavailable(error: errors.Unavailable) -> JSONResponse:
    """Return the answer to a call that comes again later."""
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
    advised = isinstance(error, errors.RequestError)  # whose text says what to do
    what = f"there is nothing at {request.url.path}" if error.status_code == 404 else error.detail
    detail = error.detail if advised else f"{what}; check the address; the OpenAPI page at /docs lists the calls"
    return problem(error.status_code, title, detail, dict(error.headers or {}))


async def _invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return problem(422, "InvalidRequest", f"{where}: {first['msg']}; the OpenAPI page at /docs shows what is expected")


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(
        500,
        "InternalError",
        "the coordinator failed at this call; try again, and show its operator the log",
        {"Retry-After": str(RETRY_SECONDS)},
    )
