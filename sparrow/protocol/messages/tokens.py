"""Messages about operators' tokens: creating, describing and revoking them, and invitations of devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..fields import Answer, FederationName, Request
from ..tags import Where
from .federations import JoinLink

TokenKind = Literal["admin", "observer", "enrolment"]

LONGEST_NOTE = 200
"""Characters of a token's note."""

Uses = Annotated[int, Field(ge=1, lt=2**31)]
Lifetime = Annotated[float, Field(ge=60, le=1_000_000 * 86400)]


class CreateToken(Request):
    """``POST /v1/tokens``."""

    kind: TokenKind
    note: str = Field(default="", max_length=LONGEST_NOTE, description="Its purpose")
    uses: Uses | None = Field(default=None, description="Devices that may enrol with it; null: any number")
    seconds: Lifetime | None = Field(default=None, description="Its lifetime; null: for ever")
    federation: FederationName | None = Field(default=None, description="The only federation that it is for")
    where: Where = Field(default="", description="Only devices with these tags may enrol with it; empty: all")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> CreateToken:
        if self.uses is not None and self.kind != "enrolment":
            raise ValueError("uses: only for enrolment tokens; leave it out")
        if self.where and self.kind != "enrolment":
            raise ValueError("where: only for enrolment tokens; leave it out")
        if self.federation is not None and self.kind == "admin":
            raise ValueError("federation: an admin token is for all federations; leave it out")
        return self


class TokenInfo(Answer):
    """A token, without its secret."""

    id: str
    kind: TokenKind
    status: Literal["valid", "revoked", "expired", "used up"]
    federation: str | None = Field(description="The only federation that it is for; null: all")
    where: str = Field(default="", description="Only devices with these tags may enrol with it; empty: all")
    uses: int = Field(description="Devices that enrolled with it")
    max_uses: int | None
    created_at: str
    expires_at: str | None
    made_by: str | None = Field(
        description="Id of the admin token that made it; settings: COORDINATOR_ADMIN_TOKEN; null: made on the "
        "coordinator's machine"
    )
    note: str


class MadeToken(TokenInfo):
    """A new token and its secret, which is returned only once."""

    secret: str = Field(repr=False)


class RevokedTokens(Answer):
    """``DELETE /v1/tokens/{id}``: the tokens that are revoked now, the requested one first."""

    revoked: tuple[str, ...]


class Invite(Request):
    """``POST /v1/federations/{name}/invitations``: make an enrolment token for this federation, and a link with it."""

    server: str | None = Field(
        default=None, description="The coordinator's address for devices; null: the address of this call"
    )
    note: str = Field(default="", max_length=LONGEST_NOTE, description="The token's purpose")
    uses: Uses | None = Field(default=1, description="Devices that may enrol with it; null: any number")
    seconds: Lifetime | None = Field(default=86400.0, description="The token's lifetime; null: for ever")
    where: Where = Field(default="", description="Only devices with these tags may enrol with it; empty: all")


class Invitation(Answer):
    """Join commands and links for a device. Anyone who has them can enrol devices."""

    token: MadeToken | None = Field(description="The new enrolment token; null if devices need none")
    join_link: JoinLink | None = Field(description="The link for browsers; null if pages cannot take part")
    command: str = Field(repr=False, description="The command for other devices")
