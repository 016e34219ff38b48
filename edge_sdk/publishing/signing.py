"""The author's key, which signs publications (``sparrow.protocol.publication``).

It is created once in ``~/.config/sparrow/publisher.key``, readable only by its owner; SPARROW_PUBLISHER_KEY names
another file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparrow.places import user_folder
from sparrow.protocol.errors import MissingPart, ProtocolError
from sparrow.protocol.manifest import GraphName, Manifest
from sparrow.protocol.publication import Terms
from sparrow.protocol.ranges import Range, default_ranges, faults
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import MAX_STATEMENT, Publication, fingerprint, signed_text

from ..errors import BadArgument

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_BYTES = 32
VARIABLE = "SPARROW_PUBLISHER_KEY"


@dataclass(frozen=True)
class Publisher:
    """An author of models."""

    # Private Ed25519 key, 32 bytes.
    key: bytes

    def __repr__(self) -> str:
        return f"Publisher({self.fingerprint})"

    @classmethod
    def new(cls) -> Publisher:
        """Create a publisher with a new key, without saving it.

        Raises MissingPart if the package for signatures is not installed.
        """
        return cls(_private_key_type().generate().private_bytes_raw())

    @classmethod
    def load(cls, path: Path | None = None) -> Publisher:
        """Return the publisher of a key file; create the file if missing.

        Raises BadArgument if it is unusable, MissingPart.
        """
        path = path or default_path()
        try:
            text = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return cls._make(path)
        except (OSError, UnicodeDecodeError) as error:
            raise BadArgument(f"the publisher's key {path} cannot be read ({error}); {_REMEDY}") from None
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise BadArgument(f"{path} is not a publisher's key (64 hexadecimal digits); restore it, or {_REMEDY}")
        _private_key_type()
        return cls(key)

    @classmethod
    def _make(cls, path: Path) -> Publisher:
        made = cls.new()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A file name per process: two commands that start together must agree on one complete key.
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{made.key.hex()}\n")
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(partial, path)
            except FileExistsError:
                return cls.load(path)
            finally:
                partial.unlink()
        except OSError as error:
            raise BadArgument(f"the publisher's key cannot be written to {path} ({error}); {_REMEDY}") from None
        return made

    @property
    def public(self) -> str:
        """The public key, hexadecimal."""
        return _private_key_type().from_private_bytes(self.key).public_key().public_bytes_raw().hex()

    @property
    def fingerprint(self) -> str:
        """The fingerprint that devices show and pin."""
        return fingerprint(self.public)

    def sign(self, terms: Terms) -> Publication:
        """Return the signed terms. Raises ProtocolError if they are too long."""
        statement = terms.model_dump_json(exclude_none=True)
        if len(statement) > MAX_STATEMENT:
            raise ProtocolError(f"the publication has {len(statement):,} bytes; it must have at most {MAX_STATEMENT:,}")
        private = _private_key_type().from_private_bytes(self.key)
        signature = private.sign(signed_text(statement)).hex()
        return Publication(statement=statement, publisher=self.public, signature=signature)


_REMEDY = f"set {VARIABLE} to a file that can"


def default_path() -> Path:
    """Return the path of the key file."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return user_folder("XDG_CONFIG_HOME") / "publisher.key"


def terms_of(
    federation: str,
    manifest: Manifest,
    settings: FederationSettings,
    *,
    graphs: Mapping[GraphName, str],
    weights: Mapping[str, str],
    ranges: Mapping[str, Range],
    edition: int = 1,
) -> Terms:
    """Return the terms of a model: by default its settings, or more private ones.

    graphs: SHA-256 of the graphs for devices. ranges: replace the default ones. Raises ProtocolError for settings
    outside the ranges.
    """
    wrong = faults(ranges, settings)
    if wrong:
        raise ProtocolError(f"settings outside the ranges to be signed: {'; '.join(wrong)}")
    return Terms(
        federation=federation,
        edition=edition,
        task=manifest.task,
        manifest=manifest.digest,
        graphs=dict(graphs),
        weights=dict(weights),
        settings={**default_ranges(settings), **ranges},
    )


def _private_key_type() -> type[Ed25519PrivateKey]:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise MissingPart("signing needs the package cryptography: pip install 'sparrow-fl[publish]'") from None
    return Ed25519PrivateKey
