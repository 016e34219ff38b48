"""Options and questions of commands with which an operator steers a running coordinator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edge_sdk.device.transport import Transport, connect, token_of
from edge_sdk.protocol import tls
from sparrow.command_line.command import WrongUsage, add_json, add_wait

LOOPBACK = "http://127.0.0.1:8000"


def add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which coordinator is meant, and how to call it."""
    parser.add_argument("--server", default=LOOPBACK, help="the coordinator's address (default: %(default)s)")
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


def sure(question: str, otherwise: str) -> None:
    """Have a person say yes. Raises WrongUsage where there is none, KeyboardInterrupt for any other answer."""
    if not sys.stdin.isatty():
        raise WrongUsage(f"{otherwise}, and nobody can be asked here: give --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt("nothing was changed")
