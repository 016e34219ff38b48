"""The files of ``--data`` if each simulated device has its own file."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from edge_sdk.tasks import OWN
from sparrow.reading.errors import DataError, NoData
from sparrow.reading.folders import USES

SUFFIXES = (".npz", ".csv", ".tsv", ".parquet", ".csv.gz", ".tsv.gz")

PLACES = ("{index}", "{name}")


def files_of_devices(task: str, data: str, devices: int | None = None) -> tuple[str, ...]:
    """Return the files of the first ``devices`` devices (None: all), sorted by name; () if the devices share ``data``.

    data: a folder of npz files or tables, or of folders with a folder per class; a pattern such as ``data/*.npz``; or
    a path with ``{index}`` (0, 1, ...) or ``{name}`` (device-0, device-1, ...). Only the task npz has such files.
    Raises DataError if they are too few, NoData if there is none.
    """
    if task != OWN or not data:
        return ()
    if any(place in data for place in PLACES):
        found = _numbered(data, devices)
    elif Path(data).is_dir():
        files, folders = _in_order(Path(data))
        parts = {folder.name.lower() for folder in folders} & set(USES)
        found = list(map(str, files or [folder for folder in folders if not parts and _in_order(folder)[1]]))
        if not found:
            # A folder per class of pictures or sounds is distributed like a single file.
            return ()
    elif set(data) & set("*?["):
        found = sorted(glob(data))
        if not found:
            raise NoData(f"--data {data}: no file matches")
    else:
        return ()
    if devices is None:
        devices = len(found)
    if len(found) < max(devices, 2):
        raise DataError(
            f"--data {data}: {len(found)} files are too few for {max(devices, 2)} devices, which need one file each; "
            "use fewer devices, or name one file, which is then split among all"
        )
    return tuple(found[:devices])


def _in_order(folder: Path) -> tuple[list[Path], list[Path]]:
    shown = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    files = [path for path in shown if path.name.lower().endswith(SUFFIXES)]
    return files, [path for path in shown if path.is_dir()]


def _numbered(data: str, devices: int | None) -> list[str]:
    found: list[str] = []
    while devices is None or len(found) < devices:
        path = data.replace("{index}", str(len(found))).replace("{name}", f"device-{len(found)}")
        if not Path(path).exists():
            if not found:
                raise NoData(
                    f"--data {data}: there is no file {path}; {{index}} is 0, 1, ... and {{name}} device-0, device-1, "
                    "...; for files with other names name their folder"
                )
            break
        found.append(path)
    return found
