"""The calls of commands with which an operator looks at and steers a running coordinator."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from edge_sdk.device.connection import connect, token_of
from edge_sdk.device.transport import Transport

from .command_line.options import add_json, add_server, add_wait
from .protocol import tls


def add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which coordinator is meant, and how to call it."""
    add_server(parser)
    add_wait(parser)
    add_json(parser)
    tls.add_options(parser)


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Transport]:
    """Call the coordinator of these options, as an admin where it asks for one."""
    with connect(options.server, tls.from_options(options)) as client:
        transport = Transport(client, patience_seconds=options.wait)
        transport.token = token_of("admin") or token_of("observer")
        yield transport
