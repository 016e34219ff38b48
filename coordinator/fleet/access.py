"""Tokens of operators, from the settings and from the records, kept as digests.

A look-up is cached for ``REMEMBER_SECONDS``, after which every process knows of a revocation.

A secret is 256 random bits after a prefix with its kind, for scanners of leaked secrets. It is looked up by its
SHA-256, which a caller cannot choose, so the timing reveals nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast, get_args

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.messages import TokenKind

from ..errors import NotAuthenticated
from ..storage.store import Store
from ..storage.tables import Federation, Token

Caller = TypeVar("Caller")
Kind = TokenKind
KINDS: tuple[Kind, ...] = get_args(Kind)
PREFIXES = {
    "admin": "sparrow_admin_",
    "observer": "sparrow_observe_",
    "enrolment": "sparrow_enrol_",
    "device": "sparrow_device_",
    "session": "sparrow_session_",
}
REMEMBER_SECONDS = 5.0
"""Lifetime of a cached look-up."""

MOST_REMEMBERED = 100_000
"""Largest number of cached look-ups per cache; a full cache is cleared."""


def new_secret(kind: str) -> str:
    """Return a new secret of a kind in ``PREFIXES``."""
    return PREFIXES[kind] + secrets.token_urlsafe(32)


def secret_after(kind: str, before: bytes, key: str) -> str:
    """Return the secret that follows the one with digest ``before``, derived from the holder's secret ``key``."""
    made = hmac.digest(key.encode(), kind.encode() + before, "sha256")
    return PREFIXES[kind] + base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def digest_of(secret: str) -> bytes:
    """Return the digest of a secret, which is long and random, so one hash suffices."""
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True)
class Holder:
    """The holder of an operator's token."""

    kind: Kind
    # Id in the records; None for a setting.
    token_id: str | None = None
    # The only federation it is for; None for all.
    federation: str | None = None
    # Seconds since the epoch; None for never.
    expires_at: float | None = None

    def reaches(self, federation: str | None) -> bool:
        """Return whether the token is for this federation. None: for a call outside of all federations."""
        return self.federation is None or self.federation == federation

    def is_over(self, now: float) -> bool:
        """Return whether the token has expired."""
        return self.expires_at is not None and self.expires_at <= now


def new_token(
    kind: str,
    now: float,
    secret: str,
    *,
    note: str = "",
    uses: int | None = None,
    seconds: float | None = None,
    federation_id: int | None = None,
    where: str = "",
    made_by: str | None = None,
) -> Token:
    """Return a new token with this secret.

    seconds: its lifetime; None for ever. made_by: id of the admin token that made it.
    """
    return Token(
        id=secrets.token_hex(8),
        kind=kind,
        note=note,
        secret_sha256=digest_of(secret),
        federation_id=federation_id,
        where=where,
        max_uses=uses,
        uses=0,
        made_by=made_by,
        created_at=now,
        expires_at=None if seconds is None else now + seconds,
    )


class Remembered(Generic[Caller]):
    """Cache of callers for ``REMEMBER_SECONDS``, by the digest of their secret."""

    def __init__(self, clock: Callable[[], float], is_over: Callable[[Caller, float], bool]) -> None:
        self._clock = clock
        self._is_over = is_over
        self._found: dict[bytes, tuple[Caller, float]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def get(self, digest: bytes) -> Caller | None:
        """Return the caller, unless the look-up is too old."""
        now = self._clock()
        caller, looked_at = self._found.get(digest, (None, 0.0))
        if caller is None or abs(now - looked_at) >= REMEMBER_SECONDS or self._is_over(caller, now):
            return None
        return caller

    def put(self, digest: bytes, caller: Caller, looked_at: float) -> None:
        """Cache a look-up."""
        if len(self._found) >= MOST_REMEMBERED:
            self._found.clear()
        self._found[digest] = (caller, looked_at)

    def forget(self, digest: bytes) -> None:
        """Forget one look-up."""
        self._found.pop(digest, None)

    def clear(self) -> None:
        """Forget all look-ups."""
        self._found.clear()


class Tokens:
    """All operators' tokens. given: tokens of the settings by kind."""

    def __init__(self, store: Store, clock: Callable[[], float], given: Mapping[Kind, str]) -> None:
        self._store = store
        self._clock = clock
        self._given = [(digest_of(secret), Holder(kind)) for kind, secret in given.items()]
        self.remembered = Remembered[Holder](clock, Holder.is_over)
        self._kinds = frozenset(given)
        self._looked_at = -REMEMBER_SECONDS

    def guarded(self) -> frozenset[Kind]:
        """Return the kinds of which a token ever existed; their calls need one."""
        # Revoked and expired tokens count: otherwise revoking the last one would open the calls to everybody.
        if len(self._kinds) < len(KINDS) and not self.guarded_known():
            with self._store.reading() as db:
                self._kinds |= frozenset(kind for kind in db.scalars(select(Token.kind).distinct()) if kind in KINDS)
            self._looked_at = self._clock()
        return self._kinds

    def make_first(self, keep: Callable[[Mapping[Kind, str]], None]) -> dict[Kind, str]:
        """Make a token of each kind and return the secrets; nothing if a token exists or ever existed.

        keep: called with the secrets before they become valid.
        """
        if self.guarded():
            return {}
        found = {kind: new_secret(kind) for kind in KINDS}
        keep(found)
        note = "made at the first start on a network"
        now = self._clock()
        with self._store.writing() as db:
            db.add_all(new_token(kind, now, secret, note=note) for kind, secret in found.items())
        self.forget()
        return found

    def forget(self) -> None:
        """Clear the cache."""
        self.remembered.clear()
        self._looked_at = -REMEMBER_SECONDS

    def guarded_before(self) -> frozenset[Kind]:
        """Return the last known result of ``guarded``."""
        return self._kinds

    def guarded_known(self) -> bool:
        """Return True if the result of ``guarded`` is cached."""
        return len(self._kinds) == len(KINDS) or abs(self._clock() - self._looked_at) < REMEMBER_SECONDS

    def known_holder(self, secret: str) -> Holder | None:
        """Return the cached holder of this token, without a query."""
        digest = digest_of(secret)
        return self.of_settings(lambda known: hmac.compare_digest(known, digest)) or self.remembered.get(digest)

    def of_settings(self, is_it: Callable[[bytes], bool]) -> Holder | None:
        """Return the holder of the setting's token whose digest satisfies ``is_it``, or None."""
        found = [holder for digest, holder in self._given if is_it(digest)]
        return found[0] if found else None

    def find(self, secret: str) -> Holder | None:
        """Return the holder of this token, or None if it is unknown, revoked or expired."""
        known = self.known_holder(secret)
        if known is not None:
            return known
        digest = digest_of(secret)
        now = self._clock()
        with self._store.reading() as db:
            holder = valid_holder(db, Token.secret_sha256 == digest)
        if holder is None:
            self.remembered.forget(digest)
            return None
        if holder.is_over(now):
            return None
        # The kind is guarded at once, not only after the next query.
        self._kinds |= {holder.kind}
        self.remembered.put(digest, holder, now)
        return holder


def valid_holder(db: Session, which: ColumnElement[bool]) -> Holder | None:
    """Return a token's holder, or None if it is unknown or revoked. It may have expired."""
    row = db.execute(
        select(Token, Federation.name)
        .outerjoin(Federation, Federation.id == Token.federation_id)
        .where(which, Token.revoked_at.is_(None))
    ).first()
    return None if row is None else Holder(cast(Kind, row[0].kind), row[0].id, row[1], row[0].expires_at)


def spend(db: Session, token_id: str, now: float) -> None:
    """Count one use of an enrolment token, in the transaction that enrols the device. Raises NotAuthenticated."""
    left = or_(Token.max_uses.is_(None), Token.uses < Token.max_uses)
    valid = (Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > now))
    counted = update(Token).where(Token.id == token_id, left, *valid).values(uses=Token.uses + 1)
    if not db.connection().execute(counted).rowcount:
        raise NotAuthenticated(
            "the enrolment token is used up or no longer valid; ask the operator for another (sparrow token create "
            "enrolment)"
        )
