"""The calls of a device-round: a device asks for work, gets its payload, and sends its update.

    GET /v1/federations/{name}/assignment      answered when there is work, with its payload where that is small
    GET /v1/assignments/{id}/payload           of a large one
    PUT /v1/assignments/{id}/update            answered with the next work, if there is any already

A caller that accepts ``ASSIGNMENT_TYPE`` is answered with one line of JSON and the payload's bytes after it; any other
with JSON alone, and it asks for the payload. Calls that come together are done together (``threads.Batches``).
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sparrow.protocol import bundle
from sparrow.protocol.fields import Digest
from sparrow.protocol.messages import ASSIGNMENT_TYPE, UpdateAccepted, UploadCost

from ..app import Coordinator
from ..errors import NotAllowed
from ..fleet.devices import Caller
from ..models.payloads import Packed
from ..reports.metrics import counted_refusals
from ..rounds.dispatch import Ask
from .bodies import InParts, ranged
from .headers import header
from .middleware.base import Middleware
from .problems import answer_of

log = logging.getLogger(__name__)

LARGEST_BROUGHT = 256 * 1024
"""The largest payload, in bytes, that comes with its assignment: one that breaks on its way comes again as a whole."""
MOST_COST = 2000
"""Characters of ``Sparrow-Upload-Cost``."""
JSON = "application/json"


class Holding(BaseModel):
    """The query of a device that says what it holds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    mask: Digest | None = Field(default=None, description="Digest of the mask that the device holds")
    model: Digest | None = Field(default=None, description="SHA-256 of the global model that the device holds")


class Asking(Holding):
    """The query of a device that asks for work."""

    wait: float = Field(default=0.0, ge=0, le=600, description="Longest wait for work, s")


async def give_work(
    request: Request, coordinator: Coordinator, device: Caller, name: str, asking: Asking, upload_cost: str | None
) -> Response:
    """Answer a device that asks for work, when there is some, or its wait is over."""
    if name != device.federation:
        raise NotAllowed(f"this device is not enrolled in {name}; enrol there first")
    note_upload_cost(coordinator, device.device_id, upload_cost)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(asking.wait, coordinator.settings.max_wait_seconds)
    renew = _renewal(coordinator, device)
    known = coordinator.found_nothing.holds(device.device_id, coordinator.moved.count, (asking.mask, asking.model))
    ask = Ask(device.device_id, asking.mask, asking.model, first=not known)
    with coordinator.polls.newest(device.device_id, request.receive) as poll:
        while True:
            moved = coordinator.moved.next()
            if not known:
                work = await coordinator.asking.run(ask)
                if work.was_away:
                    coordinator.fact_recorded()  # a round may open
                if work.assignment is not None:
                    text = work.assignment.model_dump_json()
                    return _answer(request, coordinator, device, 200, text, work.payload, renew)
                ask = Ask(device.device_id, asking.mask, asking.model, first=False)
            known = False
            remaining = until - loop.time()
            if remaining <= 0 or coordinator.stopping.is_set() or poll.over:
                pause = coordinator.polling.known_pause(device.device_id)
                if pause is None:
                    pause = await run_in_threadpool(coordinator.polling.retry_after, device.device_id)
                return Response(status_code=204, headers={"Retry-After": str(pause), **renew})
            await poll.wait(moved, remaining)


async def give_payload(request: Request, coordinator: Coordinator, device: Caller, assignment_id: str) -> Response:
    """Answer with an assignment's bundle; a range resumes a broken download."""
    packed = await coordinator.fetching.run((assignment_id, device.device_id))
    answer = ranged(request, packed.body, bundle.MEDIA_TYPE, packed.sha256)
    coordinator.metrics.traffic.labels(device.federation, "down").inc(len(answer.body))
    return answer


async def take_update(
    request: Request,
    coordinator: Coordinator,
    device: Caller,
    assignment_id: str,
    holding: Holding,
    upload_cost: str | None,
) -> Response:
    """Receive an update, and answer when it is durable."""
    note_upload_cost(coordinator, device.device_id, upload_cost)
    media_type = (header(request.scope, b"content-type") or "").split(";")[0].strip()
    goes_on = accepts_work(request.scope)
    ask = Ask(device.device_id, holding.mask, holding.model) if goes_on else None
    seen = coordinator.moved.count
    with counted_refusals(coordinator.metrics.refused, device.federation):
        taken = await coordinator.uploads.receive(request, assignment_id, device.device_id, media_type, ask)
    if taken.new:
        coordinator.metrics.accepted.labels(device.federation).inc()
        coordinator.metrics.traffic.labels(device.federation, "up").inc(taken.size)
        coordinator.fact_recorded()
    status = 201 if taken.new else 200
    asked = taken.asked
    if asked is None or asked.assignment is None:
        if asked is not None:
            coordinator.found_nothing.note(device.device_id, seen, (holding.mask, holding.model))
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
    """Return an answer with an assignment, and its payload where that is small and the caller takes it."""
    line = text.encode()
    small = payload is not None and len(payload.body) <= LARGEST_BROUGHT
    if payload is None or not (small and accepts_work(request.scope) and coordinator.downloads.has_room(payload.body)):
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


def accepts_work(scope: Scope) -> bool:
    """Return whether a caller takes an assignment with its payload."""
    return header(scope, b"accept") == ASSIGNMENT_TYPE


def _renewal(coordinator: Coordinator, device: Caller) -> dict[str, str]:
    return {"Sparrow-Renew-Token": "now"} if coordinator.devices.wants_rotation(device) else {}


def note_upload_cost(coordinator: Coordinator, device_id: str, text: str | None) -> None:
    """Keep what a device says that its last upload cost."""
    if text is None:
        return
    try:
        coordinator.costs.note(device_id, UploadCost.model_validate_json(text))
    except ValidationError:
        # Telemetry must never keep a device from its work.
        log.warning("device %s sent a Sparrow-Upload-Cost that cannot be read", device_id)


class DeviceCalls(Middleware):
    """Answers the well-formed calls of a device-round itself. The routes, which take longer to read a call than the
    rest does, answer what is left, and say what is wrong with it."""

    _WORK = re.compile(r"/v1/federations/([^/]+)/assignment")
    _UPDATE = re.compile(r"/v1/assignments/([^/]+)/update")
    _PAYLOAD = re.compile(r"/v1/assignments/([^/]+)/payload")
    _WORK_ROUTE = SimpleNamespace(path="/v1/federations/{name}/assignment")
    _UPDATE_ROUTE = SimpleNamespace(path="/v1/assignments/{assignment_id}/update")
    _PAYLOAD_ROUTE = SimpleNamespace(path="/v1/assignments/{assignment_id}/payload")

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope["state"]["identity"].caller
        cost = header(scope, b"sparrow-upload-cost")
        if not isinstance(caller, Caller) or len(cost or "") > MOST_COST:
            await self._app(scope, receive, send)
            return
        answering = self._answering(coordinator, scope, receive, caller, cost)
        if answering is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await answering
        except Exception as error:
            known = answer_of(scope["path"], error)
            if known is None:
                raise
            answer = known
        await answer(scope, receive, send)

    def _answering(
        self, coordinator: Coordinator, scope: Scope, receive: Receive, caller: Caller, cost: str | None
    ) -> Any:
        """Return the coroutine that answers a call; None for one that the routes answer."""
        method = scope["method"]
        if method == "GET" and (found := self._WORK.fullmatch(scope["path"])):
            asking = _query(scope, Asking)
            if asking is not None:
                scope["route"] = self._WORK_ROUTE
                return give_work(Request(scope, receive), coordinator, caller, found[1], asking, cost)
        elif method == "GET" and (found := self._PAYLOAD.fullmatch(scope["path"])):
            scope["route"] = self._PAYLOAD_ROUTE
            return give_payload(Request(scope, receive), coordinator, caller, found[1])
        elif method == "PUT" and (found := self._UPDATE.fullmatch(scope["path"])):
            holding = _query(scope, Holding)
            if holding is not None:
                scope["route"] = self._UPDATE_ROUTE
                return take_update(Request(scope, receive), coordinator, caller, found[1], holding, cost)
        return None


def _query(scope: Scope, kind: type[Any]) -> Any:
    """Return the query of a call, if it is well-formed."""
    with suppress(ValueError):
        return kind.model_validate(dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)))
    return None
