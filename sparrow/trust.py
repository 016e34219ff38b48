"""``sparrow trust``: accept another publisher for a federation that this device has joined.

sparrow trust 3f2a-9c01-77aa-0b12-5e6d-8f90-1234-abcd --server http://host:8000 --federation lab
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge_sdk.arguments import add_federation_to_join
from edge_sdk.device.state import StateFolder, default_root
from edge_sdk.device.trust import accept
from edge_sdk.errors import BadArgument
from edge_sdk.join import default_name

from .command_line.command import Command, Parser
from .command_line.options import add_json, add_server
from .protocol.signatures import is_fingerprint


def _options(parser: Parser) -> None:
    parser.add_argument(
        "publisher", metavar="FINGERPRINT", help="the publisher's fingerprint; ask the model's author for it"
    )
    add_server(parser)
    add_federation_to_join(parser)
    parser.add_argument("--device-name", metavar="NAME", help="name of this device (default: the host's name)")
    parser.add_argument("--state-dir", type=Path, help="the device's state folder")
    add_json(parser)


def _run(options: argparse.Namespace) -> None:
    if not is_fingerprint(options.publisher):
        raise BadArgument(f"{options.publisher!r} is not a fingerprint; give eight groups of four hexadecimal digits")
    name = options.device_name or default_name()
    path = options.state_dir or default_root(options.server, options.federation) / name
    if not path.is_dir():
        raise BadArgument(f"{path} does not exist: no device has joined {options.federation} there; give --state-dir")
    folder = StateFolder(path)
    try:
        before = accept(folder, options.publisher)
    finally:
        folder.close()
    known = None if before.publication is None else before.publication.fingerprint
    if options.json:
        print(json.dumps({"publisher": options.publisher, "before": known}))
        return
    print(f"{name} accepts the publisher {options.publisher} in {options.federation}; before: {known or 'none'}")
    print("Start the device again.")


COMMAND = Command(
    "sparrow trust",
    "Accept another publisher for a federation that this device has joined.",
    _options,
    _run,
    usage="FINGERPRINT [--server URL] [--federation NAME]",
)
