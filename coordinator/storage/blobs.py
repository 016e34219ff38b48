"""Models, graphs, masks and updates by key, in a folder or in object storage, verified at each read.

A key contains the digest of its content: ``3/models/000000012.SHA256.safetensors``, ``3/updates/ASSIGNMENT.SHA256``,
``3/masks/SHA256``. So a blob never changes under its key, and a changed, truncated or exchanged blob raises
``errors.Damaged``. The coordinator is not ready until the blob is intact.

``put`` is ``write`` followed by ``settle``; separate calls let many writers share the cost of making names durable.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from .failing import Troubles

PARTIAL = ".partial"
MAP_WHOLE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""Map all pages at once if the system supports it; otherwise each first access is a page fault."""
FOLDER_MODE = 0o700
FILE_MODE = 0o600
"""Only the coordinator's user may read its files."""

_DIGEST = re.compile(r"(?:^|[./])([0-9a-f]{64})(?:\.[a-z]+)?$")


class Blobs(ABC):
    """Storage of blobs.

    All methods raise ``errors.Unavailable`` (``errors.DiskFull``) if the storage fails.
    """

    def __init__(self, troubles: Troubles | None = None) -> None:
        self._troubles = troubles or Troubles()

    @abstractmethod
    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Store ``data`` under ``key``, replacing a former blob; durable after ``settle``.

        file: a local file with the same content, which may save a copy.
        """

    @abstractmethod
    def settle(self, keys: Iterable[str]) -> None:
        """Make the blobs written under these keys durable."""

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` durably under ``key``, replacing a former blob."""
        self.write(key, data)
        self.settle([key])

    def load(self, key: str, *, needed: bool = True) -> memoryview:
        """Return a verified blob without an extra copy.

        Raises Damaged, or FileNotFoundError for a missing blob that is not ``needed``.
        """
        wanted = digest_of(key)
        try:
            data = self._read(key)
        except FileNotFoundError:
            if not needed:
                raise
            raise self._troubles.damaged(key, "missing") from None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise self._troubles.damaged(key, "damaged: its SHA-256 is not the one in its name")
        self._troubles.whole(key)
        return data

    def get(self, key: str, *, needed: bool = True) -> bytes:
        """Return a verified blob like ``load``, as bytes."""
        return bytes(self.load(key, needed=needed))

    @abstractmethod
    def _read(self, key: str) -> memoryview:
        """Return a blob's bytes, unverified. Raises FileNotFoundError."""

    def delete(self, key: str) -> None:
        """Remove a blob, if it exists."""
        self._remove(key)
        self._troubles.forget([key])

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Remove a blob, if it exists."""

    def retain(self, prefix: str, keep: Iterable[str], found: Iterable[str] | None = None) -> None:
        """Remove the blobs in the folder ``prefix`` except those to keep.

        found: the keys to consider, by default all. If other processes may write, list them before ``keep`` is
        determined, so that newer blobs stay.
        """
        keep = set(keep)
        for key in self.keys(prefix) if found is None else found:
            if key not in keep:
                self.delete(key)
        self._troubles.forget(
            key for key in self._troubles.damages() if key.startswith(f"{prefix}/") and key not in keep
        )

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes in bytes of the blobs in the folder ``prefix``, sorted by key."""

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys in the folder ``prefix``."""
        return list(self.sizes(prefix))

    @abstractmethod
    def clean(self) -> None:
        """Remove partial blobs of killed processes. Only for a process with exclusive use of the storage."""


def digest_of(key: str) -> str:
    """Return the SHA-256 in a blob's key. Raises ValueError for a key without one."""
    found = _DIGEST.search(key)
    if found is None:
        raise ValueError(f"{key} does not name the SHA-256 of its content")
    return found[1]


class FolderBlobs(Blobs):
    """Blobs as files in ``root``.

    A blob is written under a temporary name, flushed and renamed; then the folder is flushed.
    """

    def __init__(self, root: Path, troubles: Troubles | None = None) -> None:
        super().__init__(troubles)
        self._root = root
        make_folder(root)

    def clean(self) -> None:
        """Remove partial blobs of killed processes. Only for a process with exclusive use of the folder."""
        for partial in self._root.rglob(f"*{PARTIAL}"):
            partial.unlink()

    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Write and flush ``data``; ``settle`` makes the name durable."""
        path = self._root / key
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
        with self._troubles.of_blobs(len(data)):
            make_folder(path.parent)
            try:
                if file is None or not _link(file, partial):
                    with open(partial, "wb", opener=private) as new:
                        new.write(data)
                        new.flush()
                        os.fsync(new.fileno())
                else:
                    flush(partial)
                partial.replace(path)
            finally:
                # If both names are links to one file (a repeated update), replace() leaves both.
                partial.unlink(missing_ok=True)

    def settle(self, keys: Iterable[str]) -> None:
        """Flush the folders of these keys, each once."""
        with self._troubles.of_blobs():
            for folder in sorted({(self._root / key).parent for key in keys}):
                flush_folder(folder)

    def _read(self, key: str) -> memoryview:
        with self._troubles.of_blobs():
            return read_file(self._root / key)

    def _remove(self, key: str) -> None:
        with self._troubles.of_blobs():
            (self._root / key).unlink(missing_ok=True)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes in bytes of the blobs in the folder ``prefix``, sorted by key."""
        folder = self._root / prefix
        found = {}
        if not folder.is_dir():
            return {}
        with self._troubles.of_blobs():
            for path in sorted(folder.iterdir()):
                # A file may be deleted meanwhile.
                with suppress(FileNotFoundError):
                    if path.suffix != PARTIAL:
                        found[str(path.relative_to(self._root))] = path.stat().st_size
        return found

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys in the folder ``prefix``."""
        with self._troubles.of_blobs(), suppress(FileNotFoundError):
            names = os.listdir(self._root / prefix)
            return sorted(f"{prefix}/{name}" for name in names if not name.endswith(PARTIAL))
        return []


def make_folder(folder: Path) -> None:
    """Make a folder and its parents durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=FOLDER_MODE)
    flush_folder(folder.parent)


def private(path: str | Path, flags: int) -> int:
    """Open a file that only its owner may read, as an ``opener``; refuse links."""
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)


def flush_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    flush(folder)


def read_file(path: Path) -> memoryview:
    """Return a file's bytes in an array's memory."""
    # numpy allocates huge pages; with small ones, allocation takes three times as long as reading.
    with path.open("rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8).data
        read = 0
        while read < len(data):
            got = file.readinto(data[read:])
            if not got:
                raise OSError(errno.EIO, "the file was truncated while it was read", str(path))
            read += got
    return data


def map_file(path: Path) -> memoryview:
    """Map a file that no longer changes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), size, MAP_WHOLE, mmap.PROT_READ) if size else b"")


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _link(file: Path, path: Path) -> bool:
    """Create a hard link; return False if that is not possible."""
    # It fails across file systems, on some file systems, and if a copy of the call was faster and has removed the
    # file.
    try:
        os.link(file, path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            return False
        raise
    return True
