"""Health, metrics, and the page of all calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from .. import dashboard
from ..calls.problems import problem
from ..fleet.access import KINDS
from . import sign_in
from .access import ObserverOnly, TheCoordinator, TheIdentity, may_look

log = logging.getLogger(__name__)
router = APIRouter(tags=["status"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process runs."""
    return {"status": "ok"}


@router.get("/readyz", response_model=dict[str, str])
async def readyz(coordinator: TheCoordinator, identity: TheIdentity) -> dict[str, str] | JSONResponse:
    """Report whether the coordinator is ready; known callers get the reason."""
    try:
        await coordinator.check_ready()
    except Exception as error:
        log.error("not ready: %s", error)
        closed = identity.caller is None and len(identity.guarded) == len(KINDS)
        reason = "the coordinator is not ready" if closed else str(error)
        return problem(503, "NotReady", f"{reason}; check the database and the disk of the data folder")
    return {"status": "ready"}


@router.get("/metrics", dependencies=[ObserverOnly])
async def metrics(coordinator: TheCoordinator) -> Response:
    """Return the metrics as Prometheus text."""
    try:
        await coordinator.check_ready()
        ready = True
    except Exception as error:
        log.error("not ready: %s", error)
        ready = False
    text = await run_in_threadpool(coordinator.metrics.text, coordinator.store, ready=ready)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/docs", include_in_schema=False)
def docs(request: Request, identity: TheIdentity) -> Response:
    """Return a page of all calls and messages, without scripts."""
    if not may_look(identity):
        return sign_in.form(request, again=identity.failure is not None, page="docs")
    return HTMLResponse("\n".join(_lines(request.app.openapi())), headers=dashboard.HEADERS)


@router.get("/openapi.json", include_in_schema=False, dependencies=[ObserverOnly])
def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI document."""
    return JSONResponse(request.app.openapi())


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield an OpenAPI document as HTML."""
    title = escape(document["info"]["title"])
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<link rel="stylesheet" href="page/dashboard.css"><main><h1>{title}</h1>'
    yield '<p>For programs: <a href="openapi.json">openapi.json</a>.</p><h2>Calls</h2>'
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            yield f"<h3>{method.upper()} {escape(path)}</h3><p>{escape(call.get('description', ''))}</p>"
            yield _details({key: call[key] for key in ("parameters", "requestBody", "responses") if key in call})
    yield "<h2>Messages</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        yield _details({key: value for key, value in schema.items() if key not in ("description", "title")})
    yield "</main></html>"


def _details(value: dict[str, Any]) -> str:
    return f"<details><summary>Fields</summary><pre>{escape(json.dumps(value, indent=2))}</pre></details>"
