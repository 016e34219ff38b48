"""``sparrow restore SOURCE``: restore a backup of ``sparrow backup`` into an empty folder or database.

The coordinator's settings (``COORDINATOR_*``) name the target. Everything is checked first, and existing data is never
changed. The records come last, so that an interrupted restore leaves no coordinator without its models.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from sqlalchemy import inspect

from sparrow.command_line.command import Command, Parser

from ..errors import BackupFailed, NoRecords
from ..settings import Settings, read_settings
from ..storage.blobs import FolderBlobs, flush, flush_folder, make_folder, private
from ..storage.database import connect
from ..storage.failing import database_errors
from ..storage.moving import to_postgresql
from ..storage.store import RECORDS_FILE, lock_folder, open_blobs
from .backup import (
    BLOBS_FOLDER,
    DUMP_FILE,
    FORMAT,
    SUMMARY_FILE,
    check_copy,
    run_postgresql,
)


def bring_back(settings: Settings, source: Path) -> None:
    """Restore the backup in ``source`` to the storage of these settings.

    Raises NoRecords, BackupFailed.
    """
    try:
        summary = json.loads((source / SUMMARY_FILE).read_text())
    except FileNotFoundError:
        raise NoRecords(f"{source} has no {SUMMARY_FILE}: it is not a complete backup; give another folder") from None
    except ValueError:
        raise BackupFailed(f"{source / SUMMARY_FILE} is damaged; use another backup") from None
    if summary["format"] != FORMAT:
        raise BackupFailed(
            f"{source} has format {summary['format']}, this version reads {FORMAT}; use the version that made it"
        )
    to_server = settings.database_url is not None
    dumped = summary["records"] == DUMP_FILE
    if dumped and not to_server:
        raise BackupFailed(
            "the backup is of PostgreSQL and cannot be restored into SQLite; set COORDINATOR_DATABASE_URL to an empty "
            "database"
        )
    made = FolderBlobs(source / BLOBS_FOLDER)
    check_copy(source, summary)
    make_folder(settings.data_dir)
    with lock_folder(settings.data_dir):
        _check_empty(settings)
        blobs = open_blobs(settings.data_dir, settings.blobs)
        for key in summary["blobs"]:
            blobs.put(key, made.get(key))
        if settings.database_url is not None:
            address = settings.database_url.get_secret_value()
            if dumped:
                run_postgresql(address, "pg_restore", "--no-owner", "--single-transaction", str(source / DUMP_FILE))
            else:
                to_postgresql(source / RECORDS_FILE, address)
            return
        partial = settings.data_dir / f"{RECORDS_FILE}.partial"
        partial.unlink(missing_ok=True)
        os.close(private(partial, os.O_RDWR | os.O_CREAT))
        shutil.copyfile(source / RECORDS_FILE, partial)
        flush(partial)
        partial.replace(settings.data_dir / RECORDS_FILE)
        flush_folder(settings.data_dir)


def _check_empty(settings: Settings) -> None:
    if settings.database_url is not None:
        engine = connect(settings.database_url.get_secret_value())
        try:
            if "federations" in inspect(engine).get_table_names():
                raise BackupFailed("the PostgreSQL database already has a coordinator's tables; use an empty database")
        finally:
            engine.dispose()
    elif (settings.data_dir / RECORDS_FILE).exists():
        raise BackupFailed(f"{settings.data_dir} already has records; move it, or set another COORDINATOR_DATA_DIR")
    if open_blobs(settings.data_dir, settings.blobs).keys("1/models"):
        raise BackupFailed("the blobs already exist; set another COORDINATOR_DATA_DIR or prefix in COORDINATOR_BLOBS")


def _options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, help="folder of a backup")


def _run(options: argparse.Namespace) -> None:
    settings = read_settings()
    with database_errors(settings.data_dir):
        bring_back(settings, options.source)
    print("restored; start the coordinator with the same settings")


COMMAND = Command(
    "sparrow restore",
    "Restore a backup into an empty folder or database.",
    _options,
    _run,
    epilog="COORDINATOR_DATA_DIR, COORDINATOR_DATABASE_URL and COORDINATOR_BLOBS name the target.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
