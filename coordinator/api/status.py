"""Health, metrics, and the way in for people."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request

from coordinator.api.access import ObserverOnly
from coordinator.api.parts import House, TheHouse
from coordinator.api.problems import problem

router = APIRouter(tags=["status"])


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/readyz", response_model=dict[str, str])
def readyz(house: TheHouse) -> dict[str, str] | JSONResponse:
    """The records can be read and the data folder written."""
    try:
        house.check_ready()
    except Exception as error:
        return problem(503, "NotReady", f"{error}; check the database and the disk of the data folder")
    return {"status": "ready"}


@router.get("/metrics", dependencies=[ObserverOnly])
def metrics(house: TheHouse) -> Response:
    """Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Federations(house))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Federations(Collector):
    """Reads the records at scrape time: nothing is counted twice, and a restart resets nothing."""

    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterable[Metric]:
        label = ["federation"]
        devices = GaugeMetricFamily("sparrow_devices", "Enrolled devices by status", labels=["federation", "status"])
        rounds = CounterMetricFamily("sparrow_rounds_closed", "Closed rounds", labels=label)
        updates = CounterMetricFamily("sparrow_updates_accepted", "Updates acknowledged", labels=label)
        left_out = CounterMetricFamily(
            "sparrow_updates_left_out", "Updates acknowledged, but left out as outliers", labels=label
        )
        privacy = GaugeMetricFamily(
            "sparrow_privacy_epsilon",
            "Differential privacy's epsilon of the global models",
            labels=["federation", "delta"],
        )
        traffic = CounterMetricFamily(
            "sparrow_bytes", "Bodies of payloads and updates, bytes", labels=["federation", "direction", "purpose"]
        )
        accuracy = GaugeMetricFamily("sparrow_accuracy_ratio", "Latest mean accuracy", labels=["federation", "model"])
        for info in self._house.federations.list():
            records = self._house.records.rounds(info.name)
            devices.add_metric([info.name, "active"], info.devices - info.devices_stopped)
            devices.add_metric([info.name, "stopped"], info.devices_stopped)
            rounds.add_metric([info.name], info.round)
            updates.add_metric([info.name], sum(record.updates for record in records))
            left_out.add_metric([info.name], sum(len(record.left_out) for record in records))
            if info.privacy is not None:
                privacy.add_metric([info.name, f"{info.privacy.delta:g}"], info.privacy.epsilon)
            for purpose, direction, field in (
                ("train", "down", "bytes_down"),
                ("train", "up", "bytes_up"),
                ("evaluate", "down", "evaluation_bytes_down"),
                ("evaluate", "up", "evaluation_bytes_up"),
            ):
                total = sum(getattr(record, field) for record in records)
                traffic.add_metric([info.name, direction, purpose], total)
            for model, field in (("personal", "accuracy_personal"), ("global", "accuracy_global")):
                known = [getattr(record, field) for record in records if getattr(record, field) is not None]
                if known:
                    accuracy.add_metric([info.name, model], known[-1])
        return [devices, rounds, updates, left_out, privacy, traffic, accuracy]


@router.get("/", include_in_schema=False, dependencies=[ObserverOnly])
def index() -> RedirectResponse:
    """The way in for a browser, until there is a dashboard: the calls."""
    return RedirectResponse("/docs")


@router.get("/docs", include_in_schema=False, dependencies=[ObserverOnly])
def docs() -> HTMLResponse:
    """OpenAPI, to read and try."""
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Sparrow coordinator")


@router.get("/openapi.json", include_in_schema=False, dependencies=[ObserverOnly])
def openapi(request: Request) -> JSONResponse:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())
