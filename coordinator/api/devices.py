"""Devices and their assignments."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response

from sparrow.protocol.messages import (
    ChangeDevice,
    DeviceHistory,
    DeviceInfo,
    DeviceRound,
    DeviceStates,
    Doing,
    Enrol,
    Enrolled,
    HandBack,
    NewToken,
    RenewToken,
    UpdateReceived,
)
from sparrow.protocol.tags import LONGEST_SELECTION

from ..errors import NotAllowed
from ..fleet.access import Holder
from ..fleet.devices import Caller
from ..reports.device_list import DeviceQuery, Only, Order
from .access import (
    EnrollerOnly,
    KnownDevice,
    ObserverOnly,
    TheCoordinator,
    TheIdentity,
    check_admin,
)
from .packing import PackedRoute
from .spreadsheets import as_csv

router = APIRouter(prefix="/v1", tags=["devices"], route_class=PackedRoute)


@router.post("/federations/{name}/devices", status_code=201, dependencies=[EnrollerOnly])
async def enrol(name: str, request: Enrol, coordinator: TheCoordinator, identity: TheIdentity) -> Enrolled:
    """Enrol a device; return its id and secret token."""
    holder = identity.caller
    counted = holder.token_id if isinstance(holder, Holder) and holder.kind == "enrolment" else None
    enrolled = await coordinator.writers.run(coordinator.devices.enrol, name, request, counted)
    coordinator.fact_recorded()
    return enrolled


@router.get("/federations/{name}/devices", dependencies=[ObserverOnly])
def list_devices(
    name: str,
    coordinator: TheCoordinator,
    response: Response,
    search: Annotated[str, Query(max_length=200, description="Part of the name or board")] = "",
    device: Annotated[str | None, Query(max_length=64, description="Exact name of one device")] = None,
    doing: Doing | None = None,
    only: Annotated[Only | None, Query(description="Devices whose work fails, or that have exported no model")] = None,
    where: Annotated[str, Query(max_length=LONGEST_SELECTION, description="By tags, such as board=orin")] = "",
    order: Order = "name",
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int | None, Query(ge=1, le=100_000, description="All if omitted")] = None,
) -> list[DeviceInfo]:
    """Return the devices of a federation with their budgets, and the work of each or the reason why it does not train.

    The header ``Sparrow-Total`` has the number of devices on all pages.
    """
    query = DeviceQuery(search, device, doing, only, where, order, offset, limit)
    found, total = coordinator.device_lists.list(name, query)
    response.headers["Sparrow-Total"] = str(total)
    return found


@router.get("/federations/{name}/devices/states", dependencies=[ObserverOnly])
def device_states(
    name: str,
    coordinator: TheCoordinator,
    most: Annotated[
        int, Query(ge=1, le=100_000, description="Maximum number of devices, in natural order of their names")
    ] = 10_000,
) -> DeviceStates:
    """Return the name and activity of each device."""
    return coordinator.device_lists.states(name, most)


@router.get("/devices/{device_id}", dependencies=[ObserverOnly], response_model=DeviceHistory)
def get_device(
    device_id: str,
    coordinator: TheCoordinator,
    most: Annotated[int, Query(ge=1, le=10_000, description="Maximum number of assignments, newest first")] = 200,
    format: Literal["json", "csv"] = "json",
) -> DeviceHistory | Response:
    """Return a device and its history: accuracy, loss, seconds, bytes and joules of each piece of work, or why it
    failed. As CSV, only the work.
    """
    found = coordinator.device_lists.history(device_id, most)
    return found if format == "json" else as_csv(DeviceRound, found.work)


async def _itself(device_id: str, identity: TheIdentity) -> bool:
    """Return True if the device itself is calling; other callers must be admins. Raises NotAuthenticated."""
    # An invalid token is refused even if the call needs none, so that its holder notices.
    if isinstance(identity.caller, Caller) and identity.caller.device_id == device_id:
        return True
    if identity.failure is not None:
        raise identity.failure
    check_admin(identity)
    return False


@router.patch("/devices/{device_id}", status_code=204)
async def change_device(
    device_id: str,
    change: ChangeDevice,
    coordinator: TheCoordinator,
    identity: TheIdentity,
    itself: Annotated[bool, Depends(_itself)],
) -> None:
    """Change a device: itself its budget and conditions; an admin may also revoke it."""
    if itself and (change.revoked or change.set_tags is not None):
        check_admin(identity)
    coordinator.found_nothing.forget(device_id)
    await coordinator.writers.run(coordinator.devices.change, device_id, change)
    coordinator.fact_recorded()


@router.delete("/devices/{device_id}", status_code=204, dependencies=[Depends(_itself)])
async def remove_device(device_id: str, coordinator: TheCoordinator) -> None:
    """Revoke a device and remove it from lists and counts. Records of rounds keep its name.

    A device may remove itself; an admin may remove any device.
    """
    coordinator.found_nothing.forget(device_id)
    await coordinator.writers.run(coordinator.devices.remove, device_id)
    coordinator.fact_recorded()


@router.post("/devices/{device_id}/token", status_code=201)
async def rotate_token(
    device_id: str, device: KnownDevice, coordinator: TheCoordinator, request: RenewToken
) -> NewToken:
    """Return a new token; the old one stays valid until its first use."""
    if device_id != device.device_id:
        raise NotAllowed("a device may renew only its own token; check the device id")
    return await coordinator.writers.run(coordinator.devices.rotate, device_id, request.enrolment_key)


@router.post("/assignments/{assignment_id}/heartbeat", status_code=204)
def heartbeat(assignment_id: str, device: KnownDevice, coordinator: TheCoordinator) -> None:
    """Report that the device still works on an assignment. 409 if the assignment is closed."""
    # The middleware notes that the device was seen.
    coordinator.dispatch.check_open(assignment_id, device.device_id)


@router.delete("/assignments/{assignment_id}", status_code=204)
async def hand_back(assignment_id: str, device: KnownDevice, coordinator: TheCoordinator, request: HandBack) -> None:
    """Return an assignment unfinished, with a reason."""
    await coordinator.writers.run(coordinator.dispatch.hand_back, assignment_id, device.device_id, request.reason)
    coordinator.fact_recorded()


@router.get("/assignments/{assignment_id}/update")
def get_received(
    assignment_id: str,
    device: KnownDevice,
    coordinator: TheCoordinator,
    sha256: Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="Digest of the update")],
) -> UpdateReceived:
    """Return the number of bytes received of an interrupted update; send the rest with ``Content-Range``."""
    coordinator.acceptance.check_owner(assignment_id, device.device_id)
    return UpdateReceived(received=coordinator.uploads.received(assignment_id, sha256))
