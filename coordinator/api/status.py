"""Health, metrics, and the calls to read."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import generate_latest
from starlette.requests import Request

from sparrow.coordinator.api.access import ObserverOnly, TheCoordinator, TheIdentity
from sparrow.coordinator.api.problems import problem
from sparrow.coordinator.fleet.access import KINDS

log = logging.getLogger(__name__)
router = APIRouter(tags=["status"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process runs."""
    return {"status": "ok"}


@router.get("/readyz", response_model=dict[str, str])
async def readyz(coordinator: TheCoordinator, identity: TheIdentity) -> dict[str, str] | JSONResponse:
    """Report whether rounds move on, records can be read and the data folder written. Unknown callers are not told the
    reason."""
    try:
        await coordinator.check_ready()
    except Exception as error:
        log.error("not ready: %s", error)
        closed = identity.caller is None and len(identity.guarded) == len(KINDS)
        what = "something is wrong" if closed else str(error)
        return problem(503, "NotReady", f"{what}; check the database and the disk of the data folder")
    return {"status": "ready"}


@router.get("/metrics", dependencies=[ObserverOnly])
def metrics(coordinator: TheCoordinator) -> Response:
    """Return the metrics as Prometheus text."""
    return Response(
        generate_latest(coordinator.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


@router.get("/docs", include_in_schema=False, dependencies=[ObserverOnly])
def docs() -> HTMLResponse:
    """Return the page that shows the OpenAPI document."""
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Sparrow coordinator")


@router.get("/openapi.json", include_in_schema=False, dependencies=[ObserverOnly])
def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI document."""
    return JSONResponse(request.app.openapi())
