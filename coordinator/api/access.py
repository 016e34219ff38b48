"""Check the permissions of callers that ``api.middleware.authentication`` has identified.

If no token of a kind is set, calls of this kind need no token. Calls of administrators and observers must then use a
host name of this coordinator (``calls.hosts``), which excludes DNS rebinding by web pages. Enrolment has no such
restriction, because devices may use any name of this machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from ..app import Coordinator
from ..errors import NotAllowed, NotAuthenticated, OtherStart, WrongHost
from ..fleet.access import Holder, Kind
from ..fleet.devices import UNKNOWN, Caller
from .middleware.authentication import Identity

# The middleware reads the header; this names it in the OpenAPI document.
bearer = HTTPBearer(auto_error=False)


def coordinator_of(request: Request) -> Coordinator:
    """Return the coordinator that the call's application runs."""
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


async def get_coordinator(request: Request) -> Coordinator:
    """Return ``coordinator_of`` a call, as a dependency; async, because a plain function costs a thread."""
    return coordinator_of(request)


async def get_identity(request: Request, _: Annotated[object, Depends(bearer)]) -> Identity:
    """Return the caller's identity."""
    identity: Identity = request.state.identity
    return identity


TheCoordinator = Annotated[Coordinator, Depends(get_coordinator)]
TheIdentity = Annotated[Identity, Depends(get_identity)]


async def known_device(request: Request, _: Annotated[object, Depends(bearer)]) -> Caller:
    """Return the calling device. Raises NotAuthenticated, OtherStart."""
    # Without a dependency of its own: FastAPI resolves each anew, and devices call most often.
    identity: Identity = request.state.identity
    if isinstance(identity.caller, Caller):
        await _check_start(request, identity.caller)
        return identity.caller
    if identity.failure is None and identity.caller is None:
        raise NotAuthenticated("enrol first, then send the device's token: Authorization: Bearer <token>")
    raise NotAuthenticated(UNKNOWN)


async def _check_start(request: Request, caller: Caller) -> None:
    start = request.headers.get("sparrow-start")
    if start is None or start == caller.start:
        return
    coordinator = coordinator_of(request)
    # The cached caller may be older than the last start.
    if not await coordinator.look_ups.run(coordinator.devices.is_last_start, caller.device_id, start):
        raise OtherStart("another process of this device has started since; register this start again")


def check_admin(identity: Identity) -> None:
    """Raise NotAuthenticated, WrongHost unless the caller is an administrator."""
    _need(identity, None, "admin")


async def token_maker(identity: TheIdentity) -> Holder:
    """Return the calling administrator. Raises NotAuthenticated, WrongHost; NotAllowed without an admin token, also if
    none exists.

    If the first token of a kind needed no admin token, anyone on the network could lock the operator out.
    """
    check_admin(identity)
    if not makes_tokens(identity):
        raise NotAllowed(
            "creating and listing tokens requires an admin token, and this coordinator has none; create the first one "
            "on the coordinator's machine: sparrow token create admin --records"
        )
    assert isinstance(identity.caller, Holder)
    return identity.caller


def makes_tokens(identity: Identity) -> bool:
    """Return True if the caller has an admin token."""
    return isinstance(identity.caller, Holder) and identity.caller.kind == "admin"


def is_admin(identity: Identity) -> bool:
    """Return True if the caller is an administrator."""
    try:
        check_admin(identity)
    except (NotAuthenticated, WrongHost):
        return False
    return True


def may_look(identity: Identity) -> bool:
    """Return True if the caller is an observer or an administrator. Raises WrongHost."""
    try:
        check_observer(identity, own_federation(identity))
    except NotAuthenticated:
        return False
    return True


def check_observer(identity: Identity, federation: str | None) -> None:
    """Raise NotAuthenticated, WrongHost unless the caller may observe this federation, or all if None."""
    _need(identity, federation, "observer", "admin")


def own_federation(identity: Identity) -> str | None:
    """Return the only federation that an operator's token is for, or None if it is for all."""
    return identity.caller.federation if isinstance(identity.caller, Holder) else None


def _one_of(kind: Kind, *others: Kind) -> Callable[[Identity, Request], Awaitable[None]]:
    """Return a dependency that raises NotAuthenticated unless the caller has one of these tokens for the path's
    federation.
    """

    async def check(identity: TheIdentity, request: Request) -> None:
        _need(identity, request.path_params.get("name"), kind, *others)

    return check


admin = _one_of("admin")
enroller = _one_of("enrolment", "admin")
observer = _one_of("observer", "admin")


async def member(identity: TheIdentity, request: Request) -> None:
    """Raise NotAuthenticated unless the caller is an observer or a device of this federation."""
    if not _is_device_of(identity, request):
        await observer(identity, request)


async def prospective_member(identity: TheIdentity, request: Request) -> None:
    """Raise NotAuthenticated unless the caller is a member or may enrol a device."""
    if _is_device_of(identity, request):
        return
    name = request.path_params["name"]
    if "enrolment" in identity.guarded:
        _need(identity, name, "observer", "enrolment", "admin")
    else:
        _need(identity, name, "enrolment", "observer", "admin")


def _is_device_of(identity: Identity, request: Request) -> bool:
    return isinstance(identity.caller, Caller) and identity.caller.federation == request.path_params["name"]


def _need(identity: Identity, name: str | None, kind: Kind, *others: Kind) -> None:
    """Raise NotAuthenticated if this kind is guarded and the caller has no such token for the federation."""
    if kind not in identity.guarded:
        joins = "enrolment" in (kind, *others) and "enrolment" not in identity.guarded
        if not identity.own_host and not isinstance(identity.caller, Holder) and not joins:
            raise WrongHost(
                f"without an {kind} token this call is answered under this machine's own names and addresses only, to "
                f"keep other web pages out; call the coordinator by its IP address, add this name to "
                f"COORDINATOR_HOSTS, or set COORDINATOR_{kind.upper()}_TOKEN"
            )
        return
    if identity.failure is not None:
        raise NotAuthenticated(f"this call needs an {kind} token (SPARROW_{kind.upper()}_TOKEN); {identity.failure}")
    holder = identity.caller
    if not isinstance(holder, Holder) or holder.kind not in (kind, *others):
        sent = "none was sent" if holder is None else f"the one sent is for {_use_of(holder)}"
        raise NotAuthenticated(
            f"this call needs an {kind} token, and {sent}: set SPARROW_{kind.upper()}_TOKEN, or send "
            f"Authorization: Bearer <token>"
        )
    if not holder.reaches(name):
        raise NotAuthenticated(
            f"this token is only for the federation {holder.federation}; use a token for this federation or for all"
        )


def _use_of(caller: Caller | Holder) -> str:
    if isinstance(caller, Caller):
        return "a device"
    return {"admin": "administrators", "observer": "observers", "enrolment": "enrolment"}[caller.kind]


AdminOnly = Depends(admin)
ObserverOnly = Depends(observer)
MemberOnly = Depends(member)
ProspectiveMemberOnly = Depends(prospective_member)
EnrollerOnly = Depends(enroller)
KnownDevice = Annotated[Caller, Depends(known_device)]
TokenMaker = Annotated[Holder, Depends(token_maker)]
