"""Exit codes of what can go wrong between a device and its coordinator (``command_line.exits`` has the codes)."""

from __future__ import annotations

import httpx

from edge_sdk.errors import (
    BadArgument,
    CoordinatorFull,
    NoCoordinator,
    NotInstalled,
    Refused,
    SdkError,
    Unreachable,
    WrongSettings,
)
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.tls import BadCertificate
from sparrow.command_line.command import Exits
from sparrow.command_line.exits import Exit, of_status

EXITS: Exits = {
    SdkError: Exit.FAILED,
    BadArgument: Exit.USAGE,
    BadCertificate: Exit.USAGE,
    Unreachable: Exit.UNREACHABLE,
    CoordinatorFull: Exit.FULL,
    Refused: lambda refused: of_status(refused.status),
    NoCoordinator: Exit.UNREACHABLE,
    NotInstalled: Exit.NOT_FOUND,
    WrongSettings: Exit.USAGE,
    ProtocolError: Exit.FAILED,
    httpx.TransportError: Exit.UNREACHABLE,
}
