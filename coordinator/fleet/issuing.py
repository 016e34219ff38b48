"""Create, list and revoke operators' tokens, for calls and for ``sparrow token --records``.

The record of a token names the admin token that created it. A stolen one can therefore be revoked together with all
tokens created with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.command_line.nearest import nearest
from sparrow.protocol.messages import CreateToken, MadeToken, TokenInfo

from ..clock import iso
from ..errors import NotAuthenticated, NotFound
from ..models.global_models import settings_of
from ..storage.store import Store
from ..storage.tables import Federation, Token
from .access import Holder, Kind, Tokens, new_secret, new_token
from .checks import selection_of
from .federations import find
from .sessions import Sessions

log = logging.getLogger(__name__)

SETTINGS = "settings"
"""``Token.made_by`` of tokens made with COORDINATOR_ADMIN_TOKEN."""


class Issuing:
    """Tokens as administrators' calls change them."""

    def __init__(self, store: Store, clock: Callable[[], float], tokens: Tokens, sessions: Sessions) -> None:
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._sessions = sessions

    def create(self, wanted: CreateToken, holder: Holder, secret: str | None = None) -> MadeToken:
        """Create a token. holder: the caller. Raises NotFound, NotAuthenticated."""
        now = self._clock()
        with self._store.writing() as db:
            _check_valid(db, holder, now)
            made = create(db, wanted, now, made_by=holder.token_id or SETTINGS, secret=secret)
        self._forget()
        log.info("token %s (%s) is made with token %s", made.id, made.kind, made.made_by)
        return made

    def list(self) -> list[TokenInfo]:
        """Return all tokens, newest first."""
        with self._store.reading() as db:
            return listed(db, self._clock())

    def revoke(self, token_id: str, holder: Holder, *, made: bool) -> tuple[str, ...]:
        """Revoke a token, with ``made`` also the tokens made with it; return their ids. Raises NotFound."""
        now = self._clock()
        with self._store.writing() as db:
            _check_valid(db, holder, now)
            revoked = revoke(db, token_id, now, made=made)
        self._forget()
        log.info("tokens %s are revoked with token %s", ", ".join(revoked), holder.token_id or SETTINGS)
        return revoked

    def _forget(self) -> None:
        self._tokens.forget()
        self._sessions.forget()


def _check_valid(db: Session, holder: Holder, now: float) -> None:
    """Raise NotAuthenticated if the caller's token was revoked after its look-up."""
    if holder.token_id is None:
        return
    token = db.get(Token, holder.token_id)
    if token is None or status_of(token, now) != "valid":
        raise NotAuthenticated("this token is no longer valid; ask the coordinator's operator for another")


def create(
    db: Session, wanted: CreateToken, now: float, *, made_by: str | None = None, secret: str | None = None
) -> MadeToken:
    """Create a token. made_by: id of the admin token that made it. secret: None for a new one. Raises NotFound."""
    federation_id = None
    if wanted.federation is not None:
        federation = _named(db, wanted.federation)
        federation_id = federation.id
        selection_of(wanted.where, settings_of(federation))
    secret = secret or new_secret(wanted.kind)
    token = new_token(
        wanted.kind,
        now,
        secret,
        note=wanted.note,
        uses=wanted.uses,
        seconds=wanted.seconds,
        federation_id=federation_id,
        where=wanted.where,
        made_by=made_by,
    )
    db.add(token)
    return MadeToken(**describe(token, wanted.federation, now).model_dump(), secret=secret)


def listed(db: Session, now: float) -> list[TokenInfo]:
    """Return all tokens, newest first."""
    names = {row[0]: row[1] for row in db.execute(select(Federation.id, Federation.name))}
    tokens = db.scalars(select(Token).order_by(Token.created_at.desc(), Token.id))
    return [describe(token, names.get(token.federation_id or 0), now) for token in tokens]


def revoke(db: Session, token_id: str, now: float, *, made: bool = False) -> tuple[str, ...]:
    """Revoke a token; with ``made`` also the tokens made with it, and those made with them. Raises NotFound.

    Returns the ids of all of them.
    """
    token = db.get(Token, token_id)
    if token is None:
        raise NotFound(f"there is no token with the id {token_id!r}; sparrow token list shows the tokens")
    found = [token]
    # The list grows while it is read: tokens made with the new entries follow.
    for each in found if made else ():
        found += db.scalars(select(Token).where(Token.made_by == each.id).order_by(Token.created_at, Token.id))
    for each in found:
        each.revoked_at = each.revoked_at or now
    return tuple(each.id for each in found)


def status_of(token: Token, now: float) -> str:
    """Return the status of a token."""
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is not None and token.expires_at <= now:
        return "expired"
    return "used up" if token.max_uses is not None and token.uses >= token.max_uses else "valid"


def describe(token: Token, federation: str | None, now: float) -> TokenInfo:
    """Return a description of a token. federation: name of its only federation."""
    return TokenInfo(
        id=token.id,
        kind=cast(Kind, token.kind),
        status=status_of(token, now),
        federation=federation,
        where=token.where,
        uses=token.uses,
        max_uses=token.max_uses,
        created_at=iso(token.created_at),
        expires_at=None if token.expires_at is None else iso(token.expires_at),
        made_by=token.made_by,
        note=token.note,
    )


def _named(db: Session, name: str) -> Federation:
    try:
        return find(db, name)
    except NotFound:
        there = sorted(db.scalars(select(Federation.name)))
        hint = f"there are {', '.join(there)}{nearest(name, there)}" if there else "create one first"
        raise NotFound(f"there is no federation {name!r}; {hint}") from None
