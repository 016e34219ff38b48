"""Federations, their records and their models."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from sparrow.protocol import checkpoint
from sparrow.protocol.events import Event, EventKind, Events
from sparrow.protocol.manifest import GraphName, Values
from sparrow.protocol.messages import (
    ChangeFederation,
    Choices,
    CompareFederation,
    CreateFederation,
    DeviceReport,
    Evaluation,
    FederationInfo,
    JoinLink,
    MakeJoinLink,
    ModelInfo,
    OpenWork,
    RoundRecord,
    UpdateReceived,
)
from sparrow.protocol.overview import Overview, Summaries
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import Published

from ..app import Coordinator
from ..calls.bodies import LARGEST_REQUEST, ranged, read_body
from ..calls.signals import LongPoll
from ..errors import WrongMediaType, callers_data
from ..fleet.access import Holder
from ..fleet.checks import completed
from ..fleet.choices import choices
from ..reports.timeline import EventQuery, Owner
from ..storage.events import MOST_EVENTS
from ..web import links
from ..web.steps import check_ratio
from .access import (
    AdminOnly,
    MemberOnly,
    ObserverOnly,
    ProspectiveMemberOnly,
    TheCoordinator,
    TheIdentity,
    check_observer,
    is_admin,
    observer,
    own_federation,
)
from .live import follow, seen_by
from .middleware.authentication import Identity, identify
from .packing import HEADERS, PackedRoute, packed_events, takes_gzip
from .spreadsheets import as_csv

router = APIRouter(prefix="/v1/federations", tags=["federations"], route_class=PackedRoute)
settings_router = APIRouter(prefix="/v1/settings", tags=["federations"], route_class=PackedRoute)
summaries_router = APIRouter(prefix="/v1/summaries", tags=["federations"], route_class=PackedRoute)

JSON_TYPE = "application/json"


def _body(media_type: str, schema: dict[str, str]) -> dict[str, Any]:
    """Return the OpenAPI entry of a body that the handler reads itself."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


A_FILE = _body(checkpoint.MEDIA_TYPE, {"type": "string", "format": "binary"})


def _check_type(request: Request, media_type: str, what: str) -> None:
    """Raise WrongMediaType."""
    sent = request.headers.get("content-type", "").split(";")[0].strip()
    if sent != media_type:
        raise WrongMediaType(f"send {what} as {media_type}, not {sent!r}")


async def _read_file(request: Request, coordinator: Coordinator, what: str, limit: int) -> bytes | Response:
    """Return a checkpoint's bytes, or the answer to a part of it. Raises WrongMediaType, and errors of ``Parts``."""
    _check_type(request, checkpoint.MEDIA_TYPE, what)
    body = await coordinator.parts.receive(request, limit)
    return JSONResponse(UpdateReceived(received=body).model_dump(), 202) if isinstance(body, int) else body


A_PART: dict[int | str, dict[str, Any]] = {202: {"model": UpdateReceived, "description": "A part; send the next one"}}


@router.post(
    "",
    status_code=201,
    dependencies=[AdminOnly],
    openapi_extra=_body(JSON_TYPE, {"$ref": "#/components/schemas/CreateFederation"}),
)
async def create_federation(request: Request, coordinator: TheCoordinator) -> FederationInfo:
    """Create a federation of a built-in task."""
    _check_type(request, JSON_TYPE, "name, task and settings")
    body = await read_body(request, LARGEST_REQUEST)
    with callers_data():
        wanted = CreateFederation.model_validate_json(body)
    return await coordinator.writers.run(coordinator.publisher.create, wanted)


@settings_router.get("", dependencies=[AdminOnly])
def get_choices() -> Choices:
    """Return the built-in tasks and the installed methods."""
    return choices()


@settings_router.post("", dependencies=[AdminOnly])
def complete_settings(settings: FederationSettings) -> FederationSettings:
    """Return settings completed with their method's defaults."""
    return completed(settings)


@router.post(
    "/from-model",
    status_code=201,
    dependencies=[AdminOnly],
    openapi_extra=A_FILE,
    response_model=FederationInfo,
    responses=A_PART,
)
async def publish_model(request: Request, coordinator: TheCoordinator) -> FederationInfo | Response:
    """Create a federation of a custom model: a checkpoint with manifest, graphs and settings."""
    most = coordinator.settings.max_model_bytes
    body = await _read_file(request, coordinator, "the model", most)
    if isinstance(body, Response):
        return body
    return await coordinator.publishing.run(coordinator.publisher.publish, body, most)


@router.get("", dependencies=[ObserverOnly])
def list_federations(coordinator: TheCoordinator) -> list[FederationInfo]:
    """Return all federations of this coordinator."""
    return coordinator.federations.list()


@summaries_router.get("")
def list_summaries(coordinator: TheCoordinator, identity: TheIdentity) -> Summaries:
    """Return a line on each federation that the caller may observe, the newest first."""
    only = own_federation(identity)
    check_observer(identity, only)
    return Summaries(
        federations=tuple(coordinator.summaries.list(only)),
        may_change=is_admin(identity),
        signed_in=isinstance(identity.caller, Holder),
    )


@router.get("/{name}", dependencies=[ProspectiveMemberOnly])
def get_federation(name: str, coordinator: TheCoordinator) -> FederationInfo:
    """Return the state of a federation."""
    return coordinator.federations.get(name)


@router.patch("/{name}", dependencies=[AdminOnly])
async def change_federation(name: str, change: ChangeFederation, coordinator: TheCoordinator) -> FederationInfo:
    """Pause, resume, stop or reopen a federation, or roll back to an older model.

    Deadline, cohort and rounds change from the next round on; operator and purpose at once.
    """
    info = await coordinator.writers.run(coordinator.federations.change, name, change)
    coordinator.fact_recorded()
    coordinator.wake()
    return info


@router.post("/{name}/comparison", dependencies=[ProspectiveMemberOnly])
def compare_federation(name: str, wanted: CompareFederation, coordinator: TheCoordinator) -> FederationInfo:
    """Return the federation if the caller would publish the same; otherwise 409 with the differences."""
    return coordinator.publisher.compare(name, wanted)


@router.delete("/{name}", status_code=204, dependencies=[AdminOnly])
async def delete_federation(name: str, coordinator: TheCoordinator) -> None:
    """Delete an inactive federation with its records, devices and models."""
    await coordinator.writers.run(coordinator.federations.delete, name)
    coordinator.devices.forget()
    coordinator.tokens.forget()
    coordinator.fact_recorded()
    coordinator.wake()


@router.get("/{name}/rounds", dependencies=[ObserverOnly], response_model=list[RoundRecord])
def get_rounds(
    name: str, coordinator: TheCoordinator, format: Literal["json", "csv"] = "json"
) -> list[RoundRecord] | Response:
    """Return one record per round, as JSON or CSV."""
    records = coordinator.records.rounds(name)
    return records if format == "json" else as_csv(RoundRecord, records)


@router.get("/{name}/rounds/{number}/reports", dependencies=[ObserverOnly])
def get_reports(name: str, number: int, coordinator: TheCoordinator) -> list[DeviceReport]:
    """Return the reports of a round's devices."""
    return coordinator.records.reports(name, number)


@router.get("/{name}/assignments", dependencies=[ObserverOnly], response_model=OpenWork)
async def get_open_work(
    name: str,
    coordinator: TheCoordinator,
    request: Request,
    wait: Annotated[float, Query(ge=0, le=600, description="Longest wait for a change, s")] = 0.0,
) -> Response:
    """Return the open assignments; with ``If-None-Match`` and ``wait``, once they have changed (long poll)."""
    loop = asyncio.get_running_loop()
    poll = LongPoll(request.receive)
    until = loop.time() + min(wait, coordinator.settings.max_wait_seconds)
    try:
        while True:
            moved = coordinator.moved.next()
            work = await run_in_threadpool(coordinator.open_assignments.list, name)
            # These times change with every request, so they must not change the ETag.
            lasting = work.model_dump_json(exclude={"at": True, "assignments": {"__all__": {"heard_at"}}})
            headers = {"ETag": f'"{hashlib.sha256(lasting.encode()).hexdigest()}"'}
            if request.headers.get("if-none-match") != headers["ETag"]:
                return Response(work.model_dump_json(), media_type="application/json", headers=headers)
            remaining = until - loop.time()
            if remaining <= 0 or coordinator.stopping.is_set() or poll.over:
                return Response(status_code=304, headers=headers)
            await poll.wait(moved, remaining)
    finally:
        poll.end()


@router.get("/{name}/overview", dependencies=[ObserverOnly])
def get_overview(name: str, coordinator: TheCoordinator, identity: TheIdentity) -> Overview:
    """Return an overview of bounded size."""
    return seen_by(identity, coordinator.overviews.look(name))


@router.get("/{name}/events", dependencies=[ObserverOnly])
async def get_events(name: str, coordinator: TheCoordinator, request: Request) -> StreamingResponse:
    """Stream server-sent events ``overview``: first the whole overview, then its changes."""
    # Answer 404 before the stream begins.
    await run_in_threadpool(coordinator.federations.get, name)

    async def admit() -> Identity:
        identity = await identify(coordinator, request.scope)
        await observer(identity, request)
        return identity

    stream = follow(coordinator.live_views.of(name), admit)
    packs = takes_gzip(request)
    return StreamingResponse(
        packed_events(stream) if packs else stream,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", **(HEADERS if packs else {})},
    )


@router.get("/{name}/timeline", dependencies=[ObserverOnly], response_model=Events)
def get_timeline(
    name: str,
    coordinator: TheCoordinator,
    device: Annotated[str | None, Query(max_length=64, description="Name of one device")] = None,
    of: Annotated[
        Owner | None,
        Query(description="Only events of the federation itself, of its devices, or for the marks of charts"),
    ] = None,
    kinds: Annotated[list[EventKind] | None, Query(alias="kind", description="All kinds if omitted")] = None,
    before: Annotated[int | None, Query(ge=0, le=2**53, description="Only older ones than this id")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="Only newer ones than this id")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = MOST_EVENTS,
    format: Literal["json", "csv"] = "json",
) -> Events | Response:
    """Return events of the federation and its devices, the newest first, as JSON or CSV."""
    found = coordinator.timeline.look(name, EventQuery(device, of, tuple(kinds or ()), before, after, limit))
    return found if format == "json" else as_csv(Event, found.events)


@router.post("/{name}/join-link", dependencies=[ObserverOnly])
def make_join_link(
    name: str, wanted: MakeJoinLink, coordinator: TheCoordinator, request: Request, response: Response
) -> JoinLink:
    """Return a link that makes a browser a device, and its QR code."""
    response.headers["Cache-Control"] = "no-store"
    server = str(request.base_url) if wanted.server is None else wanted.server
    info = coordinator.federations.get(name)
    return links.make(info, server, links.checked(wanted.token, name, coordinator.tokens))


@router.get("/{name}/manifest", dependencies=[ProspectiveMemberOnly])
def get_manifest(name: str, coordinator: TheCoordinator) -> Response:
    """Return the manifest of the federation's model; its SHA-256 is ``manifest_digest``."""
    unchanged = {"Cache-Control": "no-transform"}
    return Response(coordinator.served.manifest(name).text, media_type="application/json", headers=unchanged)


@router.get("/{name}/publication", dependencies=[ProspectiveMemberOnly])
def get_publication(name: str, coordinator: TheCoordinator) -> Published:
    """Return the signed publication of the federation's model; 404 if it is not signed."""
    return coordinator.served.publication(name)


@router.get("/{name}/model", dependencies=[MemberOnly])
def get_model(
    name: str,
    coordinator: TheCoordinator,
    request: Request,
    version: Annotated[
        int | None, Query(ge=0, lt=2**31, description="Number of a kept model; the newest if omitted")
    ] = None,
) -> Response:
    """Return the global model as a safetensors file with tensors by name."""
    return ranged(request, coordinator.served.model(name, version), checkpoint.MEDIA_TYPE)


@router.patch(
    "/{name}/model",
    dependencies=[AdminOnly],
    openapi_extra=A_FILE,
    response_model=FederationInfo,
    responses=A_PART,
)
async def replace_model(name: str, request: Request, coordinator: TheCoordinator) -> FederationInfo | Response:
    """Replace the model's graphs between rounds: a checkpoint of manifest and graphs with the same tensors."""
    body = await _read_file(request, coordinator, "manifest and graphs", coordinator.settings.max_model_bytes)
    if isinstance(body, Response):
        return body
    info = await coordinator.publishing.run(coordinator.publisher.replace_model, name, body)
    coordinator.fact_recorded()
    coordinator.wake()
    return info


@router.get("/{name}/models", dependencies=[ObserverOnly])
def list_models(name: str, coordinator: TheCoordinator) -> list[ModelInfo]:
    """Return the kept global models, oldest first."""
    return coordinator.served.models(name)


@router.put("/{name}/models/{version}/pin", status_code=204, dependencies=[AdminOnly])
async def pin_model(name: str, version: Annotated[int, Path(ge=0, lt=2**31)], coordinator: TheCoordinator) -> None:
    """Keep a global model for two minutes, while an operator decides about a rollback."""
    await coordinator.writers.run(coordinator.federations.pin_model, name, version)


@router.post(
    "/{name}/model/evaluation",
    dependencies=[AdminOnly],
    openapi_extra=A_FILE,
    response_model=Evaluation,
    responses=A_PART,
)
async def evaluate_model(name: str, request: Request, coordinator: TheCoordinator) -> Evaluation | Response:
    """Evaluate the global model on the caller's test data: a safetensors file of ``inputs`` and ``targets``."""
    body = await _read_file(request, coordinator, "the test data", coordinator.settings.max_test_bytes)
    if isinstance(body, Response):
        return body
    seconds = coordinator.settings.max_test_seconds
    stop = coordinator.stopping
    return await coordinator.evaluating.run(coordinator.served.evaluate, name, body, seconds=seconds, stop=stop)


@router.get("/{name}/model.onnx", dependencies=[MemberOnly])
def get_model_onnx(name: str, coordinator: TheCoordinator, request: Request) -> Response:
    """Return the global model as ONNX."""
    return ranged(request, coordinator.served.model_onnx(name), "application/octet-stream")


@router.get("/{name}/frozen", dependencies=[ProspectiveMemberOnly])
def get_frozen(name: str, coordinator: TheCoordinator, request: Request) -> Response:
    """Return the model's frozen values, in the manifest's order."""
    return _values(name, "frozen", coordinator, request)


@router.get("/{name}/first", dependencies=[ProspectiveMemberOnly])
def get_first(name: str, coordinator: TheCoordinator, request: Request) -> Response:
    """Return the initial values of the tensors that stay on devices, in the manifest's order."""
    return _values(name, "first", coordinator, request)


def _values(name: str, which: Values, coordinator: TheCoordinator, request: Request) -> Response:
    digest = coordinator.served.manifest(name).files.get(which)
    return ranged(request, coordinator.served.values(name, which), "application/octet-stream", digest)


@router.get("/{name}/fast-step.onnx", dependencies=[ProspectiveMemberOnly])
async def get_fast_step(
    name: str,
    coordinator: TheCoordinator,
    request: Request,
    ratio: Annotated[
        float, Query(gt=0, le=1, description="Share of each group's neurons that the page trains; a multiple of 0.05")
    ] = 1.0,
) -> Response:
    """Return the training step for browsers: optimised, with errors of active neurons only.

    The graph's int64 inputs ``rows:NAME`` and ``columns:NAME`` select the active neurons.
    """
    check_ratio(ratio)
    manifest = await run_in_threadpool(coordinator.served.manifest, name)
    read = partial(coordinator.served.graph, name, "step")
    step = await coordinator.page_steps.get(manifest, ratio, read)
    return ranged(request, step.body, "application/octet-stream", step.sha256)


@router.get("/{name}/{graph}.onnx", dependencies=[ProspectiveMemberOnly])
def get_graph(name: str, graph: GraphName, coordinator: TheCoordinator, request: Request) -> Response:
    """Return an ONNX graph of the model without weights: forward pass, training step or evaluation."""
    return ranged(request, coordinator.served.graph(name, graph), "application/octet-stream")
