"""The operator's page, for which a browser asks its user for a token by itself (HTTP Basic) where one is needed, and
the page that is a device: it and its files need none, its calls do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from edge_sdk.protocol.messages import FederationName
from sparrow.coordinator import dashboard, web
from sparrow.coordinator.api.access import AdminOnly, AnyObserverOnly, TheCoordinator, TheIdentity, own_federation
from sparrow.coordinator.api.bodies import ranged
from sparrow.coordinator.api.middleware.authentication import Identity
from sparrow.coordinator.app import Coordinator
from sparrow.coordinator.web import runtime

EMPTY = b'data-federation=""'

router = APIRouter(include_in_schema=False)


@router.get("/", dependencies=[AnyObserverOnly])
def index(request: Request, coordinator: TheCoordinator, identity: TheIdentity) -> Response:
    """Return the page; of the newest federation, unless ``?federation=`` names one."""
    return _page(request, coordinator, identity)


@router.get("/admin", dependencies=[AdminOnly])
def admin(request: Request, coordinator: TheCoordinator, identity: TheIdentity) -> Response:
    """Return the same page for administrators: here a browser asks for an admin token."""
    return _page(request, coordinator, identity)


@router.get("/page/{name}", dependencies=[AnyObserverOnly])
def file(name: str, request: Request) -> Response:
    """Return a file of the page."""
    body, media_type = dashboard.load(name)
    return _answer(request, body, media_type)


@router.get("/join/{name}")
def join(name: FederationName, request: Request) -> Response:
    """Return the page that is a device of a federation, whether there is one of this name or not."""
    return _for_browsers(request, web.load("join.html"), web.ASKED_EACH_TIME)


@router.get("/web/{name}")
def device_file(name: str, request: Request) -> Response:
    """Return a file of that page."""
    return _for_browsers(request, web.load(name), web.ASKED_EACH_TIME)


@router.get("/web/runtime/{version}/{name}")
def runtime_file(version: str, name: str, request: Request) -> Response:
    """Return a file of what trains there; 503 where the operator has not fetched it."""
    return _for_browsers(request, runtime.load(version, name), runtime.FOR_GOOD)


def _for_browsers(request: Request, file: web.File, kept: str) -> Response:
    body, encoding = file.body(request.headers.get("accept-encoding", ""))
    answer = ranged(request, body, file.media_type)
    answer.headers.update({**web.HEADERS, "Cache-Control": kept, **encoding})
    return answer


def _page(request: Request, coordinator: Coordinator, identity: Identity) -> Response:
    federation = own_federation(identity) or coordinator.overviews.newest() or ""
    body, media_type = dashboard.load("index.html")
    return _answer(request, body.replace(EMPTY, EMPTY.replace(b'""', f'"{federation}"'.encode())), media_type)


def _answer(request: Request, body: bytes, media_type: str) -> Response:
    answer = ranged(request, body, media_type)
    answer.headers.update(dashboard.HEADERS)
    return answer
