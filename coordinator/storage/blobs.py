"""Models, skeletons and updates by key, such as ``3/models/000000012.safetensors``: in a folder, or elsewhere.

``write`` and ``settle`` are the two halves of ``put``, so that many writers share what making names durable costs. A
blob is there whole or not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from sparrow.coordinator.storage.failing import Troubles

PARTIAL = ".partial"


class Blobs(Protocol):
    """The place where blobs are kept.

    All but ``get`` of a key that is not there raise ``errors.Unavailable`` (``errors.DiskFull``) when the storage does
    not work.
    """

    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Store ``data`` under ``key``, replacing the former blob; durable once ``settle`` was called with the key.

        file: one of this machine that holds the same and is not written any more, where there is one: it need not be
        written again. It may be removed at any moment.
        """

    def settle(self, keys: Iterable[str]) -> None:
        """Make the blobs written under these keys durable."""

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` durably under ``key``, replacing the former blob."""

    def get(self, key: str) -> bytes:
        """Return the blob's bytes. Raises FileNotFoundError."""

    def load(self, key: str) -> memoryview:
        """Return the blob's bytes, at the least cost for many large ones in turn. Raises FileNotFoundError."""

    def delete(self, key: str) -> None:
        """Remove a blob, if it is there."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the keys in the folder ``prefix``, sorted, and the bytes of each."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys in the folder ``prefix``, sorted."""

    def clean(self) -> None:
        """Remove partial blobs of calls that a kill cut off. Only for a process that has the storage to itself."""


class FolderBlobs:
    """Blobs as files in ``root``.

    A blob is written under a temporary name, flushed to the disk and renamed; then the folder is flushed, too.
    A partial file at start-up is from an unacknowledged call and is removed.
    """

    def __init__(self, root: Path, troubles: Troubles | None = None) -> None:
        self._root = root
        self._troubles = troubles or Troubles()
        make_folder(root)

    def clean(self) -> None:
        """Remove partial blobs of calls that a kill cut off. Only for a process that has the folder to itself."""
        for partial in self._root.rglob(f"*{PARTIAL}"):
            partial.unlink()

    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Store ``data`` under ``key``: flushed, but for its name, which ``settle`` makes durable."""
        path = self._root / key
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
        with self._troubles.of_blobs(len(data)):
            make_folder(path.parent)
            try:
                if file is None or not _link(file, partial):
                    with partial.open("wb") as new:
                        new.write(data)
                        new.flush()
                        os.fsync(new.fileno())
                else:
                    _flush(partial)
                partial.replace(path)
            finally:
                # Of two names of one file, which the same update gets that comes again, replace() leaves both.
                partial.unlink(missing_ok=True)

    def settle(self, keys: Iterable[str]) -> None:
        """Flush the folders of these keys, each once."""
        with self._troubles.of_blobs():
            for folder in sorted({(self._root / key).parent for key in keys}):
                flush_folder(folder)

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` durably under ``key``, replacing the former blob."""
        self.write(key, data)
        self.settle([key])

    def get(self, key: str) -> bytes:
        """Return the blob's bytes. Raises FileNotFoundError."""
        with self._troubles.of_blobs():
            return (self._root / key).read_bytes()

    def load(self, key: str) -> memoryview:
        """Return the blob's bytes, in an array's memory. Raises FileNotFoundError."""
        with self._troubles.of_blobs():
            return read_file(self._root / key)

    def delete(self, key: str) -> None:
        """Remove a blob, if it is there."""
        with self._troubles.of_blobs():
            (self._root / key).unlink(missing_ok=True)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the keys in the folder ``prefix``, sorted, and the bytes of each."""
        folder, found = self._root / prefix, {}
        if not folder.is_dir():
            return {}
        with self._troubles.of_blobs():
            for path in sorted(folder.iterdir()):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if path.suffix != PARTIAL:
                        found[str(path.relative_to(self._root))] = path.stat().st_size
        return found

    def keys(self, prefix: str) -> list[str]:
        """Return the keys in the folder ``prefix``, sorted."""
        return list(self.sizes(prefix))


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that a power cut takes none of them."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    _flush(folder)


def read_file(path: Path) -> memoryview:
    """Return a file's bytes in an array's memory.

    numpy gets it from the system in huge pages: in small ones, that takes three times as long as reading."""
    with path.open("rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8).data
        read = 0
        while read < len(data):
            got = file.readinto(data[read:])
            if not got:
                raise OSError(errno.EIO, "the file has become shorter while it was read", str(path))
            read += got
    return data


def _flush(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _link(file: Path, path: Path) -> bool:
    """Give a file another name; return whether that is possible.

    It is not across file systems, not on all of them, and not if another copy of the call was faster and its part has
    been removed."""
    try:
        os.link(file, path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            return False
        raise
    return True
