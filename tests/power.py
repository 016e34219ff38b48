"""A disk that loses at a power cut what was not flushed: what is safe, and what the disk may look like afterwards.

``Disk`` watches a folder through ``os.fsync``. A file's content is safe as of its last flush, and its name as of the
last flush of the folder that it is in, and so on up to the watched folder. All else may be lost, torn, or kept, in any
order (Pillai and others, "All File Systems Are Not Created Equal", OSDI 2014): a file that was renamed and not flushed
may be empty under its new name, and a name whose folder was not flushed may still be the old one, or none.

    with watching(folder, monkeypatch) as disk:
        ...                              # product code runs; ``on_step`` is called before each of its steps
        disk.outcomes(path)              # the contents that a cut now may leave; ``survives``: the only one
        disk.after_cut(target, random)   # a folder as a cut now may leave it, drawn by ``random``

SQLite flushes its files itself, in C, as ``PRAGMA synchronous`` says (``storage/test_database.py`` asserts it): they
are ``trusted``, and taken as they are. ``without`` is a place of the product's code whose flushes are left out: a test
that passes all the same does not test that flush.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

STEPS = ("fsync", "replace", "rename", "link", "unlink", "mkdir")
TORN = b"torn"
HELPERS = ("flush", "flush_folder", "_flush_folder")
PRODUCT = ("coordinator", "edge_sdk")


class Disk:
    """What is safe of a folder. flushed_at: places of the product's code that flushed anything, FILE:FUNCTION:LINE."""

    def __init__(self, root: Path, trusted: str = "*.sqlite3*", without: str | None = None) -> None:
        self.root, self._trusted, self._without = root.resolve(), trusted, without
        self.flushed_at: set[str] = set()
        self.on_step: Callable[[], None] = lambda: None
        self._data: dict[int, bytes] = {}  # by inode, as of its last flush
        self._names: dict[Path, dict[str, int]] = {}  # by folder, as of its last flush: name -> inode
        self._kept: list[int] = []  # open, so that no inode is given to another file
        for folder in [self.root, *(path for path in self.root.rglob("*") if path.is_dir())]:  # what is there is safe
            self._flush_folder(folder)
            for path in folder.iterdir():
                if path.is_file():
                    self._flush_file(os.open(path, os.O_RDONLY), path.read_bytes())

    def fsync(self, number: int) -> None:
        """Flush what has this descriptor."""
        place = _place()
        self.flushed_at.add(place)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if place == self._without or not path.is_relative_to(self.root):
            return
        if stat.S_ISDIR(os.fstat(number).st_mode):
            self._flush_folder(path)
        else:
            with open(f"/proc/self/fd/{number}", "rb") as file:
                self._flush_file(os.dup(number), file.read())

    def _flush_folder(self, folder: Path) -> None:
        self._names[folder] = _entries(folder)

    def _flush_file(self, number: int, content: bytes) -> None:
        self._kept.append(number)
        self._data[os.fstat(number).st_ino] = content

    def close(self) -> None:
        """Let go of the files."""
        for number in self._kept:
            os.close(number)

    def outcomes(self, path: Path) -> set[bytes | None]:
        """Return the contents that this file may have after a power cut: None for no file, ``TORN`` for anything."""
        path = path.resolve()
        if path.match(self._trusted):
            return {path.read_bytes() if path.exists() else None}
        names = [_entries(path.parent).get(path.name), self._names.get(path.parent, {}).get(path.name)]
        found = {None if inode is None else self._data.get(inode, TORN) for inode in names}
        above = path.parents[: len(path.relative_to(self.root).parts) - 1]
        lost = any(folder.name not in self._names.get(folder.parent, {}) for folder in above)
        return found | {None} if lost else found

    def survives(self, path: Path) -> bytes | None:
        """Return the content that this file has after a power cut in any case; None where it may be lost or torn."""
        found = self.outcomes(path)
        return found.pop() if len(found) == 1 and TORN not in found else None

    def check(self, folder: Path | None = None) -> None:
        """Raise AssertionError unless all files are there whole after a power cut; locks and partial ones need not."""
        for path in (folder or self.root).rglob("*"):
            if path.is_file() and path.name != "lock" and path.suffix != ".partial":
                assert self.survives(path) == path.read_bytes(), f"{path} may be lost"

    def after_cut(self, target: Path, random: Random) -> None:
        """Write to the new folder ``target`` what a power cut may leave; ``random`` decides what of the unflushed."""
        self._write(self.root, target, random)

    def _write(self, folder: Path, target: Path, random: Random) -> None:
        target.mkdir(mode=0o700)
        now, then = _entries(folder) if folder.is_dir() else {}, self._names.get(folder, {})
        for name in sorted({*now, *then}):
            path = folder / name
            inode = random.choice([now.get(name), then.get(name)])
            if path.match(self._trusted):
                inode = now.get(name)
            if inode is None:
                continue
            if path in self._names or path.is_dir():
                self._write(path, target / name, random)
            else:
                (target / name).write_bytes(self._content(path, inode, inode == now.get(name), random))

    def _content(self, path: Path, inode: int, is_there: bool, random: Random) -> bytes:
        flushed = self._data.get(inode, b"")
        if not is_there:
            return flushed
        whole = path.read_bytes()
        if path.match(self._trusted) or whole == flushed:
            return whole
        cut = random.randrange(len(whole) + 1)
        return random.choice([flushed, whole, whole[:cut], whole[:cut] + bytes(len(whole) - cut)])


def _entries(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)} if folder.is_dir() else {}


def _place() -> str:
    """Where in the product's code the flush was asked for, not counting what only does it."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        parts, name = Path(frame.f_code.co_filename).parts, frame.f_code.co_name
        if name not in HELPERS and any(part in PRODUCT for part in parts) and "tests" not in parts:
            return f"{parts[-1]}:{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def watching(
    root: Path, monkeypatch: pytest.MonkeyPatch, trusted: str = "*.sqlite3*", without: str | None = None
) -> Iterator[Disk]:
    """Watch a folder that exists; what is in it is safe."""
    disk = Disk(root, trusted, without)
    checking = False

    def stepping(call):
        def step(*arguments, **named):
            nonlocal checking
            if not checking:
                checking = True
                try:
                    disk.on_step()
                finally:
                    checking = False
            return call(*arguments, **named)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk.fsync)
        for name in STEPS:
            patch.setattr(os, name, stepping(getattr(os, name)))
        try:
            yield disk
        finally:
            disk.close()
