"""Signed publications in transit, publishers' keys, and their fingerprints (content: ``protocol.publication``)."""

from __future__ import annotations

import hashlib

from pydantic import BaseModel, ConfigDict, Field

from .errors import MissingPart, ProtocolError
from .failures import Failure
from .fields import Digest

MAX_STATEMENT = 4 * 2**20
"""Largest statement in bytes: digests of some 40,000 tensors."""

CONTEXT = b"sparrow publication 1\0"
"""Prefix of each signed text, so that signatures for other uses are not valid here."""


class BadPublication(ProtocolError):
    """A federation differs from its publisher's signed terms."""

    failure = Failure("bad-work/terms")


class Publication(BaseModel):
    """Signed terms."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    # JSON of the terms, the signed text.
    statement: str = Field(max_length=MAX_STATEMENT)
    # The Ed25519 public key, hexadecimal.
    publisher: Digest
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @property
    def fingerprint(self) -> str:
        """The publisher's fingerprint."""
        return fingerprint(self.publisher)

    @property
    def digest(self) -> str:
        """SHA-256 of the statement."""
        return hashlib.sha256(self.statement.encode()).hexdigest()


class Published(BaseModel):
    """``GET /v1/federations/{name}/publication``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    publication: Publication
    # The published one, if the federation's differs.
    manifest: str | None = None


def fingerprint(publisher: str) -> str:
    """Return the fingerprint of a public key: 128 bits of its SHA-256, as eight groups of four hexadecimal digits."""
    digits = hashlib.sha256(bytes.fromhex(publisher)).hexdigest()[:32]
    return "-".join(digits[start : start + 4] for start in range(0, 32, 4))


def same_fingerprint(one: str, other: str) -> bool:
    """Return whether two fingerprints are equal, ignoring how digits are grouped."""
    return _digits(one) == _digits(other)


def is_fingerprint(text: str) -> bool:
    """Return whether a string is a valid fingerprint."""
    digits = _digits(text)
    return len(digits) == 32 and set(digits) <= set("0123456789abcdef")


def _digits(text: str) -> str:
    return text.replace("-", "").replace(":", "").replace(" ", "").lower()


def signed_text(statement: str) -> bytes:
    """Return the signed bytes."""
    return CONTEXT + statement.encode()


def check_signature(publication: Publication) -> None:
    """Raise BadPublication unless the publisher has signed the statement; MissingPart without cryptography."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise MissingPart(
            "the model of this federation is signed, and cryptography, which checks that, is not installed: "
            "pip install 'sparrow-fl[device]'"
        ) from None
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(publication.publisher))
        key.verify(bytes.fromhex(publication.signature), signed_text(publication.statement))
    except (InvalidSignature, ValueError):
        raise BadPublication(
            "the signature of the publication is not valid: the coordinator or a proxy changed the publication; "
            "ask its "
            "operator"
        ) from None
