"""Disks that are full: a real file system of a few megabytes, where this user may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[bool]:
    """A file system of so many megabytes in ``folder``; False where none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = False
    with suppress(FileNotFoundError):
        done = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, 4) as done:
        if not done:
            pytest.skip("file systems cannot be mounted here: needs root")
        yield folder


def fill(folder):
    """Use the disk up to its last byte; returns the file to delete."""
    with (folder / "others").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return folder / "others"
