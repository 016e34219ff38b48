"""Devices and their assignments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from edge_sdk.protocol import bundle
from edge_sdk.protocol.messages import (
    Assignment,
    ChangeDevice,
    DeviceInfo,
    Doing,
    Enrol,
    Enrolled,
    HandBack,
    NewToken,
    UpdateAccepted,
    UpdateReceived,
    UploadCost,
)
from sparrow.coordinator.api.access import EnrollerOnly, KnownDevice, ObserverOnly, TheVisit, check_admin
from sparrow.coordinator.api.bodies import ranged, read_body
from sparrow.coordinator.api.parts import House, TheHouse
from sparrow.coordinator.api.uploads import Whole
from sparrow.coordinator.errors import NotAllowed
from sparrow.coordinator.fleet.access import Holder
from sparrow.coordinator.fleet.devices import Caller
from sparrow.coordinator.reports.device_list import Order, Wanted
from sparrow.coordinator.reports.metrics import counted_refusals

log = logging.getLogger(__name__)

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL takes no text with one."""

router = APIRouter(prefix="/v1", tags=["devices"])


@router.post("/federations/{name}/devices", status_code=201, dependencies=[EnrollerOnly])
def enrol(name: str, request: Enrol, house: TheHouse, visit: TheVisit) -> Enrolled:
    """Enrol a device: it gets an id and a secret token."""
    holder = visit.caller
    counted = holder.token_id if isinstance(holder, Holder) and holder.kind == "enrolment" else None
    enrolled = house.devices.enrol(name, request, counted)
    house.something_happened()
    return enrolled


@router.get("/federations/{name}/devices", dependencies=[ObserverOnly])
def list_devices(
    name: str,
    house: TheHouse,
    response: Response,
    search: Annotated[str, Query(max_length=200, pattern=NO_NUL, description="Part of the name or board")] = "",
    doing: Doing | None = None,
    order: Order = "name",
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int | None, Query(ge=1, le=100_000, description="All where left out")] = None,
) -> list[DeviceInfo]:
    """The devices of a federation: who each is, what it can afford, what it is doing or why it does not train.

    ``Sparrow-Total`` says how many there are on all pages.
    """
    found, total = house.roster.list(name, Wanted(search, doing, order, offset, limit))
    response.headers["Sparrow-Total"] = str(total)
    return found


async def _itself(device_id: str, visit: TheVisit) -> bool:
    """Whether the device itself is calling; if not, it must be an admin. Raises NotAuthenticated.

    A token that is nobody's is refused, also where anybody may do it: its holder thinks that it is known.
    """
    if isinstance(visit.caller, Caller) and visit.caller.device_id == device_id:
        return True
    if visit.failure is not None:
        raise visit.failure
    check_admin(visit)
    return False


@router.patch("/devices/{device_id}", status_code=204)
def change_device(
    device_id: str, change: ChangeDevice, house: TheHouse, visit: TheVisit, itself: Annotated[bool, Depends(_itself)]
) -> None:
    """A device changes its own budget and conditions; an admin changes any device, and revokes it."""
    if change.revoked and itself:
        check_admin(visit)
    house.devices.change(device_id, change)
    house.something_happened()


@router.post("/devices/{device_id}/token", status_code=201)
def rotate_token(device_id: str, device: KnownDevice, house: TheHouse) -> NewToken:
    """A new token for the calling device. Its old one is good until the new one is used for the first time."""
    if device_id != device.device_id:
        raise NotAllowed("a device renews only its own token")
    return house.devices.rotate(device_id)


@router.get(
    "/federations/{name}/assignment", response_model=Assignment, responses={204: {"description": "No work now"}}
)
async def get_assignment(
    name: str,
    device: KnownDevice,
    house: TheHouse,
    wait: Annotated[float, Query(ge=0, le=600, description="Longest wait for work, s")] = 0.0,
    mask: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="Digest of the mask that the device holds")
    ] = None,
    model: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="SHA-256 of the global model that the device holds")
    ] = None,
    upload_cost: Annotated[str | None, Header(alias="Sparrow-Upload-Cost", max_length=2000)] = None,
) -> Response:
    """Ask for work, waiting up to ``wait`` seconds (long poll)."""
    if name != device.federation:
        raise NotAllowed(f"this device is not enrolled in {name}; enrol there first")
    if upload_cost is not None:
        _note_upload_cost(house, device.device_id, upload_cost)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(wait, house.settings.max_wait_seconds)
    renew = {"Sparrow-Renew-Token": "now"} if house.devices.wants_rotation(device) else {}
    asked = True
    while True:
        ring = house.bell.next_ring()
        work = await run_in_threadpool(house.dispatch.next_assignment, device.device_id, mask, model, asked=asked)
        asked = False
        if work.was_away:
            house.something_happened()  # a round may open
        if work.assignment is not None:
            return Response(work.assignment.model_dump_json(), media_type="application/json", headers=renew)
        remaining = until - loop.time()
        if remaining <= 0 or house.closing:
            pause = await run_in_threadpool(house.pace.retry_after, device.device_id)
            return Response(status_code=204, headers={"Retry-After": str(pause), **renew})
        try:
            await asyncio.wait_for(ring.wait(), remaining)
        except asyncio.TimeoutError:
            continue


def _note_upload_cost(house: TheHouse, device_id: str, text: str) -> None:
    try:
        house.costs.note(device_id, UploadCost.model_validate_json(text))
    except ValidationError:
        # Telemetry must never keep a device from its work.
        log.warning("device %s sent a Sparrow-Upload-Cost that cannot be read", device_id)


@router.get("/assignments/{assignment_id}/payload")
def get_payload(assignment_id: str, device: KnownDevice, house: TheHouse, request: Request) -> Response:
    """The assignment's bundle; a range resumes a broken download."""
    packed = house.dispatch.payload(assignment_id, device.device_id)
    answer = ranged(request, packed.body, bundle.MEDIA_TYPE, packed.sha256)
    house.metrics.traffic.labels(device.federation, "down").inc(len(answer.body))
    return answer


@router.post("/assignments/{assignment_id}/heartbeat", status_code=204)
def heartbeat(assignment_id: str, device: KnownDevice, house: TheHouse) -> None:
    """Say that the device still works on an assignment. 409: nobody waits for it any more."""
    house.dispatch.check_open(assignment_id, device.device_id)  # that the device is there, the door has noted


@router.delete("/assignments/{assignment_id}", status_code=204)
def hand_back(assignment_id: str, device: KnownDevice, house: TheHouse, request: HandBack) -> None:
    """Hand an assignment back, with a reason."""
    house.dispatch.hand_back(assignment_id, device.device_id, request.reason)
    house.something_happened()


@router.get("/assignments/{assignment_id}/update")
def get_received(
    assignment_id: str,
    device: KnownDevice,
    house: TheHouse,
    sha256: Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="Digest of the update")],
) -> UpdateReceived:
    """How much of an update that broke off is here: the rest is sent with ``Content-Range``."""
    house.acceptance.check_owner(assignment_id, device.device_id)
    return UpdateReceived(received=house.uploads.received(assignment_id, sha256))


@router.put(
    "/assignments/{assignment_id}/update",
    status_code=201,
    responses={200: {"model": UpdateAccepted, "description": "The same again"}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                bundle.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": {"type": "object"}},
            },
        }
    },
)
async def put_update(
    assignment_id: str, device: KnownDevice, house: TheHouse, request: Request, response: Response
) -> UpdateAccepted:
    """Send an update: a bundle for ``train``, JSON for every other kind; with ``Content-Range``, the rest of one."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip()
    with counted_refusals(house.metrics.refused, device.federation):
        limit = await run_in_threadpool(house.acceptance.check_envelope, assignment_id, device.device_id, media_type)
        async with _whole(house, request, assignment_id, limit) as whole:
            size, accept = len(whole.body), house.acceptance.accept_update
            new = await run_in_threadpool(accept, assignment_id, device.device_id, whole.body, whole.digest, whole.file)
    if new:
        house.metrics.accepted.labels(device.federation).inc()
        house.metrics.traffic.labels(device.federation, "up").inc(size)
        house.something_happened()
    response.status_code = 201 if new else 200
    return UpdateAccepted(new=new)


@asynccontextmanager
async def _whole(house: House, request: Request, assignment_id: str, limit: int) -> AsyncIterator[Whole]:
    """The body of an update."""
    if "content-range" in request.headers:
        async with house.uploads.receive(request, assignment_id, limit) as whole:
            yield whole
    else:
        yield Whole(await read_body(request, limit))
