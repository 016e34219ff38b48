"""Records from SQLite to PostgreSQL."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from sqlalchemy import JSON, Connection, Integer, MetaData, func, select

from .database import connect, create_tables, migrate
from .tables import Base


def to_postgresql(records: Path, address: str) -> None:
    """Copy the records of an SQLite file to an empty PostgreSQL database, in one transaction."""
    with tempfile.TemporaryDirectory() as folder:
        # The copy is migrated; the backup stays as it is.
        copy = Path(folder) / records.name
        shutil.copyfile(records, copy)
        source = connect(copy)
        target = connect(address)
        try:
            migrate(source)
            with source.connect() as before, target.begin() as after:
                create_tables(after)
                _copy(before, after)
        finally:
            source.dispose()
            target.dispose()


def _copy(before: Connection, after: Connection) -> None:
    tables = MetaData()
    for table in Base.metadata.sorted_tables:
        copied = table.to_metadata(tables)
        for column in copied.columns:
            if isinstance(column.type, JSON):
                # NULL stays NULL, and does not become the JSON value null.
                column.type = JSON(none_as_null=bool(column.nullable))
        # Rows that name others of their table come after these.
        order = list(copied.primary_key.columns)
        for rows in before.execute(select(copied).order_by(*order)).mappings().partitions(1000):
            after.execute(copied.insert(), [dict(row) for row in rows])
        for column in copied.primary_key.columns:
            if isinstance(column.type, Integer) and column is copied.autoincrement_column:
                sequence = func.pg_get_serial_sequence(copied.name, column.name)
                last = select(func.coalesce(func.max(column), 0) + 1).scalar_subquery()
                after.execute(select(func.setval(sequence, last, False)))
