"""``sparrow restore SOURCE``: restore a backup into an empty folder or database.

SOURCE is a folder that ``sparrow backup`` has made; where it goes is said by the coordinator's settings
(``COORDINATOR_*``). Everything is checked first; what lies there already is never touched. The records come last, so
that a restore which was cut off is no coordinator that lacks its models.

Devices that are ahead of the backup get along: updates for assignments that are not known any more are dropped, and who
holds a model or mask that is not known is sent the whole. Devices that enrolled later must enrol again.
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
    """Restore the backup in ``source`` to where these settings keep records and blobs.

    Raises NoRecords where there is none, BackupFailed.
    """
    try:
        summary = json.loads((source / SUMMARY_FILE).read_text())
    except FileNotFoundError:
        raise NoRecords(f"{source} has no {SUMMARY_FILE}: it is not a complete backup; give another folder") from None
    except ValueError:
        raise BackupFailed(f"{source / SUMMARY_FILE} is damaged; take another backup") from None
    if summary["format"] != FORMAT:
        raise BackupFailed(f"{source} is of format {summary['format']}, this version reads {FORMAT}; update it")
    to_server = settings.database_url is not None
    if summary["records"] != (DUMP_FILE if to_server else RECORDS_FILE):
        kinds = ("PostgreSQL", "SQLite") if to_server else ("SQLite", "PostgreSQL")
        raise BackupFailed(f"the settings say {kinds[0]}, the backup is of {kinds[1]}; change COORDINATOR_DATABASE_URL")
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
            run_postgresql(address, "pg_restore", "--no-owner", "--single-transaction", str(source / DUMP_FILE))
            return
        partial = settings.data_dir / f"{RECORDS_FILE}.partial"
        partial.unlink(missing_ok=True)
        os.close(private(partial, os.O_RDWR | os.O_CREAT))
        shutil.copyfile(source / RECORDS_FILE, partial)
        flush(partial)
        partial.replace(settings.data_dir / RECORDS_FILE)
        flush_folder(settings.data_dir)


def _check_empty(settings: Settings) -> None:
    """Raise BackupFailed where there are records or blobs already."""
    if settings.database_url is not None:
        engine = connect(settings.database_url.get_secret_value())
        try:
            if "federations" in inspect(engine).get_table_names():
                raise BackupFailed("the PostgreSQL database has a coordinator's tables already; give an empty one")
        finally:
            engine.dispose()
    elif (settings.data_dir / RECORDS_FILE).exists():
        raise BackupFailed(f"{settings.data_dir} has records already; move the folder away, or give another one")
    if open_blobs(settings.data_dir, settings.blobs).keys("1/models"):
        raise BackupFailed("there are blobs already; give an empty folder, or another prefix in COORDINATOR_BLOBS")


def _options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, help="the folder of a backup")


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
    epilog="Goes where COORDINATOR_DATA_DIR, COORDINATOR_DATABASE_URL and COORDINATOR_BLOBS say.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
