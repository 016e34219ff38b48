"""Sign-in to the pages: a form accepts a token, and a cookie stores a session instead of it.

The cookie is not sent on behalf of another site, and no script can read it. Browsers send cookies to all ports of a
machine. Its name has the port, so that two coordinators do not overwrite each other's; programs on other ports can see
the session, but not the token. It has no path, so that a browser sends it only below the form's folder, even behind a
proxy that removes a prefix.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.types import Scope

from sparrow.protocol.fields import FederationName

from .. import dashboard
from ..app import Coordinator
from ..calls.bodies import read_body
from ..errors import BadContent, NotAuthenticated
from ..fleet.access import Holder
from .headers import header

LONGEST_FORM = 4096
"""Longest form, in bytes: a token, a federation's name and a page's name."""

PAGES = ("/", "/docs", "/sign-in", "/sign-out")
"""Pages that need no token or redirect to the form."""

AGAIN = "You were signed out: your token has expired or was revoked. Sign in with another one."
WRONG = "This is not an observer or admin token of this coordinator."
NOTES = {"again": AGAIN, "out": "You are signed out."}

router = APIRouter(include_in_schema=False)


def kept_session(scope: Scope) -> str | None:
    """Return the session id in the browser's cookie for this coordinator."""
    begins = f"{_cookie(header(scope, b'host') or '')}="
    for pair in (header(scope, b"cookie") or "").split(";"):
        if pair.strip().startswith(begins):
            return pair.strip().removeprefix(begins) or None
    return None


def form(request: Request, *, again: bool, page: str = "") -> Response:
    """Redirect to the form, and from there to ``page``. again: after an invalid token."""
    wanted = {"federation": request.query_params.get("federation", ""), "page": page, "note": "again" if again else ""}
    query = urlencode({key: value for key, value in wanted.items() if value})
    return RedirectResponse(f"sign-in?{query}" if query else "sign-in", 303)


@router.get("/sign-in")
def ask(federation: FederationName | None = None, page: str = "", note: str = "") -> HTMLResponse:
    """Return the form."""
    return _form(federation or "", page, NOTES.get(note, ""))


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    """Begin a session and redirect to the requested page; show the form again if the token is not valid."""
    coordinator: Coordinator = request.app.state.coordinator
    try:
        sent = parse_qs((await read_body(request, LONGEST_FORM)).decode(), max_num_fields=8)
    except ValueError:
        raise BadContent("the form is not valid; reload the page and try again") from None
    token, federation, page = (sent.get(name, [""])[0].strip() for name in ("token", "federation", "page"))
    holder = await coordinator.look_ups.run(_holder, coordinator, token) if token else None
    if holder is None or holder.kind == "enrolment":
        enrols = f"{WRONG} It is an enrolment token, for devices." if holder else WRONG
        answer = _form(federation, page, enrols)
        answer.status_code = 401
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer
    to = "docs" if page == "docs" else f"./?{urlencode({'federation': federation})}" if federation else "./"
    session = await coordinator.writers.run(coordinator.sessions.begin, token, kept_session(request.scope))
    led = RedirectResponse(to, 303)
    led.set_cookie(_cookie(request.headers.get("host", "")), session, **_rules(request))
    return led


@router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    """End the session and delete its cookie."""
    coordinator: Coordinator = request.app.state.coordinator
    session = kept_session(request.scope)
    # An unknown caller must not make the coordinator write.
    if session is not None and isinstance(request.state.identity.caller, Holder):
        await coordinator.writers.run(coordinator.sessions.end, session)
    led = RedirectResponse("sign-in?note=out", 303)
    led.set_cookie(_cookie(request.headers.get("host", "")), max_age=0, **_rules(request))
    return led


def _holder(coordinator: Coordinator, token: str) -> Holder | None:
    try:
        return coordinator.tokens.find(token)
    except NotAuthenticated:
        # The token has expired.
        return None


def _rules(request: Request) -> dict[str, Any]:
    return {"path": None, "secure": request.url.scheme == "https", "httponly": True, "samesite": "strict"}


def _cookie(host: str) -> str:
    port = host.rpartition(":")[2]
    return f"sparrow-{port if port.isdigit() else 'session'}"


def _form(federation: str, page: str, note: str) -> HTMLResponse:
    body = dashboard.load("sign-in.html").filled(federation=federation, page=page, note=note).plain
    # With no-referrer, browsers send Origin: null, which ``CrossSite`` refuses over plain HTTP.
    headers = {**dashboard.HEADERS, "Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
    headers["Content-Security-Policy"] = headers["Content-Security-Policy"].replace(
        "form-action 'none'", "form-action 'self'"
    )
    return HTMLResponse(body, headers=headers)
