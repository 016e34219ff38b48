"""Calls of a device's round: ask for work, download the payload, send the update.

    GET /v1/federations/{name}/assignment      answered when there is work, with its payload if that is small
    GET /v1/assignments/{id}/payload           a large payload
    PUT /v1/assignments/{id}/update            answered with the next work, if there is any

A caller that accepts ``ASSIGNMENT_TYPE`` gets one line of JSON followed by the payload's bytes; any other gets JSON and
requests the payload.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from sparrow.protocol import bundle
from sparrow.protocol.fields import Digest
from sparrow.protocol.messages import ASSIGNMENT_TYPE, Assignment, UpdateAccepted, UpdateReceived, UploadCost

from ..app import Coordinator
from ..calls.bodies import InParts, ranged
from ..errors import Finished, NotAllowed
from ..fleet.devices import Caller
from ..models.payloads import Packed
from ..reports.metrics import counted_refusals
from ..rounds.dispatch import Ask
from .access import KnownDevice, coordinator_of

log = logging.getLogger(__name__)
# Compressing these frequent answers would cost the coordinator more than the network saves.
router = APIRouter(prefix="/v1", tags=["devices"])

LARGEST_BROUGHT = 256 * 1024
"""Largest payload sent with its assignment, in bytes, because such a download cannot resume."""
JSON = "application/json"


# Single parameters: FastAPI reads them with less work than a model of them.
HeldMask = Annotated[Digest | None, Query(description="Digest of the mask that the device holds")]
HeldModel = Annotated[Digest | None, Query(description="SHA-256 of the global model that the device holds")]
Wait = Annotated[float, Query(ge=0, le=600, description="Longest wait for work, s")]
Cost = Annotated[str | None, Header(alias="Sparrow-Upload-Cost", max_length=2000)]
WITH_PAYLOAD = {
    "description": "One line of JSON, and the bytes of the payload",
    "content": {ASSIGNMENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}
BODIES = {
    bundle.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
    JSON: {"schema": {"type": "object"}},
}


@router.get(
    "/federations/{name}/assignment",
    response_model=Assignment,
    responses={200: WITH_PAYLOAD, 204: {"description": "No work now"}},
)
async def get_assignment(
    name: str,
    device: KnownDevice,
    request: Request,
    mask: HeldMask = None,
    model: HeldModel = None,
    wait: Wait = 0.0,
    upload_cost: Cost = None,
) -> Response:
    """Ask for work; wait up to ``wait`` seconds (long poll) or until this device asks again."""
    coordinator = coordinator_of(request)
    if name != device.federation:
        raise NotAllowed(f"this device is not enrolled in {name}; enrol it there first")
    _note_upload_cost(coordinator, device.device_id, upload_cost)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(wait, coordinator.settings.max_wait_seconds)
    renew = _renewal(coordinator, device)
    known = coordinator.found_nothing.holds(device.device_id, coordinator.moved.count, (mask, model))
    ask = Ask(device.device_id, mask, model, first=not known)
    with coordinator.polls.newest(device.device_id, request.receive) as poll:
        while True:
            moved = coordinator.moved.next()
            if not known:
                try:
                    work = await coordinator.asking.run(ask)
                except Finished:
                    # The call may have begun long before the end.
                    coordinator.last_seen.note(device.device_id)
                    raise
                if work.was_away:
                    # With the device back, a round may open.
                    coordinator.fact_recorded()
                if work.assignment is not None:
                    text = work.assignment.model_dump_json()
                    return _answer(request, coordinator, device, 200, text, work.payload, renew)
                ask = Ask(device.device_id, mask, model, first=False)
            known = False
            remaining = until - loop.time()
            if remaining <= 0 or coordinator.stopping.is_set() or poll.over:
                pause = coordinator.polling.known_pause(device.device_id)
                if pause is None:
                    pause = await run_in_threadpool(coordinator.polling.retry_after, device.device_id)
                return Response(status_code=204, headers={"Retry-After": str(pause), **renew})
            await poll.wait(moved, remaining)


@router.get("/assignments/{assignment_id}/payload")
async def get_payload(assignment_id: str, device: KnownDevice, request: Request) -> Response:
    """Return the assignment's bundle; a range resumes a broken download."""
    coordinator = coordinator_of(request)
    packed = await coordinator.fetching.run((assignment_id, device.device_id))
    answer = ranged(request, packed.body, bundle.MEDIA_TYPE, packed.sha256)
    coordinator.metrics.traffic.labels(device.federation, "down").inc(len(answer.body))
    return answer


@router.put(
    "/assignments/{assignment_id}/update",
    status_code=201,
    response_model=UpdateAccepted,
    responses={
        201: WITH_PAYLOAD,
        200: {"model": UpdateAccepted, "description": "The same again"},
        202: {"model": UpdateReceived, "description": "A part; send the next one"},
    },
    openapi_extra={"requestBody": {"required": True, "content": BODIES}},
)
async def put_update(
    assignment_id: str,
    device: KnownDevice,
    request: Request,
    mask: HeldMask = None,
    model: HeldModel = None,
    upload_cost: Cost = None,
) -> Response:
    """Send an update: a bundle for ``train``, JSON for other kinds; with ``Content-Range``, a part of it."""
    coordinator = coordinator_of(request)
    _note_upload_cost(coordinator, device.device_id, upload_cost)
    media_type = request.headers.get("content-type", "").split(";")[0].strip()
    goes_on = _accepts_work(request)
    ask = Ask(device.device_id, mask, model) if goes_on else None
    seen = coordinator.moved.count
    with counted_refusals(coordinator.metrics.refused, device.federation):
        taken = await coordinator.uploads.receive(request, assignment_id, device.device_id, media_type, ask)
    if isinstance(taken, int):
        return JSONResponse(UpdateReceived(received=taken).model_dump(), 202)
    if taken.new:
        coordinator.metrics.accepted.labels(device.federation).inc()
        coordinator.metrics.traffic.labels(device.federation, "up").inc(taken.size)
        coordinator.fact_recorded()
    status = 201 if taken.new else 200
    asked = taken.asked
    if asked is None or asked.assignment is None:
        if asked is not None:
            coordinator.found_nothing.note(device.device_id, seen, (mask, model))
        text = UpdateAccepted(new=taken.new).model_dump_json(exclude_none=True)
        return Response(text, status, media_type=JSON, headers=_renewal(coordinator, device) if goes_on else None)
    text = UpdateAccepted(new=taken.new, next=asked.assignment).model_dump_json()
    return _answer(request, coordinator, device, status, text, asked.payload, _renewal(coordinator, device))


def _answer(
    request: Request,
    coordinator: Coordinator,
    device: Caller,
    status: int,
    text: str,
    payload: Packed | None,
    headers: dict[str, str],
) -> Response:
    """Return an assignment, with its payload if that is small and the caller accepts it."""
    line = text.encode()
    small = payload is not None and len(payload.body) <= LARGEST_BROUGHT
    if payload is None or not (small and _accepts_work(request) and coordinator.downloads.has_room(payload.body)):
        return Response(line, status, media_type=JSON, headers=headers)
    coordinator.metrics.traffic.labels(device.federation, "down").inc(len(payload.body))
    return InParts(
        payload.body,
        coordinator.downloads,
        first=line + b"\n",
        status_code=status,
        media_type=ASSIGNMENT_TYPE,
        headers=headers,
    )


def _accepts_work(request: Request) -> bool:
    return request.headers.get("accept") == ASSIGNMENT_TYPE


def _renewal(coordinator: Coordinator, device: Caller) -> dict[str, str]:
    return {"Sparrow-Renew-Token": "now"} if coordinator.devices.wants_rotation(device) else {}


def _note_upload_cost(coordinator: Coordinator, device_id: str, text: str | None) -> None:
    if text is None:
        return
    try:
        coordinator.costs.note(device_id, UploadCost.model_validate_json(text))
    except ValidationError:
        # Invalid telemetry must not stop a device.
        log.warning("device %s sent an invalid Sparrow-Upload-Cost header", device_id)
