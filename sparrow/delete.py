"""``sparrow delete URL FEDERATION``: a federation's records, devices and models, gone from a running coordinator."""

from __future__ import annotations

import argparse
import json
import sys

from edge_sdk.device.transport import Transport, connect, token_of
from edge_sdk.protocol import tls
from edge_sdk.protocol.messages import FederationInfo
from sparrow.command_line.command import Command, Parser, WrongUsage, add_json, add_wait
from sparrow.command_line.table import printable


def _options(parser: Parser) -> None:
    parser.add_argument("server", help="the coordinator's address, http://HOST:PORT or https://HOST")
    parser.add_argument("federation", help="its name; one that is running or paused is to be stopped first")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_wait(parser)
    add_json(parser)
    tls.add_options(parser)


def _run(options: argparse.Namespace) -> None:
    with connect(options.server, tls.from_options(options)) as client:
        transport = Transport(client, patience_seconds=options.wait)
        transport.token = token_of("admin")
        info = transport.federation(options.federation)
        if not options.yes:
            _ask(info)
        transport.delete_federation(info.name)
    what = printable(f"federation {info.name} is deleted: {info.devices} devices, {info.round} rounds")
    print(json.dumps({"deleted": info.name}) if options.json else what)


def _ask(info: FederationInfo) -> None:
    """Have a person say yes. Raises WrongUsage where there is none, KeyboardInterrupt for any other answer."""
    if not sys.stdin.isatty():
        raise WrongUsage(f"{info.name} would be gone for good, and nobody can be asked here: give --yes to delete it")
    sys.stderr.write(
        f"Delete {printable(info.name)} for good, its {info.devices} devices, {info.round} rounds and all its models? "
        "[y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt("nothing was deleted")


COMMAND = Command(
    "sparrow delete",
    "Delete a federation, with its records, devices and models, for good.",
    _options,
    _run,
    epilog="SPARROW_ADMIN_TOKEN holds the admin token where the coordinator asks for one.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
