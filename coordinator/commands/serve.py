"""``sparrow serve``: run the coordinator, like ``uvicorn coordinator.main:app``, with one-line errors at the start.

Its settings are the environment variables ``COORDINATOR_*`` (docs/settings.md). If other machines can reach it and no
token is set, it makes one of each kind.
"""

from __future__ import annotations

import argparse
import errno
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.options import add_help_settings, coloured

from ..errors import OperatorError
from ..settings import Settings, read_settings
from ..storage.failing import database_errors
from .starting import Listening

LAST_PORT = 65535


class _Observed:
    """ASGI application that keeps the error of its start, of which uvicorn shows only the traceback."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self.failure: BaseException | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def quietly(message: Any) -> None:
            await send({"type": message["type"]} if message["type"] == "lifespan.startup.failed" else message)

        try:
            await self._app(scope, receive, quietly)
        except BaseException as error:
            self.failure = error
            raise


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the system choose. Raises WrongUsage, OperatorError."""
    # The system's resolver takes ports modulo 65536.
    if not 0 <= port <= LAST_PORT:
        raise WrongUsage(f"--port {port}: not a port; choose one from 1 to {LAST_PORT}, or 0 for any")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only if the protocol is given.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise WrongUsage(f"--host {host} --port {port}: {error}; give a host name or address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        hint = "; choose another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise OperatorError(f"{host}:{port} is not available: {error.strerror}{hint}") from None
    return listener


def _options(parser: Parser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, 0.0.0.0 for all (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="serve https with this certificate")
    parser.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="the certificate's key, if in another file")
    add_help_settings(parser, Settings, "the COORDINATOR_* variables", prefix="COORDINATOR_")


def _run(options: argparse.Namespace) -> None:
    settings = read_settings()
    for option, path in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", options.ssl_keyfile)):
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"{option}: there is no file {path}")
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise WrongUsage("--ssl-keyfile needs --ssl-certfile; pass both")
    with listen(options.host, options.port) as listener:
        # Importing it reads the environment.
        from ..main import create_app

        host, port = listener.getsockname()[:2]
        listening = Listening(host, port, options.ssl_certfile is not None)
        observed = _Observed(create_app(settings, listening))
        server = uvicorn.Server(
            uvicorn.Config(
                observed,
                loop="asyncio",
                # Otherwise uvicorn reads WEB_CONCURRENCY.
                workers=1,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
                use_colors=coloured(),
            )
        )
        try:
            # Raised after a failed start, which is reported below.
            with suppress(SystemExit):
                server.run([listener])
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; run the same command to continue") from None
    if observed.failure is not None:
        with database_errors(settings.data_dir):
            raise observed.failure
    if not server.started:
        raise OperatorError("the coordinator did not start; see the lines above")


COMMAND = Command(
    "sparrow serve",
    "Run the coordinator.",
    _options,
    _run,
    epilog="Set it up with environment variables COORDINATOR_*. By default it creates the federation default and keeps "
    "its data in ~/.local/state/sparrow-coordinator. If other machines can reach it, it makes tokens at its first "
    "start, unless some are set.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
