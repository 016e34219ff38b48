"""Models, graphs, masks and updates by key, in a folder or elsewhere, each checked before its bytes are used.

A key names its content: ``3/models/000000012.SHA256.safetensors``, ``3/updates/ASSIGNMENT.SHA256``,
``3/masks/SHA256``. So a blob never changes under its key, and what is read is compared with the key: one that was
changed, cut off, or exchanged for another raises ``errors.Damaged``. That is logged once, and the coordinator is not
ready until the blob is whole again.

``write`` and ``settle`` are the two halves of ``put``, so that many writers share what making names durable costs. A
blob is there whole or not at all.
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
"""A file's pages are mapped at once, where the system can: each that is met by itself is an interrupt."""
FOLDER_MODE, FILE_MODE = 0o700, 0o600
"""What the coordinator keeps is for its own user alone."""

_DIGEST = re.compile(r"(?:^|[./])([0-9a-f]{64})(?:\.[a-z]+)?$")


class Blobs(ABC):
    """The place where blobs are kept.

    All methods raise ``errors.Unavailable`` (``errors.DiskFull``) when the storage does not work.
    """

    def __init__(self, troubles: Troubles | None = None) -> None:
        self._troubles = troubles or Troubles()

    @abstractmethod
    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Store ``data`` under ``key``, replacing the former blob; durable once ``settle`` was called with the key.

        file: one of this machine that holds the same and is not written any more, where there is one: it need not be
        written again. It may be removed at any moment.
        """

    @abstractmethod
    def settle(self, keys: Iterable[str]) -> None:
        """Make the blobs written under these keys durable."""

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` durably under ``key``, replacing the former blob."""
        self.write(key, data)
        self.settle([key])

    def load(self, key: str, *, needed: bool = True) -> memoryview:
        """Return the blob's bytes, compared with its key, at the least cost for many large ones in turn.

        Raises Damaged where it is not what the key names, or missing; where it is missing and not ``needed``,
        FileNotFoundError.
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
        """Return the blob's bytes as ``load`` does, as an object of their own."""
        return bytes(self.load(key, needed=needed))

    @abstractmethod
    def _read(self, key: str) -> memoryview:
        """Return the blob's bytes as they are. Raises FileNotFoundError."""

    def delete(self, key: str) -> None:
        """Remove a blob, if it is there."""
        self._remove(key)
        self._troubles.forget([key])

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Remove a blob, if it is there."""

    def retain(self, prefix: str, keep: Iterable[str], found: Iterable[str] | None = None) -> None:
        """Remove the blobs in the folder ``prefix`` but those to keep; nobody needs the others any more.

        found: those that were there before it was known which to keep, where others may have written since.
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
        """Return the keys in the folder ``prefix``, sorted, and the bytes of each."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys in the folder ``prefix``, sorted."""
        return list(self.sizes(prefix))

    @abstractmethod
    def clean(self) -> None:
        """Remove partial blobs of calls that a kill cut off. Only for a process that has the storage to itself."""


def digest_of(key: str) -> str:
    """Return the SHA-256 that a blob's key names. Raises ValueError for a key without one."""
    found = _DIGEST.search(key)
    if found is None:
        raise ValueError(f"{key} does not name the SHA-256 of its content")
    return found[1]


class FolderBlobs(Blobs):
    """Blobs as files in ``root``.

    A blob is written under a temporary name, flushed to the disk and renamed; then the folder is flushed, too.
    A partial file at start-up is from an unacknowledged call and is removed.
    """

    def __init__(self, root: Path, troubles: Troubles | None = None) -> None:
        super().__init__(troubles)
        self._root = root
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
                    with open(partial, "wb", opener=private) as new:
                        new.write(data)
                        new.flush()
                        os.fsync(new.fileno())
                else:
                    flush(partial)
                partial.replace(path)
            finally:
                # Of two names of one file, which the same update gets that comes again, replace() leaves both.
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
        with self._troubles.of_blobs(), suppress(FileNotFoundError):
            names = os.listdir(self._root / prefix)
            return sorted(f"{prefix}/{name}" for name in names if not name.endswith(PARTIAL))
        return []


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that a power cut takes none of them."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=FOLDER_MODE)
    flush_folder(folder.parent)


def private(path: str | Path, flags: int) -> int:
    """Open a file that nobody else may read, and that is no link: the ``opener`` of ``open``."""
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)


def flush_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    flush(folder)


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


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file that was just written, and that nobody changes: no copy, and no reading either."""
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
