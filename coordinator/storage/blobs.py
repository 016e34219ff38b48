"""Models, skeletons and updates as files in a folder, written so that they survive a power cut.

A blob is written under a temporary name, flushed to the disk, renamed, and the folder flushed too: it is there whole or
not at all. What is found half written at start-up is from an unacknowledged call and is removed.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


class BlobStore:
    """Blobs by key, such as ``3/models/12.safetensors``, in ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.rglob("*.partial"):
            leftover.unlink()

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` durably under ``key``, in place of what was there."""
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def get(self, key: str) -> bytes:
        """The blob's bytes. Raises FileNotFoundError."""
        return (self._root / key).read_bytes()

    def delete(self, key: str) -> None:
        """Remove a blob, if it is there."""
        (self._root / key).unlink(missing_ok=True)

    def keys(self, prefix: str) -> list[str]:
        """Keys in the folder ``prefix``, sorted."""
        folder = self._root / prefix
        return sorted(str(path.relative_to(self._root)) for path in folder.glob("*")) if folder.is_dir() else []
