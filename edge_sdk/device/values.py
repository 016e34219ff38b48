"""Frozen and initial values of a federation's model, downloaded once and shared on this device's disk.

A device's state folder keeps the file of frozen values, so that exports need no download. It is a hard link (or a copy)
of a file in the user's ``sparrow/frozen`` (XDG state), where federations with the same values find it by its SHA-256.
That folder may be emptied at any time.

Symbolic links are not followed: another user could redirect writes, or change a file after its digest was checked.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sparrow.protocol import personal, values
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, Tensors, Values

from ..errors import Damaged, StateError
from .state import PARTIAL, make_folder, state_home
from .transport import Transport

log = logging.getLogger(__name__)

TRIES = 3

# Bytes of the disk that a download leaves free.
SPARE = 100_000_000

# A shared file is removed if no device of this user opened it for this time.
UNUSED_SECONDS = 30 * 24 * 3600.0

# Names in the shared folder: digests, and incomplete files.
_SHARED = re.compile(r"[0-9a-f]{64}(\.\d+\.partial)?")


def load_values(
    which: Values, manifest: Manifest, federation: str, transport: Transport, folder: Path, *, share: bool = False
) -> Tensors:
    """Return the tensors of a file by name, read-only and memory-mapped; {} if the model has no such file.

    share: use the user's shared folder, and remove unused files there. Raises StateError if the folder is unusable,
    Damaged if a file's digest is wrong.
    """
    if share:
        _clean(shared_folder())
    if which not in manifest.files:
        return {}
    mine = folder / personal.values_file(which)
    shared = shared_folder() / manifest.files[which]
    came = False
    try:
        found = _open(which, manifest, mine)
        if found is None and share and (found := _open(which, manifest, shared, own=True)) is not None:
            size = values.size(manifest, which)
            log.info("reusing %d bytes of frozen values of another federation", size)
            _link(shared, mine)
        if found is None:
            _check_room(folder, values.size(manifest, which))
            found = _download(which, manifest, federation, transport, mine)
            came = True
        if share:
            _leave(mine, shared, anew=came)
    except OSError as error:
        raise StateError(
            f"{mine} cannot be written ({error.strerror}): {values.size(manifest, which):,} bytes of the model are "
            "kept on the disk; make room, or give another --state-dir"
        ) from error
    return found


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size + SPARE > free:
        raise StateError(
            f"the federation's model has {size:,} bytes that are kept on the disk, and {free:,} are free at {folder}; "
            f"make room for them and {SPARE:,} more, or give another --state-dir"
        )


def shared_folder() -> Path:
    """Return the folder of frozen values that this user's devices share."""
    return state_home() / "frozen"


def _open(which: Values, manifest: Manifest, path: Path, *, own: bool = False) -> Tensors | None:
    """Return a file's tensors if it matches the manifest, else None. own: require that this user owns the file."""
    try:
        file = _open_file(path)
    except OSError:
        return None
    with file:
        found = os.fstat(file.fileno())
        right = stat.S_ISREG(found.st_mode) and found.st_size == values.size(manifest, which)
        if right and not (own and found.st_uid != os.geteuid()):
            with suppress(ManifestError):
                return values.unpack(manifest, which, np.memmap(file, np.uint8, mode="r"))
    return None


def _open_file(path: Path) -> BinaryIO:
    # O_NONBLOCK, so that opening a pipe does not wait.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _open_partial(path: Path, most: int) -> BinaryIO:
    """Open an incomplete download; start again if it is no regular file, is linked elsewhere, or exceeds ``most``."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > most:
            path.unlink()
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")


def _download(which: Values, manifest: Manifest, federation: str, transport: Transport, path: Path) -> Tensors:
    partial = path.with_name(path.name + PARTIAL)
    for _ in range(TRIES):
        with _open_partial(partial, values.size(manifest, which)) as file:
            transport.values(federation, manifest, which, file)
        if (found := _open(which, manifest, partial)) is not None:
            partial.replace(path)
            return found
        partial.unlink()
    raise Damaged(
        f"{TRIES} downloads of the {which} values did not match their digest; check proxies "
        "between this device and the coordinator"
    )


def _link(file: Path, path: Path) -> None:
    """Link a file to another name, or copy it."""
    new = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    new.unlink(missing_ok=True)
    try:
        os.link(file, new)
    except OSError:
        made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(made, "wb") as copy, _open_file(file) as source:
            shutil.copyfileobj(source, copy)
    new.replace(path)


def _leave(file: Path, shared: Path, *, anew: bool) -> None:
    # Sharing is optional.
    with suppress(OSError):
        make_folder(shared.parent, durable=False)
        if anew or not shared.exists():
            _link(file, shared)
        os.utime(shared, follow_symlinks=False)


def _clean(folder: Path) -> None:
    now = time.time()
    found = list(folder.iterdir()) if folder.is_dir() else []
    for path in found:
        # Another device may have removed the file, or another user may own it.
        with suppress(OSError):
            if _SHARED.fullmatch(path.name) and now - path.lstat().st_mtime >= UNUSED_SECONDS:
                path.unlink()
