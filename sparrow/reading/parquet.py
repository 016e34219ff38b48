"""Parquet tables, in the same blocks as text tables."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import MissingPart
from .dialect import BLOCK, Block
from .errors import DataError
from .options import ReadOptions

Column = NDArray[np.float64] | list[str]


# Types of columns that are read, besides times if these are wanted.
READ = ("integer", "floating", "decimal", "boolean", "string", "large_string", "null")


@dataclass(frozen=True)
class ParquetTable:
    """A parquet file. Numbers are float64 with NaN if missing, other values the texts of a CSV file."""

    path: Path
    source: str
    names: tuple[str, ...]
    skip: int
    said: tuple[str, ...] = ()
    decimal: str = field(default=".", init=False)
    delimiter: str = field(default="", init=False)
    unit: str = field(default="row", init=False)

    def blocks(self, used: Set[int], texts: Set[int] = frozenset(), times: Set[int] = frozenset()) -> Iterator[Block]:
        """Yield the rows, numbered from 1 as lines.

        used: columns to read; the others are empty. texts: columns read as text. times: columns that may hold dates and
        times, which become ISO 8601 text.
        """
        file = _open(self.path, self.source)
        stored = {place: file.schema_arrow.names[place] for place in sorted(used)}
        for place in stored.keys() - times:
            _check_type(self.source, self.names[place], file.schema_arrow.field(place).type)
        start = 1
        try:
            for batch in file.iter_batches(batch_size=BLOCK, columns=list(stored.values())):
                lines = np.arange(start, start + batch.num_rows, dtype=np.int64)
                start += batch.num_rows
                columns: list[Column] = [
                    _values(batch.column(stored[place]), place in texts) if place in stored else []
                    for place in range(len(self.names))
                ]
                left_out = max(0, self.skip - int(lines[0]) + 1) if len(lines) else 0
                if left_out:
                    lines = lines[left_out:]
                    columns = [column[left_out:] for column in columns]
                if len(lines):
                    yield Block(lines, columns)
        # pyarrow's own errors are ValueErrors.
        except (OSError, ValueError) as error:
            raise _unreadable(self.source, error) from None


def open_parquet(path: Path, source: str, options: ReadOptions) -> ParquetTable:
    """Return the table at ``path``. Raises DataError, MissingPart without pyarrow."""
    names = [str(name).strip() for name in _open(path, source).schema_arrow.names]
    return ParquetTable(path, source, tuple(names), options.skip)


def _open(path: Path, source: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingPart(f"{source}: parquet files need pyarrow: pip install 'sparrow-fl[data]'") from None
    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from None


def _unreadable(source: str, error: BaseException) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{source}: cannot be read as a parquet file ({reason}); write it again")


def _check_type(source: str, name: str, kind: Any) -> None:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if not any(getattr(types, f"is_{name}")(kind) for name in READ):
        content = "times" if types.is_temporal(kind) else f"values of the type {kind}"
        raise DataError(
            f"{source}: the column {name} holds {content}; leave it out: drop={name}, or store numbers or text"
        )


def _values(column: Any, as_text: bool) -> Column:
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if types.is_timestamp(kind) or types.is_date(kind):
        return ["" if value is None else str(value) for value in column.cast("timestamp[us]", safe=False).to_pylist()]
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if not numeric or as_text:
        return ["" if value is None or value != value else str(value) for value in column.to_pylist()]
    if types.is_decimal(kind):
        return np.array([np.nan if value is None else float(value) for value in column.to_pylist()], np.float64)
    if types.is_float16(kind):
        column = column.cast("float32")
    return np.asarray(column.cast("float64", safe=False).to_numpy(zero_copy_only=False), np.float64)
