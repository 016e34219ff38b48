"""Data files and folders to raw samples; the format follows from the content, not from the name."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

from ..places import expanded
from ..protocol.preparation import Preparation, Targets
from .archives import read_archive
from .dialect import open_text
from .errors import DataError, NoData
from .folders import read_folder, read_single
from .listings import files_column, read_listed
from .media import medium_of, other_reader
from .options import ReadOptions, Wanted
from .parquet import open_parquet
from .recordings import read_recordings
from .samples import Raw
from .tables import Table, read_table
from .times import is_time
from .windows import is_recordings

ARCHIVES = (".npz", ".npy")


def read_file(
    path: str | Path,
    options: ReadOptions = ReadOptions(),  # noqa: B008  a frozen record
    *,
    preparation: Preparation | None = None,
    targets: Targets | None = None,
    shape: tuple[int, ...] | None = None,
    labelled: bool = True,
) -> dict[str, Raw]:
    """Return the samples of a file or folder by use: all as ``""``, or train and optionally val, test and public.

    preparation, targets: the federation's; they match columns and labels. shape: shape of the model's inputs, in a
    federation without a preparation. labelled: whether labels are needed; otherwise they are left out, and a single
    picture or sound can be read. Raises DataError, and MissingPart if a package for the format is not installed.
    """
    wanted = Wanted(preparation, targets, shape, labelled)
    place = expanded(path)
    if not place.exists():
        raise NoData(f"{path}: there is no such file; check --data")
    if place.is_dir():
        return read_folder(place, options, wanted)
    if _is_archive(place):
        options.refuse(str(path), "holds arrays", "rate", "window", "step", "time", "unreadable")
        return read_archive(place, str(path), options, wanted)
    medium = medium_of(place)
    if medium is not None:
        return {"": read_single(place, medium, options, wanted)}
    table = open_parquet(place, str(path), options) if _is_parquet(place) else open_text(place, str(path), options)
    return {"": _read(table, options, wanted)}


def _read(table: Table, options: ReadOptions, wanted: Wanted) -> Raw:
    preparation = wanted.preparation
    measured = preparation is not None and (preparation.axes == "TC" or bool(preparation.columns))
    files = files_column(table, options, measured=measured)
    if files is not None:
        return read_listed(table, files, options, wanted)
    if options.time is not None and options.window is None and preparation is None:
        raise DataError(
            f"{table.source}: time={options.time} needs the length of the windows; add it, as in window=2.56s"
        )
    if is_recordings(options, preparation):
        return read_recordings(table, options, wanted)
    if preparation is not None and preparation.reader in ("images", "audio"):
        raise other_reader(table.source, "is a table that does not list such files", preparation)
    options.refuse(table.source, "is a table of rows", "rate", "window", "step", "time", "unreadable")
    raw = read_table(table, options, wanted).raw
    timed = next((column.name for column in raw.columns if is_time(column.name)), None)
    if timed is None or preparation is not None:
        return raw
    hint = f"the column {timed} is a feature: leave it out with drop={timed}, or cut recordings with window=2.56s"
    return replace(raw, said=(*raw.said, hint))


def _start(place: Path) -> bytes:
    try:
        with place.open("rb") as file:
            return file.read(6)
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror or error}); check the file") from None


def _is_parquet(place: Path) -> bool:
    return place.suffix.lower() == ".parquet" or _start(place).startswith(b"PAR1")


def _is_archive(place: Path) -> bool:
    start = _start(place)
    if place.suffix.lower() in ARCHIVES or start == b"\x93NUMPY":
        return True
    if not start.startswith(b"PK"):
        return False
    try:
        with zipfile.ZipFile(place) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False
