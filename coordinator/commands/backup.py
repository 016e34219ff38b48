"""``sparrow backup TARGET``: a copy of a coordinator, running or not, that fits together.

TARGET gets ``coordinator.sqlite3`` (of PostgreSQL ``records.dump``, made by pg_dump), ``blobs/`` and, last,
``backup.json``: without that file it is not complete. Which coordinator is said by the settings that it has itself
(``COORDINATOR_*``); ``sparrow restore`` brings a copy back.

Every file is compared with its digest as it is copied, and the copy again; ``backup.json`` names them all.

The records come first, as of one moment; then the blobs that they name. A coordinator that goes on deletes what it does
not need any more: where that has taken a blob, newer records are copied, and what these name. Blobs never change under
their names, so each is copied once.
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

DUMP_FILE, SUMMARY_FILE, BLOBS_FOLDER = "records.dump", "backup.json", "blobs"
TRIES = 50
KEY = re.compile(r"[0-9]{1,18}/[a-z]+/[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""A blob's key. No other is read or written: a hostile backup could name files outside of the folder."""
FORMAT = 2


def back_up(settings: Settings, target: Path, copied: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Copy the coordinator of these settings to the folder ``target``; returns what ``backup.json`` says.

    copied: called when the records of one try are there. Raises BackupFailed, NoRecords.
    """
    records = settings.data_dir / RECORDS_FILE
    if settings.database_url is None and not records.exists():
        raise NoRecords(f"there are no records in {settings.data_dir}; set COORDINATOR_DATA_DIR to the coordinator's")
    if target.exists() and any(target.iterdir()):
        raise BackupFailed(f"{target} is not empty; give a new folder")
    make_folder(target)
    gone: set[str] = set()
    source, kept = open_blobs(settings.data_dir, settings.blobs), FolderBlobs(target / BLOBS_FOLDER)
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
            f"rounds closed faster than their blobs could be copied, {TRIES} times; pause the federations (PATCH with "
            f"the action pause), make the backup, and resume them"
        )
    summary["records_sha256"] = hashlib.sha256(read_file(target / summary["records"])).hexdigest()
    folder = target / BLOBS_FOLDER
    summary["blobs"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    check_copy(target, summary)
    _write(target / SUMMARY_FILE, json.dumps(summary, indent=1).encode())
    return summary


def check_copy(copy: Path, summary: dict[str, Any]) -> None:
    """Raise BackupFailed, with the names, where a file of a backup is missing or not what ``backup.json`` says."""
    blobs, damaged = FolderBlobs(copy / BLOBS_FOLDER), []
    records = copy / summary["records"]
    if not records.is_file() or hashlib.sha256(read_file(records)).hexdigest() != summary["records_sha256"]:
        damaged.append(summary["records"])
    for key in summary["blobs"]:
        try:
            if KEY.fullmatch(key) is None:
                raise ValueError(f"{key!r} is no key of a blob")
            blobs.load(key)
        except (Damaged, ValueError):
            damaged.append(repr(key)[1:-1])
    if damaged:
        raise BackupFailed(f"{copy} is damaged: {', '.join(damaged)}; take another backup")


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
    """Copy the named blobs and all other models and masks; return False if a named one has gone.

    Newer records may name a model that is here already, and has gone by then. gone: those that had gone before; one
    that newer records name as well is lost. Raises BackupFailed where any is, or is damaged."""
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
            f"damaged or missing: {', '.join(damaged)}; this copy is not complete: bring these back from an earlier "
            f"backup, or restore that"
        )
    return not gone & named


@contextmanager
def _records_of(settings: Settings, target: Path) -> Iterator[Connection]:
    """Copy the records; gives a connection that sees them as they were copied."""
    if settings.database_url is None:
        copy = target / RECORDS_FILE
        where = f"file:{settings.data_dir.resolve() / RECORDS_FILE}?mode=rw"
        os.close(private(copy, os.O_RDWR | os.O_CREAT))
        with closing(sqlite3.connect(where, uri=True)) as source, closing(sqlite3.connect(copy)) as made:
            source.backup(made)
            made.execute("PRAGMA journal_mode=DELETE")  # one file, for any later copy
        check_sqlite(copy)  # pages are copied as they are
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
        with engine.connect() as connection:  # its transaction keeps the snapshot that pg_dump shares
            snapshot = connection.scalar(text("SELECT pg_export_snapshot()"))
            run_postgresql(
                address, "pg_dump", "--format=custom", f"--snapshot={snapshot}", f"--file={target / DUMP_FILE}"
            )
            flush(target / DUMP_FILE)
            yield connection
    finally:
        engine.dispose()


def run_postgresql(address: str, program: str, *arguments: str) -> None:
    """Run one of PostgreSQL's programs on a database; the password is not on its command line.

    Raises BackupFailed, MissingProgram.
    """
    url = make_url(address).set(drivername="postgresql")
    password = {"PGPASSWORD": str(url.password)} if url.password else {}
    where = f"--dbname={url._replace(password=None).render_as_string()}"
    if shutil.which(program) is None:
        raise MissingProgram(f"{program} is not installed here; install PostgreSQL's client of the server's version")
    done = subprocess.run([program, where, *arguments], env={**os.environ, **password}, capture_output=True, text=True)
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
    "Copy a coordinator, running or not, so that records and models fit together.",
    _options,
    _run,
    epilog="Finds it by its own settings: COORDINATOR_DATA_DIR, COORDINATOR_DATABASE_URL, COORDINATOR_BLOBS.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
