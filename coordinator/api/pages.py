"""The operator's page, which redirects to a sign-in form if a token is needed (``api.sign_in``), and the device page.

The pages' files need no token, their calls do.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sparrow.protocol.fields import FederationName

from .. import dashboard, web
from ..calls.bodies import ranged
from ..web import offline, runtime
from . import sign_in
from .access import TheCoordinator, TheIdentity, may_look, own_federation
from .packing import takes_gzip

router = APIRouter(include_in_schema=False)


@router.get("/")
def index(request: Request, coordinator: TheCoordinator, identity: TheIdentity) -> Response:
    """Return the operator's page of a federation, or the list of all."""
    if not may_look(identity):
        return sign_in.form(request, again=identity.failure is not None)
    federation = own_federation(identity) or coordinator.summaries.only() or ""
    return _file(request, dashboard.load("index.html").filled(federation=federation), dashboard.HEADERS)


@router.get("/page/{name}")
def file(name: str, request: Request) -> Response:
    """Return a file of the operator's page."""
    return _file(request, dashboard.load(name), dashboard.HEADERS)


@router.get("/join/{name}")
def join(name: FederationName, request: Request) -> Response:
    """Return the device page of a federation, existing or not."""
    return _for_browsers(request, web.load("join.html"), web.ASKED_EACH_TIME)


@router.get(f"/join/{{name}}/{offline.MANIFEST}")
def manifest(name: FederationName, request: Request) -> Response:
    """Return the web app manifest of a federation's device page."""
    return _for_browsers(request, offline.manifest(name), web.ASKED_EACH_TIME)


@router.get(f"/web/{offline.WORKER}")
def service_worker(request: Request) -> Response:
    """Return the service worker of the device page."""
    answer = _for_browsers(request, offline.service_worker(), web.ASKED_EACH_TIME)
    answer.headers.update(offline.SCOPE)
    return answer


@router.get("/web/{name}")
def device_file(name: str, request: Request) -> Response:
    """Return a file of the device page."""
    return _for_browsers(request, web.load(name), web.ASKED_EACH_TIME)


@router.get("/web/runtime/{package}/{name}")
def runtime_file(package: str, name: str, request: Request) -> Response:
    """Return a file of a package; 503 until ``sparrow web`` has downloaded it."""
    return _for_browsers(request, runtime.load(package, name), runtime.FOR_GOOD)


def _for_browsers(request: Request, file: web.File, kept: str) -> Response:
    return _file(request, file, {**web.HEADERS, "Cache-Control": kept})


def _file(request: Request, file: web.File, headers: dict[str, str]) -> Response:
    body, encoding = file.body(packed=takes_gzip(request))
    answer = ranged(request, body, file.media_type)
    answer.headers.update({**headers, **encoding})
    return answer
