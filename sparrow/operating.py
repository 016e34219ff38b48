"""Connection options and clients of the commands for operators."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from edge_sdk.device.connection import token_of
from edge_sdk.device.transport import Transport

from .command_line.options import add_json, add_server, add_wait
from .transport import connect, tls


def add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Add the options for connecting to a coordinator."""
    add_server(parser)
    add_wait(parser)
    add_json(parser)
    tls.add_options(parser)


@contextmanager
def connected(
    options: argparse.Namespace,
    tokens: tuple[Literal["admin", "observer", "enrolment"], ...] = ("admin", "observer"),
    on_wait: Callable[[str, float], None] = lambda reason, seconds: None,
) -> Iterator[Transport]:
    """Context manager: connect to the coordinator. tokens: kinds of tokens; the first available one is used."""
    with connect(options.server, tls.from_options(options)) as client:
        transport = Transport(client, patience_seconds=options.wait, on_wait=on_wait)
        transport.token = token_of(*tokens)
        yield transport
