"""The page for people. A browser asks its user for a token by itself (HTTP Basic) where one is needed."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sparrow.coordinator import dashboard
from sparrow.coordinator.api.access import AdminOnly, AnyObserverOnly, TheCoordinator, TheIdentity, own_federation
from sparrow.coordinator.api.bodies import ranged
from sparrow.coordinator.api.middleware.authentication import Identity
from sparrow.coordinator.app import Coordinator

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


def _page(request: Request, coordinator: Coordinator, identity: Identity) -> Response:
    federation = own_federation(identity) or coordinator.overviews.newest() or ""
    body, media_type = dashboard.load("index.html")
    return _answer(request, body.replace(EMPTY, EMPTY.replace(b'""', f'"{federation}"'.encode())), media_type)


def _answer(request: Request, body: bytes, media_type: str) -> Response:
    answer = ranged(request, body, media_type)
    answer.headers.update(dashboard.HEADERS)
    return answer
