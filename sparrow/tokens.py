"""``sparrow token``: create, list and revoke tokens of operators, and revoke tokens of devices.

    sparrow token create enrolment --uses 20 --expires 7d --note "lab 3" --server https://HOST
    sparrow token list
    sparrow token revoke 3f0c9a52d1e84b67

It calls a running coordinator with an admin token. With ``--records`` it changes the records on the coordinator's
machine, also while it runs. A secret is printed once, on stdout without other text; only its SHA-256 is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

from pydantic import ValidationError

from edge_sdk.device.transport import Transport
from edge_sdk.errors import NotFound

from .command_line.command import Command, Parser, WrongUsage
from .command_line.faults import faults
from .command_line.options import add_yes, sure
from .command_line.table import moment, table
from .operating import add_coordinator, connected
from .protocol.errors import MissingPart
from .protocol.messages import ChangeDevice, CreateToken, MadeToken, TokenInfo, TokenKind
from .protocol.messages.tokens import LONGEST_NOTE

if TYPE_CHECKING:
    from .coordinator.commands.tokens import TokenRecords

UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}


class TokenCalls:
    """The tokens of a running coordinator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, wanted: CreateToken) -> MadeToken:
        """Create a token. Raises NotFound for its federation."""
        return self._transport.create_token(wanted)

    def list(self) -> list[TokenInfo]:
        """Return all tokens, newest first."""
        return self._transport.tokens()

    def revoke(self, wanted: str, *, made: bool) -> tuple[str, ...]:
        """Revoke the token or device with this id; return the revoked ids. Raises NotFound if there is no such id."""
        try:
            return self._transport.revoke_token(wanted, made=made)
        except NotFound as unknown:
            try:
                self._transport.change_device(wanted, ChangeDevice(revoked=True))
            except NotFound:
                raise unknown from None
            return (wanted,)


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[TokenCalls | TokenRecords]:
    """Context manager: the tokens of the running coordinator, or with ``--records`` those on this machine."""
    if options.records:
        yield _records()
        return
    with connected(options, ("admin",)) as transport:
        yield TokenCalls(transport)


def _records() -> TokenRecords:
    try:
        from .coordinator.commands.tokens import TokenRecords
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise MissingPart(
            f"{missing} is not installed, which --records needs: pip install 'sparrow-fl[coordinator]'"
        ) from error
    return TokenRecords()


def _run(options: argparse.Namespace) -> None:
    wanted = _wanted(options) if options.command == "create" else None
    if options.command == "revoke":
        sure(options, f"Revoke the token {options.id} for good?", f"the holder of {options.id} would lose access")
    with _opened(options) as tokens:
        if wanted is not None:
            _print_made(options, tokens.create(wanted))
        elif options.command == "list":
            found = tokens.list()
            print(json.dumps([each.model_dump(mode="json") for each in found]) if options.json else as_table(found))
        else:
            revoked = tokens.revoke(options.id, made=options.made)
            print(json.dumps({"revoked": list(revoked)}) if options.json else f"revoked {', '.join(revoked)}")


def _wanted(options: argparse.Namespace) -> CreateToken:
    """Return the token that the options describe. Raises WrongUsage if they are invalid."""
    try:
        return CreateToken(
            kind=options.kind,
            note=options.note,
            uses=options.uses,
            seconds=options.expires,
            federation=options.federation,
            where=options.where,
        )
    except ValidationError as error:
        found = faults(error, CreateToken.model_fields)
        raise WrongUsage("; ".join(f"--{name}: {text}" if name else text for name, text in found)) from None


def _print_made(options: argparse.Namespace, made: MadeToken) -> None:
    if options.json:
        print(made.model_dump_json())
        return
    until = f"until {moment(made.expires_at)}" if made.expires_at else "for ever"
    uses = f", for {made.max_uses} devices" if made.max_uses else ""
    sys.stderr.write(f"{made.kind} token {made.id}, valid {until}{uses}; its secret is shown only now:\n")
    print(made.secret)


def as_table(found: list[TokenInfo]) -> str:
    """Return a table of tokens."""
    head = ("id", "kind", "status", "federation", "where", "uses", "expires", "made by", "note")
    rows = [
        (
            each.id,
            each.kind,
            each.status,
            each.federation or "any",
            each.where or "-",
            str(each.uses) + (f" of {each.max_uses}" if each.max_uses else ""),
            moment(each.expires_at) if each.expires_at else "never",
            each.made_by or "-",
            each.note,
        )
        for each in found
    ]
    return table(head, rows)


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    making = commands.add_parser("create", help="make a token and print its secret")
    making.add_argument("kind", choices=get_args(TokenKind))
    making.add_argument("--note", default="", help=f"purpose of the token, up to {LONGEST_NOTE} characters")
    making.add_argument("--uses", type=_count, help="number of devices that may enrol with it (default: any)")
    making.add_argument("--expires", type=_seconds, metavar="TIME", help="30m, 12h or 7d from now (default: never)")
    making.add_argument("--federation", metavar="NAME", help="limit the token to this federation (default: all)")
    making.add_argument(
        "--where",
        default="",
        metavar="TAGS",
        help="limit the token to devices with these tags, such as board=orin; they get them",
    )
    listing = commands.add_parser("list", help="show all tokens, without their secrets")
    revoking = commands.add_parser("revoke", help="revoke a token or a device")
    add_yes(revoking)
    revoking.add_argument("id", help="id of a token (sparrow token list) or of a device")
    revoking.add_argument(
        "--made", action="store_true", help="also revoke the tokens that were made with it, such as by a thief"
    )
    for command in (making, listing, revoking):
        command.add_argument(
            "--records",
            action="store_true",
            help="change the records on this machine, found by COORDINATOR_* settings, without calling the coordinator",
        )
        add_coordinator(command)


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if found and int(found[1]):
        return float(int(found[1]) * UNITS[found[2]])
    raise argparse.ArgumentTypeError(f"{text!r}: give minutes, hours or days, such as 30m, 12h or 7d")


COMMAND = Command(
    "sparrow token",
    "Create, list and revoke tokens.",
    _options,
    _run,
    epilog="Set SPARROW_ADMIN_TOKEN to an admin token. Without one, use --records on the coordinator's machine, with "
    "COORDINATOR_DATA_DIR or COORDINATOR_DATABASE_URL as for the coordinator.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
