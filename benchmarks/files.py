"""Experiments in which each simulated device has a file of its own: the files that ``--data`` names."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from edge_sdk.reading.errors import DataError, NoData
from edge_sdk.tasks import OWN

SUFFIXES = (".npz", ".csv", ".tsv", ".parquet", ".csv.gz", ".tsv.gz")

PLACES = ("{index}", "{name}")


def files_of_devices(task: str, data: str, devices: int | None = None) -> tuple[str, ...]:
    """Return the files of the first ``devices`` devices (None: all); () if the devices share ``data``.

    data: a folder of npz files or tables; a pattern such as ``data/*.npz``; or a path with ``{index}`` or ``{name}`` in
    it, which are 0, 1, ... and device-0, device-1, .... Files of a folder or pattern are in the order of their names.
    Only a user's own files (the task npz) are such. Raises DataError, NoData.
    """
    if task != OWN or not data:
        return ()
    if any(place in data for place in PLACES):
        found = _numbered(data, devices)
    elif Path(data).is_dir():
        found = sorted(str(path) for path in Path(data).iterdir() if path.name.lower().endswith(SUFFIXES))
        if not found:
            raise NoData(f"--data {data}: the folder has no {', '.join(SUFFIXES)} files; it needs one per device")
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
            f"--data {data}: {len(found)} files are too few for {max(devices, 2)} devices, of which each has its own; "
            "use fewer devices, or name one file, which is then dealt to all"
        )
    return tuple(found[:devices])


def _numbered(data: str, devices: int | None) -> list[str]:
    found: list[str] = []
    while devices is None or len(found) < devices:
        path = data.replace("{index}", str(len(found))).replace("{name}", f"device-{len(found)}")
        if not Path(path).is_file():
            if not found:
                raise NoData(
                    f"--data {data}: there is no file {path}; {{index}} is 0, 1, ... and {{name}} device-0, device-1, "
                    "...; for files with other names name their folder"
                )
            break
        found.append(path)
    return found
