"""A data file to raw samples, whatever its format: its content decides, not its name."""

from __future__ import annotations

import zipfile
from pathlib import Path

from edge_sdk.protocol.preparation import Preparation, Targets
from edge_sdk.reading.archives import read_archive
from edge_sdk.reading.errors import DataError, NoData
from edge_sdk.reading.options import ReadOptions
from edge_sdk.reading.samples import Raw
from edge_sdk.reading.tables import read_table

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
    """Return a file's samples by use: all as ``""``, or train and perhaps val, test and public of an npz file.

    preparation, targets: the federation's; then columns are matched by name, and samples and labels must be of its
    kind. shape: that of the model's inputs, in a federation without a preparation. labelled: whether labels are needed;
    if not, they are left out. Raises DataError.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise NoData(f"{path}: there is no such file; check --data")
    if place.is_dir():
        raise DataError(f"{path}: is a folder; name one file in it")
    if _is_archive(place):
        return read_archive(
            place,
            str(path),
            options,
            preparation=preparation,
            targets=targets,
            shape=shape,
            labelled=labelled,
        )
    raw = read_table(
        place,
        str(path),
        options,
        parquet=_is_parquet(place),
        preparation=preparation,
        targets=targets,
        labelled=labelled,
    )
    return {"": raw}


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
