"""Detect a text table's encoding, delimiter and decimal sign from its first bytes and lines."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .numbers import is_decimal, is_grouped, is_missing, number
from .options import DELIMITERS, ReadOptions
from .roles import find

# Rows in memory as Python strings.
BLOCK = 1_024

# Lines used to detect delimiter and decimal sign.
SAMPLE = 1_000

_BINARY = {
    b"PK\x03\x04": "a zip archive or spreadsheet (.xlsx, .ods); save the sheet as CSV, or unpack it",
    b"\xd0\xcf\x11\xe0": "an old Excel file (.xls); save the sheet as CSV",
    b"PAR1": "a parquet file in an archive; unpack it",
    b"\x93NUMPY": "a numpy file in an archive; unpack it",
    b"\x89HDF": "an HDF5 file; write its arrays with numpy.savez",
    b"SQLite format": "an SQLite database; export the table as CSV",
    b"%PDF": "a PDF; give the table as CSV",
    b"BZh": "a bzip2 archive; unpack it",
    b"\xfd7zXZ": "an xz archive; unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it",
    b"\x1f\x8b": "compressed twice; unpack it",
    b"\x89PNG": "an image, not a table",
    b"\xff\xd8\xff": "an image, not a table",
}

_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_SEPARATOR = re.compile(r"\ufeff?sep=([,;|]?)", re.IGNORECASE)

_NAMES = {sign: name for name, sign in DELIMITERS.items()}


@dataclass(frozen=True)
class Block:
    """Consecutive rows: their lines in the file, and their cells by column, as texts or float64."""

    lines: NDArray[np.int64]
    columns: Sequence[Any]


@dataclass(frozen=True)
class TextTable:
    """A text file with a header, read in blocks as often as needed."""

    path: Path
    source: str
    encoding: str
    delimiter: str
    decimal: str
    skip: int
    names: tuple[str, ...]
    # Remarks on an unusual dialect.
    said: tuple[str, ...]
    # Lines above the header, such as Excel's ``sep=;``.
    before: int = 0
    # The word for a row's position in messages.
    unit: str = field(default="line", init=False)

    def blocks(self, used: Set[int], texts: Set[int] = frozenset(), times: Set[int] = frozenset()) -> Iterator[Block]:
        """Yield the rows below the header, all columns as text. Raises DataError for a row of another length."""
        with _opened(self.path, self.source, self.encoding) as text:
            rows = _records(_lines(text, self.delimiter), self.delimiter, self.source)
            for _ in range(self.before + 1 + self.skip):
                next(rows, None)
            while chunk := list(islice(rows, BLOCK)):
                for line, row in chunk:
                    if len(row) != len(self.names):
                        raise DataError(
                            f"{self.source}: line {line} has {len(row)} cells, the header has {len(self.names)}; "
                            f"correct the line, or quote a cell that holds a {_NAMES[self.delimiter]}"
                        )
                lines = np.fromiter((line for line, _ in chunk), np.int64, len(chunk))
                yield Block(lines, list(zip(*(row for _, row in chunk), strict=True)))


def open_text(path: Path, source: str, options: ReadOptions) -> TextTable:
    """Return the table at ``path``, with its dialect detected or taken from the options.

    Raises DataError if it cannot be read as a table.
    """
    said = []
    encoding = options.encoding or _encoding(path, source)
    if encoding == "cp1252" and options.encoding is None:
        said.append("read as cp1252, since it is not UTF-8; for another encoding add encoding=NAME")
    with _opened(path, source, encoding) as text:
        first = list(islice(text, SAMPLE))
    if not any(line.strip() for line in first):
        raise DataError(f"{source}: the file is empty; give a table with a header and a row for each sample")
    declared = _SEPARATOR.fullmatch(first[0].strip())
    delimiter = options.delimiter or (declared[1] if declared and declared[1] else _delimiter(first[bool(declared) :]))
    if delimiter not in (",", options.delimiter):
        said.append(f"cells are separated by {_NAMES[delimiter]}s")
    records = list(_records(_lines(first, delimiter), delimiter, source, complete=len(first) < SAMPLE))
    before = 1 if declared else 0
    del records[:before]
    names = tuple(" ".join(cell.split()) for cell in records[0][1])
    _check_header(source, records, names, delimiter)
    decimal = options.decimal or _decimal(source, records, names, delimiter, options)
    if decimal == "," and options.decimal is None:
        said.append("numbers are written with a decimal comma")
    return TextTable(path, source, encoding, delimiter, decimal, options.skip, names, tuple(said), before)


@contextmanager
def _opened(path: Path, source: str, encoding: str) -> Iterator[IO[str]]:
    """Open a file's text, unpacked if it is gzipped."""
    try:
        with io.TextIOWrapper(open_bytes(path), encoding=encoding, newline="") as text:
            yield text
    except UnicodeError as error:
        raise DataError(
            f"{source}: is not written in {encoding} ({error}); name its encoding, as in encoding=cp1251, or save it "
            "as UTF-8"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(source, error) from None


def _unreadable(source: str, error: BaseException) -> DataError:
    return DataError(f"{source}: cannot be read ({error}); download or write it again")


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, unpacked if its content is gzipped."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def _encoding(path: Path, source: str) -> str:
    try:
        with open_bytes(path) as file:
            start = file.read(1 << 16)
            for magic, kind in _BINARY.items():
                if start.startswith(magic):
                    raise DataError(f"{source}: is {kind}")
            for bom, name in _BOMS.items():
                if start.startswith(bom):
                    return name
            if b"\0" in start:
                return _wide(source, start)
            decoder = codecs.getincrementaldecoder("utf-8")()
            while start:
                decoder.decode(start)
                start = file.read(1 << 20)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "cp1252"
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(source, error) from None
    return "utf-8"


def _wide(source: str, start: bytes) -> str:
    """Return the byte order of UTF-16 text, whose Latin letters have a zero byte each."""
    even = start[::2].count(0)
    odd = start[1::2].count(0)
    half = len(start) // 4
    if odd > half and even < odd / 10:
        return "utf-16-le"
    if even > half and odd < even / 10:
        return "utf-16-be"
    raise DataError(f"{source}: is binary, not a text; give a table as CSV or parquet, or arrays as npz")


def _lines(lines: Iterable[str], delimiter: str) -> Iterable[str]:
    if delimiter != " ":
        return lines
    return (" ".join(line.split()) + "\n" for line in lines)


def _records(
    lines: Iterable[str], delimiter: str, source: str, *, complete: bool = True
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of each row that is not blank. complete: the lines do not end within a row."""
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=delimiter != "\t", strict=True)
    line = 1
    try:
        for row in reader:
            if row and (len(row) > 1 or row[0].strip()):
                if line == 1:
                    row[0] = row[0].removeprefix("\ufeff")
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        if complete or "unexpected end" not in str(error):
            raise DataError(
                f"{source}: line {line} cannot be split into cells ({error}); close or remove its quotation marks"
            ) from None


def _delimiter(lines: list[str]) -> str:
    """Return the delimiter that gives most lines the same number of cells, and the most cells."""
    best = ","
    score = (0.0, 0)
    for delimiter in (",", ";", "\t", "|"):
        try:
            counts = [len(row) for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if row]
        except csv.Error:
            continue
        if counts[0] < 2:
            continue
        alike = sum(count == counts[0] for count in counts) / len(counts)
        if (alike, counts[0]) > score:
            best = delimiter
            score = (alike, counts[0])
    return best


def _check_header(source: str, records: list[tuple[int, list[str]]], names: tuple[str, ...], delimiter: str) -> None:
    given = [name for name in names if name]
    if given and all(number(name) is not None or is_decimal(name, ",") for name in given):
        raise DataError(
            f"{source}: the first line holds numbers ({', '.join(given[:4])}); add a first line with the columns' names"
        )
    if len(names) == 1 and any(len(row) > 1 for _, row in records[1:]):
        raise DataError(
            f"{source}: line {records[0][0]} has one cell, {names[0][:60]!r}, and rows below it have more; remove the "
            "lines above the columns' names"
        )
    if len(names) == 1 and delimiter != " " and len(names[0].split()) > 1:
        raise DataError(
            f"{source}: the header has one cell, {names[0][:60]!r}; if blanks separate the cells, add delimiter=space, "
            f"otherwise delimiter={' or '.join(name for name in DELIMITERS if name != 'space')}"
        )
    if len(records) == 1:
        raise DataError(f"{source}: has a header and no rows; give a row for each sample")


def _decimal(
    source: str,
    records: list[tuple[int, list[str]]],
    names: tuple[str, ...],
    delimiter: str,
    options: ReadOptions,
) -> str:
    """Return the decimal sign of the first rows' numbers. Raises DataError if points and commas are mixed."""
    if delimiter == ",":
        return "."
    dropped = {find(name, names) for name in options.drop}
    commas: list[tuple[int, str, str]] = []
    points: list[tuple[int, str, str]] = []
    for line, row in records[1 + options.skip :]:
        for place, (name, cell) in enumerate(zip(names, row, strict=False)):
            text = cell.strip()
            if place in dropped:
                continue
            if is_decimal(text, ","):
                commas.append((line, name, text))
            elif is_decimal(text, "."):
                points.append((line, name, text))
    if not commas:
        return "."
    advice = "add decimal=comma or decimal=point, and remove thousands separators"
    if points:
        before, after = sorted((commas[0], points[0]))
        raise DataError(
            f"{source}: line {after[0]}, column {after[1]}: {after[2]!r} has another decimal sign than {before[2]!r} "
            f"in line {before[0]}, column {before[1]}; {advice}"
        )
    if all(is_grouped(text) and not text.lstrip("+-").startswith("0") for _, _, text in commas):
        line, name, text = commas[0]
        raise DataError(
            f"{source}: line {line}, column {name}: {text!r} has a decimal comma or a thousands separator; {advice}"
        )
    return ","


def explain(text: str, decimal: str, delimiter: str) -> str:
    """Return advice on a cell that looks like a number but is not one, else ""."""
    if is_missing(text):
        return ""
    if decimal == "." and is_decimal(text, ",") and not is_grouped(text):
        return "it has a decimal comma; write a point, or add decimal=comma if all numbers have one" + (
            " (and delimiter=semicolon or tab if these separate the cells)" if delimiter == "," else ""
        )
    if decimal == "," and is_decimal(text, "."):
        return "it has a decimal point; leave decimal=comma out if all numbers have one"
    if is_grouped(text):
        return "it has a thousands separator; write the number without it" + (
            ", or add decimal=comma if that is a decimal comma" if decimal == "." and "," in text else ""
        )
    return ""
