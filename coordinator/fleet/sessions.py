"""Sessions of users who sign in to the pages: the browser keeps a random id instead of the token.

The records have the id's SHA-256 and its token, so every process on the database knows the session. It ends after
``SESSION_SECONDS``, at sign-out, and when its token is revoked, expires or, in the settings, is changed.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ..errors import NotAuthenticated
from ..storage.store import Store
from ..storage.tables import BrowserSession, Token
from .access import Holder, Remembered, Tokens, digest_of, new_secret, valid_holder

SESSION_SECONDS = 12 * 3600.0

MOST_SESSIONS = 100
"""Sessions per token; a further one ends the oldest."""

OVER = "you are signed out: the session has ended or its token is no longer valid; sign in again"


class Sessions:
    """All browser sessions."""

    def __init__(self, store: Store, clock: Callable[[], float], tokens: Tokens) -> None:
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._remembered = Remembered[Holder](clock, Holder.is_over)

    def begin(self, token: str, former: str | None = None) -> str:
        """Return the id of a new session for this token. Raises NotAuthenticated.

        former: id of the browser's previous session, which ends.
        """
        holder = self._tokens.find(token)
        now = self._clock()
        if holder is None:
            raise NotAuthenticated("this token is not valid; ask the coordinator's operator for another")
        made = new_secret("session")
        with self._store.writing() as db:
            db.execute(delete(BrowserSession).where(BrowserSession.expires_at <= now))
            if former is not None:
                _delete(db, former)
            same_token = (
                BrowserSession.kind == holder.kind,
                BrowserSession.token_id.is_not_distinct_from(holder.token_id),
            )
            newest_first = (
                select(BrowserSession.id_sha256).where(*same_token).order_by(BrowserSession.expires_at.desc())
            )
            too_many = newest_first.offset(MOST_SESSIONS - 1)
            db.execute(delete(BrowserSession).where(BrowserSession.id_sha256.in_(too_many)))
            db.add(
                BrowserSession(
                    id_sha256=digest_of(made),
                    kind=holder.kind,
                    token_id=holder.token_id,
                    proof=_proof(made, digest_of(token)) if holder.token_id is None else None,
                    expires_at=now + SESSION_SECONDS,
                )
            )
        if former is not None:
            self._remembered.forget(digest_of(former))
        return made

    def end(self, session_id: str) -> None:
        """Delete a session at sign-out."""
        with self._store.writing() as db:
            _delete(db, session_id)
        self._remembered.forget(digest_of(session_id))

    def forget(self) -> None:
        """Clear the cache after tokens were revoked."""
        self._remembered.clear()

    def known_holder(self, session_id: str) -> Holder | None:
        """Return the cached holder of a session's token, without a query."""
        return self._remembered.get(digest_of(session_id))

    def find(self, session_id: str) -> Holder:
        """Return the holder of a session's token. Raises NotAuthenticated."""
        digest = digest_of(session_id)
        now = self._clock()
        with self._store.reading() as db:
            session = db.get(BrowserSession, digest)
            holder = None if session is None else self._holder(db, session, session_id)
        if session is None or holder is None or holder.is_over(now) or session.expires_at <= now:
            self._remembered.forget(digest)
            raise NotAuthenticated(OVER)
        ends = min(session.expires_at, holder.expires_at or session.expires_at)
        holder = replace(holder, expires_at=ends)
        self._remembered.put(digest, holder, now)
        return holder

    def _holder(self, db: Session, session: BrowserSession, session_id: str) -> Holder | None:
        proof = session.proof
        if proof is None:
            return valid_holder(db, Token.id == session.token_id)
        return self._tokens.of_settings(lambda digest: hmac.compare_digest(proof, _proof(session_id, digest)))


def _delete(db: Session, session_id: str) -> None:
    db.execute(delete(BrowserSession).where(BrowserSession.id_sha256 == digest_of(session_id)))


def _proof(session_id: str, token_digest: bytes) -> bytes:
    return hmac.digest(session_id.encode(), token_digest, "sha256")
