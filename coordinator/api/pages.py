"""The operator's page, which leads to a form where a token is needed (``api.sign_in``), and the page that is a device.
Files of both need none, their calls do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sparrow.protocol.fields import FederationName

from .. import dashboard, web
from ..calls.bodies import ranged
from ..web import runtime
from . import sign_in
from .access import TheCoordinator, TheIdentity, may_look, own_federation
from .packing import takes_gzip

router = APIRouter(include_in_schema=False)


@router.get("/")
def index(request: Request, coordinator: TheCoordinator, identity: TheIdentity) -> Response:
    """Return the page; of the newest federation, unless ``?federation=`` names one."""
    if not may_look(identity):
        return sign_in.form(request, again=identity.failure is not None)
    federation = own_federation(identity) or coordinator.overviews.newest() or ""
    return _file(request, dashboard.load("index.html").filled(federation=federation), dashboard.HEADERS)


@router.get("/page/{name}")
def file(name: str, request: Request) -> Response:
    """Return a file of the page."""
    return _file(request, dashboard.load(name), dashboard.HEADERS)


@router.get("/join/{name}")
def join(name: FederationName, request: Request) -> Response:
    """Return the page that is a device of a federation, whether there is one of this name or not."""
    return _for_browsers(request, web.load("join.html"), web.ASKED_EACH_TIME)


@router.get("/web/{name}")
def device_file(name: str, request: Request) -> Response:
    """Return a file of that page."""
    return _for_browsers(request, web.load(name), web.ASKED_EACH_TIME)


@router.get("/web/runtime/{package}/{name}")
def runtime_file(package: str, name: str, request: Request) -> Response:
    """Return a file of a package that it needs; 503 where the operator has not fetched it."""
    return _for_browsers(request, runtime.load(package, name), runtime.FOR_GOOD)


def _for_browsers(request: Request, file: web.File, kept: str) -> Response:
    return _file(request, file, {**web.HEADERS, "Cache-Control": kept})


def _file(request: Request, file: web.File, headers: dict[str, str]) -> Response:
    body, encoding = file.body(packed=takes_gzip(request))
    answer = ranged(request, body, file.media_type)
    answer.headers.update({**headers, **encoding})
    return answer
