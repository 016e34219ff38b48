"""``sparrow token``: make, list and revoke tokens of operators, and revoke tokens of devices.

    sparrow token create enrolment --uses 20 --expires 7d --note "lab 3"
    sparrow token list
    sparrow token revoke 3f0c9a52d1e84b67

It changes the records directly, found by the coordinator's COORDINATOR_* settings. A running coordinator follows within
seconds. A secret is printed once, on stdout without other text; only its SHA-256 is kept. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.nearest import nearest
from sparrow.command_line.options import add_json, add_yes, sure
from sparrow.command_line.table import table

from ..clock import SteadyClock
from ..errors import NoRecords, NotFound
from ..fleet.access import KINDS, REMEMBER_SECONDS, new_token
from ..fleet.devices import revoke as revoke_device
from ..fleet.federations import find
from ..reports.summary import iso
from ..settings import Settings, read_settings
from ..storage.database import WRITING, open_database
from ..storage.failing import database_errors
from ..storage.tables import Device, Federation, Token

UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}


@contextmanager
def records(settings: Settings) -> Iterator[Session]:
    """Context manager: a transaction on the coordinator's records. Raises NoRecords, BadStorage."""
    if settings.database_url is not None:
        engine = open_database(settings.database_url.get_secret_value())
    else:
        path = settings.data_dir / "coordinator.sqlite3"
        if not path.exists():
            raise NoRecords(f"{path} does not exist; start the coordinator once, or set its COORDINATOR_DATA_DIR")
        engine = open_database(path)
    try:
        with Session(engine.execution_options(**WRITING)) as db, db.begin():
            yield db
    finally:
        engine.dispose()


def create(
    db: Session, kind: str, now: float, *, note: str, uses: int | None, seconds: float | None, federation: str | None
) -> tuple[Token, str]:
    """Create a token; return it and its secret. seconds: its lifetime; None for ever. Raises NotFound."""
    federation_id = None if federation is None else _named(db, federation).id
    token, secret = new_token(kind, now, note=note, uses=uses, seconds=seconds, federation_id=federation_id)
    db.add(token)
    return token, secret


def _named(db: Session, name: str) -> Federation:
    """Return the federation of this name. Raises NotFound, listing the existing ones."""
    try:
        return find(db, name)
    except NotFound:
        there = sorted(db.scalars(select(Federation.name)))
        hint = f"there are {', '.join(there)}{nearest(name, there)}" if there else "create one first"
        raise NotFound(f"there is no federation {name!r}; {hint}") from None


def revoke(db: Session, wanted: str, now: float) -> str:
    """Revoke the operator's or device's token with this id; return a confirmation. Raises NotFound."""
    token = db.get(Token, wanted)
    if token is not None:
        token.revoked_at = token.revoked_at or now
        return f"revoked the {token.kind} token {token.id}"
    device = db.get(Device, wanted)
    if device is None:
        raise NotFound(f"no token or device has the id {wanted!r}; sparrow token list shows the tokens")
    revoke_device(db, device)
    return f"revoked the device {device.name}"


def describe(token: Token, federation: str | None, now: float) -> dict[str, Any]:
    """Return a description of a token."""
    status = "valid"
    if token.revoked_at is not None:
        status = "revoked"
    elif token.expires_at is not None and token.expires_at <= now:
        status = "expired"
    elif token.max_uses is not None and token.uses >= token.max_uses:
        status = "used up"
    return {
        "id": token.id,
        "kind": token.kind,
        "status": status,
        "federation": federation,
        "uses": token.uses,
        "max_uses": token.max_uses,
        "created_at": iso(token.created_at),
        "expires_at": None if token.expires_at is None else iso(token.expires_at),
        "note": token.note,
    }


def _run(options: argparse.Namespace) -> None:
    if options.command == "create":
        _check(options)
    if options.command == "revoke":
        sure(options, f"Revoke the token {options.id} for good?", f"the holder of {options.id} would lose access")
    settings = read_settings()
    now = SteadyClock(settings.data_dir)()
    with database_errors(settings.data_dir), records(settings) as db:
        text = {"create": _create, "list": _list, "revoke": _revoke}[options.command](db, options, now)
    # Printed after the commit, so that a secret that was shown is valid.
    print(text)


def _create(db: Session, options: argparse.Namespace, now: float) -> str:
    token, secret = create(
        db,
        options.kind,
        now,
        note=options.note,
        uses=options.uses,
        seconds=options.expires,
        federation=options.federation,
    )
    about = describe(token, options.federation, now)
    if options.json:
        return json.dumps({**about, "secret": secret})
    until = f"until {about['expires_at']}" if about["expires_at"] else "for ever"
    uses = f", for {token.max_uses} devices" if token.max_uses else ""
    print(f"{token.kind} token {token.id}, valid {until}{uses}; its secret is shown only now:", file=sys.stderr)
    return secret


def _list(db: Session, options: argparse.Namespace, now: float) -> str:
    names = {row[0]: row[1] for row in db.execute(select(Federation.id, Federation.name))}
    tokens = db.scalars(select(Token).order_by(Token.created_at, Token.id))
    found = [describe(token, names.get(token.federation_id or 0), now) for token in tokens]
    if options.json:
        return json.dumps(found)
    head = ("id", "kind", "status", "federation", "uses", "expires", "note")
    rows = [
        (
            each["id"],
            each["kind"],
            each["status"],
            each["federation"] or "any",
            str(each["uses"]) + (f" of {each['max_uses']}" if each["max_uses"] else ""),
            (each["expires_at"] or "never")[:16],
            each["note"],
        )
        for each in found
    ]
    return table(head, rows)


def _revoke(db: Session, options: argparse.Namespace, now: float) -> str:
    done = revoke(db, options.id, now)
    return json.dumps({"id": options.id, "revoked": True}) if options.json else f"{done}{SOON}"


SOON = f"; a running coordinator follows within {REMEMBER_SECONDS:g} seconds"


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    making = commands.add_parser("create", help="make a token and print its secret")
    making.add_argument("kind", choices=KINDS)
    making.add_argument("--note", type=_note, default="", help="purpose of the token, up to 200 characters")
    making.add_argument("--uses", type=_count, help="number of devices that may enrol with it (default: any)")
    making.add_argument("--expires", type=_seconds, metavar="TIME", help="30m, 12h or 7d from now (default: never)")
    making.add_argument("--federation", help="limit the token to this federation (default: all)")
    listing = commands.add_parser("list", help="show all tokens, without their secrets")
    revoking = commands.add_parser("revoke", help="revoke a token or a device")
    add_yes(revoking)
    revoking.add_argument("id", help="id of a token (sparrow token list) or of a device")
    for command in (making, listing, revoking):
        add_json(command)


def _check(options: argparse.Namespace) -> None:
    """Raise WrongUsage for options that do not fit the kind of token."""
    if options.uses is not None and options.kind != "enrolment":
        raise WrongUsage("--uses is only for enrolment tokens; leave it out")
    if options.federation is not None and options.kind == "admin":
        raise WrongUsage("--federation: an admin token is for all federations; leave the option out")


def _note(text: str) -> str:
    if len(text) <= 200:
        return text
    raise argparse.ArgumentTypeError(f"{len(text)} characters; give up to 200")


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if found and int(found[1]):
        return float(int(found[1]) * UNITS[found[2]])
    raise argparse.ArgumentTypeError(f"{text!r}: give minutes, hours or days, such as 30m, 12h or 7d")


COMMAND = Command(
    "sparrow token",
    "Make, list and revoke tokens, whether or not the coordinator is running.",
    _options,
    _run,
    epilog="Set COORDINATOR_DATA_DIR or COORDINATOR_DATABASE_URL as for the coordinator.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
