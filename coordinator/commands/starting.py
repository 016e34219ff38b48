"""Lines logged at the coordinator's start: its data folder, its page, and the command with which a device joins.

Only ``sparrow serve`` knows its address, and logs the last two.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparrow.protocol.addresses import in_network, in_url, is_loopback, is_unspecified

from ..fleet.access import Kind
from ..settings import Settings
from ..storage.blobs import flush, flush_folder, private

TOKENS_FILE = "tokens.sh"
"""File in the data folder with the tokens that ``sparrow serve`` made."""


@dataclass(frozen=True)
class Listening:
    """The address on which the coordinator listens."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """Return the address for other machines."""
        return f"http{'s' if self.tls else ''}://{in_url(_in_network(self.host))}:{self.port}"


def keep_tokens(folder: Path, secrets: Mapping[Kind, str]) -> None:
    """Write tokens as shell variables to ``TOKENS_FILE``, readable only by its owner."""
    path = folder / TOKENS_FILE
    # An existing file would keep its permissions.
    path.unlink(missing_ok=True)
    with open(path, "w", opener=private) as file:
        file.writelines(f"export {_variable(kind)}={secret}\n" for kind, secret in secrets.items())
    flush(path)
    flush_folder(folder)


def first_join(settings: Settings, listening: Listening, secrets: Mapping[Kind, str]) -> Iterator[str]:
    """Yield the lines about the tokens created at the first start on a network."""
    path = settings.data_dir / TOKENS_FILE
    server = f"--server {listening.url}"
    yield f"Other machines can reach this coordinator, so its calls need tokens, kept in {path} and shown only now:"
    yield ""
    yield "  join with a device on another machine:"
    join = f"sparrow join {server}{_federation(settings)}"
    yield f"    {_variable('enrolment')}={secrets['enrolment']} {join}"
    yield f"  sign in at {listening.url}/ with the admin token:"
    yield f"    {secrets['admin']}"
    yield "  set all tokens in a shell on this machine:"
    yield f"    . {shlex.quote(str(path))}"
    yield ""
    if not listening.tls:
        yield "Plain http sends tokens unencrypted: beyond your own network, give --ssl-certfile or use a TLS proxy."


def introduction(settings: Settings, listening: Listening | None, *, enrolment_guarded: bool) -> Iterator[str]:
    """Yield the lines logged once the coordinator answers. enrolment_guarded: whether devices need a token to enrol."""
    yield f"data folder: {settings.data_dir}"
    if listening is None:
        return
    token = f", with {_variable('enrolment')} set" if enrolment_guarded else ""
    yield f"page: {listening.url}/"
    yield f"devices join with: sparrow join --server {listening.url}{_federation(settings)}{token}"
    if (settings.data_dir / TOKENS_FILE).exists():
        yield f"tokens: {settings.data_dir / TOKENS_FILE}"
    if is_loopback(listening.host):
        yield "only this machine can reach it; let others with --host 0.0.0.0"


def _federation(settings: Settings) -> str:
    return "" if settings.default_task else " --federation NAME"


def _variable(kind: Kind) -> str:
    return f"SPARROW_{kind.upper()}_TOKEN"


def _in_network(host: str) -> str:
    """Return ``host``, or this machine's address in its network if ``host`` means all addresses."""
    if not is_unspecified(host):
        return host
    return in_network(6 if ":" in host else 4) or socket.gethostname()
