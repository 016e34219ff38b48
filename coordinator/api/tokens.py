"""Operators' tokens, and invitations of devices, for administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from sparrow.protocol.messages import (
    CreateToken,
    FederationInfo,
    Invitation,
    Invite,
    MadeToken,
    RevokedTokens,
    TokenInfo,
)

from ..fleet.access import new_secret
from ..web import links
from .access import AdminOnly, TheCoordinator, TheIdentity, TokenMaker, token_maker

router = APIRouter(prefix="/v1", tags=["tokens"])

SECRET = {"Cache-Control": "no-store"}


@router.post("/tokens", status_code=201)
async def create_token(
    wanted: CreateToken, coordinator: TheCoordinator, maker: TokenMaker, response: Response
) -> MadeToken:
    """Create a token; return it with its secret."""
    made = await coordinator.writers.run(coordinator.issuing.create, wanted, maker)
    coordinator.fact_recorded()
    response.headers.update(SECRET)
    return made


@router.get("/tokens")
def list_tokens(coordinator: TheCoordinator, maker: TokenMaker) -> list[TokenInfo]:
    """Return all tokens of the records, newest first, without secrets."""
    return coordinator.issuing.list()


@router.delete("/tokens/{token_id}")
async def revoke_token(
    token_id: str,
    coordinator: TheCoordinator,
    maker: TokenMaker,
    made: Annotated[bool, Query(description="Also revoke the tokens made with it, and those made with them")] = False,
) -> RevokedTokens:
    """Revoke a token permanently."""
    revoked = await coordinator.writers.run(coordinator.issuing.revoke, token_id, maker, made=made)
    coordinator.fact_recorded()
    return RevokedTokens(revoked=revoked)


@router.post("/federations/{name}/invitations", status_code=201, dependencies=[AdminOnly])
async def invite(
    name: str,
    wanted: Invite,
    coordinator: TheCoordinator,
    identity: TheIdentity,
    request: Request,
    response: Response,
) -> Invitation:
    """Make an enrolment token for this federation if devices need one, and the link and command with which they join.

    If the model is signed, both name its publisher.
    """
    maker = await token_maker(identity) if "enrolment" in identity.guarded else None
    info = await coordinator.look_ups.run(coordinator.federations.get, name)
    server = str(request.base_url) if wanted.server is None else wanted.server
    # The token is recorded last, so a wrong address leaves none behind.
    secret = None if maker is None else new_secret("enrolment")
    link = links.make(info, server, secret) if "page" in info.device_kinds else None
    command = links.command(info, server, secret)
    made = None
    if maker is not None:
        made = await coordinator.writers.run(coordinator.issuing.create, _token(info, wanted), maker, secret)
        coordinator.fact_recorded()
    response.headers.update(SECRET)
    return Invitation(token=made, join_link=link, command=command)


def _token(info: FederationInfo, wanted: Invite) -> CreateToken:
    return CreateToken(
        kind="enrolment",
        note=wanted.note,
        uses=wanted.uses,
        seconds=wanted.seconds,
        federation=info.name,
        where=wanted.where,
    )
