"""``sparrow backup TARGET``: a consistent copy of a coordinator, running or not.

TARGET gets ``coordinator.sqlite3`` (for PostgreSQL ``records.dump``, by pg_dump), ``blobs/`` and finally
``backup.json``, without which the copy is incomplete. The coordinator is found by its settings (``COORDINATOR_*``).

The records are copied first, from one transaction, then the blobs that they name. If the coordinator has deleted one
meanwhile, the newer records and their blobs are copied.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, case, create_engine, make_url, select, text
from sqlalchemy.orm import Session

from sparrow.command_line.command import Command, Parser
from sparrow.command_line.options import add_json
from sparrow.protocol.manifest import Manifest

from ..errors import BackupFailed, Damaged, MissingProgram, NoRecords
from ..models.global_models import file_keys, keys_of
from ..rounds.assignments import BUNDLE_KINDS, update_key
from ..settings import Settings, read_settings
from ..storage.blobs import Blobs, FolderBlobs, flush, flush_folder, make_folder, private, read_file
from ..storage.database import check_sqlite, connect
from ..storage.failing import database_errors
from ..storage.store import RECORDS_FILE, open_blobs
from ..storage.tables import Assignment, Federation, Model, Round

DUMP_FILE = "records.dump"
SUMMARY_FILE = "backup.json"
BLOBS_FOLDER = "blobs"
TRIES = 50
KEY = re.compile(r"[0-9]{1,18}/[a-z]+/[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Valid keys of blobs, because a hostile backup could name files outside the folder."""
FORMAT = 2


def back_up(settings: Settings, target: Path, copied: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Copy the coordinator of these settings to the folder ``target``; return the content of ``backup.json``.

    Raises BackupFailed, NoRecords.
    """
    records = settings.data_dir / RECORDS_FILE
    if settings.database_url is None and not records.exists():
        raise NoRecords(f"{settings.data_dir} has no records; set COORDINATOR_DATA_DIR to the coordinator's folder")
    if target.exists() and any(target.iterdir()):
        raise BackupFailed(f"{target} is not empty; give a new folder")
    make_folder(target)
    gone: set[str] = set()
    source = open_blobs(settings.data_dir, settings.blobs)
    kept = FolderBlobs(target / BLOBS_FOLDER)
    for _ in range(TRIES):
        with _records_of(settings, target) as connection, Session(connection) as db:
            named = blobs_named(db)
            summary: dict[str, Any] = {
                "format": FORMAT,
                "records": DUMP_FILE if settings.database_url else RECORDS_FILE,
                "made_at": time.time(),
                "federations": {each.name: each.round for each in db.scalars(select(Federation))},
            }
            ids = list(db.scalars(select(Federation.id)))
        copied()
        if _copy(source, kept, ids, named, gone):
            break
    else:
        raise BackupFailed(
            f"rounds closed faster than their blobs could be copied, {TRIES} times; run sparrow federation pause for "
            f"each federation, repeat the backup, and resume them"
        )
    summary["records_sha256"] = hashlib.sha256(read_file(target / summary["records"])).hexdigest()
    folder = target / BLOBS_FOLDER
    summary["blobs"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    check_copy(target, summary)
    _write(target / SUMMARY_FILE, json.dumps(summary, indent=1).encode())
    return summary


def check_copy(copy: Path, summary: dict[str, Any]) -> None:
    """Raise BackupFailed if a file of a backup is missing or does not match ``backup.json``."""
    blobs = FolderBlobs(copy / BLOBS_FOLDER)
    damaged = []
    records = copy / summary["records"]
    if not records.is_file() or hashlib.sha256(read_file(records)).hexdigest() != summary["records_sha256"]:
        damaged.append(summary["records"])
    for key in summary["blobs"]:
        try:
            if KEY.fullmatch(key) is None:
                raise ValueError(f"{key!r} is not a valid key")
            blobs.load(key)
        except (Damaged, ValueError):
            damaged.append(repr(key)[1:-1])
    if damaged:
        raise BackupFailed(f"{copy} is damaged: {', '.join(damaged)}; use another backup")


def blobs_named(db: Session) -> set[str]:
    """Return the keys of the blobs that the records need."""
    named = {key for model in db.scalars(select(Model)) for key in keys_of(model)}
    for federation in db.scalars(select(Federation)):
        named |= file_keys(federation, Manifest.model_validate_json(federation.manifest))
    waiting = (
        select(Assignment)
        .join(Round, (Round.federation_id == Assignment.federation_id) & (Round.number == Assignment.round))
        .where(
            Assignment.status == "done",
            Assignment.kind.in_(BUNDLE_KINDS),
            case((Assignment.arrival.is_(None), Round.status == "open"), else_=Assignment.counted_round.is_(None)),
        )
    )
    for each in db.scalars(waiting):
        named.add(update_key(each.federation_id, each.id, each.update_sha256 or ""))
    return named


def _copy(source: Blobs, kept: Blobs, ids: Sequence[int], named: set[str], gone: set[str]) -> bool:
    """Copy the named blobs and all other models and masks; return False if a named one was deleted meanwhile.

    gone: blobs missing in earlier tries. Raises BackupFailed if one that newer records still name is lost or damaged.
    """
    wanted = sorted(named)
    for number in ids:
        wanted += source.keys(f"{number}/models") + source.keys(f"{number}/masks")
    damaged: list[str] = []
    for key in dict.fromkeys(wanted):
        if key in kept.sizes(key.rpartition("/")[0]):
            continue
        try:
            kept.put(key, source.get(key, needed=False))
        except Damaged:
            damaged.append(key)
        except FileNotFoundError:
            if key in named & gone:
                damaged.append(key)
            elif key in named:
                gone.add(key)
    if damaged:
        raise BackupFailed(
            f"damaged or missing: {', '.join(damaged)}; the copy is incomplete: restore these files or everything "
            f"from an earlier backup"
        )
    return not gone & named


@contextmanager
def _records_of(settings: Settings, target: Path) -> Iterator[Connection]:
    """Context manager: copy the records; gives a connection to the state that was copied."""
    if settings.database_url is None:
        copy = target / RECORDS_FILE
        uri = f"file:{settings.data_dir.resolve() / RECORDS_FILE}?mode=rw"
        os.close(private(copy, os.O_RDWR | os.O_CREAT))
        with closing(sqlite3.connect(uri, uri=True)) as source, closing(sqlite3.connect(copy)) as made:
            source.backup(made)
            # Without a WAL the database is one file.
            made.execute("PRAGMA journal_mode=DELETE")
        # The backup copies damaged pages unseen.
        check_sqlite(copy)
        engine = create_engine(f"sqlite:///{copy.resolve()}")
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()
        return
    address = settings.database_url.get_secret_value()
    engine = connect(address)
    try:
        os.close(private(target / DUMP_FILE, os.O_RDWR | os.O_CREAT))
        # The open transaction keeps the snapshot that pg_dump uses.
        with engine.connect() as connection:
            snapshot = connection.scalar(text("SELECT pg_export_snapshot()"))
            run_postgresql(
                address, "pg_dump", "--format=custom", f"--snapshot={snapshot}", f"--file={target / DUMP_FILE}"
            )
            flush(target / DUMP_FILE)
            yield connection
    finally:
        engine.dispose()


def run_postgresql(address: str, program: str, *arguments: str) -> None:
    """Run a program of PostgreSQL, without the password on its command line.

    Raises BackupFailed, MissingProgram.
    """
    url = make_url(address).set(drivername="postgresql")
    password = {"PGPASSWORD": str(url.password)} if url.password else {}
    database = f"--dbname={url._replace(password=None).render_as_string()}"
    if shutil.which(program) is None:
        raise MissingProgram(f"{program} is not installed here; install the PostgreSQL client of the server's version")
    command = [program, database, *arguments]
    done = subprocess.run(command, env={**os.environ, **password}, capture_output=True, text=True)
    if done.returncode:
        raise BackupFailed(f"{program} failed: {done.stderr.strip()[-1000:]}")


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=private) as file:
        file.write(data)
    flush(path)
    flush_folder(path.parent)


def _options(parser: Parser) -> None:
    parser.add_argument("target", type=Path, help="a new folder")
    add_json(parser)


def _run(options: argparse.Namespace) -> None:
    settings = read_settings()
    with database_errors(options.target):
        summary = back_up(settings, options.target)
    rounds = ", ".join(f"{name} after round {number}" for name, number in summary["federations"].items())
    print(json.dumps(summary) if options.json else f"{options.target}: {rounds or 'no federations'}")


COMMAND = Command(
    "sparrow backup",
    "Copy the records and models of a coordinator, running or not.",
    _options,
    _run,
    epilog="The coordinator's settings apply: COORDINATOR_DATA_DIR, COORDINATOR_DATABASE_URL, COORDINATOR_BLOBS.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
