"""Disks that are full: a real file system of a few megabytes, where this user may mount one."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    with suppress(FileNotFoundError):
        if subprocess.run(mount, capture_output=True).returncode == 0:
            yield folder
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
            return
    pytest.skip("file systems cannot be mounted here: needs root")


def fill(folder):
    """Use the disk up to its last byte; returns the file to delete."""
    with (folder / "others").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return folder / "others"
