"""The lines that a coordinator logs when it has started: its data folder, its page, and how a device joins.

An application is not told where its server listens, so only ``sparrow serve`` has the last two.
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
"""In the data folder: the tokens that ``sparrow serve`` has made."""


@dataclass(frozen=True)
class Listening:
    """The address on which a coordinator listens."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """Return the address at which others reach it: this machine's in its network, if it listens on all."""
        return f"http{'s' if self.tls else ''}://{in_url(_in_network(self.host))}:{self.port}"


def keep_tokens(folder: Path, secrets: Mapping[Kind, str]) -> None:
    """Write tokens to ``TOKENS_FILE`` in a folder, where its owner alone reads them, as a shell's variables."""
    path = folder / TOKENS_FILE
    path.unlink(missing_ok=True)  # another one's rights would stay
    with open(path, "w", opener=private) as file:
        file.writelines(f"export {_variable(kind)}={secret}\n" for kind, secret in secrets.items())
    flush(path)
    flush_folder(folder)


def first_join(settings: Settings, listening: Listening, secrets: Mapping[Kind, str]) -> Iterator[str]:
    """Yield what to say once of the tokens that a coordinator made at its first start on a network."""
    path = settings.data_dir / TOKENS_FILE
    server = f"--server {listening.url}"
    yield f"Other machines reach this coordinator, so its calls need tokens. They are kept in {path}; shown this once:"
    yield ""
    yield "  a device on another machine joins with"
    join = f"sparrow join {server}{_federation(settings)}"
    yield f"    {_variable('enrolment')}={secrets['enrolment']} {join}"
    yield f"  the page {listening.url}/ asks for a token, which is"
    yield f"    {secrets['admin']}"
    yield "  commands on this machine have all of them after"
    yield f"    . {shlex.quote(str(path))}"
    yield ""
    if not listening.tls:
        yield "Tokens go over plain http: beyond your own network give --ssl-certfile, or use a proxy with TLS."


def introduction(settings: Settings, listening: Listening | None, *, enrolment_guarded: bool) -> Iterator[str]:
    """Yield what to say when the coordinator answers. enrolment_guarded: whether devices need a token to enrol."""
    yield f"data folder: {settings.data_dir}"
    if listening is None:
        return
    token = f", with {_variable('enrolment')} set" if enrolment_guarded else ""
    yield f"page: {listening.url}/"
    yield f"devices join with: sparrow join --server {listening.url}{_federation(settings)}{token}"
    if (settings.data_dir / TOKENS_FILE).exists():
        yield f"tokens: {settings.data_dir / TOKENS_FILE}"
    if is_loopback(listening.host):
        yield "only this machine can reach it; --host 0.0.0.0 lets others"


def _federation(settings: Settings) -> str:
    return "" if settings.default_task else " --federation NAME"


def _variable(kind: Kind) -> str:
    """Return the variable from which commands read a token."""
    return f"SPARROW_{kind.upper()}_TOKEN"


def _in_network(host: str) -> str:
    """Return the address by which others call this machine, if it listens on all of its addresses."""
    if not is_unspecified(host):
        return host
    return in_network(6 if ":" in host else 4) or socket.gethostname()
