"""``sparrow token``: make, list and revoke tokens of operators, and take devices' tokens away.

    sparrow token create enrolment --uses 20 --expires 7d --note "lab 3"
    sparrow token list
    sparrow token revoke 3f0c9a52d1e84b67

It works on the records themselves, found by the same COORDINATOR_* settings as the coordinator's, which may be running;
changes take effect there within seconds. A secret is printed once, alone on stdout, and kept as its SHA-256 only.
Exit codes: docs/cli.md.
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
    """Open a transaction on the coordinator's records, committed when the block ends. Raises NoRecords, BadStorage."""
    if settings.database_url is not None:
        engine = open_database(settings.database_url.get_secret_value())
    else:
        path = settings.data_dir / "coordinator.sqlite3"
        if not path.exists():
            raise NoRecords(f"there is no {path}; set COORDINATOR_DATA_DIR as for the coordinator, which makes it")
        engine = open_database(path)
    try:
        with Session(engine.execution_options(**WRITING)) as db, db.begin():
            yield db
    finally:
        engine.dispose()


def create(
    db: Session, kind: str, now: float, *, note: str, uses: int | None, seconds: float | None, federation: str | None
) -> tuple[Token, str]:
    """Create a token; return it and its secret. seconds: how long it is valid; None for ever. Raises NotFound."""
    federation_id = None if federation is None else _named(db, federation).id
    token, secret = new_token(kind, now, note=note, uses=uses, seconds=seconds, federation_id=federation_id)
    db.add(token)
    return token, secret


def _named(db: Session, name: str) -> Federation:
    """Return the federation of this name. Raises NotFound, naming those that there are."""
    try:
        return find(db, name)
    except NotFound:
        there = sorted(db.scalars(select(Federation.name)))
        said = f"there are {', '.join(there)}{nearest(name, there)}" if there else "there is none yet"
        raise NotFound(f"there is no federation {name!r}; {said}") from None


def revoke(db: Session, wanted: str, now: float) -> str:
    """Revoke the operator's or the device's token with this id; return a sentence that says so. Raises NotFound."""
    token = db.get(Token, wanted)
    if token is not None:
        token.revoked_at = token.revoked_at or now
        return f"the {token.kind} token {token.id} is revoked"
    device = db.get(Device, wanted)
    if device is None:
        raise NotFound(f"there is no token and no device with the id {wanted!r}; list shows those of tokens")
    revoke_device(db, device)
    return f"the device {device.name} is revoked"


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
        sure(options, f"Take the token {options.id} away for good?", f"whoever has {options.id} could do nothing here")
    settings = read_settings()
    now = SteadyClock(settings.data_dir)()
    with database_errors(settings.data_dir), records(settings) as db:
        text = {"create": _create, "list": _list, "revoke": _revoke}[options.command](db, options, now)
    print(text)  # not before the commit: a secret that was shown is good


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
    print(f"{token.kind} token {token.id}, good {until}{uses}; its secret is shown this once:", file=sys.stderr)
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
    said = revoke(db, options.id, now)
    return json.dumps({"id": options.id, "revoked": True}) if options.json else f"{said}, at once or within {SOON}"


SOON = f"{REMEMBER_SECONDS:g} seconds where a coordinator runs"


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    making = commands.add_parser("create", help="make a token and print its secret")
    making.add_argument("kind", choices=KINDS)
    making.add_argument("--note", type=_note, default="", help="what it is for, up to 200 characters")
    making.add_argument("--uses", type=_count, help="how many devices an enrolment token lets in (default: any number)")
    making.add_argument("--expires", type=_seconds, metavar="TIME", help="30m, 12h or 7d from now (default: never)")
    making.add_argument("--federation", help="the only federation that it is for (default: all)")
    listing = commands.add_parser("list", help="show all tokens, without their secrets")
    revoking = commands.add_parser("revoke", help="take a token away, or a device's")
    add_yes(revoking)
    revoking.add_argument("id", help="of a token, as list shows it, or of a device")
    for command in (making, listing, revoking):
        add_json(command)


def _check(options: argparse.Namespace) -> None:
    """Raise WrongUsage for what no such token can have."""
    if options.uses is not None and options.kind != "enrolment":
        raise WrongUsage("--uses counts devices that are enrolled: leave it out")
    if options.federation is not None and options.kind == "admin":
        raise WrongUsage("--federation: an admin token is for the whole coordinator: leave it out")


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
    "Make, list and revoke tokens, beside a running coordinator or without one.",
    _options,
    _run,
    epilog="Finds the records by COORDINATOR_DATA_DIR or COORDINATOR_DATABASE_URL.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
